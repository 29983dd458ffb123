"""The marks of functions that programs may call: `@function()` for function nodes, `@loss_term` for a term of a loss,
`@optimizer` and `@schedule` for an optimizer and its learning rate, `@option` for what an option takes as its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, overload

# What an option of a function may be told to be; the compiler knows these names.
Count: TypeAlias = int  # from 1 up
Positive: TypeAlias = float  # above 0
NotNegative: TypeAlias = float
Share: TypeAlias = float  # from 0 to 1
Below: TypeAlias = float  # from 0 to below 1
Betas: TypeAlias = tuple[float, float]  # two of them
Rate: TypeAlias = float  # a learning rate: NotNegative, a state, or the call of a schedule
F = TypeVar("F", bound=Callable[..., Any])


def function(
    *,
    scope: Literal["row", "group", "batch"] = "row",
    together: tuple[str, ...] = (),
    many: Callable[..., list[Any]] | None = None,
    parallel: bool = True,
) -> Callable[[F], F]:
    """Marks a function for function nodes. `scope` is what it must see at once: any row, all rows of a group, or all of
    the batch; of the parameters named in `together` a call gives all or none. `many` does for many rows what the
    function does for one, where that is quicker: it takes a list for each column, the same options, and returns a
    list. `parallel`: several processes may call the function at once (`run { function_workers }`)."""

    def mark(f: F) -> F:
        f.many = many  # type: ignore[attr-defined]
        return f

    return mark


_figures: dict[str, float] = {}


def tell(name: str, amount: float) -> None:
    """Adds to a figure of the run's metrics, from within a function: what its rows told is summed up over the
    iteration."""
    _figures[name] = _figures.get(name, 0) + amount


def told() -> dict[str, float]:
    """What functions of this process have told since it was last asked."""
    found = dict(_figures)
    _figures.clear()
    return found


@overload
def loss_term(f: F) -> F: ...


@overload
def loss_term(*, scope: Literal["row", "mini_batch"]) -> Callable[[F], F]: ...


def loss_term(f: Any = None, *, scope: Literal["row", "mini_batch"] = "row") -> Any:
    """Marks a term of a loss: columns and what the update knows as tensors, a tensor back (losses.py). `scope` is what
    it must see at once: any row, so that it may be handed the rows of any micro-batch, or all rows of the
    mini-batch."""

    def mark(f: F) -> F:
        return f

    return mark if f is None else f


def optimizer(f: F) -> F:
    """Marks an optimizer: its options to what it does with which weights, and what it keeps of them (optimizers.py)."""
    return f


def schedule(f: F) -> F:
    """Marks a learning rate that depends on the step: what the update knows, and options, to a number
    (optimizers.py)."""
    return f


def option(f: F) -> F:
    """Marks a function whose result is the value of an option: of those that are annotated with what it returns."""
    return f
