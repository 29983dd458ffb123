"""Pieces of text that become tokens one by one and are read as one sequence: a response after its prompt, what an
environment says after a response.

Invariant: the tokens of a piece, after those of what comes before it, decode to the joined text. Some tokenizers put a
blank before each text (Llama 2, TinyLlama): there a piece is encoded with what comes before it, and cut. Where that
does not help either, the piece is refused.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .columns import Array

# Texts that stand for what comes before a piece, where that is not known or is joined with the piece to one token.
ANCHORS = ("=", "\n", "1", "a", ".")
# Parts of a tokenizer that leave every text as it is. NFC composes characters, which the comparison does too.
EXACT = {"Sequence", "Split", "Digits", "ByteLevel", "NFC"}
# Parts of a tokenizer that never leave out a character of a text: NFC makes at most COMPOSED characters one.
KEEPING = {*EXACT, "Prepend", "Replace", "Metaspace", "Punctuation"}
COMPOSED = 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class BadPieceError(ValueError):
    """A text that a tokenizer cannot encode after another; `index` is its place among those given."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(what)
        self.index = index


class Pieces:
    """Encodes the pieces of a sequence with a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of each text by itself."""
        return [np.asarray(e.ids, np.int32) for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def following(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Array]:
        """The tokens of each text after the text `before` it; None: it is not known. Raises BadPieceError."""
        alone = self.encode(texts)
        if self.exact:
            return alone
        given = [ANCHORS[0]] * len(texts) if before is None else before
        first = self.encode(given)
        joint = self.encode([b + t for b, t in zip(given, texts, strict=True)])
        wanted = self._decode(joint)
        found: dict[int, Array] = {}
        for anchor in (None, "", *ANCHORS):
            left = [i for i in range(len(texts)) if i not in found]
            if not left:
                break
            if anchor is None:
                tried: list[Array | None] = [*alone]
            elif not anchor:
                tried = [_cut(whole, part) for whole, part in zip(joint, first, strict=True)]
            else:
                (part,) = self.encode([anchor])
                tried = [_cut(whole, part) for whole in self.encode([anchor + text for text in texts])]
            fits = [(i, ids) for i in left if (ids := tried[i]) is not None]
            got = self._decode([np.concatenate([first[i], ids]) for i, ids in fits])
            found |= {i: ids for (i, ids), text in zip(fits, got, strict=True) if _same(text, wanted[i])}
        for i in range(len(texts)):
            if i not in found:
                (text,) = self._decode([np.concatenate([first[i], alone[i]])])
                end = f"{wanted[i][-20:]!r} becomes {text[-20:]!r}"
                raise BadPieceError(f"the tokenizer cannot encode it after what comes before it: {end}", i)
        return [found[i] for i in range(len(texts))]

    @cached_property
    def exact(self) -> bool:
        """Whether each text decodes to itself after any other, as far as the tokenizer's parts say."""
        parts = {key: [*_parts(getattr(self.tokenizer, key))] for key in ("normalizer", "pre_tokenizer", "decoder")}
        every = [part for some in parts.values() for part in some]
        added = self.tokenizer.get_added_tokens_decoder().values()
        return (
            {part["type"] for part in every} <= EXACT
            and any(part["type"] == "ByteLevel" for part in parts["decoder"])
            and not any(part.get("add_prefix_space") for part in parts["pre_tokenizer"])
            and not any(part.get("behavior") == "Removed" for part in every)
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        )

    def beginning(self, text: str, tokens: int) -> str:
        """The text, or a beginning of it that has more than so many tokens, so that the text itself has more too."""
        if len(text) <= tokens or self._longest is None:
            return text
        beginning = text[: tokens * self._longest + 1]
        return beginning if beginning.isascii() else text[: tokens * self._longest * COMPOSED + 1]

    @cached_property
    def _longest(self) -> int | None:
        """The most characters (after NFC, if the tokenizer composes them) that one token can stand for; None where a
        part of the tokenizer may leave characters out or join any number of them."""
        parts = [part for key in ("normalizer", "pre_tokenizer") for part in _parts(getattr(self.tokenizer, key))]
        added = self.tokenizer.get_added_tokens_decoder().values()
        keeps = (
            {part["type"] for part in parts} <= KEEPING
            and not any(part.get("behavior") == "Removed" for part in parts)
            and all(_keeps_length(part) for part in parts if part["type"] == "Replace")
            and not any(token.lstrip or token.rstrip for token in added)
        )
        known = self.tokenizer.get_vocab(with_added_tokens=True)
        bytewise = any(part["type"] == "ByteLevel" for part in parts)
        if not (keeps and _reads_all(self.tokenizer.model, known, bytewise)):
            return None
        return max(map(len, known))

    def _decode(self, rows: Sequence[Array]) -> list[str]:
        found: list[str] = self.tokenizer.decode_batch([r.tolist() for r in rows], skip_special_tokens=False)
        return found


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer, a pre-tokenizer or a decoder, as a tokenizer.json writes them."""
    left = [json.loads(part.__getstate__())] if part is not None else []
    while left:
        yield (one := left.pop())
        left += next((value for key, value in one.items() if key in ("normalizers", "pretokenizers", "decoders")), [])


def _keeps_length(replace: dict[str, Any]) -> bool:
    """Whether a normalizer that replaces a text writes at least as many characters."""
    found = replace["pattern"].get("String")
    return found is not None and len(replace["content"]) >= len(found)


def _reads_all(model: Any, known: Mapping[str, int], bytewise: bool) -> bool:
    """Whether a model makes at least one token of each character that is in no longer token. BPE does where it knows
    all bytes, or has a token for an unknown character that it does not join with the next one's."""
    from tokenizers.pre_tokenizers import ByteLevel

    if type(model).__name__ != "BPE":
        return False
    if bytewise:
        return known.keys() >= {*ByteLevel.alphabet()}
    own = model.unk_token in known and not model.fuse_unk
    return own or bool(model.byte_fallback and known.keys() >= {*BYTES})


def _cut(whole: Array, part: Array) -> Array | None:
    """What is left of tokens after those of their beginning; None where they begin otherwise."""
    return whole[len(part) :] if np.array_equal(whole[: len(part)], part) else None


def _same(one: str, other: str) -> bool:
    """Whether texts differ at most in how their characters are composed."""
    return one == other or unicodedata.normalize("NFKC", one) == unicodedata.normalize("NFKC", other)
