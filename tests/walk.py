"""Ranks without Ray and without a dock that walk their instruction streams, every row at its bound: what each instruction holds at its
peak, beside what the plan says."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist

from msrl_graph import compile, models
from msrl_graph.runtime import memory, wrong
from msrl_graph.runtime.actors import Task
from msrl_graph.runtime.columns import Column, offsets_of, ragged
from msrl_graph.runtime.dock import Batch, Share
from msrl_graph.runtime.engines import Engines
from msrl_graph.runtime.worker import Rank

ROOT = Path(__file__).parent.parent
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model and a program. `shape` is (hidden, layers, heads, key-value heads, intermediate, vocabulary), `deploy` the statements of
    the deploy, `rows` (prompts, responses each, mini-batch), `tokens` the bounds of prompt and response."""

    name: str
    family: str
    shape: tuple[int, ...]
    deploy: str
    ranks: int = 1
    tied: bool = False
    dtype: str = "f32"
    rows: tuple[int, int, int] = (4, 4, 16)
    tokens: tuple[int, int] = (24, 40)
    changes: tuple[tuple[str, str], ...] = field(default=())

    def write(self, folder):
        """The model, with random weights, and the program of the example with this case's figures: its plan."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        config = dict(zip(names, self.shape, strict=True)) | {
            "model_type": self.family,
            "architectures": [FAMILIES[self.family]],
            "dtype": str(FLOATS[self.dtype]).removeprefix("torch."),
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 512,
        }
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config))
        draw = torch.Generator().manual_seed(0)
        tensors = models.load("./model", folder).tensors
        weights = {t.name: (0.05 * torch.randn(t.shape, generator=draw)).to(FLOATS[self.dtype]) for t in tensors}
        save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
        example = ROOT / "examples" / "arithmetic"
        for file in ("train.jsonl", "model/tokenizer.json", "model/tokenizer_config.json"):
            (folder / file).symlink_to(example / file)
        text = (example / "grpo.rlg").read_text()
        prompts, group, mini = self.rows
        for old, new in (
            ("i32[<= 6]", f"i32[<= {self.tokens[0]}]"),
            ("i32[<= 5]", f"i32[<= {self.tokens[1]}]"),
            ("mini_batch = 256", f"mini_batch = {mini}"),
            ("devices_per_node = 2", f"devices_per_node = {self.ranks}"),
            ('  data held_out = "test.jsonl"  { prompt = "prompt", answer = "answer" }\n', ""),
            ('  evaluate held_out { every = 40, report = reward, samples = 1, temperature = 0, label = "held-out accuracy" }\n', ""),
            ("  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n", f"  {self.deploy}\n"),
            *self.changes,
        ):
            assert old in text, old
            text = text.replace(old, new)
        return compile(folder / "walk.rlg", text=text, sets={"prompts": str(prompts), "group": str(group)})


class Walk(Rank):
    """Needs a process group of the plan's devices."""

    def __init__(self, plan, rank):
        Engines.__init__(self, plan, rank)
        self.seed, self.watch, self.recording, self.client = plan.deploy.run.seed, wrong.Watch(plan), None, self
        self.waited = self.moving = 0.0
        self.columns = {}
        with memory.Peak() as peak:
            self.build()
        self.loaded = peak.peak["device"]
        for generator in self.generators.values():
            generator.ends = []

    # Stands in for the dock's client.

    def at(self, what):
        pass

    def flush(self):
        return {}

    def put(self, node, task, columns):
        self.written = columns

    def _ask(self, node, task):
        pass

    def _run(self, instruction, task, report):
        self.written = {}
        super()._run(instruction, task, report)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {c: (rows, [column[i] for i in range(len(rows))]) for c, (rows, column) in self.written.items()})
        for name in {c for written in everyone for c in written}:
            pieces = {row: value for written in everyone if name in written for row, value in zip(*written[name], strict=True)}
            self.columns[name] = ragged([pieces[row] for row in sorted(pieces)], np.int32 if name == "response" else np.float32)

    def _batches(self, node, task, report):
        """This group's rows of what a node reads; of an update, mini-batch by mini-batch."""
        layout, graph = self.plan.placement(node.name).layout, self.plan.graph
        every = np.arange(graph.rows[graph.level(node)])
        size = int(node.number("mini_batch", len(every)))
        for start in range(0, len(every), size):
            rows = np.array_split(every[start : start + size], layout.dp)[layout.coordinates(self.local)[1]]
            known = [c for c in self.columns if c in (*node.reads, "response.logp")]
            # A prompt goes with each of its responses.
            columns = {c: self.columns[c].take(rows * len(self.columns[c]) // len(every)) for c in known}
            elements = {c: size * graph.bound(c) for c in node.reads}
            yield Batch(Share(rows, {}, len(rows), size, elements, 0, True), rows, columns)

    def iteration(self, number):
        """The instructions of one iteration, with what ranks write shared among them; the report."""
        graph, draw = self.plan.graph, np.random.default_rng(number)
        prompts, responses = graph.rows[0], graph.rows[-1]
        size = self.plan.model("actor.update").vocabulary
        bound, longest = graph.bound("prompt"), graph.bound("response")
        self.columns = {"prompt": ragged([draw.integers(0, size, bound) for _ in range(prompts)], np.int32)}
        offsets = offsets_of(np.full(responses, longest))
        self.columns["advantage"] = Column(draw.normal(size=responses * longest).astype(np.float32), offsets)
        return self.run(Task("train", number, prompts, responses // prompts), True)


__all__ = ["Case", "Walk"]
