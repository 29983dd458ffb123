"""The options of a run and of an export, as fields of two frozen dataclasses.

    record: bool = option(False, "write the rows of each iteration")

Invariant: the field of an option is the only place that states the option's type, default and meaning. These are made
from the fields: the flags of msrl-run, the arguments of `run` in Python, their checks, docs/reference/options.md, and
the message of a supervisor to its driver.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar

from ..diagnostics.surface import name_option

# A folder or a URL. A Path becomes a str when an object with options is made, so that the object can be sent as JSON.
if TYPE_CHECKING:
    from .plan import Plan

    Location: TypeAlias = Path | str
else:
    Location = Annotated[str, "a folder or a URL"]

Kind = Literal["switch", "number", "location", "text"]
T = TypeVar("T")
_KEY = "option"


@dataclass(frozen=True)
class OptionDeclaration:
    """What the field of an option states.

    - `kind`: "switch" for an option that is on or off, "number" for a natural number, "location" for a folder or a URL,
      "text" for any other.
    - `help`: the meaning. `{NAME}` stands for the option NAME.
    - `value`: what stands for the value in documentation, such as DIR; "" for a switch.
    - `most`: the largest allowed number.
    - `evaluates`: whether the option goes with `evaluate`, which trains nothing.
    - `python`: the name of the argument in Python; "" if it has the name of the option.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    value: str
    most: int | None
    evaluates: bool
    python: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def argument(self) -> str:
        return self.python or self.name

    def meaning(self) -> str:
        """Return the meaning, with other options named as on the current surface."""
        text = re.sub(r"\{(\w+)\}", lambda match: name_option(match[1]), self.help)
        return text if self.most is None else f"{text} ({self.value} from 0 to {self.most})"


def option(
    default: T, help: str, value: str = "", *, most: int | None = None, evaluates: bool = True, python: str = ""
) -> T:
    """Declare an option, as a field of a dataclass.

    The arguments are fields of `OptionDeclaration`.
    """
    metadata = {"help": help, "value": value, "most": most, "evaluates": evaluates, "python": python}
    return dataclasses.field(default=default, metadata={_KEY: metadata})


class DeclaredOptions:
    """Options that the fields of a subclass declare."""

    @classmethod
    @functools.cache
    def declared(cls) -> tuple[OptionDeclaration, ...]:
        """Return the declarations, in the order of the fields."""
        types = typing.get_type_hints(cls, include_extras=True)
        return tuple(
            OptionDeclaration(field.name, _find_kind(types[field.name]), field.default, **field.metadata[_KEY])
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if _KEY in field.metadata
        )

    @classmethod
    def collect(cls, source: object) -> Self:
        """Create the object from the attributes of another object, such as parsed flags."""
        return cls(**{declared.name: getattr(source, declared.name) for declared in cls.declared()})

    def stated(self) -> list[OptionDeclaration]:
        """Return the options whose values differ from the defaults."""
        return [declared for declared in self.declared() if getattr(self, declared.name) != declared.default]

    def __post_init__(self) -> None:
        for declared in self.declared():
            value = getattr(self, declared.name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, declared.name, os.fspath(value))


def _find_kind(annotation: Any) -> Kind:
    types = (annotation, *typing.get_args(annotation))
    kinds: dict[Any, Kind] = {bool: "switch", int: "number", Location: "location", str: "text"}
    return next(kind for type_, kind in kinds.items() if type_ in types)


@dataclass(frozen=True)
class RunOptions(DeclaredOptions):
    """The options of a run that are not in the program."""

    out: Location | None = option(
        None, "folder or URL for metrics, curve, trace and weights (default: a new folder under runs/)", "DIR"
    )
    _: KW_ONLY
    iterations: int | None = option(None, "override the number of iterations", "N", evaluates=False)
    seed: int | None = option(None, "override the seed", "N")
    resume: Location | None = option(
        None, "resume a run or a checkpoint from a folder or URL; without {out}, write to the run's folder", "DIR"
    )
    overwrite: bool = option(
        False, "replace the results of a run in {out}, or checkpoints newer than the one to {resume} from"
    )
    record: bool = option(
        False,
        "write the rows of each iteration and evaluation to the run's folder, as Parquet under rows/ and "
        "evaluation_rows/",
    )
    replay: Location | None = option(
        None, "train on the responses of a recorded run instead of generated ones", "DIR", evaluates=False
    )
    evaluate: bool = option(
        False,
        "run the program's evaluations once without training, with the models' own weights or, with {resume}, those "
        "of a checkpoint; results go to a folder of their own",
    )
    dry_run: bool = option(False, "check everything that can be checked and show what would run, without starting it")
    verbose: bool = option(False, "show the output of the processes, each line prefixed with its process")
    watch: bool = option(False, "serve a page that shows the run and print its address; also show more on the terminal")
    metrics_port: int | None = option(
        None, "serve metrics for Prometheus on this port of 127.0.0.1; 0: use a free port and print it", "N"
    )
    nice: int = option(0, "add N to the niceness of compute processes", "N", most=19)
    measure_memory: bool = option(
        False, "measure the memory of a rank's tensors at each instruction of an iteration", evaluates=False
    )

    def find_conflict(self) -> OptionDeclaration | None:
        """Return a stated option that does not go with `evaluate`, if `evaluate` is set."""
        return next((declared for declared in self.stated() if self.evaluate and not declared.evaluates), None)

    def apply_to(self, plan: Plan) -> Plan:
        """Return the plan with the values that the options override."""
        run = plan.deploy.run
        iterations = run.iterations if self.iterations is None else self.iterations
        seed = run.seed if self.seed is None else self.seed
        run = dataclasses.replace(run, iterations=iterations, seed=seed)
        return dataclasses.replace(plan, deploy=dataclasses.replace(plan.deploy, run=run))


@dataclass(frozen=True)
class ExportOptions(DeclaredOptions):
    """The options of an export, which starts no run."""

    export: Location | None = option(
        None,
        "write the weights of a checkpoint, or of a run's newest one, as Hugging Face folders, without a run; "
        "FILE is only needed if the run's folder is missing or the model was moved",
        "DIR",
        python="checkpoint",
    )
    to: Location | None = option(
        None,
        "folder for {export}, with a folder for each worker or, with {worker}, that worker's files (default: under "
        "exported/ in the run's folder)",
        "DIR",
    )
    worker: str | None = option(None, "the worker whose weights {export} writes (default: all)", "NAME")
    merged: bool = option(False, "with {export}: write the weights with their adapter merged, not the adapter alone")
