"""Ranks without Ray and without a dock that walk their instruction streams, every row at its bound: what each
instruction holds at its peak, beside what the plan says."""

import gc
import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import torch
from even_routers import even_out
from safetensors.torch import save_file
from stage import share
from torch import distributed as dist

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost import holdings
from msrl_graph.ir.attributes import UpdateAttributes
from msrl_graph.ir.plan import from_json
from msrl_graph.model import models
from msrl_graph.model.families import FAMILIES
from msrl_graph.runtime.data.columns import ColumnData, offsets_from_lengths, ragged
from msrl_graph.runtime.dock.client import Client
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.rank.context import RankContext
from msrl_graph.runtime.rank.rank import InstructionRunner, Rank

ROOT = Path(__file__).parents[2]
LIGHT = ("fsdp", "hf")
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model and a program. `shape` is (hidden, layers, heads, key-value heads, intermediate, vocabulary), `deploy`
    the statements of the deploy, `rows` (prompts, responses each, mini-batch), `tokens` the bounds of prompt and
    response, `experts` (how many, of which a token gets how many, of which width), `config` more fields of the
    config.json."""

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
    engines: tuple[str, str] = LIGHT  # of update and generation
    experts: tuple[int, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    def write(self, folder):
        """The model, with random weights, and the program of the example with this case's figures: its plan."""
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        )
        config = dict(zip(names, self.shape, strict=True)) | {
            "model_type": self.family,
            "architectures": [FAMILIES[self.family].architecture],
            "dtype": str(FLOATS[self.dtype]).removeprefix("torch."),
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 512,
        }
        if self.experts:
            names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            config |= dict(zip(names, self.experts, strict=True))
            config |= {"norm_topk_prob": True, "head_dim": self.shape[0] // self.shape[2]}
        config |= dict(self.config)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config))
        draw = torch.Generator().manual_seed(0)
        weights = {
            name: even_out(name, 0.05 * torch.randn(size, generator=draw)).to(FLOATS[self.dtype])
            for name, size in models.load("./model", folder).shapes_in_files.items()
        }
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
            (
                "  evaluate held_out { every = 40, report = reward, samples = 1, temperature = 0, "
                'label = "held-out accuracy" }\n',
                "",
            ),
            (
                "  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n",
                f"  {self.deploy}\n",
            ),
            *self.changes,
        ):
            assert old in text, old
            text = text.replace(old, new)
        return compile(folder / "walk.rlg", text=text, sets={"prompts": str(prompts), "group": str(group)})


class Sharing(InstructionRunner):
    """What ranks write, all of them have."""

    def run(self, pool, node):
        client = self.rank.client
        client.written = {}
        super().run(pool, node)
        everyone = [None] * dist.get_world_size()
        mine = client.written
        dist.all_gather_object(
            everyone, {c: (p.rows, [p.column[i] for i in range(len(p.rows))]) for c, p in mine.items()}
        )
        for name in {c for written in everyone for c in written}:
            pieces = {
                row: value for written in everyone if name in written for row, value in zip(*written[name], strict=True)
            }
            client.columns[name] = ragged(
                [pieces[row] for row in sorted(pieces)], np.int32 if name == "response" else np.float32
            )


