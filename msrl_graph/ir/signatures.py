"""Signatures of the Python functions that programs call: parameters, never bodies.

Invariant: signatures are read from source code, which is never run. Functions of msrl_graph itself and functions in
users' files are read in the same way.

A decorator of the function states how the function is used:

- `@function(scope=…)`: a function that needs all rows of a group, or of the batch, in one call.
- `@function(parallel=False)`: a function that only one process may call.
- `@loss_term`: a term of a loss. `@loss_term(scope="mini_batch")`: a term that needs all rows of the mini-batch in one
  call.
- `@optimizer`: an optimizer. `@schedule`: a learning rate.
- `@option`: a function whose call a program may write as the value of an option (see below). The annotation of the
  option must be the return type of the called function.

Parameters are of three kinds:

- Positional parameters bind columns by name. A column may be missing if its parameter has a default.
- `*columns` binds all other columns that the node reads, in the order in which the node reads them.
- Keyword-only parameters are options. A call passes options in their order or by name. An option that is annotated
  `Sequence[float]` gets all the numbers of the call. The values of options with a plain type are checked. Plain types
  are those of Python, and the types of registry.py: `Count`, `Positive`, `NotNegative`, `Share`, `Below`, `Betas`,
  `Rate`.

A program does not pass the following parameters; the runtime passes their values:

- To a function or an environment's method: `rng`, `tokenizer` and `iteration`.
- To an agent: also `base_url`, `api_key` and `model`, with which the agent calls the policy.
- To a schedule: `step`, the number of the optimizer step counted from 1, and `last`, the number of the run's last step.
  Other positional parameters of a schedule bind states.
- To a loss term: `rng`, but only if the scope of the term is the mini-batch, since draws for a micro-batch would depend
  on the size of the micro-batch.

The runtime also passes the following parameters to a loss term. In each of them, the tokens of all rows of a
micro-batch (or of the mini-batch, if this is the scope of the term) are concatenated:

- `logp`: the log-probability of each response token under the weights being updated.
- `entropy`: for each response token, the entropy in nats of the distribution that predicts the token.
- `values`: a value worker's prediction before each response token, or a reward model's score of the text that ends with
  the token.
- `lengths`: the number of response tokens of each row.
- `NAME_lengths`: for each row, the number of tokens in the column that the parameter NAME binds.
- `rounding`: a number of nats. The `logp` of a token may differ by this number between two forward passes with the same
  weights, since the passes round in different orders. If a term has a kink where two log-probabilities are equal, the
  sign of a difference below `rounding` means nothing.

Some annotations of a loss term have a meaning:

- A parameter annotated `LogProbs` binds a column of token ids. The parameter receives the log-probabilities of these
  tokens under the weights being updated.
- A parameter annotated `Scores` binds a column of token ids. The parameter receives one number per row: the score that
  the reward model being updated gives to the row's context followed by the tokens of this column. The number is nan if
  there are no tokens.
- A term that is annotated to return `Rows` returns one number per row. Other terms return one number per token.
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
# The kind of the functions that a decorator marks.
MARKS: dict[str, CallKind] = {"loss_term" if kind == "loss" else kind: kind for kind in get_args(CallKind)}
FILLED = ("logp", "entropy", "values", "lengths")
# The inputs of a loss term that depend on the weights being updated, and the kinds of workers that provide them.
GIVEN_BY = {
    "logp": ("policy",),
    "entropy": ("policy",),
    "values": ("value", "reward_model"),
    "LogProbs": ("policy",),
    "Scores": ("reward_model",),
}
ROUNDING = "rounding"
OF_STEP = ("step", "last")
GIVEN = ("rng", "tokenizer", "iteration")  # filled for all but loss terms and schedules
ENDPOINT = ("base_url", "api_key", "model")  # filled for agents


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter of a function.

    - `words`: the words that the option accepts.
    - `kind`: the annotated plain type, or None.
    - `calls`: the functions whose calls the option accepts as a value.
    - `several`: whether the option takes a list of numbers.
    """

    name: str
    required: bool = False
    words: tuple[str, ...] = ()
    kind: Plain | None = None
    calls: tuple[str, ...] = ()
    several: bool = False


