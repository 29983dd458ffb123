"""Who else writes in a response: an environment, which answers the policy, or an agent, which asks it; from a file.

Invariant: as in node_calls.py: what stands in the file is read, never run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from ..ir.graph import Expr
from ..ir.kinds import WordsKind
from ..ir.signatures import ENDPOINT, agents, called_as, classes
from . import ast
from .attributes import read_as
from .calls import CallingNode
from .expressions import Names, mistake
from .user_functions import call_in, in_file


@dataclass(frozen=True)
class EnvironmentReader:
    """`environment = "file.py:Class"`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Literal_) or expr.kind != "string":
            raise mistake("bad-value", f"`{key}` takes a class of a file", expr.span, f'write `{key} = "file.py:Name"`')
        path, name, found = in_file(self.caller, str(expr.value), expr.span, "class", classes)
        for method in ("reset", "step"):
            if method not in found[name]:
                help = "an environment has `reset(columns)` and `step(text)`"
                raise mistake(
                    "unknown-function", f"`{name}` of `{path.name}` has no method `{method}`", expr.span, help
                )
        step = found[name]["step"]
        must = [p for p in step.columns if p not in step.optional] + [o.name for o in step.options if o.required]
        if step.fills or not step.columns or must not in ([], [*step.columns[:1]]):
            help = "write `def step(self, text)`; `rng`, `tokenizer` and `iteration` are for `reset`"
            raise mistake("unknown-function", f"`{step.name}` takes something else than one text", expr.span, help)
        if (made := found[name].get("__init__")) is not None:
            needs = [] if made.rest else [p for p in made.columns if p not in made.optional]
            needs += [o.name for o in made.options if o.required]
            if needs:
                help = f"give `{needs[0]}` a default, or take it in `reset`, which is given the row's columns"
                what = f"`{made.name}` needs `{needs[0]}`, and an instance is made without arguments"
                raise mistake("unknown-function", what, expr.span, help)
        call = Expr("call", f"{path}:{name}", span=expr.span)
        reset = found[name]["reset"]
        if reset.seeded:  # gymnasium's way: all that the node reads are options
            reset = replace(reset, columns=(), options=(), rest="options")
        self.caller.used["function", str(call.value)] = (reset, str(path))
        return call


@dataclass(frozen=True)
class AgentReader:
    """`agent = "file.py:function"`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        said = call_in(expr)
        if said is None:
            raise mistake(
                "unknown-function", f"`{key}` takes a function of a file", expr.span, f'write `{key} = "file.py:solve"`'
            )
        path, name, found = in_file(self.caller, said.name.text, said.name.span, "function", agents, awaited=True)
        if found[name].rest:
            what = f"`{name}` of `{path.name}` takes `*{found[name].rest}`, and an agent takes each column by its name"
            raise mistake("unknown-function", what, said.name.span, f"write `def {name}(prompt, …, base_url, api_key)`")
        for needed in ENDPOINT[:2]:
            if needed not in found[name].fills:
                help = f"write `def {name}(…, base_url, api_key, model)`: it asks the policy by these"
                what = f"`{name}` of `{path.name}` takes no `{needed}`"
                raise mistake("unknown-function", what, said.name.span, help)
        call = replace(self.caller.call(said, found[name], names), value=f"{path}:{name}")
        self.caller.used["function", str(call.value)] = (found[name], str(path))
        return call


@dataclass(frozen=True)
class ToolCallsReader:
    """`hermes`, `mistral`, `llama3` or `"file.py:function"`."""

    caller: CallingNode
    WORDS: ClassVar = WordsKind(("hermes", "mistral", "llama3"))

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Literal_) or expr.kind != "string":
            return read_as(self.WORDS, key, expr, names)
        path, name, found = in_file(self.caller, str(expr.value), expr.span, "function", partial(called_as, "function"))
        taken = [p for p in found[name].columns if p not in found[name].optional]
        if len(taken) != 1 or any(o.required for o in found[name].options):
            what = f"`{name}` of `{path.name}` takes something else than one text"
            raise mistake("unknown-function", what, expr.span, f"write `def {name}(text)`")
        return Expr("call", f"{path}:{name}", span=expr.span)
