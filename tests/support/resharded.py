"""Resharding between real engines: programs drawn at random of those that compile and run, and what holds of each on
every rank.

Invariant: of a draw nothing is made up here but the weights. The plan is the compiler's, engines, process groups and
routes are those that a rank builds by it (runtime/rank/engines.py).
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import ranks
import torch
from safetensors.torch import save_file

from msrl_graph.backends import ENGINES, hf_modules
from msrl_graph.backends.spec import BYTES
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.cost import holdings
from msrl_graph.diagnostics import NOWHERE, Fault
from msrl_graph.ir.plan import from_json
from msrl_graph.model import models
from msrl_graph.model.families import find_family
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.rank.context import RankContext
from msrl_graph.runtime.rank.engines import Engines
from msrl_graph.sharding.layout import slices

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
SIZES = {
    "hidden_size": 256,  # that of all heads, which vLLM takes it to be
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128}
LARGE = "large"  # of 66 million parameters
# By name: the class, tied or not, the vocabulary (1,009 is prime: engines pad it), the type.
MODELS = {
    "llama": ("Llama", False, 1000, "float32", {}),
    "qwen2, tied": ("Qwen2", True, 1009, "float32", {}),
    "qwen2, bf16": ("Qwen2", False, 1000, "bfloat16", {}),
    "qwen3": ("Qwen3", False, 1009, "float32", {}),
    "qwen3, tied": ("Qwen3", True, 1000, "float32", {}),
    "mixture": ("Qwen3Moe", False, 1000, "float32", ROUTED),
    "mixture, tied, bf16": ("Qwen3Moe", True, 1009, "bfloat16", ROUTED),
    LARGE: ("Qwen2", False, 1000, "float32", {"hidden_size": 1024, "intermediate_size": 4096}),
}
PROGRAM = """
algorithm moved {
  columns {
    prompt    : i32[<= 6]
    answer    : text
    response  : i32[<= 5]
    old_logp  : f32[response]
    reward    : f32
    advantage : f32[response]
  }
  worker actor : policy
  worker host  : function
  source(16) -> prompt, answer
  node actor.generate(prompt) -> response { samples = 2 }
  node actor.infer(prompt, response) -> old_logp
  node host.reward(response, answer) -> reward { call = exact_match() }
  node host.advantage(response, reward) -> advantage { call = group_norm(), per = prompt }
  node actor.update(prompt, response, old_logp, advantage) { loss = clip(0.2), optimizer = adamw(lr = 1e-3) }
  source -> actor.generate -> actor.infer, host.reward
  host.reward -> host.advantage
  actor.infer, host.advantage -> actor.update
  actor.update => actor.generate
}
cluster here { device = "cpu", devices_per_node = RANKS }
deploy moved on here {
  model policy = "./MODEL"
  data source = "train.jsonl" { prompt = "prompt", answer = "answer" }
  DEPLOY
}
"""


@dataclass(frozen=True)
class Pair:
    """Engines of update and generation, and a program's statements of where they compute."""

    model: str
    ranks: int
    trainer: str
    generator: str
    update: str
    generate: str
    more: str = ""

    def plan(self, folder):
        """Of a folder with the models; None where the compiler or a run refuses it."""
        deploy = f"""layout actor.update {{ {self.update} }}
  layout actor.generate {{ {self.generate} }}
  engine actor.update = {self.trainer} {{ micro_batch = 4 }}
  engine actor.generate = {self.generator} {{ micro_batch = 2 }}
  {self.more}"""
        text = PROGRAM.replace("RANKS", str(self.ranks)).replace("MODEL", _folder(self.model))
        try:
            plan = translate(read_source(str(folder / "p.rlg"), text.replace("DEPLOY", deploy))).plan
        except Fault:
            return None
        return None if find_unsupported(plan) else plan


def _folder(name):
    return name.replace(", ", "-")


