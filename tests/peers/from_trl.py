"""What trl's own functions make of the inputs, in float64: writes trl.json (`make peer-values`, in an environment of
its own).

Its losses are methods of trainers that run a model first; here they are called with the log-probabilities that the
model would give.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import inputs
import torch
import trl
from accelerate import Accelerator
from tables import padded, ragged, value, write
from trl import DPOTrainer, GRPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.rewards import get_soft_overlong_punishment

ACCELERATOR = Accelerator(cpu=True)


def metrics() -> dict[str, dict[str, list[float]]]:
    return defaultdict(lambda: defaultdict(list))


def grpo(batch: inputs.Batch) -> list[dict[str, Any]]:
    found = []
    for loss_type, level, low, high, delta, beta, entropy in (
        ("bnpo", "token", 0.2, 0.28, None, 0.0, 0.0),
        ("bnpo", "token", 0.2, 0.2, 3.0, 0.0, 0.01),
        ("dapo", "token", 0.2, 0.28, None, 0.0, 0.0),
        ("grpo", "token", 0.2, 0.2, None, 0.04, 0.0),
        ("grpo", "sequence", 3e-4, 4e-4, None, 0.0, 0.0),
        ("grpo", "sequence", 0.2, 0.2, None, 0.0, 0.0),
        ("dr_grpo", "token", 0.2, 0.2, None, 0.0, 0.0),
        ("cispo", "token", 0.2, 5.0, None, 0.0, 0.0),
        ("cispo", "token", 0.2, 1.1, None, 0.04, 0.0),
    ):
        logp = padded(batch["logp"]).requires_grad_()
        mask = torch.tensor([[int(t < n) for t in range(logp.shape[1])] for n in batch["lengths"]])
        trainer = SimpleNamespace(
            loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=beta,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            entropy_coef=entropy, _entropy_bonus_enabled=bool(entropy), use_adaptive_entropy=False,
            max_completion_length=16, current_gradient_accumulation_steps=1, accelerator=ACCELERATOR,
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
            _metrics=metrics(),
            _get_per_token_logps_and_entropies=lambda *_, logp=logp, **__: (logp, padded(batch["entropy"]), None),
        )  # fmt: skip
        given = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": padded(batch["advantage"]), "old_per_token_logps": padded(batch["old_logp"]),
            "ref_per_token_logps": padded(batch["ref_logp"]), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        if level == "sequence":  # one advantage a row, as trl's own
            given["advantages"] = torch.tensor(batch["score"])
        loss = GRPOTrainer._compute_loss(trainer, None, given)
        loss.backward()
        options = {
            "loss_type": loss_type,
            "level": level,
            "low": low,
            "high": high,
            "delta": delta,
            "beta": beta,
            "entropy": entropy,
        }
        found.append(
            value("GRPOTrainer._compute_loss", options, loss=loss.item(), gradient=ragged(logp.grad, batch["lengths"]))
        )
    return found


def dpo(batch: inputs.Batch) -> list[dict[str, Any]]:
    found = []
    for loss_type, beta, smoothing in (
        ("sigmoid", 0.1, 0.0),
        ("sigmoid", 1.0, 0.0),
        ("hinge", 0.1, 0.0),
        ("hinge", 1.0, 0.0),
        ("ipo", 0.1, 0.0),
        ("ipo", 0.7, 0.0),
        ("aot", 0.1, 0.2),
        ("sft", 0.1, 0.0),
    ):
        options = {"loss_type": loss_type, "beta": beta, "smoothing": smoothing}
        number = len(batch["chosen"])
        alone = [dpo_loss(batch, [i], **options)[0] for i in range(number)] if loss_type != "sft" else []
        gives: dict[str, Any] = {"rows": alone}
        if loss_type != "aot":  # it sorts the pairs of a batch: only one at a time is DPO's
            gives["loss"], gives["gradient"], told = dpo_loss(batch, list(range(number)), **options)
            if loss_type != "sft":
                gives |= {name: told[f"rewards/{name}"][0] for name in ("margins", "accuracies")}
        found.append(value("DPOTrainer._compute_loss", options, **gives))
    return found


def dpo_loss(
    batch: inputs.Batch, rows: list[int], loss_type: str, beta: float, smoothing: float
) -> tuple[float, list[list[float]], Any]:
    """The mean over pairs, its gradient in the tokens of all chosen and then all rejected responses, and metrics."""
    both = [batch[side][i] for side in ("chosen", "rejected") for i in rows]
    lengths = [len(row) for row in both]
    logps = padded(both).requires_grad_()
    mask = torch.tensor([[0] + [int(t < n) for t in range(logps.shape[1])] for n in lengths])  # one prompt token before
    references = {
        f"ref_{side}_logps": torch.tensor([sum(batch[f"ref_{side}"][i]) for i in rows], dtype=torch.float64)
        for side in ("chosen", "rejected")
    }
    outputs = SimpleNamespace(log_probs=logps, entropy=logps, mean_logits=logps, is_top1=logps > 0)
    trainer = SimpleNamespace(
        loss_types=[loss_type], loss_weights=[1.0], beta=beta, label_smoothing=smoothing,
        f_divergence_type="reverse_kl",
        ld_alpha=None, precompute_ref_logps=True, use_weighting=False, aux_loss_enabled=False, accelerator=ACCELERATOR,
        model=SimpleNamespace(training=True), _metrics=metrics(), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    given = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask, **references}
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, given, False)
    loss.backward()
    return loss.item(), ragged(logps.grad, lengths), trainer._metrics["train"]


def distributions() -> list[dict[str, Any]]:
    policy, teacher = (torch.tensor(inputs.distributions()[name]) for name in ("policy", "teacher"))
    found = []
    for form, beta in (("forward", 0), ("reverse", 1)):
        tokens = [
            GKDTrainer.generalized_jsd_loss(p[None, None], t[None, None], beta=beta, reduction="sum").item()
            for p, t in zip(policy, teacher, strict=True)
        ]
        found.append(value("GKDTrainer.generalized_jsd_loss", {"form": form}, tokens=tokens))
    return found


def overlong() -> list[dict[str, Any]]:
    found = []
    for limit, buffer in ((16, 4), (16, 16), (13, 3)):
        given = get_soft_overlong_punishment(limit, buffer)([[0] * n for n in inputs.LENGTHS])
        found.append(
            value(
                "get_soft_overlong_punishment", {"max": limit, "buffer": buffer, "lengths": inputs.LENGTHS}, added=given
            )
        )
    return found


def main() -> None:
    values = [{"batch": name, **made} for name, batch in inputs.batches().items() for made in grpo(batch)]
    values += [{"batch": name, **made} for name, batch in inputs.pairs().items() for made in dpo(batch)]
    write(f"trl {trl.__version__}", [*values, *distributions(), *overlong()])


if __name__ == "__main__":
    main()
