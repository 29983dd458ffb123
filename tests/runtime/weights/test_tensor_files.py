"""What a trained model's folder holds beside its weights, for each kind of tokenizer; and the modes of files."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import chat
import numpy as np
import pytest
import transformers

from msrl_graph import compile
from msrl_graph.cli import run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.files import urls
from msrl_graph.runtime.data.tokens import Tokens
from msrl_graph.runtime.driver import shipping
from msrl_graph.runtime.process import shipped_files
from msrl_graph.runtime.weights import tensor_files

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[PAD]",
    "[MASK]",
    "one",
    "plus",
    "two",
    "o",
    "n",
    "e",
    "|",
]
TEXT = "one plus two"


def kinds() -> dict[str, set[str]]:
    """The files that each of transformers' tokenizers says it reads."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")):
        if stated := re.search(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(encoding="utf-8"), re.DOTALL):
            found[file.stem] = set(re.findall(r':\s*"([^"]+)"', stated[1]))
    return found


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    tensor_files.copy_companions(source, target)
    return target


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_the_files_of_every_kind_of_tokenizer_are_copied_and_no_weights(tmp_path: Path) -> None:
    known = kinds()
    assert len(known) > 60 and {"vocab.txt", "merges.txt", "tokenizer.json", "spiece.model", "bpe.codes"} <= set.union(
        *known.values()
    )
    always = {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    }
    always |= {"chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja", "LICENSE"}
    custom = {"qwen.tiktoken", "tokenization_mine.py", "prompts.txt"}
    weights = {
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    }
    weights |= {
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.gguf",
        "optimizer.pt",
    }
    others = {
        "README.md",
        ".gitattributes",
        "original/tokenizer.model",
        "onnx/model.onnx",
        ".cache/x.json",
        "train.jsonl",
    }
    source = tmp_path / "model"
    for name in set.union(*known.values()) | always | custom | weights | others:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
        (source / name).chmod(0o444)
    target = copied(source, tmp_path / "copy")
    assert files(target) == set.union(*known.values()) | always | custom
    for name in files(target):
        assert (target / name).read_text() == name and stat.S_IMODE(
            (target / name).stat().st_mode
        ) == 0o666 & ~umask(), name


def made(folder: Path) -> Iterator[transformers.PreTrainedTokenizerBase]:
    """Tokenizers that need no file of another's, of kinds that keep their words in different files."""
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\no n\n")
    yield transformers.AutoTokenizer.from_pretrained(chat.model(folder / "chat"))
    yield transformers.BertTokenizer(str(folder / "vocab.txt"))
    yield transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    yield transformers.CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), unk_token="<unk>")
    yield transformers.ByT5Tokenizer()


def test_a_tokenizer_of_a_trained_model_is_the_one_that_it_was_trained_with(tmp_path: Path) -> None:
    own = set()
    for i, tokenizer in enumerate(made(tmp_path)):
        tokenizer.chat_template = {"default": chat.TEMPLATE, "tool_use": "{{ messages | length }}"}
        source = tmp_path / f"source{i}"
        tokenizer.save_pretrained(source)
        (source / "model.safetensors").write_text("weights")
        target = copied(source, tmp_path / f"target{i}")
        assert files(target) == files(source) - {"model.safetensors"}
        again = type(tokenizer).from_pretrained(target)
        assert again(TEXT).input_ids == tokenizer(TEXT).input_ids
        assert again.chat_template == tokenizer.chat_template and len(again.chat_template) == 2
        own |= files(target)
    assert {"tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"} & own >= {"tokenizer.json", "vocab.json"}


def test_a_model_whose_template_stands_in_a_file_of_its_own_renders_messages_as_before(tmp_path: Path) -> None:
    source = chat.model(tmp_path / "model", separate=True)
    target = copied(source, tmp_path / "copy")
    messages = [{"role": "user", "content": "what is one plus two"}]
    assert Tokens(str(target)).prompt(messages) == Tokens(str(source)).prompt(messages) != ""


# Links in a model's folder.

PROGRAM = """
import grpo
cluster one {{ device = "cpu", devices_per_node = 1 }}
deploy grpo on one {{
  set prompts = 2
  set prompt_len = 16
  set group = 2
  set response_len = 4
  model policy = "{model}"
  data source  = "rows.jsonl" {{ prompt = "question", answer = "answer" }}
}}
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's, outside of any model's folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "shadow").write_text("secret")
    return tmp_path / "home" / "shadow"


def linked(folder: Path, secret: Path) -> Path:
    """A stranger's model, each of whose links leads to the secret, but for one that leads to its own config."""
    shutil.copytree(chat.EXAMPLE, folder)
    (folder / "secret.txt").symlink_to(secret)
    (folder / "again.txt").symlink_to("secret.txt")
    (folder / "additional_chat_templates").symlink_to(secret.parent)
    (folder / "same.json").symlink_to("config.json")
    os.mkfifo(folder / "pipe.txt")
    return folder


