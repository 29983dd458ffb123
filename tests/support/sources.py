"""What packages offer, as their sources say it.

Invariant: nothing is imported or run. A name is followed as Python would follow it: through imports, stars, assignments
and base classes, of stubs too; of several definitions under conditions the first that leads somewhere counts.

What is said of a name is a line that contracts.py reads: `module`; `= other.name`; `def(a, b=..., *, c) -> type`
without `self`; `class(a, b=...)`, with what constructs it; `value: type`; or a list of lines, of what is overloaded.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import schemas
from modules import Module, Read, decorators_of, names_of, signature_of, statements

# Names that no source binds: what torch_npu registers as it is imported, and what is compiled.
REGISTERED = {"torch.npu": "torch_npu.npu", "torch.cuda.FloatTensor": "torch.FloatTensor"}
# Where the rest of a module's names come from, which it takes over in a loop.
COMPILED = {
    "torch": ("torch._C", "torch._C._VariableFunctions"),
    "torch.distributed": ("torch._C._distributed_c10d",),
    "torch_npu": ("torch_npu.libtorch_npu",),
}
# Modules that are a library's operators: its file, and the one that says which of them a package has as functions.
LIBRARIES = {"torch_npu.libtorch_npu": ("torch_npu/lib/libtorch_npu.so", "torch_npu/utils/custom_ops.py")}
# Classes that are compiled: the header that declares one, and the library that binds it.
CLASSES = {
    "torch_npu._C._distributed_c10d": (
        "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp",
        "torch_npu/lib/libtorch_npu.so",
        "ProcessGroupHCCL",
    )
}
EXPORTED = re.compile(r"^torch_npu\.(\w+) = torch\.ops\.npu\.\1$", re.MULTILINE)
# What types are called in stubs.
SHORT = {"_int": "int", "_float": "float", "_bool": "bool", "_size": "int", "_dtype": "torch.dtype"}
RECORDS = ("NamedTuple", "msgspec.Struct")
Line = str | list[str]
Found = tuple[str, ast.AST | None, str] | None


def _one(lines: list[str]) -> Line:
    every = list(dict.fromkeys(lines))
    return every[0] if len(every) == 1 else every


def _optional(value: ast.expr | None) -> bool | None:
    """Whether a record's field may be left out; None: nothing is given for it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field"):
        said = {k.arg: ast.unparse(k.value) for k in value.keywords}
        return (
            None if said.get("init") == "False" else bool(value.args) or bool({"default", "default_factory"} & {*said})
        )
    return value is not None


