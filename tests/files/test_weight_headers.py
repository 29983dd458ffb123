"""Headers of weight files: the same names, shapes and types as the libraries read, and messages for broken files."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from msrl_graph.files.weight_headers import read_bytes, read_header
from msrl_graph.files.weights import UnclearError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TENSORS = {name: torch.arange(6).to(dtype).view(2, 3) for name, dtype in DTYPES.items()}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_names_shapes_types_and_bytes(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    held = {**TENSORS, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    if file.suffix == ".bin":
        torch.save(held, file)
    else:
        save_file(held, file)
    found = read_header(file)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in found.items()} == {
        **{key: (key, (2, 3)) for key in TENSORS},
        "scalar": ("F32", ()),
        "empty": ("F32", (0, 4)),
    }
    for key, value in held.items():
        stored = read_bytes(found[key])
        assert stored == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_that_share_values_have_their_own_place(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    torch.save({"a": whole, "b": whole[1:], "head": torch.nn.Parameter(whole)}, tmp_path / "m.bin")
    found = read_header(tmp_path / "m.bin")
    assert [found[name].start for name in ("a", "b", "head")] == [0, 16, 0]
    assert len({tensor.record for tensor in found.values()}) == 1
    assert read_bytes(found["b"]) == whole[1:].contiguous().view(-1).numpy().tobytes()


class Evil:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, ("executed",)


def cut(file: Path) -> None:
    torch.save(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-200])


def without_values(file: Path) -> None:
    torch.save(TENSORS, whole := file.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith("data/1"):
                new.writestr(entry, old.read(entry))


BROKEN = {
    "cut": (cut, "not a complete file of torch 1.6 or later"),
    "as before torch 1.6": (
        lambda file: torch.save(TENSORS, file, _use_new_zipfile_serialization=False),
        "not a complete file of torch 1.6 or later",
    ),
    "another archive": (lambda file: zipfile.ZipFile(file, "w").close(), "it has no `data.pkl`"),
    "values missing": (without_values, "the bytes of `F32` do not match its shape"),
    "nested": (lambda file: torch.save({"state": TENSORS}, file), "its entry 'state' is not a tensor"),
    "a list": (lambda file: torch.save([*TENSORS.values()], file), "it holds no dictionary of tensors"),
    "code": (lambda file: torch.save({"a": Evil()}, file), "it holds `posix.mkdir`, but only tensors are read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_of_torch_is_an_error(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write, message = BROKEN[case]
    write(tmp_path / "pytorch_model.bin")  # type: ignore[no-untyped-call]
    with pytest.raises((ValueError, UnclearError, pickle.UnpicklingError)) as caught:
        read_header(tmp_path / "pytorch_model.bin")
    assert message in str(caught.value)
    assert not Path("executed").exists()
