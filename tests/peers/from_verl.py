"""What verl's own functions make of the inputs, in float64: writes verl.json (`make peer-values`, in an environment of
its own).

verl computes on padded rectangles with a mask; what stands here is ragged again. Where a function gives one number for
a batch, the value of each token is had by weights that are 0 for all others, and the gradient beside it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import inputs
import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from tables import padded, ragged, value, write
from transformers.data.metrics.squad_metrics import compute_f1
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

Tensor = torch.Tensor


class Padded:
    """A batch as verl has it: every column a rectangle, and which of it are response tokens."""

    def __init__(self, batch: inputs.Batch) -> None:
        self.lengths: list[int] = batch["lengths"]
        self.mask = padded([[1.0] * n for n in self.lengths])
        self.groups = np.array(batch["groups"])
        self.score = torch.tensor(batch["score"])
        self.last = torch.zeros_like(
            self.mask
        )  # the score on the last token; in an empty row on the last column, as its managers do
        for i, n in enumerate(self.lengths):
            self.last[i, n - 1] = self.score[i]
        self.columns = {
            name: padded(rows) for name, rows in batch.items() if name not in ("lengths", "groups", "score")
        }

    def __getattr__(self, name: str) -> Tensor:
        return self.columns[name]

    def ragged(self, rectangle: Tensor) -> list[list[float]]:
        return ragged(rectangle, self.lengths)

    def each(self) -> list[Tensor]:
        """For each token a rectangle that is 1 there and 0 elsewhere."""
        found = []
        for i, n in enumerate(self.lengths):
            for t in range(n):
                one = torch.zeros_like(self.mask)
                one[i, t] = 1.0
                found.append(one)
        return found


def advantages(b: Padded) -> list[dict[str, Any]]:
    found = []
    for std in (True, False):
        given, _ = core_algos.compute_grpo_outcome_advantage(
            b.last.clone(), b.mask, b.groups, norm_adv_by_std_in_grpo=std
        )
        found.append(value("compute_grpo_outcome_advantage", {"std": std}, advantage=b.ragged(given)))
    given, _ = core_algos.compute_rloo_outcome_advantage(b.last.clone(), b.mask, b.groups)
    found.append(value("compute_rloo_outcome_advantage", {}, advantage=b.ragged(given)))
    given, _ = core_algos.compute_opo_outcome_advantage(b.last.clone(), b.mask, b.groups)
    found.append(value("compute_opo_outcome_advantage", {}, advantage=b.ragged(given)))
    for kl in (0.0, 0.1):
        rewards, _ = penalized(b, kl)
        given, _ = core_algos.compute_remax_outcome_advantage(
            rewards, b.score.flip(0), b.mask
        )  # as if of greedy responses
        found.append(value("compute_remax_outcome_advantage", {"kl": kl}, advantage=b.ragged(given)))
    for kl, gamma, lam in ((0.0, 1.0, 1.0), (0.1, 1.0, 0.95), (0.05, 0.9, 0.7)):
        rewards, _ = penalized(b, kl)
        given, returns = core_algos.compute_gae_advantage_return(rewards, b.value, b.mask, gamma, lam)
        options = {"kl": kl, "gamma": gamma, "lam": lam}
        found.append(
            value("compute_gae_advantage_return", options, advantage=b.ragged(given), returns=b.ragged(returns))
        )
    for kl, gamma in ((0.0, 1.0), (0.1, 0.9)):
        rewards, _ = penalized(b, kl)
        config = AlgoConfig(gamma=gamma)
        given, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, b.mask, config=config)
        options = {"kl": kl, "gamma": gamma}
        found.append(
            value(
                "compute_reinforce_plus_plus_outcome_advantage",
                options,
                advantage=b.ragged(given),
                returns=b.ragged(returns),
            )
        )
    for coefficient, target, horizon in ((0.1, 0.02, 10000), (0.2, 10.0, 50), (0.05, 0.01, 20)):
        _, after = penalized(b, coefficient, target, horizon)
        found.append(
            value("apply_kl_penalty", {"kl_coef": coefficient, "target": target, "horizon": horizon}, kl_coef=after)
        )
    return found


def penalized(b: Padded, kl: float, target: float = 1.0, horizon: int = 1) -> tuple[Tensor, float]:
    """The token rewards, and the controller's next coefficient."""
    columns = {
        "token_level_scores": b.last,
        "response_mask": b.mask,
        "old_log_probs": b.old_logp,
        "ref_log_prob": b.ref_logp,
    }
    controller = core_algos.AdaptiveKLController(kl, target, horizon)
    data, _ = ray_trainer.apply_kl_penalty(DataProto.from_dict(tensors=columns), controller)
    return data.batch["token_level_rewards"], float(controller.value)