@dataclass(frozen=True)
class Signature:
    """The signature of a function.

    - `columns`: the parameters that bind columns.
    - `optional`: the parameters in `columns` whose column may be missing.
    - `text`: the parameters that receive decoded text.
    - `answers`: the parameters in `text` that are annotated `Answers`; of a JSON column they receive the value.
    - `logps`: the parameters that receive log-probabilities of the tokens of their column.
    - `scores`: the parameters that receive one score per row: the score of the text up to the end of their column.
    - `rest`: the parameter `*columns`, which binds all other columns; "" if there is none.
    - `together`: parameters (options included) of which a call must pass all or none.
    - `fills`: the parameters whose values the runtime passes.
    - `scope`: the rows that one call needs. `rows`: whether a loss term returns one number per row.
    - `gives`: what the annotation says of each result: an array per row (`list[Array]`), a number per row, or ""
      (unknown).
    - `waits`: whether the function is `async`. `parallel`: whether several processes may call the function at the same
      time.
    """

    name: str
    kind: CallKind
    columns: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
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
        """Whether the function has the options of gymnasium's `reset`: `seed`, `options`."""
        return {"seed", "options"} <= {option.name for option in self.options}

    def unfit(self, kind: str) -> list[str]:
        """Return the function's inputs that workers of the kind `kind` do not provide.

        Only inputs that depend on the weights being updated are considered: `logp`, `entropy`, `values`, and parameters
        annotated `LogProbs` or `Scores`, which are returned as the names of these annotations.
        """
        bound = [name for name, parameters in (("LogProbs", self.logps), ("Scores", self.scores)) if parameters]
        return [name for name, kinds in GIVEN_BY.items() if name in (*self.fills, *bound) and kind not in kinds]

    @property
    def rng(self) -> bool:
        return "rng" in self.fills

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)


