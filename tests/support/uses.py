"""What our code uses of packages that cannot run here, found by walking its files: each name, call, override and patch,
held to their contracts.

Invariant: nothing of ours is imported or run. What an expression is follows from imports, annotations, assignments and
from what functions return, ours and theirs, and else from a table (theirs.py); what stays unknown is held to nothing.
Files are walked until no more is learnt, since a file may use what a later one makes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contracts import Call, Contracts, gives, lines
from holding import Holding, closely
from modules import signature_of
from things import (
    BUILT,
    Keys,
    Method,
    Of,
    Ref,
    Scope,
    Things,
    arguments,
    bare,
    built,
    each,
    either,
    listed,
    merged,
    nth,
    spelt,
)

PASSES = 3


class Uses(Holding):
    """Of some files, by the names of their modules; `table`: what some names are or return, where nothing says it."""

    def __init__(self, contracts: Contracts, files: Mapping[str, tuple[str, str]], table: Mapping[str, Sequence[str]]):
        super().__init__(contracts, table)
        self.trees = {module: (path, ast.parse(text)) for module, (path, text) in files.items()}
        self.mentioned = {n.attr for _, t in self.trees.values() for n in ast.walk(t) if isinstance(n, ast.Attribute)}
        self.scopes: dict[str, Scope] = {}
        self.bases: dict[str, Things] = {}  # of our classes
        self.members: dict[str, Things] = {}  # of our classes, by whole name
        self.functions: dict[str, ast.FunctionDef] = {}
        self.returned: dict[str, Things] = {}
        self.stated: set[str] = set()  # functions of which an annotation says what they return
        self.given: dict[str, Things] = {}  # to parameters of our functions, by whole name
        for _ in range(PASSES):
            self.problems.clear()
            for module, (path, tree) in self.trees.items():
                self.path = path
                self._body(tree.body, self._scope(module, None))
        for path, tree in self.trees.values():
            self.path = path
            self._strings(tree)

    def _scope(self, name: str, around: Scope | None, owner: str = "") -> Scope:
        """What was learnt of it in an earlier walk stays."""
        return self.scopes.setdefault(name, Scope(name, around, owner))

    # Statements.

    def _body(self, body: Iterable[ast.stmt], scope: Scope) -> None:
        for node in body:
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Import():
                for name in node.names:
                    self._held(name.name, node)
                    root = name.name if name.asname else name.name.partition(".")[0]
                    scope.bound[name.asname or root] = (Ref(root),)
            case ast.ImportFrom():
                base = self._absolute(node, scope)
                for name in node.names:
                    one = f"{base}.{name.name}"
                    found = self._is(one, node) if self.contracts.has(one) else self._ours(one)
                    scope.bound[name.asname or name.name] = found
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Assign():
                value = self._things(node.value, scope)
                for target in node.targets:
                    self._bind(target, value, scope)
            case ast.AnnAssign():
                value = self._things(node.value, scope) if node.value else ()
                self._bind(node.target, self._annotated(node.annotation, scope) or value, scope)
            case ast.AugAssign():
                both = self._things(node.target, scope), self._things(node.value, scope)
                self._bind(node.target, merged(either(*both)) if all(both) else (), scope)
            case ast.For():
                self._bind(node.target, each(self._things(node.iter, scope)), scope)
                self._body([*node.body, *node.orelse], scope)
            case ast.Return():
                found = self._things(node.value, scope) if node.value else ()
                if scope.name not in self.stated:
                    self.returned[scope.name] = merged(either(self.returned.get(scope.name, ()), found))
            case _:
                for child in ast.iter_child_nodes(node):
                    self._any(child, scope)

    def _any(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.stmt():
                self._statement(node, scope)
            case ast.expr():
                self._things(node, scope)
            case ast.withitem():
                found = self._things(node.context_expr, scope)
                if node.optional_vars:
                    self._bind(node.optional_vars, each(found), scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._any(child, scope)

    def _function(self, node: Any, scope: Scope) -> None:
        name = f"{scope.name}.{node.name}"
        owner = scope.name if scope.name in self.bases else ""
        self.functions[name] = node
        scope.bound[node.name] = (Ref(name),)
        for decorator in node.decorator_list:
            self._things(decorator, scope)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default:
                self._things(default, scope)
        inner = self._scope(name, scope, owner)
        if stated := self._annotated(node.returns, scope):
            self.returned[name] = stated
            self.stated.add(name)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for one in every:
            inner.bound[one.arg] = self._annotated(one.annotation, scope) or self.given.get(f"{name}.{one.arg}", ())
        if owner and every and "staticmethod" not in [ast.unparse(d) for d in node.decorator_list]:
            inner.bound[every[0].arg] = (Of(owner),)
        if node.args.kwarg:
            more = self.given.get(f"{name}.**", ())
            inner.bound[node.args.kwarg.arg] = more
        self._body(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        name = f"{scope.name}.{node.name}"
        scope.bound[node.name] = (Ref(name),)
        self.bases[name] = either(*(self._things(base, scope) for base in node.bases))
        inner = self._scope(name, scope)
        for decorator in node.decorator_list:
            self._things(decorator, scope)
        self._body(node.body, inner)
        for key, things in inner.bound.items():
            self.members.setdefault(f"{name}.{key}", things)
        above = [b.name for b in self._above(name) if isinstance(b, Ref)]
        theirs = [b for b in above if self.contracts.has(b) and closely(b)]
        for method in (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("__")):
            self._override(method, theirs, method.name in self.mentioned)

    def _above(self, name: str) -> Things:
        """The bases of a class of ours, and theirs, as far as they are ours."""
        found = self.bases.get(name, ())
        return either(found, *(self._above(b.name) for b in found if isinstance(b, Ref)))

    def _bind(self, target: ast.expr, value: Things, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.bound[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for i, part in enumerate(parts):
                    self._bind(part, nth(value, i), scope)
            case ast.Starred(value=inner):
                self._bind(inner, (), scope)
            case ast.Attribute(value=inner, attr=name):
                for thing in self._things(inner, scope):
                    if isinstance(thing, Of) and thing.type in self.bases:
                        key = f"{thing.type}.{name}"
                        self.members[key] = either(self.members.get(key, ()), value)
                    else:
                        self._member((thing,), name, target)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                scope.bound[name] = merged(either(scope.find(name), (Keys(frozenset((key,))),)))
            case ast.Subscript():
                self._things(target.value, scope)
                self._things(target.slice, scope)

    def _absolute(self, node: ast.ImportFrom, scope: Scope) -> str:
        while scope.around:
            scope = scope.around
        inside = scope.name.split(".")
        level = node.level - self.path.endswith("__init__.py")
        base = inside[: len(inside) - level] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])

    def _ours(self, name: str) -> Things:
        """What a name is that is not theirs."""
        if name in self.trees:
            return (Ref(name),)
        owner, _, last = name.rpartition(".")
        return self.scopes[owner].bound.get(last, ()) if owner in self.trees and owner in self.scopes else (Ref(name),)

    # Expressions.

    def _things(self, node: ast.expr, scope: Scope) -> Things:
        match node:
            case ast.Name(id=name):
                return scope.find(name)
            case ast.Attribute(value=inner, attr=name):
                return self._member(self._things(inner, scope), name, node)
            case ast.Call():
                return self._called(node, scope)
            case ast.IfExp(test=test, body=one, orelse=other):
                self._things(test, scope)
                return either(self._things(one, scope), self._things(other, scope))
            case ast.BoolOp(values=values):
                return either(*(self._things(v, scope) for v in values))
            case ast.BinOp(left=left, op=operator, right=right):
                both = either(self._things(left, scope), self._things(right, scope))
                return merged(both) if isinstance(operator, ast.BitOr) else ()
            case ast.NamedExpr(target=target, value=value):
                found = self._things(value, scope)
                self._bind(target, found, scope)
                return found
            case ast.Subscript(value=inner, slice=place):
                found = self._things(inner, scope)
                self._things(place, scope)
                if isinstance(place, ast.Slice):
                    return found
                at = place.value if isinstance(place, ast.Constant) and isinstance(place.value, int) else 0
                return nth(found, at, False)
            case ast.Dict(keys=keys, values=values):
                every = [self._things(v, scope) for v in values]
                names = {k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
                spread = [e for k, e in zip(keys, every, strict=True) if k is None]
                whole = all(k is None or isinstance(k, ast.Constant) for k in keys) and all(spread)
                return merged(either((Keys(frozenset(names)),), *spread)) if whole else ()
            case ast.List(elts=parts) | ast.Set(elts=parts):
                return listed(either(*(self._things(p, scope) for p in parts)))
            case ast.Tuple(elts=parts):
                every = [[t.type for t in self._things(p, scope) if isinstance(t, Of)] for p in parts]
                return (Of(f"tuple[{', '.join(e[0] if e else 'object' for e in every)}]"),) if any(every) else ()
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inner = Scope(scope.name, scope, scope.owner)
                for part in node.generators:
                    self._bind(part.target, each(self._things(part.iter, inner)), inner)
                    for test in part.ifs:
                        self._things(test, inner)
                if isinstance(node, ast.DictComp):
                    self._things(node.key, inner)
                    self._things(node.value, inner)
                    return ()
                return listed(self._things(node.elt, inner))
            case ast.Lambda(args=given, body=body):
                inner = Scope(scope.name, scope, scope.owner, {a.arg: () for a in (*given.args, *given.kwonlyargs)})
                self._things(body, inner)
                return ()
            case _:
                for child in ast.iter_child_nodes(node):
                    self._any(child, scope)
                return ()

    def _member(self, things: Things, name: str, node: ast.AST) -> Things:
        found: list[Things] = []
        for thing in things:
            match thing:
                case Ref(name=owner) if owner in self.trees:
                    found.append(self._ours(f"{owner}.{name}"))
                case Ref(name=owner) | Of(type=owner) if owner in self.bases:
                    found.append(self._inherited(owner, name, node))
                case Of(type=owner) if self.contracts.has(owner) and not closely(owner):
                    pass
                case Ref(name=owner) if self.contracts.has(owner) and name.startswith("__"):
                    pass  # which each module has, and each class
                case Ref(name=owner) | Of(type=owner) if self.contracts.has(owner) and "[" not in owner:
                    found.append(self._is(f"{owner}.{name}", node))
                case Of(type=kind) if kind.startswith(("dict[", "Mapping[")) and name in ("keys", "values", "items"):
                    key, value = arguments(kind)
                    given = {"keys": key, "values": value, "items": f"tuple[{key}, {value}]"}[name]
                    found.append((Ref(f"() -> list[{given}]"),))
                case Ref(name=owner) if not self.contracts.has(owner):
                    found.append((Ref(f"{owner}.{name}"),))
        return either(*found)

    def _inherited(self, owner: str, name: str, node: ast.AST) -> Things:
        """A member of a class of ours: its own, or a base's, ours or theirs."""
        for one in (Ref(owner), *self._above(owner)):
            if not isinstance(one, Ref):
                continue
            if f"{one.name}.{name}" in self.functions:
                function = self.functions[key := f"{one.name}.{name}"]
                kinds = [ast.unparse(d) for d in function.decorator_list]
                if "property" in kinds or "cached_property" in kinds:
                    return self.returned.get(key, ())
                return (Method(key),)
            if f"{one.name}.{name}" in self.members:
                return self.members[f"{one.name}.{name}"]
            if self.contracts.has(one.name):
                if not closely(one.name):
                    return ()
                return self._is(f"{one.name}.{name}", node)
        return ()

    def _called(self, node: ast.Call, scope: Scope) -> Things:
        function = node.func
        given = [self._things(a.value if isinstance(a, ast.Starred) else a, scope) for a in node.args]
        by_name = {k.arg: self._things(k.value, scope) for k in node.keywords if k.arg}
        spread = [self._things(k.value, scope) for k in node.keywords if k.arg is None]
        keys = [t for things in spread for t in things if isinstance(t, Keys)]
        call = Call(
            sum(not isinstance(a, ast.Starred) for a in node.args),
            frozenset(by_name),
            frozenset(n for k in keys for n in k.names),
            any(isinstance(a, ast.Starred) for a in node.args),
            len(keys) < len(spread),
        )
        match function:
            case ast.Name(id="super"):
                return tuple(Of(b.name) for b in self.bases.get(scope.owner, ()) if isinstance(b, Ref))
            case ast.Name(id="getattr" | "setattr") if len(node.args) == (2 if function.id == "getattr" else 3):
                if isinstance(node.args[1], ast.Constant):
                    return self._member(given[0], node.args[1].value, node)
            case ast.Name(id="dict") if not given:
                return (Keys(call.named | call.maybe),)
            case ast.Name(id=name) if name in BUILT:
                return built(name, given)
        if isinstance(function, ast.Attribute) and function.attr == "__init__":  # of super()
            for one in self._things(function.value, scope):
                if isinstance(one, Of) and self.contracts.has(one.type):
                    self._call(*self._held(one.type, node), call, node)
            return ()
        found: list[Things] = []
        called = self._things(function, scope)
        every = [t.name for t in called if isinstance(t, Ref) and self.contracts.has(t.name)]
        for thing in called:
            match thing:
                case Ref(name=name) if name.startswith("() -> "):
                    found.append((Of(name.removeprefix("() -> ")),))
                case Ref(name="importlib.import_module") if isinstance(node.args[0], ast.Constant):
                    found.append(self._is(str(node.args[0].value), node))
                case Ref(name="unittest.mock.patch.object" | "unittest.mock.patch.multiple"):
                    self._patched(node, given, by_name, keys)
                case Ref(name=name) if self.contracts.has(name):
                    whole, line = self._held(name, node)
                    self._call(whole, line, self._narrowed(call, name, every, node), node)
                    if whole in self.table:
                        found.append(self._stated(self.table[whole]))
                    elif line is not None and any(
                        one.startswith("class") for one in ([line] if isinstance(line, str) else line)
                    ):
                        found.append((Of(whole),))
                    elif line is not None and gives(line):
                        found.append(tuple(Of(t) for t in bare(gives(line))))
                case Ref(name=name) if name in self.bases:
                    self._inheriting(name, call, node)
                    self._hand_on(f"{name}.__init__", True, node, given, by_name, keys)
                    found.append((Of(name),))
                case Ref(name=name) | Method(name=name) if name in self.functions:
                    self._hand_on(name, isinstance(thing, Method), node, given, by_name, keys)
                    found.append(self.returned.get(name, ()))
        return either(*found)

    def _inheriting(self, name: str, call: Call, node: ast.AST) -> None:
        """A class of ours that theirs construct."""
        above = (Ref(name), *self._above(name))
        for one in above:
            if isinstance(one, Ref) and f"{one.name}.__init__" in self.functions:
                return
            if isinstance(one, Ref) and self.contracts.has(one.name):
                self._call(*self._held(one.name, node), call, node)
                return

    def _hand_on(
        self, name: str, bound: bool, node: ast.Call, given: list[Things], by_name: dict[str, Things], keys: list[Keys]
    ) -> None:
        """What a function of ours is called with, for the parameters that no annotation says the type of."""
        if name not in self.functions:
            return
        stated = self.functions[name].args
        plain = [a.arg for a in (*stated.posonlyargs, *stated.args)][bound:]
        at = next((i for i, a in enumerate(node.args) if isinstance(a, ast.Starred)), len(given))
        pairs = [*zip(plain, given[:at], strict=False), *by_name.items()]
        for parameter, things in pairs:
            key = f"{name}.{parameter}"
            self.given[key] = either(self.given.get(key, ()), things)
        if stated.kwarg:
            known = {*plain, *(a.arg for a in stated.kwonlyargs)}
            more = Keys(frozenset(by_name) - known | {n for k in keys for n in k.names})
            self.given[f"{name}.**"] = merged(either(self.given.get(f"{name}.**", ()), (more,)))

    def _patched(self, node: ast.Call, given: list[Things], by_name: dict[str, Things], keys: list[Keys]) -> None:
        """What is put in the place of something of theirs, by unittest.mock."""
        names = {name: by_name.get(name, ()) for name in (*by_name, *(n for k in keys for n in k.names))}
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            names = {node.args[1].value: given[2] if len(given) > 2 else by_name.get("new", ())}
        for owner in given[0] if given else ():
            if not isinstance(owner, Ref) or not self.contracts.has(owner.name):
                continue
            _, line = self._held(owner.name, node)
            bound = any(one.startswith("class") for one in lines(line))
            for name, things in names.items():
                self._held(f"{owner.name}.{name}", node)
                for ours in (t.name for t in things if isinstance(t, Ref) and t.name in self.functions):
                    function = self.functions[ours]
                    self._replaces(function.name, signature_of(function, bound), f"{owner.name}.{name}", function)

    def _annotated(self, node: ast.expr | None, scope: Scope) -> Things:
        """What an annotation says; nothing of Any, and of what is not known."""

        def whole(name: ast.expr) -> str:
            found = [t.name for t in self._things(name, scope) if isinstance(t, Ref)]
            return found[0] if found and (self.contracts.has(found[0]) or found[0] in self.bases) else ""

        text = spelt(node, whole) if node is not None else ""
        return tuple(Of(t) for t in bare(text)) if text else ()
