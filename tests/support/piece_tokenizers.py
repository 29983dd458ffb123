"""Folders with tokenizers of each published kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import chat
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["12+34=46, and 7+8=15.", "one plus two is three", "Naïve café\n\tdéjà vu", "the answer: 42", "ab abc bca"] * 3


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


SPECIAL = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]


# How Llama's sentencepiece model becomes a tokenizer.json, by transformers' converter.
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def bpe() -> Tokenizer:
    return Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def llama() -> Tokenizer:
    """Llama 2, TinyLlama, Vicuna: a blank before each text."""
    made = bpe()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)])
    return made


def mistral() -> Tokenizer:
    """Mistral, and Llama with `legacy = false`."""
    made = bpe()
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)])
    return made


def gemma() -> Tokenizer:
    made = bpe()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([*FALLBACK])
    return made


def t5() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    return made


def albert() -> Tokenizer:
    made = t5()
    made.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    return made


def bert() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def gpt2(add_prefix_space: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    return made


def roberta() -> Tokenizer:
    """As those are loaded that want a blank before the first word."""
    return gpt2(add_prefix_space=True)


def qwen() -> Tokenizer:
    made = gpt2()
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}\s]+|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


def deepseek() -> Tokenizer:
    made = gpt2()
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    f.__name__: f for f in (llama, mistral, gemma, t5, albert, bert, gpt2, roberta, qwen, deepseek, words)
}


@cache
def made(kind: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(tokenizer.decoder, decoders.ByteLevel) else []
    trainer = {
        models.BPE: lambda: trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*SPECIAL, *(BYTES if not alphabet else [])], initial_alphabet=alphabet
        ),
        models.Unigram: lambda: trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>"),
        models.WordPiece: lambda: trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL),
        models.WordLevel: lambda: trainers.WordLevelTrainer(special_tokens=SPECIAL),
    }[type(tokenizer.model)]()
    tokenizer.train_from_iterator(CORPUS, trainer)
    if BYTES[0] in tokenizer.get_vocab():
        # Trained as special, so that all are there; of a model they are tokens as any other.
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in BYTES]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def folder(path: Path, kind: str) -> Path:
    """A model's folder with such a tokenizer."""
    model = chat.model(path / "model", ends=None)
    made(kind).save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 700}))
    held = load_file(model / "model.safetensors")
    large = {n: np.resize(t, (700, *t.shape[1:])) for n, t in held.items() if "embed" in n or "lm_head" in n}
    save_file({**held, **large}, model / "model.safetensors")
    return model