class Handed:
    """Stands in for the dock's client and for the requests for rows: every row that a node reads is here."""

    def __init__(self, context):
        self.context = context
        self.wait_seconds = 0.0
        self.move_seconds = 0.0
        self.columns = {}

    def report_activity(self, what):
        pass

    def flush(self, task, report):
        pass

    def report_rows_done(self, node, task, rows):
        pass

    def walk(self, pool, instructions, task, walker, around):
        Client.walk(self, pool, instructions, task, walker, around)

    def _reach(self, what, task):
        pass

    def put_rows(self, node, task, columns):
        self.written = columns

    def begin(self, instructions, task):
        pass

    def batches(self, node, task, report):
        """This group's rows of what a node reads; of an update, mini-batch by mini-batch."""
        plan = self.context.plan
        layout = plan.placement(node.name).layout
        graph = plan.graph
        every = np.arange(graph.rows[graph.level(node)])
        size = UpdateAttributes.of(node).step_rows(len(every))
        for start in range(0, len(every), size):
            rows = np.array_split(every[start : start + size], layout.dp)[layout.coordinates(self.context.local).dp]
            known = [c for c in self.columns if c in (*node.reads, "response.logp")]
            # A prompt goes with each of its responses.
            columns = {c: self.columns[c].take(rows * len(self.columns[c]) // len(every)) for c in known}
            elements = {c: size * graph.bound(c) for c in node.reads}
            yield Batch(share(rows, len(rows), size, elements), rows, columns)


class Walk(Rank):
    """Needs a process group of the plan's devices. `case` is a name that no other walk of these ranks has."""

    runner = Sharing

    def __init__(self, plan, rank, case):
        super().__init__(RankContext(plan, rank))
        self.context.store = dist.PrefixStore(case, dist.distributed_c10d._get_default_store())
        self.client = self.shares = Handed(self.context)
        with memory.Peak() as peak:
            self.build()
        self.loaded = peak
        self.generation.ends = dict.fromkeys(self.generation.ends, ())

    def iteration(self, number, measure):
        """The instructions of one iteration, with what ranks write shared among them; the report."""
        graph = self.context.plan.graph
        draw = np.random.default_rng(number)
        prompts = graph.rows[0]
        responses = graph.rows[-1]
        size = self.context.plan.model("actor.update").vocabulary
        bound = graph.bound("prompt")
        longest = graph.bound("response")
        offsets = offsets_from_lengths(np.full(responses, longest))
        self.client.columns = {
            "prompt": ragged([draw.integers(0, size, bound) for _ in range(prompts)], np.int32),
            "advantage": ColumnData(draw.normal(size=responses * longest).astype(np.float32), offsets),
        }
        return self.run(Task("train", number, prompts), measure)


# What the instructions of each phase are called in a report.
OPS = {"RESHARD": "reshard", "WAIT": "swap", "generate": "generate", "infer": "infer", "update": "update"}


def predicted(plan):
    """By place and phase, bytes and what they are: of a device the plan's entry, of a host what one rank has swapped
    and offloaded to it."""
    found = {("device", m.phase): (m.total, f"{m.items} {m.remark}") for m in plan.memory if m.place == "device"}
    swapped = sum(r.released_bytes_per_device for r in plan.reshards)
    away = sum(sum(holdings.offloaded_items(plan, ENGINES, pool.name).values()) for pool in plan.pools)
    frozen = {end: holdings.weights(plan, ENGINES, f"actor.{end}", "frozen_kinds") for end in ("update", "generate")}
    away += frozen["generate"]
    host = {("host", phase): (away + swapped, "") for phase in ("reshard", "swap")}
    if meanwhile := away + frozen["update"] + holdings.activations_away(plan, ENGINES, "actor.update"):
        host["host", "update"] = meanwhile, ""
    return found | host


def measured(plan, moments=False):
    """By place and phase, the bytes of the busiest rank in the second iteration (the first makes the optimizer's
    states), and with `moments` what it held then."""
    found = {}
    for report in measure_ranks(plan, moments):
        for name, (size, moment) in report.items():
            place, phase = name.split(" ")
            found[place, phase] = max(found.get((place, phase), (0, "")), (size, moment))
    return found


def measure_ranks(plan, moments=False):
    """Of each rank, the bytes in the second iteration by "PLACE PHASE"."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(plan.cluster.devices, _walk, plan.to_json(), folder, moments)
        return [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]


def _walk(rank, _, plan, out, moments):
    gc.collect()  # what the last case held
    walk = Walk(from_json(plan), rank, out)
    walk.iteration(0, False)
    peaks = []
    told = memory.Peak.__init__

    def remembered(self):
        told(self)
        peaks.append(self)

    memory.Peak.__init__ = remembered
    try:
        report = walk.iteration(1, True)
    finally:
        memory.Peak.__init__ = told
    found = {"device load": (walk.loaded.peak["device"], _largest(walk.loaded) if moments else "")}
    keys = [key for key in report.bytes if key.startswith("peak of ") and key.endswith(", device")]
    for key, peak in zip(keys, peaks, strict=True):
        op, node = key.removeprefix("peak of ").removesuffix(", device").split(" ")
        phase = OPS.get(node.split(".")[1] if op == "RUN" else op)
        for place, size in peak.peak.items():
            if phase:
                told_of = _largest(peak) if moments else ""
                found[f"{place} {phase}"] = max(found.get(f"{place} {phase}", (0, "")), (size, told_of))
    (Path(out) / str(rank)).write_text(json.dumps(found))


def _largest(peak):
    counts = Counter(peak.largest).most_common()
    lines = [
        f"{n:4} x {size:>12,} {made} {shape}"
        for (size, made, shape), n in sorted(counts, key=lambda i: -i[0][0] * i[1])
    ]
    return "\n  ".join([peak.moment, *lines[:40]])


def case(
    name,
    family,
    shape,
    update,
    generate="dp = 1",
    micro=8,
    prompts=4,
    engine="",
    reference="",
    limit="micro_batch",
    **more,
):
    trainer, generator = more.get("engines", LIGHT)
    deploy = f"""layout actor.update {{ {update} }}
  layout actor.generate {{ {generate} }}
  engine actor.update = {trainer} {{ {limit} = {micro}{engine} }}
  engine actor.generate = {generator} {{ micro_batch = {prompts} }}"""
    if reference:
        deploy += f"\n  engine reference.infer = {trainer} {{ {reference} }}"
    return Case(name, family, shape, deploy, **more)


def heavy(name, *arguments, **more):
    """A case of the engines that need packages of their own."""
    return case(f"{name}, megatron and vllm", *arguments, engines=("megatron", "vllm"), **more)


# Hidden size, layers, heads, key-value heads, intermediate size, vocabulary.
WIDE = (256, 4, 8, 4, 704, 2048)
DEEP = (128, 8, 4, 2, 448, 512)
EVEN = (192, 3, 6, 6, 512, 4096)
# With rows so short that the optimizer's step holds most.
FLAT = (384, 2, 6, 6, 1024, 64)
ROUTED = (8, 2, 256)
SHORT: dict[str, Any] = {"rows": (2, 2, 4), "tokens": (6, 4)}


def by(optimizer):
    return (("adamw(lr = 2e-4, betas = [0.9, 0.99], weight_decay = 0, warmup = 20)", optimizer),)


CASES = (
    case("llama", "llama", WIDE, "dp = 1"),
    case("qwen2, bf16", "qwen2", WIDE, "dp = 1", dtype="bf16"),
    case("qwen2, tied, deep", "qwen2", DEEP, "dp = 1", micro=16, tied=True),
    case("llama, recompute", "llama", WIDE, "dp = 1", engine=", recompute = full"),
    case(
        "llama, bf16, recompute, long prompts",
        "llama",
        DEEP,
        "dp = 1",
        dtype="bf16",
        engine=", recompute = full",
        tokens=(96, 16),
    ),
    *(case(f"llama, dp 2, zero {z}", "llama", WIDE, f"dp = 2, zero = {z}", "dp = 2", 4, 2, ranks=2) for z in range(4)),
    case("qwen2, bf16, dp 2, zero 1", "qwen2", EVEN, "dp = 2, zero = 1", "tp = 2", 4, 4, ranks=2, dtype="bf16"),
    case(
        "qwen2, tied, dp 2, zero 3, recompute",
        "qwen2",
        DEEP,
        "dp = 2, zero = 3",
        "tp = 2",
        8,
        4,
        ", recompute = full",
        ranks=2,
        tied=True,
    ),
    case("llama, tp 2", "llama", WIDE, "tp = 2", "tp = 2", ranks=2),
    case("llama, cp 2", "llama", WIDE, "cp = 2", "tp = 2", ranks=2),
    case("qwen2, bf16, cp 2 by Ulysses", "qwen2", WIDE, "cp = 2, cp_kind = ulysses", "tp = 2", ranks=2, dtype="bf16"),
    case("llama, cp 2 x dp 2, zero 3", "llama", DEEP, "cp = 2, dp = 2, zero = 3", "tp = 2", 4, 2, ranks=4),
    case(
        "qwen2, bf16, cp 2, recompute",
        "qwen2",
        DEEP,
        "cp = 2",
        "dp = 2",
        engine=", recompute = full",
        ranks=2,
        dtype="bf16",
    ),
    case("llama, cp 2 by Ulysses", "llama", WIDE, "cp = 2, cp_kind = ulysses", "tp = 2", ranks=2),
    case("llama, sgd", "llama", WIDE, "dp = 1", changes=by("sgd(lr = 2e-4, momentum = 0.9)")),
    case("qwen2, bf16, sgd without momentum", "qwen2", WIDE, "dp = 1", dtype="bf16", changes=by("sgd(lr = 2e-4)")),
    case("llama, muon", "llama", FLAT, "dp = 1", changes=by("muon(lr = 2e-4)"), **SHORT),
    case("qwen2, bf16, muon", "qwen2", FLAT, "dp = 1", dtype="bf16", changes=by("muon(lr = 2e-4)"), **SHORT),
    case(
        "llama, dp 2, zero 1, muon",
        "llama",
        FLAT,
        "dp = 2, zero = 1",
        "dp = 2",
        2,
        1,
        ranks=2,
        changes=by("muon(lr = 2e-4)"),
        **SHORT,
    ),
    case(
        "llama, dp 2, zero 3, muon",
        "llama",
        WIDE,
        "dp = 2, zero = 3",
        "dp = 2",
        4,
        2,
        ranks=2,
        changes=by("muon(lr = 2e-4)"),
    ),
    case("llama, tp 2, muon", "llama", FLAT, "tp = 2", "tp = 2", ranks=2, changes=by("muon(lr = 2e-4)"), **SHORT),
    case("qwen2, tied, tp 2, then dp 2", "qwen2", EVEN, "tp = 2", "dp = 2", 8, 2, ranks=2, tied=True),
    case("llama, dp 2 x tp 2, zero 3", "llama", WIDE, "dp = 2, tp = 2, zero = 3", "dp = 4", 4, 1, ranks=4),
    case(
        "qwen2, bf16, tp 2 x dp 2, zero 2",
        "qwen2",
        EVEN,
        "tp = 2, dp = 2, zero = 2",
        "tp = 2",
        4,
        2,
        ranks=4,
        dtype="bf16",
    ),
    case("llama, dp 4, zero 3", "llama", DEEP, "dp = 4, zero = 3", "tp = 2", 4, 2, ranks=4),
    case("llama, bf16, recompute", "llama", WIDE, "dp = 1", dtype="bf16", engine=", recompute = full"),
    case(
        "llama, bf16, dp 2, zero 3, recompute",
        "llama",
        WIDE,
        "dp = 2, zero = 3",
        "tp = 2",
        4,
        engine=", recompute = full",
        ranks=2,
        dtype="bf16",
    ),
    case("experts", "qwen3_moe", WIDE, "dp = 1", experts=ROUTED),
    case("experts, bf16", "qwen3_moe", WIDE, "dp = 1", dtype="bf16", experts=ROUTED),
    case("experts, tp 2", "qwen3_moe", WIDE, "tp = 2", "tp = 2", ranks=2, experts=ROUTED),
    case("experts, dp 2 x ep 2", "qwen3_moe", WIDE, "dp = 2, ep = 2", "dp = 2", 4, 2, ranks=2, experts=ROUTED),
    case(
        "experts, dp 2 x ep 2, muon",
        "qwen3_moe",
        FLAT,
        "dp = 2, ep = 2",
        "dp = 2",
        2,
        1,
        ranks=2,
        experts=ROUTED,
        changes=by("muon(lr = 2e-4)"),
        **SHORT,
    ),
    case(
        "experts, tp 2, muon",
        "qwen3_moe",
        FLAT,
        "tp = 2",
        "tp = 2",
        ranks=2,
        experts=ROUTED,
        changes=by("muon(lr = 2e-4)"),
        **SHORT,
    ),
    case("experts, tp 2 x ep 2", "qwen3_moe", WIDE, "tp = 2, ep = 2", "tp = 2", ranks=2, experts=ROUTED),
    heavy("llama", "llama", WIDE, "dp = 1"),
    heavy("qwen2, bf16", "qwen2", WIDE, "dp = 1", dtype="bf16"),
    heavy("qwen2, tied, deep", "qwen2", DEEP, "dp = 1", micro=16, tied=True),
    heavy("llama, recompute", "llama", WIDE, "dp = 1", engine=", recompute = full"),
    heavy("llama, sgd, short", "llama", FLAT, "dp = 1", changes=by("sgd(lr = 2e-4, momentum = 0.9)"), **SHORT),
    heavy("llama, dp 2, zero 0", "llama", WIDE, "dp = 2, zero = 0", "dp = 2", 4, 2, ranks=2),
    heavy("llama, dp 2, zero 1", "llama", WIDE, "dp = 2, zero = 1", "dp = 2", 4, 2, ranks=2),
    heavy("llama, tp 2", "llama", WIDE, "tp = 2", "tp = 2", ranks=2),
    heavy("qwen2, bf16, tp 2", "qwen2", EVEN, "tp = 2", "tp = 2", ranks=2, dtype="bf16"),
    heavy("llama, cp 2", "llama", WIDE, "cp = 2", "tp = 2", ranks=2),
    heavy("qwen2, tied, pp 2", "qwen2", DEEP, "pp = 2", "pp = 2", 4, ranks=2, tied=True),
    heavy("llama, pp 2 x vpp 2", "llama", DEEP, "pp = 2, vpp = 2", "pp = 2", 4, ranks=2),
    heavy("llama, tp 2 x pp 2", "llama", DEEP, "tp = 2, pp = 2", "tp = 2, dp = 2", 4, 2, ranks=4),
    heavy("llama, dp 2 x tp 2", "llama", WIDE, "dp = 2, tp = 2, zero = 1", "dp = 2, tp = 2", 4, 2, ranks=4),
    heavy("experts", "qwen3_moe", WIDE, "dp = 1", experts=ROUTED),
    heavy("experts, dp 2 x ep 2", "qwen3_moe", WIDE, "dp = 2, ep = 2", "dp = 2", 4, 2, ranks=2, experts=ROUTED),
    heavy("experts, tp 2 x ep 2", "qwen3_moe", WIDE, "tp = 2, ep = 2, etp = 1", "tp = 2", ranks=2, experts=ROUTED),
    heavy("experts, tp 2 x etp 2", "qwen3_moe", WIDE, "tp = 2, etp = 2", "tp = 2", ranks=2, experts=ROUTED),
)

__all__ = ["CASES", "Case", "Walk", "case", "measured", "predicted"]
