"""The example in trl's GRPOTrainer: one measurement per process.

Rank 0 prints it as one line of JSON. Runs inside .venv-trl, which has trl and not this package; under
torch.distributed.run for several ranks.

Invariant: timing wraps trl's own methods and changes nothing that they compute.

Phases, in seconds per iteration (one generated batch and all optimizer steps on it): generate
(`_generate_single_turn`), reward (`_calculate_rewards`), reference and old log-probabilities
(`_get_per_token_logps_and_entropies` without gradients), update (loss, backward, clipping, optimizer step).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

STEPS = 2  # optimizer steps on each generated batch


def exact_match(completions, answer, **_):
    return [
        float(completion.strip() == expected.strip()) for completion, expected in zip(completions, answer, strict=True)
    ]


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


class Trainer(GRPOTrainer):
    """A GRPOTrainer that records where its seconds go."""

    def __init__(self, *arguments, **options):
        self.spent: Counter[str] = Counter()
        super().__init__(*arguments, **options)

    def timed(self, phase, function, *arguments, **options):
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            self.spent[phase] += time.perf_counter() - start

    def _generate_single_turn(self, *arguments, **options):
        return self.timed("generate", super()._generate_single_turn, *arguments, **options)

    def _calculate_rewards(self, *arguments, **options):
        return self.timed("reward", super()._calculate_rewards, *arguments, **options)

    def _get_per_token_logps_and_entropies(self, model, *arguments, **options):
        function = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():
            return function(model, *arguments, **options)  # a part of the update
        return self.timed("reference" if model is self.ref_model else "old", function, model, *arguments, **options)

    def _prepare_inputs(self, *arguments, **options):
        return self.timed("prepare", super()._prepare_inputs, *arguments, **options)

    def training_step(self, *arguments, **options):
        return self.timed("step", super().training_step, *arguments, **options)

    def create_optimizer(self, *arguments, **options):
        optimizer = super().create_optimizer(*arguments, **options)
        step = optimizer.step
        optimizer.step = wraps(step)(lambda *args, **kwargs: self.timed("optimizer", step, *args, **kwargs))
        return optimizer


class Clock(TrainerCallback):
    """Seconds, processor seconds and phases of each iteration, and held-out accuracy.

    Accuracy is measured between iterations, while the clock is stopped.
    """

    def __init__(self, options, tokenizer):
        self.options = options
        self.tokenizer = tokenizer
        self.trainer: Trainer | None = None
        self.lines: list[dict[str, float]] = []
        self.curve: list[tuple[int, float, float]] = []  # iterations, seconds, accuracy
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **_):
        self.evaluate(0)
        self.start()

    def start(self):
        self.trainer.spent.clear()
        self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % STEPS:
            return
        wall = time.perf_counter() - self.wall
        cpu = time.process_time() - self.cpu
        spent = self.trainer.spent
        self.seconds += wall
        phases = {name: spent[name] for name in ("generate", "reward", "reference", "old")}
        phases["update"] = spent["step"] - spent["prepare"] + spent["optimizer"]
        self.lines.append({"iteration": wall, "cpu": cpu, **phases, "other": wall - sum(phases.values())})
        done = state.global_step // STEPS
        if done == self.options.iterations or (self.options.every and done % self.options.every == 0):
            self.evaluate(done)
        self.start()

    def evaluate(self, done: int) -> None:
        if not self.options.every:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        test = rows(self.options.example / "test.jsonl")
        batch = self.tokenizer([row["prompt"] for row in test], padding=True, return_tensors="pt")
        state = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            out = model.generate(**batch, max_new_tokens=self.options.response, do_sample=False)
        model.train()
        torch.set_rng_state(state)
        texts = self.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        self.curve.append((done, self.seconds, statistics.mean(exact_match(texts, [row["answer"] for row in test]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=0, help="iterations between held-out accuracies; 0: none")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = str(options.example / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    clock = Clock(options, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=options.seed,
            # The recipe of grpo.rlg: mini-batches of 256 responses, one pass over each.
            per_device_train_batch_size=options.prompts * options.group // STEPS // ranks,
            steps_per_generation=STEPS,
            gradient_accumulation_steps=1,
            num_iterations=1,
            num_generations=options.group,
            max_steps=options.iterations * STEPS,
            max_completion_length=options.response,
            temperature=1.0,
            beta=0.001,
            epsilon=0.2,
            use_bias_correction_kl=False,
            loss_type="bnpo",
            scale_rewards="group",
            learning_rate=2e-4,
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            optim="adamw_torch_fused",
            # Settings for speed on processors, and without output files.
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            model_init_kwargs={"dtype": "float32"},
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            reward_funcs=exact_match,
            args=config,
            train_dataset=Dataset.from_list(rows(options.example / "train.jsonl")),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        clock.trainer = trainer
        trainer.train()
    result = {"lines": clock.lines, "curve": clock.curve}
    if ranks > 1:
        # An iteration's processor seconds are those of all ranks.
        cpu = torch.tensor([line["cpu"] for line in clock.lines])
        torch.distributed.all_reduce(cpu)
        for line, seconds in zip(clock.lines, cpu.tolist(), strict=True):
            line["cpu"] = seconds
        torch.distributed.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
