"""The decorators that mark the functions that programs can call.

- `@function()`: a function that function nodes call.
- `@loss_term`: a term of a loss.
- `@optimizer` and `@schedule`: an optimizer, and a schedule of its learning rate.
- `@option`: a function whose result is the value of an option.

Invariant: a decorator does not change what the function computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from torch import Tensor
else:  # the compiler reads annotations, and torch may be missing there
    Tensor = object

# The types of a function's options; the compiler knows these names.
Count: TypeAlias = int  # from 1 up
Positive: TypeAlias = float  # above 0
NotNegative: TypeAlias = float
Share: TypeAlias = float  # from 0 to 1
Below: TypeAlias = float  # from 0 to below 1
Betas: TypeAlias = tuple[float, float]  # two of type Below
Rate: TypeAlias = float  # a learning rate: NotNegative, a state, or the call of a schedule
# The text of a column, or what a column of type `json` has: one answer or a list of accepted answers.
Answers: TypeAlias = Any
# The types of a loss term's arguments and results; the compiler knows the names LogProbs, Scores and Rows.
Tokens: TypeAlias = Tensor  # a value per response token
LogProbs: TypeAlias = Tensor
Scores: TypeAlias = Tensor
Rows: TypeAlias = Tensor  # a value per row
Figures: TypeAlias = dict[str, Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def function(
    *,
    scope: Literal["row", "group", "batch"] = "row",
    together: tuple[str, ...] = (),
    many: Callable[..., list[Any]] | None = None,
    parallel: bool = True,
) -> Callable[[F], F]:
    """Mark a function that function nodes call.

    - `scope`: the rows that one call needs: a single row, all rows of a group, or all rows of the batch.
    - `together`: parameters that must either all be bound to columns or all be left out.
    - `many`: a second function that computes the results of many rows in one call, if that is faster. For each column
      parameter of the marked function, the second function takes a list with one value per row. The second function
      takes the same options as the marked function, and returns a list with one result per row.
    - `parallel`: whether several processes may call the function at the same time (`run { function_workers }`).
    """

    def mark(target: F) -> F:
        target.many = many  # type: ignore[attr-defined]
        return target

    return mark


_figures: dict[str, float] = {}


def tell(name: str, amount: float) -> None:
    """Add an amount to a metric of the run, from within a function.

    The metric is the sum of the amounts that all calls of an iteration add.
    """
    _figures[name] = _figures.get(name, 0) + amount


def take_amounts() -> dict[str, float]:
    """Return the amounts that this process has added to metrics, and clear them."""
    amounts = dict(_figures)
    _figures.clear()
    return amounts


@overload
def loss_term(target: F) -> F: ...


@overload
def loss_term(*, scope: Literal["row", "mini_batch"]) -> Callable[[F], F]: ...


def loss_term(target: Any = None, *, scope: Literal["row", "mini_batch"] = "row") -> Any:
    """Mark a term of a loss: a function of tensors that returns a tensor.

    The run fills in the arguments: columns, and values such as `logp` (losses.py). `scope` is "row" if the term can be
    called with any subset of the rows, such as a micro-batch. `scope` is "mini_batch" if the term needs all rows of the
    mini-batch in one call.
    """

    def mark(target: F) -> F:
        return target

    return mark if target is None else target


def optimizer(target: F) -> F:
    """Mark an optimizer: a function of options that returns an OptimizerSpec."""
    return target


def schedule(target: F) -> F:
    """Mark a learning-rate schedule (optimizers.py).

    The function returns the learning rate. Its parameters are options, and values such as `step`, which the update node
    fills in.
    """
    return target


def option(target: F) -> F:
    """Mark a function whose result is the value of an option.

    If an option is annotated with the function's return type, a program can use a call of the function as the option's
    value.
    """
    return target
