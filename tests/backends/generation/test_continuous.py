"""Continuous batching of the light generator: nobody draws otherwise for who is beside it, places are taken at once,
and no more rows than allowed are under way."""

from itertools import pairwise
from pathlib import Path

import engines
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_engines import EXAMPLE, model, sampling
from mixture import WINDOWED, qwen2
from sample import examples

from msrl_graph.backends.engine_protocols import GenerateRequest, collect_responses
from msrl_graph.backends.generation.continuous import SequenceBatch
from msrl_graph.model import models


@pytest.fixture(scope="module", params=["full attention", "windows"])
def generator(request, tmp_path_factory):
    """A generator; that with windows has them in three of four layers, and they are shorter than sequences."""
    if request.param == "full attention":
        return engines.loaded(model(), EXAMPLE / "model")
    folder = Path(qwen2(tmp_path_factory.mktemp("windows"), **WINDOWED))
    return engines.loaded(models.load(str(folder), Path("/")), folder)


PROMPTS = st.lists(st.lists(st.integers(3, 15), min_size=1, max_size=9), min_size=1, max_size=9)


@examples(25)
@given(
    prompts=PROMPTS,
    samples=st.integers(1, 3),
    limits=st.tuples(st.integers(0, 4), st.integers(0, 7)),
    heat=st.sampled_from([0.7, 1.0, 3.0]),
)
def test_any_number_at_once_draws_the_same(generator, prompts, samples, limits, heat):
    """Of prompts, and of sequences: fewer than one prompt has, too."""
    prompts, rows = [np.array(p, np.int32) for p in prompts], np.arange(len(prompts) * samples) + 7
    said = sampling(samples=samples, max_tokens=12, temperature=heat)
    generator.micro_batch = 0
    tokens, logps = collect_responses(generator.generate(GenerateRequest(prompts, rows, said)))
    generator.micro_batch, generator.sequences = limits
    some, theirs = collect_responses(generator.generate(GenerateRequest(prompts, rows, said)))
    generator.sequences = 0
    assert [t.tolist() for t in some] == [t.tolist() for t in tokens]
    assert np.allclose(np.concatenate(theirs), np.concatenate(logps), atol=1e-5)


class Watched(SequenceBatch):
    """Notes after each step how many rows are under way, and which have ended."""

    def __init__(self, *of):
        super().__init__(*of)
        self.under_way = []
        self.ended = []

    def step(self):
        found = super().step()
        self.under_way.append(len(self.running) + len(found))
        self.ended.append([r.place for r in found])
        return found


def watched(generator, lengths, slots):
    """A batch of rows that end after so many tokens each."""
    prompts = [np.array([5 + i % 9], np.int32) for i in range(len(lengths))]
    said = sampling(max_tokens=50, temperature=9.0, ends=())
    begun = np.array([50 - n for n in lengths])
    batch = Watched(generator, GenerateRequest(prompts, np.arange(len(lengths)), said, begun), slots, None)
    while batch.unfinished:
        batch.step()
    return batch


def test_a_row_that_ends_is_told_at_once_and_leaves_its_place(generator):
    lengths = [1, 2, 40, 3, 5, 8, 30, 1, 2, 3, 4, 2]
    batch = watched(generator, lengths, 4)
    assert sorted(p for ended in batch.ended for p in ended) == [*range(12)]
    assert batch.lengths.tolist() == lengths
    assert max(batch.under_way) <= 4
    # As many steps as the longest takes, which began with the first: by waves they would be 40 + 30 + 4.
    assert len(batch.ended) == 40
    assert batch.ended[0] == [0] and batch.ended[1] == [1]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_no_more_rows_than_slots_are_under_way_also_of_one_prompt(generator, slots):
    prompts = [np.array([5], np.int32), np.array([6, 7], np.int32)]
    said = sampling(samples=4, max_tokens=9, temperature=9.0, ends=())
    batch = Watched(generator, GenerateRequest(prompts, np.arange(8), said), slots, None)
    while batch.unfinished:
        batch.step()
    assert max(batch.under_way) == slots if slots != 5 else max(batch.under_way) == 4  # whole prompts, where they fit
    assert sorted(row for ended in batch.ended for row in ended) == [*range(8)]