def test_what_links_in_a_models_folder_lead_out_to_is_not_copied_with_its_weights(tmp_path: Path, secret: Path) -> None:
    source = linked(tmp_path / "model", secret)
    copied(source, tmp_path / "copy")
    assert "secret" not in {p.read_text() for p in (tmp_path / "copy").rglob("*") if p.is_file()}
    own = {p.name for p in chat.EXAMPLE.iterdir() if p.suffix != ".safetensors"}
    assert files(tmp_path / "copy") == own | {"same.json"}
    assert (tmp_path / "copy" / "same.json").read_text() == (source / "config.json").read_text()


def test_the_links_of_a_snapshot_in_the_hubs_cache_lead_to_its_own_blobs_and_to_no_others(
    tmp_path: Path, secret: Path
) -> None:
    repository = tmp_path / "models--owner--name"
    source = repository / "snapshots" / "abc"
    source.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "one").write_text("{}")
    (repository / "blobs" / "two").symlink_to(secret)
    (source / "tokenizer.json").symlink_to("../../blobs/one")
    (source / "secret.txt").symlink_to("../../blobs/two")
    (source / "else.txt").symlink_to(secret)
    assert files(copied(source, tmp_path / "copy")) == {"tokenizer.json"}
    assert tensor_files.find_outside_links(source) == dict.fromkeys(
        (source / "else.txt", source / "secret.txt"), secret
    )
    (repository / "blobs" / "one").unlink()
    (repository / "blobs" / "two").unlink()
    (repository / "blobs").rmdir()
    (repository / "blobs").symlink_to(secret.parent)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("../../blobs/shadow")
    assert not files(copied(source, tmp_path / "again"))


def test_a_link_that_is_put_in_a_files_place_meanwhile_is_not_followed(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "notes.txt").symlink_to(secret)
    monkeypatch.setattr(tensor_files, "escape", lambda *_: None)  # as it was when somebody looked
    assert not files(copied(source, tmp_path / "copy"))


def test_a_run_of_a_model_with_a_link_out_of_its_folder_is_refused_with_the_way_out(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = linked(tmp_path / "model", secret)
    Path("rows.jsonl").write_text('{"question": "12+3=", "answer": "15"}\n' * 4)
    Path("program.rlg").write_text(PROGRAM.format(model="./model"))
    weights = secret.with_name("w.safetensors")
    shutil.move(source / "model.safetensors", weights)
    (source / "model.safetensors").symlink_to(weights)
    assert run_main(["program.rlg", "--dry-run"]) == 1
    told = capsys.readouterr().err
    for name in ("again.txt", "secret.txt", "additional_chat_templates/shadow"):
        assert f"`{name}` in the model folder {source} is a link out of it, to {secret}" in told, told
    assert f"`model.safetensors` in the model folder {source} is a link out of it, to {weights}" in told, told
    assert "same.json" not in told and "help: remove the link, or copy the file into the folder" in told
    plan = compile("program.rlg")
    sent = shipping.files(plan)
    assert str(source / "same.json") in sent and not [p for p, file in sent.items() if b"secret" in file.content]
    # The fix that the message names.
    for name in ("again.txt", "secret.txt", "additional_chat_templates", "model.safetensors"):
        (source / name).unlink()
    shutil.copy(weights, source / "model.safetensors")
    (source / "secret.txt").write_text(secret.read_text())
    assert run_main(["program.rlg", "--dry-run"]) == 0, capsys.readouterr().err


def test_what_links_of_a_model_at_a_url_lead_out_to_is_not_fetched(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = linked(tmp_path / "model", secret)
    (source / "pipe.txt").unlink()
    (source / "additional_chat_templates").unlink()
    for name in ("again.txt", "secret.txt"):
        with pytest.raises(Fault, match=f"its file {name} is a link that leads out of the folder"):
            urls.copy(f"file://{source}", folder=True)
        (source / name).unlink()
    assert (urls.copy(f"file://{source}", folder=True) / "same.json").read_text()


def test_a_shipped_file_is_laid_inside_the_runs_folder_whatever_its_path_is(tmp_path: Path) -> None:
    up = "../" * (len(tmp_path.parts) + 8)
    path = f"{tmp_path}/{up}planted/one.py"
    folder = shipped_files.ship_files({path: shipped_files.ShippedFile(b"planted", 0)})
    assert (folder / shipped_files.FILES / "planted" / "one.py").read_bytes() == b"planted"


def umask() -> int:
    known = os.umask(0)
    os.umask(known)
    return known


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_a_file_of_tensors_has_the_mode_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    import torch

    before = os.umask(mask)
    try:
        tensor_files.write_tensors(tmp_path / "one", {"w": torch.zeros(2)}, {})
        tensor_files.write_arrays(tmp_path / "two", {"w": np.zeros(2)}, {})
        (tmp_path / "mine").touch()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o666 & ~mask}


def test_a_file_without_tensors_is_read_again(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    for write, none in (
        (tensor_files.write_tensors, dict[str, torch.Tensor]()),
        (tensor_files.write_arrays, dict[str, np.ndarray]()),
    ):
        write(tmp_path / "one", none, {})  # type: ignore[operator]
        with safe_open(tmp_path / "one", framework="np") as file:
            assert not list(file.keys()) and not file.metadata()
