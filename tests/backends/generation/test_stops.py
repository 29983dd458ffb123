"""Stop strings: a response ends with the token that completes one, as a loop over the whole text says."""

from dataclasses import replace

import engines
import numpy as np
import pytest
import torch
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from light_engines import PROMPTS, model, sampling
from sample import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import GenerateRequest, collect_responses
from msrl_graph.backends.generation.stops import Stops

EXAMPLE = ROOT / "examples" / "arithmetic"
TEXT = ["the naïve 日本語 text </tool> of 🙂🙃 and </toolbox> ends\n\nhere", "日本 </too </tool>日 \n🙂🙃🙃 the end"]
STOPS = [("</tool>",), ("🙃",), ("\n\n", "日本語"), (" the e",), ("e", "<|end|>"), ("of 🙂🙃 and </toolbox> ends",)]


@pytest.fixture(scope="module")
def generator():
    torch.set_num_threads(1)
    engine = engines.generator(model())
    hf_modules.fill(model(), engine.allocate())
    return engine


def of_bytes(folder):
    """A byte-level tokenizer in which characters lie on several tokens and strings on few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT[:1], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def with_blanks(folder):
    """One whose decoder takes off the first blank, and which knows other characters by their bytes."""
    words = (
        [f"<0x{b:02X}>" for b in range(256)]
        + sorted({*"".join(TEXT).replace(" ", "▁")} - {*"🙂🙃日本語"})
        + ["<unk>", "<|end|>"]
    )
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def naive(tokenizer, tokens, strings):
    """How many tokens there are when the whole text first holds one of the strings."""
    texts = (tokenizer.decode(tokens[:n], skip_special_tokens=False) for n in range(1, len(tokens) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)


def looked(stops, rows):
    """The same, by rows that are looked at together as they grow."""
    found = [None] * len(rows)
    for n in range(1, max(map(len, rows)) + 1):
        going = [i for i, row in enumerate(rows) if found[i] is None and len(row) >= n]
        if going:
            for i, hit in zip(going, stops([np.array(rows[i][:n]) for i in going]), strict=True):
                found[i] = n if hit else None
    return found


@pytest.mark.parametrize("strings", STOPS)
@pytest.mark.parametrize("make", [of_bytes, with_blanks])
def test_a_tail_says_what_the_whole_text_says(make, strings, tmp_path):
    tokenizer = make(tmp_path)
    random = np.random.default_rng(0)
    end = tokenizer.token_to_id("<|end|>")
    rows = [tokenizer.encode(text).ids for text in (*TEXT, *TEXT[0].split(), TEXT[1] * 3)]
    rows += [[*rows[0][:20], *[end] * 40, *rows[0][20:]], [*rows[0][:5], end, *rows[0][5:]]]
    # Pieces of characters in any order, too.
    rows += [random.integers(0, tokenizer.get_vocab_size(), 60).tolist() for _ in range(20)]
    rows += [random.permutation(rows[0])[:40].tolist() for _ in range(20)]
    expected = [naive(tokenizer, row, strings) for row in rows]
    assert looked(Stops(str(tmp_path), strings), rows) == expected
    assert any(expected)


def test_a_response_ends_with_its_stop_string(generator):
    """The same tokens as without, each row up to the first stop string, and the log-probabilities of these."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    rows = np.arange(60)
    whole = sampling(samples=20, max_tokens=8, temperature=2.0)
    tokens, logps = collect_responses(generator.generate(GenerateRequest(PROMPTS, rows, whole)))
    stopped = collect_responses(
        generator.generate(
            GenerateRequest(PROMPTS, rows, sampling(samples=20, max_tokens=8, temperature=2.0, stop=("3", "11", "=")))
        )
    )
    ends = [naive(tokenizer, row.tolist(), ("3", "11", "=")) for row in tokens]
    assert 5 < sum(e is not None for e in ends) < 55
    for row, logp, short, its, end in zip(tokens, logps, *stopped, ends, strict=True):
        assert np.array_equal(row[:end], short)
        assert np.allclose(logp[:end], its, atol=1e-5)


