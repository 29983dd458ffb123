"""What both scripts share: rectangles as peers have them, rows as we do, and the file that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import inputs
import torch
from torch.nn.utils.rnn import pad_sequence

FOLDER = Path(__file__).parent
Tensor = torch.Tensor
torch.set_default_dtype(torch.float64)  # constants of the peers have the default's


def padded(rows: inputs.Ragged) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def ragged(rectangle: Tensor, lengths: list[int]) -> inputs.Ragged:
    return [row[:n].tolist() for row, n in zip(rectangle.detach(), lengths, strict=True)]


def value(function: str, options: dict[str, Any], **gives: Any) -> dict[str, Any]:
    """A call of a peer's function and what it gave; `batch`, where it has one, names its inputs."""
    return {"function": function, "options": options, "gives": gives}


def write(peer: str, values: list[dict[str, Any]]) -> None:
    """The values, and the inputs that they are of, a line each."""
    written = [{"batch": "", **value} for value in values]
    head = {"peer": peer, "torch": torch.__version__, **inputs.everything()}
    lines = [f"{json.dumps(name)}: {json.dumps(given)}" for name, given in head.items()]
    lines.append('"values": [\n' + ",\n".join(map(json.dumps, written)) + "\n]")
    (FOLDER / f"{peer.split()[0]}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
