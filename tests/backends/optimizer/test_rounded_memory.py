"""What engines hold whose gradients and optimizer states are bf16, beside what their specs and a plan say."""

import held
import pytest
import walk
import walk_rounded
from held import assert_close, peaks, small

from msrl_graph.backends.memory.sizes import CHUNK
from msrl_graph.sharding.layout import Layout

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
TALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192}
BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(), TALL | BF16),
        (Layout(), TALL | BF16 | {"tie_word_embeddings": True}),
        (Layout(), TALL),
        (Layout(tp=2), TALL | BF16),
        (Layout(dp=2, zero=1), WIDE | BF16),
        (Layout(dp=2, zero=2), WIDE | BF16),
        (Layout(dp=2, zero=3), TALL | BF16),
        (Layout(dp=2, zero=3), WIDE),
    ],
    ids=str,
)
@pytest.mark.parametrize("batches", [1, 2])
def test_engines_hold_what_their_specs_say(layout, sizes, batches, tmp_path, monkeypatch):
    for name, value in {"ROWS": 4, "EACH": 2, "PROMPT": 4, "RESPONSE": 4, "BATCHES": batches}.items():
        monkeypatch.setattr(held, name, value)
    for chunk in (1 << 12, CHUNK):  # the smaller one shows the moments besides the optimizer's step
        found = peaks("fsdp", small(tmp_path, **sizes), layout, gradients="bf16", moments="bf16", chunk=chunk)
        assert_close({"update": found["update"]})


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_rounded.CASES, ids=lambda case: case.name)
def test_the_plan_says_what_a_run_holds(case, tmp_path):
    plan = case.write(tmp_path)
    found = walk.measured(plan)
    for key, (wanted, items) in walk.predicted(plan).items():
        assert wanted == pytest.approx(found[key][0], rel=0.05), (key, items)
