"""Pieces of text that are encoded one by one and read as one sequence, by each published kind of tokenizer."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import chat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piece_tokenizers import (
    KINDS,
    folder,
    gpt2,
    made,
)
from sample import examples
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.agents.template import ChatTemplate
from msrl_graph.runtime.data.token_pieces import COMPOSED, BadPieceError, Pieces
from msrl_graph.runtime.data.tokens import Tokens

EXACT = {"gpt2", "qwen", "deepseek"}
BLANKS = {"llama", "mistral", "t5", "roberta"}  # which put a blank before each text, and lose nothing else of these


def joined(pieces: Pieces, before: str, text: str, tokens: np.ndarray) -> str:
    (first,) = pieces.encode([before])
    return str(pieces.tokenizer.decode([*first.tolist(), *tokens.tolist()], skip_special_tokens=False))


def normal(text: str) -> str:
    return normalizers.NFKC().normalize_str(text)


@pytest.mark.parametrize("kind", sorted(BLANKS))
def test_no_blank_comes_between_a_prompt_and_its_response(kind: str) -> None:
    pieces = Pieces(made(kind))
    assert not pieces.exact
    (alone,) = pieces.encode(["46"])
    assert joined(pieces, "12+34=", "46", alone) in ("12+34= 46", " 12+34= 46")
    for known in (["12+34="], None):
        (after,) = pieces.encode_after(["46"], known)
        assert joined(pieces, "12+34=", "46", after).lstrip() == "12+34=46"


@pytest.mark.parametrize("kind", sorted(KINDS))
@examples(60)
@given(st.text("ab1 2=+\n.,écafïon中🙂\u0301", max_size=8), st.text("ab1 2=+\n.,éaons中🙂\u0301", max_size=8))
def test_a_piece_reads_as_in_the_whole_text_or_is_refused(kind: str, before: str, text: str) -> None:
    pieces = Pieces(made(kind))
    whole = pieces.tokenizer.decode(pieces.encode([before + text])[0].tolist(), skip_special_tokens=False)
    try:
        (tokens,) = pieces.encode_after([text], [before])
    except BadPieceError as error:
        assert kind in ("albert", "bert", "t5", "words") and error.index == 0, error
        return
    assert normal(joined(pieces, before, text, tokens)) == normal(whole)
    assert kind not in EXACT or np.array_equal(tokens, pieces.encode([text])[0])


def test_which_tokenizers_need_no_look() -> None:
    assert {kind for kind in KINDS if Pieces(made(kind)).exact} == EXACT
    strips = gpt2()
    strips.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert not Pieces(strips).exact


COLUMNS = {"prompt": "i32[<= 40]", "chosen": "i32[<= 20]", "rejected": "i32[<= 20]"}
COLUMNS |= {"out_chosen": "f32[chosen]", "out_rejected": "f32[rejected]"}
NODES = """node judge.infer(prompt, chosen, rejected) -> out_chosen, out_rejected
           node actor.update(prompt, chosen, rejected, out_chosen, out_rejected) {
             loss = dpo(0.1, ref_chosen = out_chosen, ref_rejected = out_rejected)
             optimizer = adamw(lr = 1e-3)
           }
           source -> judge.infer -> actor.update"""


def test_a_response_from_data_is_read_after_its_prompt(tmp_path: Path) -> None:
    folder(tmp_path, "llama")
    rows = [{"prompt": "12+34=", "chosen": "46", "rejected": " 46"}, {"prompt": "ab", "chosen": "c", "rejected": "\n"}]
    data = chat.dataset(tmp_path, COLUMNS, rows, NODES)
    columns = data.all()
    for i, row in enumerate(rows):
        for name in ("chosen", "rejected"):
            whole = np.concatenate([columns["prompt"][i], columns[name][i][:-1]])  # without the end token
            assert data.tokens.decode([whole]) == [row["prompt"] + row[name]]


def test_what_cannot_be_joined_is_refused_with_its_row(tmp_path: Path) -> None:
    folder(tmp_path, "bert")
    fine = {"prompt": "12+34=", "chosen": "46", "rejected": " 7"}
    with pytest.raises(Fault) as told:
        chat.dataset(tmp_path, COLUMNS, [fine, {**fine, "prompt": "on", "chosen": "7"}], NODES)
    (diagnostic,) = told.value.diagnostics
    assert diagnostic.code == "bad-data"
    assert "line 2 of" in diagnostic.message and "has text in `chosen`, and the tokenizer" in diagnostic.message
    assert diagnostic.message.endswith("after the text before it: '<unk>' becomes 'on 7'")
    # The fix that the help names.
    tokens = Tokens(str(tmp_path / "model"))
    given = {**fine, "prompt": "on", "chosen": tokens.encode(["7"])[0].tolist()}
    assert len(chat.dataset(tmp_path, COLUMNS, [fine, given], NODES)) == 2


@pytest.mark.parametrize("element", ["text", "text[<= 20]"])
def test_a_text_that_follows_another_and_cannot_be_joined_is_refused_with_its_row(tmp_path: Path, element: str) -> None:
    folder(tmp_path, "words")
    nodes = NODES.replace("(prompt, chosen", "(prompt, hint, chosen")
    row = {"prompt": "12", "hint": "two", "chosen": "46", "rejected": "three"}
    rows = [row, {**row, "hint": "+"}]  # "=+" is one word, which the tokenizer does not know
    with pytest.raises(Fault) as told:
        chat.dataset(tmp_path, COLUMNS | {"hint": element}, rows, nodes)
    (diagnostic,) = told.value.diagnostics
    assert diagnostic.code == "bad-data"
    assert "line 2 of" in diagnostic.message and "has text in `hint`, and the tokenizer" in diagnostic.message
    # The fix that the help names.
    assert diagnostic.help.startswith("declare `hint` as tokens, `i32[<= n]`, and write the field as token ids, or")
    (ids,) = Tokens(str(tmp_path / "model")).encode(["+"])
    declared = COLUMNS | {"hint": "i32[<= 20]"}
    assert len(chat.dataset(tmp_path, declared, [{**row, "hint": ids.tolist()}] * 2, nodes)) == 2


def test_a_conversation_goes_on_without_a_blank(tmp_path: Path) -> None:
    speech = ChatTemplate(Tokens(str(folder(tmp_path, "llama"))))
    whole = np.concatenate([speech.encode("12+34="), speech.encode_following("46"), speech.encode_following(", and")])
    assert speech.decode(whole) == "12+34=46, and"


PARTS = ["ab", "1", " ", "   ", "\n", "é", "\u03b1\u0313\u0300\u0345", "中", "🙂", "<s>", "\x00", "three"]
BOUNDED = {"llama", "mistral", "gemma", "gpt2", "roberta", "qwen", "deepseek"}


@pytest.mark.parametrize("kind", sorted(KINDS))
@examples(60)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6), st.integers(1, 300), st.integers(0, 12))
def test_a_text_of_which_a_beginning_is_too_long_is_too_long(
    kind: str, parts: list[str], times: int, tokens: int
) -> None:
    pieces = Pieces(made(kind))
    text = "".join(parts) * times
    beginning = pieces.shorten(text, tokens)
    assert text.startswith(beginning)
    if len(beginning) == len(text):
        return
    assert kind in BOUNDED
    assert all(len(ids) > tokens for ids in pieces.encode([beginning, text]))


def test_what_may_shorten_a_text_has_no_beginning() -> None:
    long = "three and " * 10_000
    assert {kind for kind in KINDS if len(Pieces(made(kind)).shorten(long, 3)) < 1000} == BOUNDED
    for spoil in (
        lambda t: setattr(t, "normalizer", normalizers.Strip()),
        lambda t: setattr(t, "normalizer", normalizers.Replace("  ", " ")),
        lambda t: setattr(t, "normalizer", normalizers.Replace(Regex(" +"), "_")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda t: t.add_tokens([AddedToken("x", rstrip=True)]),
        lambda t: setattr(t.model, "byte_fallback", False),  # then unknown characters are one token, however many
    ):
        tokenizer = Tokenizer.from_str(made("gemma").to_str())
        spoil(tokenizer)
        assert Pieces(tokenizer).shorten(long, 3) == long
    tokenizer = Tokenizer.from_str(made("gemma").to_str())
    tokenizer.model.byte_fallback, tokenizer.model.fuse_unk = False, False  # one token each
    assert len(Pieces(tokenizer).shorten(long, 3)) < 1000


def test_no_character_is_composed_of_more_than_are_counted_for() -> None:
    characters = (chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in characters) == COMPOSED
