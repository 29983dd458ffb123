"""Numbers of micro-batches, and the memory of micro-batches that a number of tokens limits."""

from pathlib import Path

import pytest

from msrl_graph import compile
from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES
from msrl_graph.cost.batch_counts import BatchCounts
from msrl_graph.cost.holdings import largest_moment
from msrl_graph.ir.workload import Workload
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout

LAYOUTS = [Layout(), Layout(tp=2), Layout(cp=2), Layout(cp=2, cp_kind="ulysses"), Layout(dp=2, zero=3)]


def needed(engine, layout, verb, model="qwen3-8b", prompt=100, response=200, **sizes):
    spec = ENGINES[engine]
    work = Workload(
        load(model, Path()),
        layout,
        "bf16",
        prompt=prompt,
        response=response,
        divided=spec.divides_weights(layout),
        trained=True,
        optimizer=adamw(lr=1e-4),
        **sizes,
    )
    return sum(largest_moment(spec.memory.peaks(verb, work))[1].values())


@pytest.mark.parametrize("verb", ["infer", "update"])
@pytest.mark.parametrize(
    ("engine", "layout"), [("fsdp", layout) for layout in LAYOUTS] + [("megatron", Layout(tp=2, pp=2))], ids=str
)
def test_memory_of_a_number_of_tokens(engine, layout, verb):
    """It grows with the number, up to the memory of all rows together."""
    share = {"rows": 16, "prompts": 4, "batches": 2}
    sizes = [needed(engine, layout, verb, most_tokens=tokens, **share) for tokens in (300, 600, 1200, 2400, 4800)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == needed(engine, layout, verb, **share)
    # A row alone that is nearly all response: as many tokens, without padding.
    alone = needed(engine, layout, verb, prompt=2, response=298, rows=1, prompts=1, batches=2)
    assert alone <= sizes[0] <= 1.13 * alone


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"])
def test_memory_of_recurrent_layers_grows_with_tokens(model):
    share = {"rows": 16, "prompts": 16, "padded": True}
    sizes = [needed("fsdp", Layout(), "infer", model, most_tokens=tokens, **share) for tokens in (300, 1200, 4800)]
    assert sizes[0] < sizes[1] < sizes[2] == needed("fsdp", Layout(), "infer", model, **share)


PROGRAM = """import grpo
cluster one {{ device = "h100", nodes = 1, devices_per_node = 8 }}
deploy grpo on one {{
  set prompts = 64
  set group = 8
  set prompt_len = 100
  set response_len = 200
  model policy = "qwen2.5-7b"
  data source = "train.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update {{ tp = 4, dp = 2 }}
  engine actor.update = {engine}
}}
"""


@pytest.mark.parametrize(
    ("engine", "full", "half"),
    [
        ("fsdp { micro_batch = 8 }", 32, 32),
        ("fsdp { micro_batch_tokens = 2400 }", 32, 16),
        ("fsdp { micro_batch_tokens = 2999 }", 29, 14),
        ("megatron { micro_batch_tokens = 100 }", 256, 256),
    ],
)
def test_shorter_rows_are_fewer_micro_batches_only_of_tokens(engine, full, half):
    """256 rows of a data-parallel group, of 300 tokens or of 150."""
    plan = compile("counts.rlg", text=PROGRAM.format(engine=engine))
    counts = BatchCounts(plan, "actor.update")
    assert counts.steps * counts.step_rows == 256
    assert counts.steps * counts.count_in_step() == full
    assert counts.steps * counts.count_in_step(150) == half
