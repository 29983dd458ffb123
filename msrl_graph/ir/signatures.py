"""What the compiler knows of a Python function that a program calls: its parameters, never its body.

Invariant: signatures are read from the source, which is never run: the package's functions and a user's file take the
same path.

Marks: `@function(scope=…)` says whether a function needs all rows of a group or of the batch at once, and
`@function(parallel=False)` that only one process may call it; `@loss_term`
makes it a term of a loss, `@loss_term(scope="mini_batch")` one that needs all rows of the mini-batch at once,
`@optimizer` an optimizer, `@schedule` a learning rate; `@option` makes it a value of those options that are annotated
with what it returns.

Positional parameters bind columns by name (one with a default may be missing), `*columns` all others that the node
reads, in its order. Keyword-only parameters are options, given in the call by order or by name; one annotated
`Sequence[float]` takes all the numbers. Plain types are checked, and what registry.py names: `Count`, `Positive`,
`NotNegative`, `Share`, `Below`, `Betas`, `Rate`.

Filled by the runtime are `rng`, `tokenizer` and `iteration`; of a loss term `rng` where its scope is the mini-batch
(what a micro-batch drew would depend on its size), and these, for the rows of a micro-batch, or of the mini-batch, one
after another:

- `logp`, the log-probability of each response token under the weights being updated, and `entropy`, that of its
  distribution, in nats;
- `values`, a value worker's prediction before each response token, or a reward model's score of the text that ends with
  it;
- `lengths`, the response tokens of each row, and `NAME_lengths`, those of the column that the parameter NAME binds;
- `rounding`, a number: by how many nats two forward passes of the same weights may differ in a token's `logp`, since
  they round in another order. Where a term has a kink at equal log-probabilities, a smaller difference has no sign.

Of an agent they are also `base_url`, `api_key` and `model`, by which it asks the policy.

Of a schedule they are `step`, the number of the optimizer step from 1, and `last`, that of the run's last one; other
positional parameters bind states.

A parameter annotated `LogProbs` binds a column of token ids and receives their log-probabilities under the weights
being updated. One annotated `Scores` binds a column of token ids and receives one number a row: the score that the
reward model being updated gives the row's context with this column's tokens behind it, nan where there are none. A
term that returns `Rows` gives one number a row, others one a token.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

Def = ast.FunctionDef | ast.AsyncFunctionDef
CallKind = Literal["function", "loss", "optimizer", "schedule", "option"]
Scope = Literal["row", "group", "batch", "mini_batch"]
Plain = Literal["bool", "int", "float", "str", "Count", "Positive", "NotNegative", "Share", "Below", "Betas", "Rate"]
SCOPES: dict[str, tuple[Scope, ...]] = {"function": ("row", "group", "batch"), "loss": ("row", "mini_batch")}
PLAIN: tuple[Plain, ...] = get_args(Plain)
MARKS: dict[str, CallKind] = {"loss_term": "loss", "optimizer": "optimizer", "schedule": "schedule", "option": "option"}
FILLED = ("logp", "entropy", "values", "lengths")
# What a term of a loss may take of the weights being updated, and the kinds of workers whose weights give it.
GIVEN_BY = {
    "logp": ("policy",),
    "entropy": ("policy",),
    "values": ("value", "reward_model"),
    "LogProbs": ("policy",),
    "Scores": ("reward_model",),
}
ROUNDING = "rounding"
OF_STEP = ("step", "last")
GIVEN = ("rng", "tokenizer", "iteration")  # to all but terms of a loss and schedules
ENDPOINT = ("base_url", "api_key", "model")  # to agents


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter: `words` are its option words, if it takes words, `calls` the functions that it takes a
    call of; `kind` is the plain type that it is annotated with, `several` whether it takes a list of numbers."""

    name: str
    required: bool = False
    words: tuple[str, ...] = ()
    kind: Plain | None = None
    calls: tuple[str, ...] = ()
    several: bool = False


