"""Stop strings: a response ends with the token that completes one, as a loop over the whole text says."""

from pathlib import Path

import engines
import numpy as np
import pytest
import torch
from test_engines import PROMPTS, model, sampling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from msrl_graph.backends import transformer
from msrl_graph.backends.spec import collected
from msrl_graph.backends.stops import Stops

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
TEXT = ["the naïve 日本語 text </tool> of 🙂🙃 and </toolbox> ends\n\nhere", "日本 </too </tool>日 \n🙂🙃🙃 the end"]
STOPS = [("</tool>",), ("🙃",), ("\n\n", "日本語"), (" the e",), ("e", "<|end|>"), ("of 🙂🙃 and </toolbox> ends",)]


@pytest.fixture(scope="module")
def generator():
    torch.set_num_threads(1)
    engine = engines.generator(model())
    transformer.fill(model(), engine.allocate())
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
            for i, hit in zip(going, stops(np.array([rows[i][:n] for i in going], np.int32)), strict=True):
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
    rows, whole = np.arange(60), sampling(samples=20, max_tokens=8, temperature=2.0)
    tokens, logps = collected(generator.generate(PROMPTS, rows, whole))
    stopped = collected(
        generator.generate(PROMPTS, rows, sampling(samples=20, max_tokens=8, temperature=2.0, stop=("3", "11", "=")))
    )
    ends = [naive(tokenizer, row.tolist(), ("3", "11", "=")) for row in tokens]
    assert 5 < sum(e is not None for e in ends) < 55
    for row, logp, short, its, end in zip(tokens, logps, *stopped, ends, strict=True):
        assert np.array_equal(row[:end], short)
        assert np.allclose(logp[:end], its, atol=1e-5)


def test_a_response_goes_on_as_if_it_had_not_been_left(generator):
    """In two calls, rows of different lengths in the second: noise and room are those of the whole response."""
    rows = np.arange(60)
    tokens, logps = collected(generator.generate(PROMPTS, rows, sampling(samples=20, max_tokens=8)))
    some = np.flatnonzero([len(t) > 3 for t in tokens])
    begun = 1 + some % 3
    context = [np.concatenate([PROMPTS[i // 20], tokens[i][:n]]) for i, n in zip(some, begun, strict=True)]
    for micro_batch in (0, 1):
        generator.micro_batch = micro_batch
        again, its = collected(generator.generate(context, rows[some], sampling(samples=20, max_tokens=8), begun))
        generator.micro_batch = 0
        for i, n, row, logp in zip(some, begun, again, its, strict=True):
            assert np.array_equal(tokens[i][n:], row)
            assert np.allclose(logps[i][n:], logp, atol=1e-5)
