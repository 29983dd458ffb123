"""Modules as their sources say them: what each binds, and with what its functions are called.

Invariant: nothing is imported or run; files are read as they lie in a wheel, a git repository or a folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

MENTION = re.compile(r"\b(torch|torch_npu|vllm|vllm_ascend|megatron|mindspeed)\b|VLLM_")
Read = Callable[[str], str | None]


def of_wheel(path: Path) -> Read:
    """How files of a wheel are read, by their names."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(name: str) -> str | None:
        # Of what is compiled each byte is a character: what is text in it stays so.
        return archive.read(name).decode("latin-1" if name.endswith(".so") else "utf-8") if name in names else None

    return read


def of_commit(repository: Path, commit: str) -> Read:
    """How files of a commit are read."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True).stdout

    names = set(git("ls-tree", "-r", "--name-only", commit).splitlines())
    return lambda name: git("show", f"{commit}:{name}") if name in names else None


def of_folder(folder: Path) -> Read:
    return lambda name: path.read_text(encoding="utf-8") if (path := folder / name).is_file() else None


class Module:
    """What the body of a module binds, whatever the conditions: by name its definitions in their order."""

    def __init__(self, name: str, is_package: bool, tree: ast.Module) -> None:
        self.name = name
        self.package = name if is_package else name.rpartition(".")[0]
        self.bound: dict[str, list[ast.AST | str]] = {}  # a string is where an import leads
        self.stars: list[str] = []
        for node in statements(tree.body):
            self._bind(node)
        if "__getattr__" in self.bound:  # it answers for what stands in its tables
            tables = [n for nodes in self.bound.values() for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign))]
            for table in (t.value for t in tables if isinstance(t.value, ast.Dict)):
                for key, value in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        self.bound.setdefault(key.value, []).append(self._lazy(value))

    def _lazy(self, value: ast.expr) -> ast.AST | str:
        """`.module:name`, or a value that is made when it is asked for."""
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and ":" in value.value:
            module, _, name = value.value.partition(":")
            return f"{self._absolute(module.lstrip('.'), len(module) - len(module.lstrip('.')))}.{name}"
        return value

    def _absolute(self, module: str | None, level: int) -> str:
        base = self.package.split(".")[: len(self.package.split(".")) - level + 1] if level else []
        return ".".join([*base, *([module] if module else [])])

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.asname:
                    self.bound.setdefault(name.asname, []).append(name.name)
                else:
                    self.bound.setdefault(root := name.name.partition(".")[0], []).append(root)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node.module, node.level)
            for name in node.names:
                if name.name == "*":
                    self.stars.append(base)
                else:
                    self.bound.setdefault(name.asname or name.name, []).append(f"{base}.{name.name}")
        else:
            for name in names_of(node):
                self.bound.setdefault(name, []).append(node)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a body, and of what stands in it under conditions."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                yield from statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def names_of(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [t.id for t in flat if isinstance(t, ast.Name)]


def decorators_of(node: ast.AST) -> set[str]:
    found = (d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", []))
    return {ast.unparse(d).rpartition(".")[2] for d in found}


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """Names of parameters, and which may be left out."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    optional = len(plain) - len(given.defaults)
    parts = [f"{a.arg}=..." if i >= optional else a.arg for i, a in enumerate(plain)]
    if given.posonlyargs:
        parts.insert(len(given.posonlyargs), "/")
    if bound and "staticmethod" not in decorators_of(node) and plain:
        del parts[0]
        if parts[:1] == ["/"]:
            del parts[0]
    if given.vararg:
        parts.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        parts.append("*")
    for name, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(name.arg if default is None else f"{name.arg}=...")
    if given.kwarg:
        parts.append(f"**{given.kwarg.arg}")
    return f"({', '.join(parts)})"


def package(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """The files of a package that mention one of theirs, by the names of their modules."""
    for path in sorted(folder.rglob("*.py")):
        if MENTION.search(text := path.read_text(encoding="utf-8")):
            inside = path.relative_to(folder.parent)
            parts = inside.with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), (str(inside), text)