@cache
def written(folder, *names):
    """A folder with some models, all of the draws where none is named, their weights at random, and the data."""
    for name in names or [n for n in MODELS if n != LARGE]:
        kind, tied, vocabulary, dtype, more = MODELS[name]
        path = folder / _folder(name)
        path.mkdir()
        family = find_family(f"{kind}ForCausalLM")
        config = SIZES | more | {"architectures": [family.architecture], "model_type": family.name}
        config |= {"tie_word_embeddings": tied, "vocab_size": vocabulary, "dtype": dtype, "eos_token_id": 1}
        (path / "config.json").write_text(json.dumps(config))
        found = models.load(str(path), folder)
        draw = torch.Generator().manual_seed(0)
        weights = {
            inside: torch.randn([stop - start for start, stop in box], generator=draw).to(getattr(torch, dtype)) * 0.1
            for t in found.weights
            for inside, _, box in t.in_files(tuple((0, n) for n in t.shape))
        }
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
        for file in (EXAMPLE / "model").glob("tokenizer*"):
            (path / file.name).symlink_to(file)
    (folder / "train.jsonl").symlink_to(EXAMPLE / "train.jsonl")
    return folder


# Draws


def drawn(draw: Random, folder, world, trainer, generator, model, wanted=None):
    """A pair that compiles and runs, and its plan; with the generation's layout as `wanted`, where that is given."""
    while True:
        if apart := world > 1 and wanted is None and draw.random() < 0.15:
            first = draw.randrange(1, world)
            ends = (first, world - first)
            more = "apart actor.update, actor.generate"
        else:
            mode = draw.choice(["swap", "swap", "swap", "naive"])
            order = draw.choice(["", ", order = direct", ", order = staged"]) * (mode == "swap")
            bucket = draw.choice(["", f", bucket = {draw.choice([1, 40, 300])} KB"])
            ends = (world, world)
            more = f"reshard {{ mode = {mode}{order}{bucket} }}"
        update, generate = (
            _layout(draw, ENGINES[name], devices, "mixture" in model)
            for name, devices in zip((trainer, generator), ends, strict=True)
        )
        if wanted is not None:
            generate = ", ".join(f"{axis} = {getattr(wanted, axis)}" for axis in ("tp", "pp", "dp"))
            generate += f", stages = {[*wanted.stages]}" * bool(wanted.stages)
        pair = Pair(model, world, trainer, generator, update, generate, more)
        plan = pair.plan(folder)
        if plan and wanted in (None, replace(plan.placement("actor.generate").layout, span=NOWHERE)):
            assert apart == (plan.reshards[0].mode == "send")
            return pair, plan


def _layout(draw, spec, devices, mixed):
    """Any sizes of an engine's axes that come to so many devices; what it cannot have, the compiler says."""
    sizes = {}
    rest = devices
    # Of cp weights are copies, so that little is seen of it.
    axes = [a for a in ("tp", "pp", "cp") if a in spec.capabilities.axes and (a != "cp" or draw.random() < 0.3)]
    for axis in draw.sample(axes, len(axes)):
        sizes[axis] = draw.choice([n for n in range(1, rest + 1) if rest % n == 0])
        rest //= sizes[axis]
    sizes["dp"], pp = rest, sizes.get("pp", 1)
    if mixed and "ep" in spec.capabilities.axes and "ep" not in spec.list_plan_only("host"):
        stage = devices // pp
        sizes["ep"] = draw.choice([n for n in range(1, stage + 1) if stage % n == 0])
        if "etp" in spec.capabilities.axes and draw.random() < 0.7:
            sizes["etp"] = draw.choice([n for n in range(1, stage + 1) if stage % (n * sizes["ep"]) == 0])
    if "vpp" in spec.capabilities.axes and pp == 2 and draw.random() < 0.3:
        sizes["vpp"] = 2
    text = ", ".join(f"{axis} = {n}" for axis, n in sizes.items() if n > 1 or axis in ("dp", "etp"))
    if pp > 1 and "vpp" not in sizes and draw.random() < 0.4:
        cuts = sorted(draw.sample(range(1, SIZES["num_hidden_layers"]), pp - 1)) if pp <= 5 else []
        text += f", stages = [{', '.join(str(b - a) for a, b in zip([0, *cuts], [*cuts, 5], strict=True))}]"
    if "update" in spec.verbs:
        text += f", zero = {draw.choice(spec.capabilities.zero)}"
    return text


# On a rank


