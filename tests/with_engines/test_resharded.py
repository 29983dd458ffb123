"""Resharding between the engines' own shards: of any layout of a trainer to any of a generator each rank gets its
weights bit for bit, moves what the plan says, and holds no more than it says. `make reshard-engines` draws more."""

from random import Random

import psutil
import pytest
import ranks
import resharded
from engines import resident_without_free
from resharded import LARGE, MODELS, Pair

from msrl_graph.ir.plan import from_json
from msrl_graph.sharding.layout import Layout

DENSE = [n for n in MODELS if n != LARGE and "mixture" not in n]
MIXED = [n for n in MODELS if "mixture" in n]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return resharded.written(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("world", "seed"), [(1, 0), (2, 1), (2, 2), (4, 3), (4, 4)])
def test_any_layout_to_any_layout(world, seed, folder):
    draw = Random(seed)
    for trainer, models in zip(("fsdp", "megatron"), (DENSE, MIXED) if seed % 2 else (MIXED, DENSE), strict=True):
        pair, plan = resharded.drawn(draw, folder, world, trainer, "hf", draw.choice(models))
        resharded.tried([(pair, plan)])


# What reshards into one layout of vLLM comes one after the other: its core takes seconds to make.
CORES = [
    ("qwen2, tied", Layout(tp=2)),
    ("qwen3, tied", Layout(pp=2, stages=(1, 4))),
    ("mixture", Layout(tp=2, dp=2, etp=2, inner=2)),
]


@pytest.mark.parametrize(("model", "wanted"), CORES, ids=lambda x: str(x))
def test_any_layout_to_one_of_vllm(model, wanted, folder):
    draw = Random(0)
    trainers = ("megatron", "fsdp", "megatron")
    resharded.tried([resharded.drawn(draw, folder, wanted.devices, t, "vllm", model, wanted) for t in trainers])


# What draws have found.
FOUND = {
    "experts lie in strides where they are sent": Pair(
        "mixture", 2, "megatron", "hf", "dp = 1", "dp = 1", "apart actor.update, actor.generate"
    ),
}


@pytest.mark.parametrize("pair", FOUND.values(), ids=FOUND)
def test_what_was_found(pair, folder):
    resharded.tried([(pair, pair.plan(folder))])


def _resident(rank, _, text):
    """Resident bytes where the update's weights are on the device, on the host beside the generation's, and back."""
    found = []
    read = psutil.Process().memory_info
    engines = resharded.Engines(resharded.RankContext(from_json(text), rank))
    engines.build()
    ((edge, mover),) = engines.resharders.items()
    swap = engines.swaps["actor"]
    generator = engines.generators[edge[1]]
    for _ in range(2):
        found = [resident_without_free()]
        mover.run(generator.allocate)
        found.append(read().rss)
        generator.release()
        found.append(read().rss)
        swap.wait()
        found.append(read().rss)
    size = sum(s.tensor.nbytes for s in swap.shards)
    with_generation, alone, back = (n - found[0] for n in found[1:])
    assert size > 200e6
    assert abs(with_generation - size) < 0.1 * size, "the device's are gone, the host's and the generation's there"
    assert max(abs(alone), abs(back)) < 0.1 * size, (alone, back)


def test_the_system_has_the_memory_of_swapped_weights_again(tmp_path):
    pair = Pair(LARGE, 1, "fsdp", "hf", "dp = 1", "dp = 1", "reshard { mode = swap }")
    plan = pair.plan(resharded.written(tmp_path, LARGE))
    ranks.run(1, _resident, plan.to_json())