def test_of_many_places_a_quarter_is_free_before_the_cache_is_copied(generator):
    batch = watched(generator, [3 + i % 13 for i in range(60)], 16)
    ended = [len(places) for places in batch.ended]
    begun = [now - before + over for (before, now), over in zip(pairwise(batch.under_way), ended, strict=False)]
    assert max(batch.under_way) <= 16 and batch.under_way[0] + sum(begun) == 60
    last = max(i for i, count in enumerate(begun) if count)
    assert all(count == 0 or count >= 4 for count in begun[:last]) and sum(c > 0 for c in begun) > 5


def test_what_is_not_asked_for_any_more_is_not_drawn(generator):
    said = sampling(max_tokens=40, temperature=9.0, ends=(1,))
    generator.micro_batch = 0
    responses = generator.generate(GenerateRequest([np.array([4, 5], np.int32)] * 3, np.arange(3), said))
    first = next(responses)
    responses.close()
    whole, _ = collect_responses(
        generator.generate(GenerateRequest([np.array([4, 5], np.int32)] * 3, np.arange(3), said))
    )
    assert first.tokens.tolist() == min(whole, key=len).tolist()


@examples(25)
@given(
    prompts=PROMPTS,
    samples=st.integers(1, 3),
    micro_batch=st.integers(0, 4),
    stretch=st.integers(1, 6),
    cut=st.booleans(),
)
def test_stretches_end_to_end_are_the_response(generator, prompts, samples, micro_batch, stretch, cut):
    """All that are under way have given a stretch before any gives the next; who has had enough draws no more, and goes
    on from there by another call."""
    prompts, rows = [np.array(p, np.int32) for p in prompts], np.arange(len(prompts) * samples) + 7
    said = sampling(samples=samples, max_tokens=12)
    generator.micro_batch = 0
    whole, logps = collect_responses(generator.generate(GenerateRequest(prompts, rows, said)))
    generator.micro_batch = micro_batch
    parts = [[] for _ in rows]
    theirs = [[] for _ in rows]
    live = set(range(len(rows)))
    count = 0
    drawn = generator.generate(GenerateRequest(prompts, rows, said, stretch=stretch))
    while live and not (cut and count == 1):
        count += 1
        told = [next(drawn) for _ in range(len(live))]
        assert {r.place for r in told} == live
        for r in told:
            assert len(r.tokens) == stretch or r.ended
            parts[r.place] += r.tokens.tolist()
            theirs[r.place] += r.logps.tolist()
        live -= {r.place for r in told if r.ended}
    drawn.close()
    if live:
        left = sorted(live)
        before = [np.concatenate([prompts[i // samples], np.array(parts[i], np.int32)]) for i in left]
        for r in generator.generate(GenerateRequest(before, rows[left], said, np.array([len(parts[i]) for i in left]))):
            parts[left[r.place]] += r.tokens.tolist()
            theirs[left[r.place]] += r.logps.tolist()
    assert parts == [t.tolist() for t in whole]
    assert np.allclose(np.concatenate(theirs), np.concatenate(logps), atol=5e-5)


def test_what_goes_on_is_not_beside_what_begins(generator, monkeypatch):
    """One batch would pad all contexts to the longest; each part still says which of the responses it is of."""
    widths = []
    logits = type(generator).logits

    def seen(self, ids, mask, position, cache):
        widths.append(tuple(mask.shape))
        return logits(self, ids, mask, position, cache)

    said = sampling(samples=1, max_tokens=40, temperature=9.0)
    begun = np.array([30, 0, 31, 0, 0])
    prompts = [np.arange(i, 3 + i + b, dtype=np.int32) % 12 + 3 for i, b in enumerate(begun)]
    generator.micro_batch = 0
    whole, _ = collect_responses(generator.generate(GenerateRequest(prompts, np.arange(5), said, begun)))
    monkeypatch.setattr(type(generator), "logits", seen)
    parts = [[] for _ in begun]
    for r in generator.generate(GenerateRequest(prompts, np.arange(5), said, begun, stretch=4)):
        parts[r.place] += r.tokens.tolist()
    assert parts == [w.tolist() for w in whole]
    assert {(2, 34), (3, 3)} <= {*widths}