class Sources:
    """Some packages, by the names of their modules' roots."""

    def __init__(self, packages: dict[str, Read]) -> None:
        self.packages = packages
        self.module = cache(self._module)
        self._found: dict[str, Found] = {}
        self._sought: set[str] = set()

    def line(self, name: str) -> Line | None:
        """What is said of a name; None: there is none."""
        found = self.resolved(name)
        if found is None:
            return None
        where, node, at = found
        if at != name and (node is None or not self._inherits(name, at)):
            return f"= {at}"
        if node is None:
            return "module"
        scope = self.module(where)
        assert scope is not None
        if isinstance(node, ast.ClassDef):
            return _one([f"class{given}" for given in self._constructor(at)])
        owner = self.resolved(at.rpartition(".")[0])
        bound = owner is not None and isinstance(owner[1], ast.ClassDef)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if decorators_of(node) & {"property", "cached_property"}:
                return f"value{self._type(scope, node.returns, ': ')}"
            every = self._functions(at)
            return _one([f"def{signature_of(f, bound)}{self._type(scope, f.returns, ' -> ')}" for f in every])
        return f"value{self._type(scope, self._value(scope, node, at), ': ')}"

    def _inherits(self, name: str, at: str) -> bool:
        """Whether it is said of a class's member that it has it from another class."""
        owner = self.resolved(name.rpartition(".")[0])
        return owner is not None and isinstance(owner[1], ast.ClassDef)

    def _module(self, name: str) -> Module | None:
        read = self.packages.get(name.partition(".")[0])
        path = name.replace(".", "/")
        found: Module | None = None
        if name in LIBRARIES and read:
            library, exports = (read(file) or "" for file in LIBRARIES[name])
            return Module(name, False, ast.parse(schemas.stub(library, {*EXPORTED.findall(exports)})))
        if name in CLASSES and read:
            header, library, one_class = CLASSES[name]
            return Module(name, False, ast.parse(schemas.bound(read(header) or "", read(library) or "", one_class)))
        if any(one.startswith(f"{name}.") for one in CLASSES) and "." in name:  # what they are compiled into
            return Module(name, True, ast.Module([], []))
        for file in (f"{path}/__init__.py", f"{path}.py", f"{path}/__init__.pyi", f"{path}.pyi"):
            if read and (text := read(file)) is not None:
                one = Module(name, "__init__" in file, ast.parse(text))
                if found is None:
                    found = one
                else:  # what a stub says is said of what is compiled: of more than an assignment says
                    for key, nodes in one.bound.items():
                        held = found.bound.setdefault(key, [])
                        plain = all(isinstance(n, (ast.Assign, ast.AnnAssign)) for n in held)
                        found.bound[key] = nodes + held if plain else held
        if found is None and read and "." not in name:  # a namespace, which has no file
            return Module(name, True, ast.Module([], []))
        return found

    def resolved(self, name: str) -> Found:
        """The module and the node that a name leads to, and the name that it has there; no node: a module."""
        if name in self._found:
            return self._found[name]
        if name in self._sought:  # in a circle of imports
            return None
        self._sought.add(name)
        found = self._resolved(name)
        self._sought.remove(name)
        if found or not self._sought:
            self._found[name] = found
        return found

    def _resolved(self, name: str) -> Found:
        if name in REGISTERED:
            return self.resolved(REGISTERED[name])
        if "." not in name:
            return (name, None, name) if self.module(name) else None
        owner, _, last = name.rpartition(".")
        found = self.resolved(owner)
        if found is None:
            return None
        _, node, at = found
        if node is None:
            return self._in_module(at, last)
        return self._member(at, last) if isinstance(node, ast.ClassDef) else None

    def _in_module(self, module: str, name: str) -> Found:
        scope = self.module(module)
        assert scope is not None
        for node in scope.bound.get(name, ()):
            if isinstance(node, str):
                leads = self.resolved(node) if node != f"{module}.{name}" else None
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                leads = self.resolved(self._qualified(scope, node.value) or "") or (module, node, f"{module}.{name}")
            else:
                leads = (module, node, f"{module}.{name}")
            if leads is not None:
                return leads
        if self.module(f"{module}.{name}"):
            return (f"{module}.{name}", None, f"{module}.{name}")
        for other in (*scope.stars, *COMPILED.get(module, ())):
            if other != module and (leads := self.resolved(f"{other}.{name}")) is not None:
                return leads
        if any(isinstance(node, str) for node in scope.bound.get(name, ())):  # from a package that is not among these
            return (module, ast.Pass(), f"{module}.{name}")
        return None

    def _qualified(self, scope: Module, node: ast.expr) -> str | None:
        """Where a dotted expression in a module leads."""
        text = ast.unparse(node)
        if text.replace(".", "").replace("_", "").isalnum():
            found = self.resolved(f"{scope.name}.{text}")
            return found[2] if found else None
        return None

    # Classes.

    def bases(self, name: str) -> list[str]:
        """A class, and all that it inherits from among these packages, in the order in which they are asked."""
        found = self.resolved(name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        scope = self.module(found[0])
        every = [name]
        assert scope is not None
        for base in found[1].bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            for one in self.bases(self._qualified(scope, inner) or ""):
                every = [n for n in every if n != one] + [one]
        return every

    def _own(self, name: str) -> dict[str, list[ast.AST]]:
        """What a class's body binds, and what its methods make of `self`."""
        found = self.resolved(name)
        assert found is not None and isinstance(found[1], ast.ClassDef)
        bound: dict[str, list[ast.AST]] = {}
        for node in statements(found[1].body):
            for one in names_of(node):
                bound.setdefault(one, []).append(node)
        for method in (n for nodes in [*bound.values()] for n in nodes if isinstance(n, ast.FunctionDef)):
            for node in ast.walk(method):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else ():
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                            kept = bound.setdefault(one.attr, [])
                            kept.insert(0, node) if isinstance(node, ast.AnnAssign) else kept.append(node)
        return bound

    def _member(self, owner: str, name: str) -> Found:
        for one in self.bases(owner):
            if nodes := self._own(one).get(name):
                found = self.resolved(one)
                assert found is not None
                return (found[0], nodes[0], f"{one}.{name}")
        return None

    def _functions(self, at: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """The definitions of a function: one, or all overloads."""
        owner, _, name = at.rpartition(".")
        found = self.resolved(owner)
        assert found is not None
        scope = self.module(found[0])
        assert scope is not None
        every = self._own(owner)[name] if found[1] is not None else scope.bound[name]
        functions = [n for n in every if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return [f for f in functions if "overload" in decorators_of(f)] or functions[:1]

    def _constructor(self, name: str) -> list[str]:
        """With what a class is called: as its `__init__`, its `__new__` or its fields say."""
        every = self.bases(name)
        for one in every:
            found = self.resolved(one)
            assert found is not None and isinstance(found[1], ast.ClassDef)
            own = self._own(one)
            for kind in ("__init__", "__new__"):
                if any(isinstance(n, ast.FunctionDef) for n in own.get(kind, ())):
                    return [signature_of(f, True) for f in self._functions(f"{one}.{kind}")]
            if self._is_record(found[0], found[1]):
                return [self._fields(every[every.index(one) :])]
        return ["()"]

    def _is_record(self, module: str, node: ast.ClassDef) -> bool:
        scope = self.module(module)
        assert scope is not None
        above = (b.value if isinstance(b, ast.Subscript) else b for b in node.bases)
        return bool(decorators_of(node) & {"dataclass", "config"}) or any(
            self._named(scope, base).endswith(RECORDS) for base in above
        )

    def _named(self, scope: Module, base: ast.expr) -> str:
        """A base's name, also where it is of a package that is not among these."""
        first, _, rest = ast.unparse(base).partition(".")
        leads = next((n for n in scope.bound.get(first, ()) if isinstance(n, str)), first)
        return f"{leads}.{rest}" if rest else leads

    def _fields(self, classes: list[str]) -> str:
        """The fields of records, those of the bases first."""
        fields: dict[str, bool] = {}  # whether it has a default
        for one in reversed(classes):
            found = self.resolved(one)
            assert found is not None and isinstance(found[1], ast.ClassDef)
            if not self._is_record(found[0], found[1]):
                continue
            stated = (n for n in found[1].body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
            for node in stated:
                optional = _optional(node.value)
                if optional is not None and "ClassVar" not in ast.unparse(node.annotation):
                    fields[names_of(node)[0]] = optional
        return f"({', '.join(f'{name}=...' if optional else name for name, optional in fields.items())})"

    # Types.

    def _value(self, scope: Module, node: ast.AST, at: str) -> ast.expr | None:
        """The type of what is bound, as far as it is stated, or made by a class."""
        if isinstance(node, ast.AnnAssign):
            return node.annotation
        if isinstance(node, ast.Assign):
            value = node.value
            if isinstance(value, ast.Call):
                made = self.resolved(self._qualified(scope, value.func) or "")
                if made and isinstance(made[1], ast.ClassDef):
                    return value.func
                if made and isinstance(made[1], ast.FunctionDef):
                    inner = self.module(made[0])
                    said = self._type(inner, made[1].returns, "") if inner else ""
                    return ast.parse(said, mode="eval").body if said else None
            owner = self.resolved(at.rpartition(".")[0])
            if isinstance(value, ast.Name) and owner and isinstance(owner[1], ast.ClassDef):
                for method in (m for m in owner[1].body if isinstance(m, ast.FunctionDef)):  # a parameter of its
                    if any(n is node for n in ast.walk(method)):
                        given = [*method.args.args, *method.args.kwonlyargs]
                        return next((a.annotation for a in given if a.arg == value.id), None)
        return None

    def _type(self, scope: Module | None, node: ast.expr | None, before: str) -> str:
        """An annotation with whole names, where all of them are known."""
        if node is None or scope is None:
            return ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        try:
            return before + ast.unparse(_Whole(self, scope).visit(ast.parse(ast.unparse(node), mode="eval").body))
        except LookupError:
            return ""


class _Whole(ast.NodeTransformer):
    """Gives names in an annotation the modules that they are from. Raises LookupError."""

    PLAIN = frozenset(("int", "str", "float", "bool", "bytes", "list", "dict", "tuple", "set", "None", "type"))
    TYPING = frozenset(("Iterator", "Iterable", "Sequence", "Mapping", "Optional", "List", "Dict", "Tuple", "Union"))

    def __init__(self, sources: Sources, scope: Module) -> None:
        self.sources = sources
        self.scope = scope

    def _whole(self, node: ast.Name | ast.Attribute) -> ast.expr:
        text = ast.unparse(node)
        text = SHORT.get(text, text)
        last = text.rpartition(".")[2]
        if text in self.PLAIN or last in self.TYPING:
            return ast.Name(last)
        parsed = ast.parse(text, mode="eval").body
        whole = self.sources._qualified(self.scope, parsed) or (text if self.sources.resolved(text) else None)
        found = self.sources.resolved(whole or "")
        if not found or not isinstance(found[1], ast.ClassDef):
            raise LookupError(text)
        return ast.parse(str(whole), mode="eval").body

    visit_Name = visit_Attribute = _whole

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node