def losses(b: Padded) -> list[dict[str, Any]]:
    found = []
    for name, low, high, dual in (
        ("vanilla", 0.2, 0.2, None),
        ("vanilla", 0.2, 0.28, 3.0),
        ("vanilla", 0.1, 0.3, 1.5),
        ("gspo", 3e-4, 4e-4, None),
        ("gspo", 0.2, 0.2, None),
        ("cispo", 1.0, 0.2, None),
        ("cispo", 0.3, 0.1, None),
    ):
        options = {"name": name, "low": low, "high": high, "dual": dual}
        logp = b.logp.clone().requires_grad_()
        whole, told = policy_loss(b, logp, **options)
        whole.backward()
        tokens = [policy_loss(b, b.logp, weights=one, **options)[0].item() for one in b.each()]
        clipped = told["actor/pg_clipfrac"] + told["actor/pg_clipfrac_lower"]  # the second is of the dual clip
        found.append(
            value(f"compute_policy_loss_{name}", options, tokens=tokens, gradient=b.ragged(logp.grad), clipped=clipped)
        )
    for share, coef in ((0.0002, 1.0), (0.3, 0.5)):
        found.append(chosen(b, "kl_cov", {"share": share, "coef": coef}, kl_cov_ratio=share, ppo_kl_coef=coef))
    for least, most in ((0.2, 5.0), (-0.5, 0.5), (50.0, 60.0)):
        # It draws from those within the bounds: here as many as there are.
        options = {"share": 1.0, "least": least, "most": most}
        found.append(chosen(b, "clip_cov", options, clip_cov_ratio=1.0, clip_cov_lb=least, clip_cov_ub=most))
    for form in ("k1", "abs", "mse", "low_var_kl"):
        logp = b.logp.clone().requires_grad_()
        given = core_algos.kl_penalty(logp, b.ref_logp, form)
        (given * b.mask).sum().backward()
        found.append(value("kl_penalty", {"form": form}, tokens=b.ragged(given), gradient=b.ragged(logp.grad)))
    for size in (0.5, 0.1):
        predicted = b.values.clone().requires_grad_()
        options = {"range": size}
        whole, clipped = value_loss(b, predicted, b.mask, size)
        whole.backward()
        tokens = [value_loss(b, b.values, one, size)[0].item() for one in b.each()]
        gives = {"tokens": tokens, "gradient": b.ragged(predicted.grad), "clipped": clipped.item()}
        found.append(value("compute_value_loss", options, **gives))
    ratio = b.old_logp - b.gen_logp
    for most, level in ((2.0, "token"), (1.1, "token"), (2.0, "sequence"), (1.1, "sequence")):
        given, _ = rollout_corr_helper.compute_rollout_correction_weights(
            ratio, b.mask, rollout_is=level, rollout_is_threshold=most
        )
        options = {"most": most, "ratio": level}
        found.append(value("compute_rollout_correction_weights", options, tokens=b.ragged(given)))
    for low, high, level in ((0.5, 2.0, "token"), (0.9, 1.1, "token"), (0.5, 2.0, "sequence")):
        # Its metrics divide by the weights, of which there may be none.
        with mock.patch.object(rollout_corr_helper, "compute_is_metrics", lambda **_: {}):
            given, _ = rollout_corr_helper.compute_rollout_correction_weights(
                ratio, b.mask, rollout_is=level, rollout_is_threshold=f"{low}_{high}"
            )
        options = {"low": low, "high": high, "ratio": level}
        found.append(value("compute_rollout_correction_weights, within bounds", options, tokens=b.ragged(given)))
    for low, high, level in ((0.5, 2.0, "token"), (0.9, 1.1, "token"), (0.5, 2.0, "sequence"), (0.9, 1.1, "mean")):
        kind = {"token": "token_k1", "sequence": "seq_sum_k1", "mean": "seq_mean_k1"}[level]
        # Its bounds are of the generator's probability over the trainer's.
        given, _ = rollout_corr_helper.compute_rollout_rejection_mask(ratio, b.mask, kind, f"{1 / high}_{1 / low}")
        options = {"low": low, "high": high, "ratio": level}
        found.append(value("compute_rollout_rejection_mask", options, tokens=b.ragged(given)))
    return found


