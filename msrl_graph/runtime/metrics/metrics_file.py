"""The file metrics.jsonl of a run: one JSON object per line.

Invariant: a line is flushed when it is added, so it is complete whenever the process dies. The lines before the first
damaged line are valid. All other displays of a run's metrics can be made again from this file.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"  # within a run's folder
_GZIP = 31  # zlib's `wbits` of a gzip file


class MetricsFile:
    """Writer of a metrics file, which keeps the first lines that are there.

    `lines` are the kept lines, and `written` counts them and the lines that were added.
    """

    def __init__(self, path: Path, keep: int) -> None:
        texts, _ = read_valid_lines(path)
        texts = texts[:keep]
        self.lines = [parse_line(text) for text in texts]
        self.written = len(texts)
        # Truncated in place, not rewritten: kept lines are never in danger.
        self._file = path.open("r+b" if texts else "wb")
        self._file.truncate(sum(map(len, texts)))
        self._file.seek(0, 2)
        # A copy of all lines for checkpoints, compressed as they come, not again at each checkpoint.
        self._gzip = zlib.compressobj(wbits=_GZIP)
        self._compressed = bytearray(self._gzip.compress(b"".join(texts)))

    def add(self, line: dict[str, Any]) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }  # JSON has no nan
        text = (json.dumps(finite) + "\n").encode()
        self._file.write(text)
        self._file.flush()
        self.written += 1
        self._compressed += self._gzip.compress(text)

    def copy(self) -> bytes:
        """Return all lines written so far, as the bytes of a gzip file."""
        return bytes(self._compressed) + self._gzip.copy().flush()

    def close(self) -> None:
        self._file.close()


def parse_line(text: str | bytes) -> dict[str, Any]:
    """Parse a line of metrics.jsonl; a null in the line becomes NaN."""
    line: dict[str, Any] = json.loads(text)
    return {key: math.nan if value is None else value for key, value in line.items()}


def read_valid_lines(path: Path) -> tuple[list[bytes], str]:
    """Return a metrics file's lines before the first damaged line, and the damage.

    The damage is described in words; "" means that no line is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for i, line in enumerate(lines):
        if not _is_line(line):
            how = "damaged" if line.endswith(b"\n") else "cut"
            return lines[:i], f"line {i + 1} is {how}"
    return lines, ""


def _is_line(text: bytes) -> bool:
    try:
        return text.endswith(b"\n") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def restore_lines(path: Path, copy: bytes) -> str:
    """Restore the metrics file from a checkpoint's copy if lines are lost or changed.

    Returns a description of the damage; "" if the file is intact. Raises OSError if the file cannot be written.
    """
    content = path.read_bytes() if path.is_file() else b""
    if content.startswith(copy):
        return ""
    old = content.splitlines(keepends=True)
    new = copy.splitlines(keepends=True)
    same = next(
        (index for index, (old_line, new_line) in enumerate(zip(old, new, strict=False)) if old_line != new_line),
        min(len(old), len(new)),
    )
    damage = f"ends after line {same} of {len(new)}" if content else "is missing"
    if not copy.startswith(content):
        damage = f"was cut or changed in line {same + 1}"
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(copy)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return damage
