"""The marks of functions that programs may call: `@function()` for function nodes, `@loss_term` for a term of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def function(*, scope: Literal["row", "group"] = "row") -> Callable[[F], F]:
    """Marks a function for function nodes; `scope="group"` says that it needs all rows of a group at once."""

    def mark(f: F) -> F:
        return f

    return mark


def loss_term(f: F) -> F:
    """Marks a term of a loss: `logp` and columns as flat float tensors of one value a response token, a tensor of that shape back."""
    return f