def test_a_response_goes_on_as_if_it_had_not_been_left(generator):
    """In two calls, rows of different lengths in the second: noise and room are those of the whole response."""
    rows = np.arange(60)
    tokens, logps = collect_responses(
        generator.generate(GenerateRequest(PROMPTS, rows, sampling(samples=20, max_tokens=8)))
    )
    some = np.flatnonzero([len(t) > 3 for t in tokens])
    begun = 1 + some % 3
    context = [np.concatenate([PROMPTS[i // 20], tokens[i][:n]]) for i, n in zip(some, begun, strict=True)]
    for micro_batch in (0, 1):
        generator.micro_batch = micro_batch
        again, its = collect_responses(
            generator.generate(GenerateRequest(context, rows[some], sampling(samples=20, max_tokens=8), begun))
        )
        generator.micro_batch = 0
        for i, n, row, logp in zip(some, begun, again, its, strict=True):
            assert np.array_equal(tokens[i][n:], row)
            assert np.allclose(logps[i][n:], logp, atol=1e-5)


@examples(40)
@given(
    strings=st.sampled_from(
        [("3", "11", "="), tuple(f"{a}{b}" for a in "1357" for b in range(10)), ("246", "1", "<unk>5")]
    ),
    stretch=st.integers(1, 5),
    micro_batch=st.integers(0, 2),
    cut=st.integers(0, 3),
)
def test_a_response_in_stretches_and_across_a_cut_ends_where_it_ends_at_once(
    generator, strings, stretch, micro_batch, cut
):
    """Drawn in parts, and after so many of them by another call, which is handed what was drawn: a stop string may lie
    on both sides."""
    rows = np.arange(60)
    said = sampling(samples=20, max_tokens=8, temperature=3.0, stop=strings)
    whole, logps = collect_responses(generator.generate(GenerateRequest(PROMPTS, rows, said)))
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    free, _ = collect_responses(
        generator.generate(GenerateRequest(PROMPTS, rows, sampling(samples=20, max_tokens=8, temperature=3.0)))
    )
    assert [len(t) for t in whole] == [naive(tokenizer, t.tolist(), strings) or len(t) for t in free]
    generator.micro_batch = micro_batch
    parts = [[] for _ in rows]
    theirs = [[] for _ in rows]
    live = set(range(len(rows)))

    def draw(drawn, places, until):
        while live and until > 0:
            for r in [next(drawn) for _ in range(len(live))]:
                parts[places[r.place]] += r.tokens.tolist()
                theirs[places[r.place]] += r.logps.tolist()
                live.difference_update([places[r.place]] if r.ended else [])
            until -= 1

    draw(generator.generate(GenerateRequest(PROMPTS, rows, said, stretch=stretch)), [*rows], cut)
    if live:
        left = sorted(live)
        before = [np.concatenate([PROMPTS[i // 20], np.array(parts[i], np.int32)]) for i in left]
        begun = np.array([len(parts[i]) for i in left])
        draw(
            generator.generate(GenerateRequest(before, rows[left], replace(said, joined=begun), begun, stretch)),
            left,
            9,
        )
    generator.micro_batch = 0
    assert parts == [t.tolist() for t in whole]
    assert np.allclose(np.concatenate(theirs), np.concatenate(logps), atol=1e-5)


def test_what_is_not_joined_is_of_another_answer(generator):
    """As in an environment's turns: the string that ended the last one ends no other."""
    before = [np.concatenate([PROMPTS[0], np.array([5, 6], np.int32)])]  # "23"
    text = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json")).decode([5, 6])
    said = sampling(max_tokens=8, stop=(text,), ends=())
    lengths = [
        len(
            next(
                generator.generate(GenerateRequest(before, np.arange(1), replace(said, joined=joined), np.array([2])))
            ).tokens
        )
        for joined in (0, 2)
    ]
    assert lengths[0] > lengths[1] == 1
