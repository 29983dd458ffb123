"""Tokenization of pieces of text that are read as one sequence.

Examples of pieces are a response after its prompt, and an environment's reply after a response.

Invariant: the tokens of the text before a piece, followed by the tokens of the piece, decode to the joined text. Some
tokenizers put a blank before each text (Llama 2, TinyLlama). With such a tokenizer, a piece is encoded together with
the preceding text, and the tokens of the preceding text are removed from the result. If the joined tokens still decode
to another text, the piece is rejected.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .columns import Array

# Substitutes for the text before a piece, if that text is unknown or forms one token together with the piece.
ANCHORS = ("=", "\n", "1", "a", ".")
# Components of a tokenizer that do not change a text. NFC composes characters; the comparison of texts ignores this.
EXACT = {"Sequence", "Split", "Digits", "ByteLevel", "NFC"}
# Components of a tokenizer that never drop a character. NFC merges at most COMPOSED characters into one.
KEEPING = {*EXACT, "Prepend", "Replace", "Metaspace", "Punctuation"}
COMPOSED = 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class BadPieceError(ValueError):
    """A text that a tokenizer cannot encode as the continuation of another text.

    `index` is the position of the text among the given texts.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Pieces:
    """Encodes pieces of text with a tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """Return the tokens of each text, encoded on its own."""
        return [
            np.asarray(encoding.ids, np.int32)
            for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def encode_after(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Array]:
        """Return the tokens of each text, as the continuation of a preceding text.

        `before` has one preceding text for each of `texts`; None means that the preceding texts are not known. Raises
        BadPieceError.
        """
        own_ids = self.encode(texts)
        if self.exact:
            return own_ids
        prefixes = [ANCHORS[0]] * len(texts) if before is None else before
        first = self.encode(prefixes)
        joint = self.encode([prefix + suffix for prefix, suffix in zip(prefixes, texts, strict=True)])
        joint_texts = self._decode(joint)
        tokens: dict[int, Array] = {}
        for anchor in (None, "", *ANCHORS):
            remaining = [i for i in range(len(texts)) if i not in tokens]
            if not remaining:
                break
            if anchor is None:
                attempts: list[Array | None] = [*own_ids]
            elif not anchor:
                attempts = [
                    _strip_prefix(joint_ids, anchor_ids) for joint_ids, anchor_ids in zip(joint, first, strict=True)
                ]
            else:
                (anchor_ids,) = self.encode([anchor])
                attempts = [
                    _strip_prefix(joint_ids, anchor_ids) for joint_ids in self.encode([anchor + text for text in texts])
                ]
            candidates = [(i, ids) for i in remaining if (ids := attempts[i]) is not None]
            decoded = self._decode([np.concatenate([first[i], ids]) for i, ids in candidates])
            tokens |= {
                i: ids for (i, ids), text in zip(candidates, decoded, strict=True) if _same_text(text, joint_texts[i])
            }
        for i in range(len(texts)):
            if i not in tokens:
                (text,) = self._decode([np.concatenate([first[i], own_ids[i]])])
                end = f"{joint_texts[i][-20:]!r} becomes {text[-20:]!r}"
                raise BadPieceError(f"the tokenizer cannot encode it after the text before it: {end}", i)
        return [tokens[i] for i in range(len(texts))]

    @cached_property
    def exact(self) -> bool:
        """Whether a text can be encoded on its own, without its preceding text.

        The value is true if the tokens of every text decode to this text, no matter which tokens precede them. It is
        derived from the types of the tokenizer's components.
        """
        parts = {
            key: [*_iterate_parts(getattr(self.tokenizer, key))] for key in ("normalizer", "pre_tokenizer", "decoder")
        }
        all_parts = [part for group in parts.values() for part in group]
        added = self.tokenizer.get_added_tokens_decoder().values()
        return (
            {part["type"] for part in all_parts} <= EXACT
            and any(part["type"] == "ByteLevel" for part in parts["decoder"])
            and not any(part.get("add_prefix_space") for part in parts["pre_tokenizer"])
            and not any(part.get("behavior") == "Removed" for part in all_parts)
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        )

    def shorten(self, text: str, tokens: int) -> str:
        """Cut off the end of a text that surely has more than `tokens` tokens.

        The result is a prefix that has more than `tokens` tokens, too. A text that may have fewer tokens is returned
        unchanged.
        """
        if len(text) <= tokens or self._longest is None:
            return text
        beginning = text[: tokens * self._longest + 1]
        return beginning if beginning.isascii() else text[: tokens * self._longest * COMPOSED + 1]

    def fitting_characters(self, tokens: int) -> int:
        """Return a length up to which an ASCII text surely has 1 to `tokens` tokens.

        The length is in characters. It is -1 if the tokenizer may drop characters, or may add any number of them.
        """
        parts = [
            part for key in ("normalizer", "pre_tokenizer") for part in _iterate_parts(getattr(self.tokenizer, key))
        ]
        if self._longest is None or any(part["type"] == "Replace" and not _keeps_length(part, True) for part in parts):
            return -1
        # Some components put a blank before a text, or before each of its parts, which have a character at least.
        added = sum(part["type"] in ("Prepend", "Metaspace") or bool(part.get("add_prefix_space")) for part in parts)
        return (tokens - added) // (1 + added)

    @cached_property
    def _longest(self) -> int | None:
        """The largest number of characters that one token represents, or None.

        If the tokenizer composes characters (NFC), the composed characters are counted. The result is None if a
        component of the tokenizer may drop characters, or may join any number of characters into one token.
        """
        parts = [
            part for key in ("normalizer", "pre_tokenizer") for part in _iterate_parts(getattr(self.tokenizer, key))
        ]
        added = self.tokenizer.get_added_tokens_decoder().values()
        keeps_characters = (
            {part["type"] for part in parts} <= KEEPING
            and not any(part.get("behavior") == "Removed" for part in parts)
            and all(_keeps_length(part) for part in parts if part["type"] == "Replace")
            and not any(token.lstrip or token.rstrip for token in added)
        )
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        bytewise = any(part["type"] == "ByteLevel" for part in parts)
        if not (keeps_characters and _reads_all(self.tokenizer.model, vocabulary, bytewise)):
            return None
        return max(map(len, vocabulary))

    def _decode(self, rows: Sequence[Array]) -> list[str]:
        texts: list[str] = self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=False)
        return texts


def _iterate_parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the components of a normalizer, pre-tokenizer or decoder.

    Each component is a dictionary, as in tokenizer.json.
    """
    pending = [json.loads(part.__getstate__())] if part is not None else []
    while pending:
        yield (current := pending.pop())
        pending += next(
            (value for key, value in current.items() if key in ("normalizers", "pretokenizers", "decoders")), []
        )