@dataclass(frozen=True)
class Signature:
    """`columns` are the parameters that bind columns, `optional` those of them that may be missing, `text` those that
    receive decoded text, `logps` those that receive the log-probabilities of the column that they bind, `scores` those
    that receive the score of each row up to it; `rest` the one that takes all other columns. Of the parameters in
    `together`, options too, a call gives all or none. `fills` are the parameters that the runtime fills, `rows` says
    that a term gives one number a row, `scope` what it must see at once. `gives` are a function's results as its
    annotation has them: an array a row (`list[Array]`), a number a row, or "": unknown. `waits`: it is `async`.
    `parallel`: several processes may call it at once."""

    name: str
    kind: CallKind
    columns: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()
    scope: Scope = "row"
    rest: str = ""
    together: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    logps: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset()
    rows: bool = False
    gives: tuple[Literal["array", "number", ""], ...] = ()
    waits: bool = False
    parallel: bool = True

    @property
    def seeded(self) -> bool:
        """Whether it begins an episode as gymnasium has it: by `seed` and `options`, which are given by name."""
        return {"seed", "options"} <= {o.name for o in self.options}

    def unfit(self, kind: str) -> list[str]:
        """What a term takes that the weights of a worker of this kind do not give: names of GIVEN_BY."""
        bound = [name for name, some in (("LogProbs", self.logps), ("Scores", self.scores)) if some]
        return [name for name, kinds in GIVEN_BY.items() if name in (*self.fills, *bound) and kind not in kinds]

    @property
    def rng(self) -> bool:
        return "rng" in self.fills

    def option(self, name: str) -> Option | None:
        return next((o for o in self.options if o.name == name), None)