def read_signatures(source: str) -> dict[str, Signature]:
    """Read the signatures of the top-level functions of a Python source, by name.

    An `async` function is left out if it is a loss term, optimizer, schedule or option. Raises SyntaxError if the
    source is not valid Python.
    """
    items = [item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    items = [item for item in items if isinstance(item, ast.FunctionDef) or _kind(item) == "function"]
    makers = {item.name: _names(item.returns) for item in items if _kind(item) == "option"}
    return {item.name: _signature(item, makers) for item in items}


def read_marked_signatures(source: str) -> dict[str, Signature]:
    """Read the signatures of the top-level functions with a decorator of MARKS."""
    marked = {getattr(item, "name", "") for item in ast.parse(source).body if _find_mark(item)}
    return {name: signature for name, signature in read_signatures(source).items() if name in marked}


def read_signatures_as(kind: CallKind, source: str) -> dict[str, Signature]:
    """Read the signatures of a user's functions, for calls of the kind `kind`.

    The result has the top-level functions of the source, by name. A loss term or a schedule needs no decorator, since
    the attribute with the call decides what the function is. For the kind "function", the decorators decide.
    """
    if kind == "function":
        return read_signatures(source)
    return {
        item.name: _signature(item, {}, kind) for item in ast.parse(source).body if isinstance(item, ast.FunctionDef)
    }


def coroutines(source: str) -> set[str]:
    """Return the names of the top-level `async def` functions of a Python source."""
    return {item.name for item in ast.parse(source).body if isinstance(item, ast.AsyncFunctionDef)}


def describe_binding(source: str, name: str) -> str:
    """Describe what a name of a Python source is, if it is not a function.

    Return "a class", "assigned" or "imported". Return "" if the source does not bind the name at its top level.
    """
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


def read_agents(source: str) -> dict[str, Signature]:
    """Read all top-level functions of a Python source as agents; return signatures.

    The result maps the name of each function to its signature. It includes `async` functions.
    """
    functions = (item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return {item.name: _signature(item, {}, "function", (*GIVEN, *ENDPOINT)) for item in functions}


def read_classes(source: str) -> dict[str, dict[str, Signature]]:
    """Read the signatures of the methods of top-level classes, by class and method.

    A class also has the methods that it inherits from classes of the same source. The first parameter of a method,
    `self`, is left out. Raises SyntaxError.
    """
    signatures_of: dict[str, dict[str, Signature]] = {}
    for item in (item for item in ast.parse(source).body if isinstance(item, ast.ClassDef)):
        methods = [method for method in item.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)]
        bases = [signatures_of[name] for base in reversed(item.bases) for name in _names(base) if name in signatures_of]
        signatures_of[item.name] = {key: signature for methods_of in bases for key, signature in methods_of.items()}
        for method in methods:
            arguments = method.args
            (arguments.posonlyargs or arguments.args)[:1] = []
            method.name, name = f"{item.name}.{method.name}", method.name
            signatures_of[item.name][name] = _signature(method, {})
    return signatures_of


def _signature(
    item: Def, makers: dict[str, set[str]], kind: CallKind | None = None, runtime_names: tuple[str, ...] = GIVEN
) -> Signature:
    arguments = item.args
    kind = kind or _kind(item)
    positional = [*arguments.posonlyargs, *arguments.args]
    names = {parameter.arg for parameter in positional}
    with_default = {parameter.arg for parameter in positional[len(positional) - len(arguments.defaults) :]}
    scope = _scope(item, kind)
    if kind in ("loss", "schedule"):
        drawn = (
            parameter.arg
            for parameter in (*positional, *arguments.kwonlyargs)
            if parameter.arg == "rng" and scope == "mini_batch"
        )
        fills = (*(parameter.arg for parameter in positional if _is_filled(kind, parameter.arg, names)), *drawn)
    else:  # Python passes parameters before `*columns` by position, so those are columns
        fills = tuple(
            parameter.arg
            for parameter in (*(() if arguments.vararg else positional), *arguments.kwonlyargs)
            if parameter.arg in runtime_names
        )
    columns = tuple(parameter for parameter in positional if parameter.arg not in fills)
    signature = Signature(
        name=item.name,
        kind=kind,
        columns=tuple(parameter.arg for parameter in columns),
        # Parameters before `*columns` are passed by position, so none of their columns can be missing.
        optional=frozenset() if arguments.vararg else frozenset(parameter.arg for parameter in columns) & with_default,
        text=frozenset(
            parameter.arg
            for parameter in (*columns, *([arguments.vararg] if arguments.vararg else []))
            if _is_text(parameter.annotation)
        ),
        answers=frozenset(parameter.arg for parameter in columns if "Answers" in _names(parameter.annotation)),
        options=tuple(
            _option(parameter, default is None, makers)
            for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if parameter.arg not in fills
        ),
        scope=scope,
        rest=arguments.vararg.arg if arguments.vararg else "",
        together=_read_together(item),
        gives=_read_results(item.returns),
        fills=fills,
        waits=isinstance(item, ast.AsyncFunctionDef),
        parallel=_parallel(item),
    )
    if kind != "loss":
        return signature
    logps, scores = (
        frozenset(parameter.arg for parameter in columns if mark in _names(parameter.annotation))
        for mark in ("LogProbs", "Scores")
    )
    return replace(signature, logps=logps, scores=scores, rows="Rows" in _names(item.returns))


def _kind(item: Def) -> CallKind:
    return _find_mark(item) or "function"


def _find_mark(item: ast.stmt) -> CallKind | None:
    """Return the kind that a decorator of MARKS states; None without one."""
    decorators = item.decorator_list if isinstance(item, Def) else []
    marks = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in decorators]
    return next((MARKS[mark.id] for mark in marks if isinstance(mark, ast.Name) and mark.id in MARKS), None)