def moving(rank):
    """Each plan on a rank: the bytes that it received, and its peak."""
    gc.freeze()  # what is loaded by now: else all of it is looked through for tensors each time

    def move(text, seed):
        plan = from_json(text)
        (edge,) = plan.reshards
        engines = Engines(RankContext(plan, rank))
        engines.build()
        mover = engines.resharders[edge.src, edge.dst]
        swap = engines.swaps.get("actor")
        trained = engines.trainers["actor"].shards() if engines.trainers else []
        generator = engines.generators.get(edge.dst)
        update = storages(trained)
        sizes = [s.tensor.untyped_storage().nbytes() for s in trained]
        filled = []

        def allocate():
            filled[:] = generator.allocate() if generator else []
            return filled

        for turn in range(2):
            whole = weights(plan, seed + turn)
            if swap:
                swap.wait()
            fill(trained, whole)
            wanted = []
            if generator:  # the same, written without resharding: an engine may make something else of it
                fill(allocate(), whole)
                generator.filled()
                wanted = contents(filled)
                generator.release()
            before = held()["device"] - update
            with memory.Peak() as peak:
                mover.run(allocate)
            assert_same(filled, whole)
            away = storages(trained) == 0
            assert away or storages(trained) == update
            assert away == (edge.mode == "swap") or not update
            host = sum(s.tensor.nbytes for s in trained) * away
            assert held() == {"device": before + storages(trained) + storages(filled), "host": host}
            if generator:
                generator.filled()
                assert all(map(torch.equal, contents(filled), wanted)), "an engine made other weights of the same ones"
                generator.release()
                assert not storages(filled)
            if turn and swap:
                swap.start_in()
            if swap:
                swap.wait()
            assert [s.tensor.untyped_storage().nbytes() for s in trained] == sizes
            assert_same(trained, whole)
        return getattr(mover, "received", mover.moved), peak.peak["device"] - before

    return move


def weights(plan, seed):
    """Whole tensors of an update's model, at random, the same on each rank."""
    model = plan.model(plan.reshards[0].src)
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
    return {t.name: torch.randn(t.shape, generator=draw).to(dtype) for t in model.weights}


def fill(shards, whole):
    with torch.no_grad():
        for piece in shards:
            piece.tensor.copy_(whole[piece.name][slices(piece.box)])


def assert_same(shards, whole):
    """Bit for bit."""
    for piece in shards:
        assert torch.equal(piece.tensor, whole[piece.name][slices(piece.box)]), (piece.name, piece.box)


def held():
    gc.collect()
    return memory.live_bytes()


def _behind(shards):
    return {s.tensor.untyped_storage()._cdata: s.tensor.untyped_storage() for s in shards}.values()


def storages(shards):
    """Bytes of what lies behind some shards."""
    return sum(storage.nbytes() for storage in _behind(shards))


def contents(shards):
    """A copy of what lies behind some shards."""
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in _behind(shards)]


# What ranks tell


def assert_as_planned(plan, told):
    """Bytes that ranks received are the plan's for the busiest, up to the largest box where several have the same and
    an all-gather leaves it to one of them; none held more than the plan says, and 5 %."""
    (edge,) = plan.reshards
    model = plan.model(edge.src)
    item = BYTES[holdings.dtype(plan, edge.src)]
    for way in edge.ways:
        most = max((moved[way.of] if isinstance(moved, dict) else moved) for moved, _ in told)
        slack = item * max(t.elements for t in model.weights) if way.how == "all-gather" else 0
        assert abs(most - way.bytes) <= slack, (way, most)
    peak = max(peak for _, peak in told)
    assert peak <= 1.05 * edge.peak_bytes_per_device, (peak, edge.peak_bytes_per_device)
    return peak / edge.peak_bytes_per_device


def tried(cases, seed=0):
    """Each of some pairs and plans, on ranks of their own, which stay for all of them; the peaks beside the plans'."""
    team = ranks.Team(cases[0][0].ranks, moving)
    found = []
    try:
        for pair, plan in cases:
            try:
                found.append(assert_as_planned(plan, team.ask(plan.to_json(), seed)))
            except AssertionError as error:
                raise AssertionError(f"{pair}\n{error}") from None
    finally:
        team.close()
    return found