def chosen(b: Padded, name: str, options: dict[str, Any], **policy: float) -> dict[str, Any]:
    """A loss that chooses among all tokens of the batch: of each token its part, by the weights of rollout
    correction."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.2,
        policy_loss=PolicyLossConfig(loss_mode=name, **policy),
    )  # fmt: skip
    config.global_batch_info.update(batch_num_tokens=1)
    loss = core_algos.get_policy_loss_fn(name)
    logp = b.logp.clone().requires_grad_()
    whole, _ = loss(b.old_logp, logp, b.advantage, b.mask, "token-mean", config, None)
    whole.backward()
    tokens = [
        loss(b.old_logp, b.logp.clone(), b.advantage, b.mask, "token-mean", config, one)[0].item() for one in b.each()
    ]
    return value(f"compute_policy_loss_{name}", options, tokens=tokens, gradient=b.ragged(logp.grad))


def policy_loss(
    b: Padded, logp: Tensor, name: str, low: float, high: float, dual: float | None, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The sum over all tokens, and metrics. Its dual clip cannot be left out; one of 1e300 bounds nothing."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual or 1e300,
    )  # fmt: skip
    config.global_batch_info.update(batch_num_tokens=1)
    loss = core_algos.get_policy_loss_fn(name)
    return loss(b.old_logp, logp, b.advantage, b.mask, "token-mean", config, weights)


def value_loss(b: Padded, predicted: Tensor, mask: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """The sum over all tokens, and the share of them that is clipped."""
    return core_algos.compute_value_loss(predicted, b.returns, b.value, mask, size, batch_num_tokens=1)


def reductions(b: Padded) -> list[dict[str, Any]]:
    rows = len(b.lengths)
    found = []
    for mode, options in (
        ("token-mean", {}),
        ("token-mean", {"dp_size": 4, "batch_num_tokens": 100}),
        ("seq-mean-token-mean", {}),
        ("seq-mean-token-mean", {"global_batch_size": rows}),
        ("seq-mean-token-mean", {"dp_size": 2, "global_batch_size": 3 * rows}),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 16}),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 16, "global_batch_size": rows}),
    ):
        given = core_algos.agg_loss(b.advantage, b.mask, mode, **options)
        found.append(value("agg_loss", {"mode": mode, **options}, loss=given.item()))
    return found


def resampling(b: Padded) -> list[dict[str, Any]]:
    found = []
    for method, power in (("pow", 2.0), ("pow", 0.5), ("max_min", 2.0), ("max_random", 2.0)):
        data = DataProto.from_dict(tensors={"token_level_scores": b.score[:, None]})
        with mock.patch.object(torch, "multinomial", wraps=torch.multinomial) as drawn:
            core_algos.compute_pf_ppo_reweight_data(data, method, power)
        found.append(
            value(
                "compute_pf_ppo_reweight_data",
                {"weights": method, "k": power},
                weights=drawn.call_args.args[0].tolist(),
            )
        )
    return found


def overlong() -> list[dict[str, Any]]:
    found = []
    lengths = inputs.LENGTHS
    columns = {
        "prompts": torch.zeros(len(lengths), 2, dtype=torch.int64),
        "responses": torch.zeros(len(lengths), 20, dtype=torch.int64),
        "attention_mask": torch.tensor([[1] * (2 + n) + [0] * (20 - n) for n in lengths]),
    }
    others = {"reward_model": [{"ground_truth": ""}] * len(lengths), "data_source": ["none"] * len(lengths)}
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "", eos_token="</s>")
    for limit, buffer, factor in ((16, 4, 1.0), (16, 16, 0.5), (13, 3, 2.0)):
        config = OmegaConf.create({"enable": True, "len": buffer, "penalty_factor": factor, "log": True})
        manager = DAPORewardManager(tokenizer, 0, lambda **_: 0.0, max_resp_len=limit, overlong_buffer_cfg=config)
        data = DataProto.from_dict(
            tensors=columns, non_tensors={k: np.array(v, dtype=object) for k, v in others.items()}
        )
        given = manager(data, return_dict=True)["reward_extra_info"]["overlong_reward"]
        options = {"max": limit, "buffer": buffer, "factor": factor, "lengths": lengths}
        found.append(value("DAPORewardManager", options, added=[float(x) for x in given]))
    return found


def texts() -> list[dict[str, Any]]:
    """By the script of SQuAD, as transformers has it, which verl wants."""
    return [
        value("squad_metrics.compute_f1", {}, f1=[compute_f1(answer, response) for response, answer in inputs.TEXTS])
    ]


def main() -> None:
    values = []
    for name, batch in inputs.batches().items():
        b = Padded(batch)
        values += [{"batch": name, **made} for made in (*advantages(b), *losses(b), *reductions(b), *resampling(b))]
    write(f"verl {verl.__version__}", [*values, *overlong(), *texts()])


if __name__ == "__main__":
    main()
