"""The same rows as files of each form that a program may name as data."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows: Rows) -> Any:
    return pa.Table.from_pylist(rows)


def table_text(rows: Rows, separator: str = ",") -> str:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return file.getvalue()


def compressed(text: str) -> bytes:
    zstd: bytes = pa.compress(text.encode(), codec="zstd", asbytes=True)
    return zstd


def arrow_file(rows: Rows, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table(rows).schema) as writer:
        writer.write_table(table(rows))


def arrow_stream(rows: Rows, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table(rows).schema) as writer:
        writer.write_table(table(rows))


def folder(rows: Rows, path: Path) -> None:
    """A folder as the Hugging Face Hub has it: shards of one split below a folder `data`, and a README."""
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("---\nlicense: mit\n---\n")
    half = len(rows) // 2
    for i, part in enumerate((rows[:half], rows[half:])):
        pq.write_table(table(part), path / "data" / f"train-{i:05d}-of-00002.parquet")


def saved(rows: Rows, path: Path) -> None:
    """What `save_to_disk` of the library datasets writes."""
    path.mkdir()
    half = len(rows) // 2
    names = []
    for i, part in enumerate((rows[:half], rows[half:])):
        names.append(f"data-{i:05d}-of-00002.arrow")
        arrow_stream(part, path / names[-1])
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")


def shards(rows: Rows, path: Path) -> None:
    path.parent.mkdir()
    half = len(rows) // 2
    (path.parent / "part-0.jsonl").write_text(lines(rows[:half]))
    (path.parent / "part-1.jsonl").write_text(lines(rows[half:]))


# Each form by the name that a program writes, with what writes rows there.
FORMS: dict[str, Callable[[Rows, Path], object]] = {
    "rows.jsonl": lambda rows, path: path.write_text(lines(rows)),
    "lines.json": lambda rows, path: path.write_text(lines(rows)),
    "list.json": lambda rows, path: path.write_text(json.dumps(rows, indent=2)),
    "mark.jsonl": lambda rows, path: path.write_bytes(b"\xef\xbb\xbf" + lines(rows).encode()),
    "mark.json": lambda rows, path: path.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode()),
    "windows.jsonl": lambda rows, path: path.write_bytes(lines(rows).replace("\n", "\r\n").encode()),
    "rows.jsonl.gz": lambda rows, path: path.write_bytes(gzip.compress(lines(rows).encode())),
    "rows.jsonl.bz2": lambda rows, path: path.write_bytes(bz2.compress(lines(rows).encode())),
    "rows.jsonl.xz": lambda rows, path: path.write_bytes(lzma.compress(lines(rows).encode())),
    "rows.jsonl.zst": lambda rows, path: path.write_bytes(compressed(lines(rows))),
    "list.json.gz": lambda rows, path: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "rows.csv": lambda rows, path: path.write_text(table_text(rows), newline=""),
    "rows.tsv": lambda rows, path: path.write_text(table_text(rows, "\t"), newline=""),
    "semicolons.csv": lambda rows, path: path.write_text(table_text(rows, ";"), newline=""),
    "mark.csv": lambda rows, path: path.write_bytes(b"\xef\xbb\xbf" + table_text(rows).encode()),
    "rows.csv.gz": lambda rows, path: path.write_bytes(gzip.compress(table_text(rows).encode())),
    "rows.parquet": lambda rows, path: pq.write_table(table(rows), path),
    "rows.arrow": arrow_file,
    "stream.arrow": arrow_stream,
    "folder": folder,
    "saved": saved,
    "shards/*.jsonl": shards,
}
