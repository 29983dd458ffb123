"""The example in trl's GRPOTrainer: one measurement per process.

Rank 0 prints it as one line of JSON, and writes each iteration to a file at once (--lines). Runs inside .venv-trl,
which has trl and not this package; under torch.distributed.run for several ranks. With --gpu it runs on one GPU in
bfloat16. With --lengths each response has a stated length (bench/gpu.py).

Invariant: timing wraps trl's own methods and changes nothing that they compute. A GPU's work is waited for.

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
from functools import partial, wraps
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

STEPS = 2  # optimizer steps on each generated batch
PROMPT = 6  # tokens of a prompt, at most


def exact_match(completions, answer, **_):
    return [
        float(completion.strip() == expected.strip()) for completion, expected in zip(completions, answer, strict=True)
    ]


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def finish() -> None:
    """Wait for the work of the GPU, if there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StatedEnds(LogitsProcessor):
    """Ends each response at its stated length, with the end token."""

    def __init__(self, lengths, end, prompt):
        self.lengths = lengths
        self.end = end
        self.prompt = prompt

    def __call__(self, ids, scores):
        # Without indices that depend on values: the host does not wait for the device.
        last = self.lengths <= ids.shape[1] - self.prompt + 1
        scores = scores.masked_fill(last[:, None], -torch.inf)
        scores[:, self.end] = torch.where(last, 0.0, -torch.inf).to(scores.dtype)
        return scores


class Trainer(GRPOTrainer):
    """A GRPOTrainer that records where its seconds go.

    `lengths`: the length of each response of a batch; empty: a response ends as the model says."""

    lengths: tuple[int, ...] = ()

    def __init__(self, *arguments, **options):
        self.spent: Counter[str] = Counter()
        super().__init__(*arguments, **options)

    def timed(self, phase, function, *arguments, **options):
        finish()
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            finish()
            self.spent[phase] += time.perf_counter() - start

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        if self.lengths:
            self._state_lengths(prompt_ids)
        return self.timed("generate", super()._generate_single_turn, prompt_ids, *arguments, **options)

    def _state_lengths(self, prompt_ids):
        assert len(prompt_ids) == len(self.lengths)
        if not self.use_vllm:
            model = self.accelerator.unwrap_model(self.model)
            lengths = torch.tensor(self.lengths, device=self.accelerator.device)
            processor = StatedEnds(lengths, self.eos_token_ids[0], max(map(len, prompt_ids)))
            model.generate = partial(type(model).generate, model, logits_processor=[processor])
            return
        engine = self.vllm_generation.llm
        if "generate" in vars(engine):
            return
        generate = engine.generate

        def stated(prompts, sampling_params, **others):
            params = [sampling_params.clone() for _ in prompts]
            for own, length in zip(params, self.lengths, strict=True):
                own.max_tokens = length
                own.ignore_eos = True
            return generate(prompts, sampling_params=params, **others)

        engine.generate = stated

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
        finish()
        wall = time.perf_counter() - self.wall
        cpu = time.process_time() - self.cpu
        spent = self.trainer.spent
        self.seconds += wall
        phases = {name: spent[name] for name in ("generate", "reward", "reference", "old")}
        phases["update"] = spent["step"] - spent["prepare"] + spent["optimizer"]
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        own = {"iteration": wall, "cpu": cpu, **phases, "other": wall - sum(phases.values()), "memory": memory}
        self.lines.append(own)
        if self.options.lines:
            with self.options.lines.open("a") as file:
                file.write(json.dumps(own) + "\n")
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
    parser.add_argument("--model", type=Path, help="a model's folder (default: the example's)")
    parser.add_argument("--lengths", type=Path, help="a JSON file with the length of each response of a batch")
    parser.add_argument("--lines", type=Path, help="a file to which each iteration is appended")
    parser.add_argument("--rows", type=int, default=0, help="rows of a micro-batch (default: all of a step)")
    parser.add_argument("--gpu", action="store_true", help="on one GPU, in bfloat16")
    parser.add_argument("--vllm", type=float, default=0.0, help="generate by vLLM with this share of the GPU's memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = str(options.model or options.example / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    clock = Clock(options, tokenizer)
    rows_of_step = options.prompts * options.group // STEPS // ranks
    micro_batch = options.rows or rows_of_step
    accumulated = rows_of_step // micro_batch
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.vllm,
        "vllm_max_model_length": PROMPT + options.response,
        "vllm_importance_sampling_correction": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=options.seed,
            # The recipe of grpo.rlg: mini-batches of 256 responses, one pass over each.
            per_device_train_batch_size=micro_batch,
            steps_per_generation=STEPS * accumulated,
            gradient_accumulation_steps=accumulated,
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
            **(vllm if options.vllm else {}),
            # Settings for speed, and without output files.
            use_cpu=not options.gpu,
            bf16=options.gpu,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            model_init_kwargs={"dtype": "bfloat16" if options.gpu else "float32"},
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
        if options.lengths:
            trainer.lengths = tuple(json.loads(options.lengths.read_text())["lengths"])
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
