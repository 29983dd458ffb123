"""The marks of functions that programs may call.

- `@function()`: a function of function nodes.
- `@loss_term`: a term of a loss.
- `@optimizer` and `@schedule`: an optimizer and its learning rate.
- `@option`: a value of an option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, overload

# The types of a function's options; the compiler knows these names.
Count: TypeAlias = int  # from 1 up
Positive: TypeAlias = float  # above 0
NotNegative: TypeAlias = float
Share: TypeAlias = float  # from 0 to 1
Below: TypeAlias = float  # from 0 to below 1
Betas: TypeAlias = tuple[float, float]  # two of type Below
Rate: TypeAlias = float  # a learning rate: NotNegative, a state, or the call of a schedule
F = TypeVar("F", bound=Callable[..., Any])


def function(
    *,
    scope: Literal["row", "group", "batch"] = "row",
    together: tuple[str, ...] = (),
    many: Callable[..., list[Any]] | None = None,
    parallel: bool = True,
) -> Callable[[F], F]:
    """Mark a function for function nodes.

    - `scope`: the rows that a call needs at once: any row, all rows of a group, or the whole batch.
    - `together`: parameters that a call gets either all or none of.
    - `many`: does for many rows what the function does for one, if that is faster. It takes a list per column and
    the same options, and returns a list.
    - `parallel`: several processes may call the function at once (`run { function_workers }`).
    """

    def mark(target: F) -> F:
        target.many = many  # type: ignore[attr-defined]
        return target

    return mark


_figures: dict[str, float] = {}


def tell(name: str, amount: float) -> None:
    """Add to a metric of the run, from within a function.

    The amounts of all rows are summed over the iteration.
    """
    _figures[name] = _figures.get(name, 0) + amount


def take_amounts() -> dict[str, float]:
    """Return and reset the amounts that functions of this process have added."""
    amounts = dict(_figures)
    _figures.clear()
    return amounts


@overload
def loss_term(target: F) -> F: ...


@overload
def loss_term(*, scope: Literal["row", "mini_batch"]) -> Callable[[F], F]: ...


def loss_term(target: Any = None, *, scope: Literal["row", "mini_batch"] = "row") -> Any:
    """Mark a term of a loss: a function of tensors that returns a tensor.

    The arguments are columns and values of the update (losses.py). `scope` is "row" for a term that
    can be called with any rows, such as those of a micro-batch, and "mini_batch" for one that needs all rows of the
    mini-batch in one call.
    """

    def mark(target: F) -> F:
        return target

    return mark if target is None else target


def optimizer(target: F) -> F:
    """Mark an optimizer: options in, its specification out (optimizers.py)."""
    return target


def schedule(target: F) -> F:
    """Mark a learning rate that depends on the step (optimizers.py).

    The function takes values that the update fills, and options, and returns a number.
    """
    return target


def option(target: F) -> F:
    """Mark a function whose result is the value of an option.

    It fits the options whose annotation is the function's return type.
    """
    return target