def _is_filled(kind: CallKind, name: str, names: set[str]) -> bool:
    """Return whether the runtime passes a parameter to a loss term or a schedule.

    `name` is the name of the parameter. `names` are the names of all parameters of the function.
    """
    if kind != "loss":
        return kind == "schedule" and name in OF_STEP
    return name in (*FILLED, ROUNDING) or (name.endswith("_lengths") and name.removesuffix("_lengths") in names)


def _option(parameter: ast.arg, required: bool, makers: dict[str, set[str]]) -> Option:
    annotation = parameter.annotation
    names = _names(parameter.annotation)
    calls = tuple(maker for maker, types in makers.items() if types & names - {"None"})
    several = isinstance(annotation, ast.Subscript) and {"Sequence", "float"} <= names
    kind = None if calls or several else _plain(annotation)
    return Option(parameter.arg, required, _words(annotation), kind, calls, several)


def _names(annotation: ast.expr | None) -> set[str]:
    """Return the names in an annotation, including names in quotes."""
    parts = [*ast.walk(annotation)] if annotation else []
    return {name for part in parts if isinstance(name := getattr(part, "id", getattr(part, "value", None)), str)}


def _is_text(annotation: ast.expr | None) -> bool:
    """Return whether an annotation, such as `list[str]` or `Answers`, means text."""
    names = {word for name in _names(annotation) for word in re.findall(r"\w+", name)}
    return bool(names & {"str", "Answers"}) and not names & {"dict", "Mapping"}


def _words(annotation: ast.expr | None) -> tuple[str, ...]:
    """Return the words of a `Literal["a", "b"]` in an annotation."""
    for part in ast.walk(annotation) if annotation else ():
        if isinstance(part, ast.Subscript) and ast.unparse(part.value).endswith("Literal"):
            return tuple(
                constant.value
                for constant in ast.walk(part.slice)
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
            )
    return ()


def _plain(annotation: ast.expr | None) -> Plain | None:
    """Return the plain type in an annotation, or None if there is not exactly one.

    Examples are `float`, `"float"`, `float | None` and `Optional[float]`.
    """
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Literal"):
        return None
    parts = [] if annotation is None else list(ast.walk(annotation))
    names = [
        part.id if isinstance(part, ast.Name) else part.value
        for part in parts
        if isinstance(part, ast.Name | ast.Constant)
    ]
    plain: set[Plain] = {part for part in PLAIN if part in names}
    if plain == {"int", "float"}:
        plain = {"float"}
    others = {*names} - {*plain, "int", "float", "None", "Optional", None}
    return plain.pop() if len(plain) == 1 and not others else None


def _mark(item: Def, key: str) -> object:
    """Return the value of a decorator's keyword argument, or None if it is unknown.

    An example is `scope` of `@function(scope="group")`. The value is unknown if the argument is missing or not a
    literal.
    """
    values = [
        keyword.value
        for decorator in item.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == key
    ]
    try:
        return ast.literal_eval(values[0]) if values else None
    except ValueError:
        return None


def _parallel(item: Def) -> bool:
    return _mark(item, "parallel") is not False


def _scope(item: Def, kind: CallKind) -> Scope:
    stated = _mark(item, "scope")
    return next((scope for scope in SCOPES.get(kind, ()) if scope == stated), "row")


def _read_results(returns: ast.expr | None) -> tuple[Literal["array", "number", ""], ...]:
    several = (
        isinstance(returns, ast.Subscript)
        and ast.unparse(returns.value) == "tuple"
        and isinstance(returns.slice, ast.Tuple)
    )
    parts = returns.slice.elts if several else [returns]  # type: ignore[union-attr]
    known: dict[str, Literal["array", "number"]] = {"list[Array]": "array", "float": "number"}
    known |= {f"NDArray[np.{dtype}]": "number" for dtype in ("float32", "float64")}
    return tuple(known.get(ast.unparse(part), "") if part is not None else "" for part in parts)


def _read_together(item: Def) -> tuple[str, ...]:
    stated = _mark(item, "together")
    return tuple(map(str, stated)) if isinstance(stated, tuple) else ()
