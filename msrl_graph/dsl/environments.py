"""Readers of a generation's attributes `environment`, `agent` and `tool_calls`.

Invariant: a user's file is parsed, never executed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from ..ir.graph import Expr
from ..ir.kinds import WordsKind
from ..ir.signatures import ENDPOINT, read_agents, read_classes, read_signatures_as
from . import ast
from .attributes import read_as
from .calls import CallingNode
from .expressions import Names, mistake
from .user_functions import file_call, find_in_file


@dataclass(frozen=True)
class EnvironmentReader:
    """A reader of `environment = "file.py:Class"`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Literal_) or expr.kind != "string":
            raise mistake(
                "bad-value", f"`{key}` takes a class from a file", expr.span, f'write `{key} = "file.py:Name"`'
            )
        path, name, methods = find_in_file(self.caller.folder, str(expr.value), expr.span, "class", read_classes)
        for method in ("reset", "step"):
            if method not in methods[name]:
                help = "an environment has `reset(columns)` and `step(text)`"
                raise mistake(
                    "unknown-function", f"`{name}` of `{path.name}` has no method `{method}`", expr.span, help
                )
        step = methods[name]["step"]
        must = [parameter for parameter in step.columns if parameter not in step.optional] + [
            option.name for option in step.options if option.required
        ]
        if step.fills or not step.columns or must not in ([], [*step.columns[:1]]):
            help = "write `def step(self, text)`; `rng`, `tokenizer` and `iteration` are for `reset`"
            raise mistake("unknown-function", f"`{step.name}` must take one text", expr.span, help)
        if (init := methods[name].get("__init__")) is not None:
            needs = [] if init.rest else [parameter for parameter in init.columns if parameter not in init.optional]
            needs += [option.name for option in init.options if option.required]
            if needs:
                help = f"give `{needs[0]}` a default, or take it in `reset`, which is given the row's columns"
                message = f"`{init.name}` needs `{needs[0]}`, but instances are created without arguments"
                raise mistake("unknown-function", message, expr.span, help)
        call = Expr("call", f"{path}:{name}", span=expr.span)
        reset = methods[name]["reset"]
        if reset.seeded:  # as in gymnasium: all columns that the node reads are passed as options
            reset = replace(reset, columns=(), options=(), rest="options")
        self.caller.used["function", str(call.value)] = (reset, str(path))
        return call


@dataclass(frozen=True)
class AgentReader:
    """A reader of `agent = "file.py:function"`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        stated = file_call(expr)
        if stated is None:
            raise mistake(
                "unknown-function",
                f"`{key}` takes a function from a file",
                expr.span,
                f'write `{key} = "file.py:solve"`',
            )
        path, name, signatures = find_in_file(
            self.caller.folder,
            stated.name.text,
            stated.name.span,
            "function",
            read_agents,
            awaited=True,
            library=self.caller.library,
        )
        if signatures[name].rest:
            message = (
                f"`{name}` of `{path.name}` takes `*{signatures[name].rest}`, but an agent takes each column by name"
            )
            raise mistake(
                "unknown-function", message, stated.name.span, f"write `def {name}(prompt, …, base_url, api_key)`"
            )
        for needed in ENDPOINT[:2]:
            if needed not in signatures[name].fills:
                help = f"write `def {name}(…, base_url, api_key, model)`: the agent calls the policy through these"
                message = f"`{name}` of `{path.name}` takes no `{needed}`"
                raise mistake("unknown-function", message, stated.name.span, help)
        call = replace(self.caller.call(stated, signatures[name], names), value=f"{path}:{name}")
        self.caller.used["function", str(call.value)] = (signatures[name], str(path))
        return call


@dataclass(frozen=True)
class ToolCallsReader:
    """A reader of `tool_calls`: `hermes`, `mistral`, `llama3` or `"file.py:function"`."""

    caller: CallingNode
    WORDS: ClassVar = WordsKind(("hermes", "mistral", "llama3"))

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Literal_) or expr.kind != "string":
            return read_as(self.WORDS, key, expr, names)
        path, name, signatures = find_in_file(
            self.caller.folder,
            str(expr.value),
            expr.span,
            "function",
            partial(read_signatures_as, "function"),
            library=self.caller.library,
        )
        required = [parameter for parameter in signatures[name].columns if parameter not in signatures[name].optional]
        if len(required) != 1 or any(option.required for option in signatures[name].options):
            message = f"`{name}` of `{path.name}` must take one text"
            raise mistake("unknown-function", message, expr.span, f"write `def {name}(text)`")
        return Expr("call", f"{path}:{name}", span=expr.span)