def _keeps_length(replace: dict[str, Any], exactly: bool = False) -> bool:
    """Return whether the normalizer `Replace` never makes a text shorter.

    With `exactly`, it must not make a text longer either.

    `replace` is the normalizer as a dictionary, as in tokenizer.json.
    """
    pattern = replace["pattern"].get("String")
    added = -1 if pattern is None else len(replace["content"]) - len(pattern)
    return added == 0 if exactly else added >= 0


def _reads_all(model: Any, vocabulary: Mapping[str, int], bytewise: bool) -> bool:
    """Return whether a tokenizer's model encodes every character, even unknown ones.

    `bytewise` means that the pre-tokenizer converts text to bytes. A BPE model encodes every character if it has a
    token for each byte. It also does so if it has a token for unknown characters and never merges two of these tokens.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    if type(model).__name__ != "BPE":
        return False
    if bytewise:
        return vocabulary.keys() >= {*ByteLevel.alphabet()}
    has_unknown_token = model.unk_token in vocabulary and not model.fuse_unk
    return has_unknown_token or bool(model.byte_fallback and vocabulary.keys() >= {*BYTES})


def _strip_prefix(tokens: Array, part: Array) -> Array | None:
    """Return the tokens after the prefix `part`, or None if `part` is not a prefix."""
    return tokens[len(part) :] if np.array_equal(tokens[: len(part)], part) else None


def _same_text(one: str, other: str) -> bool:
    """Return whether two texts are equal after Unicode normalization (NFKC)."""
    return one == other or unicodedata.normalize("NFKC", one) == unicodedata.normalize("NFKC", other)
