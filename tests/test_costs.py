"""What pieces of an iteration cost: never less for more, and in keeping with each other."""

from __future__ import annotations

import page
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.backends import ENGINES
from msrl_graph.passes.costs import Costs, _Work
from msrl_graph.passes.lengths import Rows
from msrl_graph.plan import EngineChoice

PLAN = page.plan(page.start(engines={"actor.update": EngineChoice("fsdp", {"recompute": "none"})}))
GENERATE, INFER, UPDATE = (Costs(PLAN, ENGINES, n) for n in ("actor.generate", "actor.infer", "actor.update"))
LENGTHS = st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 8192)), min_size=1, max_size=20)


@given(LENGTHS, st.integers(0, 19), st.integers(1, 100))
def test_longer_rows_never_take_less(lengths: list[tuple[int, int]], which: int, more: int) -> None:
    which %= len(lengths)
    longer = [(p, r + more * (i == which)) for i, (p, r) in enumerate(lengths)]
    for state in (INFER, UPDATE):
        short, long = (state.micro_batch(Rows.of(x)).value for x in (lengths, longer))
        assert 0 < short < long
        assert state.micro_batch(Rows.of(lengths[:-1])).value < short


@given(st.lists(st.integers(1, 2048), min_size=1, max_size=20), st.integers(1, 100))
def test_more_prompts_never_prefill_in_less(lengths: list[int], more: int) -> None:
    seconds = GENERATE.prefill(lengths).value
    assert 0 < seconds < GENERATE.prefill([*lengths, more]).value
    assert seconds < GENERATE.prefill([lengths[0] + more, *lengths[1:]]).value


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(0, 1000))
def test_a_step_of_more_sequences_never_takes_less(sequences: int, cached: int, more: int) -> None:
    step = GENERATE.decode_step(sequences, cached).value
    assert 0 < step <= GENERATE.decode_step(sequences + more, cached).value
    assert step <= GENERATE.decode_step(sequences, cached + more).value


@given(st.integers(1, 50), st.integers(1, 2048), st.integers(1, 8192))
def test_rows_alike_are_rows_of_their_lengths(count: int, prompt: int, response: int) -> None:
    assert Rows.alike(count, prompt, response) == Rows.of([(prompt, response)] * count)


def test_an_update_is_three_forward_passes() -> None:
    rows = Rows.alike(4, 2048, 8192)
    host = rows.count * PLAN.cluster.device.overheads.row.value
    forward, both = (state.micro_batch(rows).value - host for state in (INFER, UPDATE))
    forward_sums = INFER.collectives.tensor_parallel(rows.tokens, rows.response).value
    sums = UPDATE.collectives.tensor_parallel(rows.tokens, rows.response, backward=True).value
    assert both - sums == pytest.approx(3 * (forward - forward_sums), rel=0.01)


def test_attention_is_counted_once_and_grows_with_the_square() -> None:
    """Of one row alone, by hand: 2 x parameters x tokens, and 2 x tokens^2 x heads x size of a causal layer."""
    model = PLAN.model("actor.infer")
    rate = PLAN.cluster.device.flops["bf16"].value * 0.4 * INFER.group

    def flops(tokens: int) -> float:
        work = _Work(tokens, tokens, 1, tokens**2, 0.0)
        return INFER._pass("infer", work).value * rate

    inside = model.parameters - model.vocabulary * model.hidden  # the embedding is looked up
    for tokens in (20_000, 200_000):  # so many that launching is hidden
        attention = 2 * model.layers * model.heads * model.head_dim * tokens**2
        assert flops(tokens) == pytest.approx(2 * inside * tokens + attention)


def test_one_data_parallel_group_exchanges_nothing() -> None:
    alone = page.plan(page.start(layouts={}))
    assert Costs(alone, ENGINES, "actor.infer").exchange().value == 0
    assert UPDATE.exchange().value > 0
