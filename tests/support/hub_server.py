"""A server that answers as the Hugging Face Hub does, with the dataset `my/toy`."""

from __future__ import annotations

import io
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq

COMMIT = "a" * 40
README = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- config_name: other
  data_files:
  - {split: train, path: other.parquet}
---
"""
ROWS = [{"question": "2024-01-01", "answer": 3}, {"question": "2024-01-02", "answer": 2.5}]


def files(script: bool) -> dict[str, bytes]:
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"question": "a", "answer": "b"}]), table)
    found = {
        "README.md": README.encode(),
        "data/train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "data/test.jsonl": (json.dumps(ROWS[0]) + "\n").encode(),
        "other.parquet": table.getvalue(),
    }
    return found | ({"toy.py": b"open('ran', 'w')"} if script else {})


def serve(script: bool = False) -> str:
    """Start the server; return its address. With `script`, the dataset has a loading script."""
    held = files(script)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            self.answer([self.entry(path) for path in paths if path in held])

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if re.fullmatch(r"/api/datasets/my/toy(/revision/\w+)?", path):
                siblings = [{"rfilename": name} for name in held]
                self.answer({"id": "my/toy", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            elif tree := re.fullmatch(r"/api/datasets/my/toy/tree/\w+/?(.*)", path):
                self.answer(self.tree(tree[1].strip("/"), "recursive=true" in query.lower()))
            elif (file := re.fullmatch(r"/datasets/my/toy/resolve/\w+/(.+)", path)) and file[1] in held:
                tag = {"ETag": f'"{file[1].replace("/", "-")}"', "X-Repo-Commit": COMMIT}
                self.answer(held[file[1]], headers=tag)
            else:
                self.answer({"error": "not found"}, 404)

        do_HEAD = do_GET

        def entry(self, path: str) -> dict[str, Any]:
            return {"type": "file", "path": path, "size": len(held[path]), "oid": "b" * 40}

        def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
            prefix = f"{folder}/" if folder else ""
            below = [path for path in held if path.startswith(prefix)]
            folders = {prefix + rest.partition("/")[0] for path in below if "/" in (rest := path[len(prefix) :])}
            found = [{"type": "directory", "path": path, "size": 0, "oid": "c" * 40} for path in sorted(folders)]
            return found + [self.entry(path) for path in below if recursive or "/" not in path[len(prefix) :]]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