def signatures(source: str) -> dict[str, Signature]:
    """The signatures of the top-level functions of a Python source, by name; SyntaxError where it is not Python. Only
    what function nodes call may be `async`."""
    items = [item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    items = [item for item in items if isinstance(item, ast.FunctionDef) or _kind(item) == "function"]
    makers = {item.name: _names(item.returns) for item in items if _kind(item) == "option"}
    return {item.name: _signature(item, makers) for item in items}


def called_as(kind: CallKind, source: str) -> dict[str, Signature]:
    """The signatures of the top-level functions of a user's file as terms of a loss, or schedules: which they are by
    where they are called. As functions, by their marks."""
    if kind == "function":
        return signatures(source)
    return {
        item.name: _signature(item, {}, kind) for item in ast.parse(source).body if isinstance(item, ast.FunctionDef)
    }


def coroutines(source: str) -> set[str]:
    """The names of the top-level functions of a Python source that are `async def`."""
    return {item.name for item in ast.parse(source).body if isinstance(item, ast.AsyncFunctionDef)}


def describe_binding(source: str, name: str) -> str:
    """Return what a top-level name that is not a function is: "a class", "assigned", "imported" or ""."""
    for item in ast.parse(source).body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return "a class"
        if isinstance(item, ast.Import | ast.ImportFrom):
            if name in {(alias.asname or alias.name).partition(".")[0] for alias in item.names}:
                return "imported"
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            if name in {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}:
                return "assigned"
    return ""


def agents(source: str) -> dict[str, Signature]:
    """The signatures of the top-level functions of a Python source as agents, those with `async` too."""
    found = (item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return {item.name: _signature(item, {}, "function", (*GIVEN, *ENDPOINT)) for item in found}


def classes(source: str) -> dict[str, dict[str, Signature]]:
    """The signatures of the methods of the top-level classes of a Python source, those inherited within it too, without
    the instance; by class and name. SyntaxError where it is not Python."""
    found: dict[str, dict[str, Signature]] = {}
    for item in (item for item in ast.parse(source).body if isinstance(item, ast.ClassDef)):
        methods = [method for method in item.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)]
        bases = [found[name] for base in reversed(item.bases) for name in _names(base) if name in found]
        found[item.name] = {k: v for methods_of in bases for k, v in methods_of.items()}
        for method in methods:
            arguments = method.args
            (arguments.posonlyargs or arguments.args)[:1] = []
            method.name, name = f"{item.name}.{method.name}", method.name
            found[item.name][name] = _signature(method, {})
    return found


def _signature(
    item: Def, makers: dict[str, set[str]], kind: CallKind | None = None, given: tuple[str, ...] = GIVEN
) -> Signature:
    a = item.args
    kind = kind or _kind(item)
    positional = [*a.posonlyargs, *a.args]
    names = {p.arg for p in positional}
    with_default = {p.arg for p in positional[len(positional) - len(a.defaults) :]}
    scope = _scope(item, kind)
    if kind in ("loss", "schedule"):
        drawn = (p.arg for p in (*positional, *a.kwonlyargs) if p.arg == "rng" and scope == "mini_batch")
        fills = (*(p.arg for p in positional if _filled(kind, p.arg, names)), *drawn)
    else:  # Python gives what stands before `*columns` by order, so those are columns
        fills = tuple(p.arg for p in (*(() if a.vararg else positional), *a.kwonlyargs) if p.arg in given)
    columns = tuple(p for p in positional if p.arg not in fills)
    signature = Signature(
        name=item.name,
        kind=kind,
        columns=tuple(p.arg for p in columns),
        # For the same reason none of it can be missing.
        optional=frozenset() if a.vararg else frozenset(p.arg for p in columns) & with_default,
        text=frozenset(p.arg for p in (*columns, *([a.vararg] if a.vararg else [])) if _is_text(p.annotation)),
        options=tuple(
            _option(p, d is None, makers)
            for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
            if p.arg not in fills
        ),
        scope=scope,
        rest=a.vararg.arg if a.vararg else "",
        together=_together(item),
        gives=_gives(item.returns),
        fills=fills,
        waits=isinstance(item, ast.AsyncFunctionDef),
        parallel=_parallel(item),
    )
    if kind != "loss":
        return signature
    logps, scores = (frozenset(p.arg for p in columns if of in _names(p.annotation)) for of in ("LogProbs", "Scores"))
    return replace(signature, logps=logps, scores=scores, rows="Rows" in _names(item.returns))


def _kind(item: Def) -> CallKind:
    marks = [d.func if isinstance(d, ast.Call) else d for d in item.decorator_list]
    return next((MARKS[d.id] for d in marks if isinstance(d, ast.Name) and d.id in MARKS), "function")


def _filled(kind: CallKind, name: str, names: set[str]) -> bool:
    """Whether the runtime fills a parameter of a loss term or a schedule."""
    if kind != "loss":
        return kind == "schedule" and name in OF_STEP
    return name in (*FILLED, ROUNDING) or (name.endswith("_lengths") and name.removesuffix("_lengths") in names)


def _option(parameter: ast.arg, required: bool, makers: dict[str, set[str]]) -> Option:
    annotation = parameter.annotation
    names = _names(parameter.annotation)
    calls = tuple(maker for maker, made in makers.items() if made & names - {"None"})
    several = isinstance(annotation, ast.Subscript) and {"Sequence", "float"} <= names
    kind = None if calls or several else _plain(annotation)
    return Option(parameter.arg, required, _words(annotation), kind, calls, several)


def _names(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation, quoted ones too."""
    parts = [*ast.walk(annotation)] if annotation else []
    return {n for p in parts if isinstance(n := getattr(p, "id", getattr(p, "value", None)), str)}


def _is_text(annotation: ast.expr | None) -> bool:
    """Whether it is text, or several of it: `str`, `list[str]`, `"Sequence[str]"`, `str | None`."""
    names = {word for name in _names(annotation) for word in re.findall(r"\w+", name)}
    return "str" in names and not names & {"dict", "Mapping"}


def _words(annotation: ast.expr | None) -> tuple[str, ...]:
    """The words of a `Literal["a", "b"]` annotation, or of one that is a part of it."""
    for part in ast.walk(annotation) if annotation else ():
        if isinstance(part, ast.Subscript) and ast.unparse(part.value).endswith("Literal"):
            return tuple(
                c.value for c in ast.walk(part.slice) if isinstance(c, ast.Constant) and isinstance(c.value, str)
            )
    return ()


def _plain(annotation: ast.expr | None) -> Plain | None:
    """The plain type of an annotation such as `float`, `"float"`, `float | None` or `Optional[float]`; None where it
    has no one such."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Literal"):
        return None
    parts = [] if annotation is None else list(ast.walk(annotation))
    names = [p.id if isinstance(p, ast.Name) else p.value for p in parts if isinstance(p, ast.Name | ast.Constant)]
    found: set[Plain] = {p for p in PLAIN if p in names}
    if found == {"int", "float"}:
        found = {"float"}
    others = {*names} - {*found, "int", "float", "None", "Optional", None}
    return found.pop() if len(found) == 1 and not others else None


def _mark(item: Def, key: str) -> object:
    """A keyword of a function's mark, such as `scope` of `@function(scope="group")`; None where it has none, or no
    plain value."""
    given = [k.value for d in item.decorator_list if isinstance(d, ast.Call) for k in d.keywords if k.arg == key]
    try:
        return ast.literal_eval(given[0]) if given else None
    except ValueError:
        return None


def _parallel(item: Def) -> bool:
    return _mark(item, "parallel") is not False


def _scope(item: Def, kind: CallKind) -> Scope:
    stated = _mark(item, "scope")
    return next((s for s in SCOPES.get(kind, ()) if s == stated), "row")


def _gives(returns: ast.expr | None) -> tuple[Literal["array", "number", ""], ...]:
    several = (
        isinstance(returns, ast.Subscript)
        and ast.unparse(returns.value) == "tuple"
        and isinstance(returns.slice, ast.Tuple)
    )
    parts = returns.slice.elts if several else [returns]  # type: ignore[union-attr]
    known: dict[str, Literal["array", "number"]] = {"list[Array]": "array", "float": "number"}
    known |= {f"NDArray[np.{dtype}]": "number" for dtype in ("float32", "float64")}
    return tuple(known.get(ast.unparse(part), "") if part is not None else "" for part in parts)


def _together(item: Def) -> tuple[str, ...]:
    stated = _mark(item, "together")
    return tuple(map(str, stated)) if isinstance(stated, tuple) else ()
