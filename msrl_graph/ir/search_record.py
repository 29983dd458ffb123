"""Record of a search over layouts: its extent, its choice, its reasons.

Invariant: plain data. The same program gives the same record, unless a budget of seconds ended the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING_FITS = "nothing fits"


@dataclass(frozen=True)
class Candidate:
    """Layouts that the search looked at: pools in words, layout and engine by node.

    `seconds` is the time of an iteration, or a lower bound of it if `exact` is False. `loses` are the seconds lost
    against the plan by phase (negative: gained). `wrong` is the reason why the candidate cannot be used.
    """

    pools: tuple[str, ...]
    layouts: dict[str, str]
    seconds: float = 0.0
    exact: bool = True
    loses: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Rival:
    """The best candidate of the other kind, synchronous or asynchronous.

    It exists if a program allows staleness and the file leaves pools open. The kinds are pools that may be `ahead`, and
    all pools in step. `seconds` is the time of an iteration, 0 if none fits. `mean` and `bound` belong to the
    asynchronous one of the two, the rival or the choice: the weights that generate are `mean` versions old on average,
    and a row is at most `bound` versions old.
    """

    ahead: bool
    seconds: float
    best: Candidate
    mean: float = 0.0
    bound: int = 0


@dataclass(frozen=True)
class SearchRecord:
    """The record of a search.

    `candidates` is the number of combinations of divisions and layouts that the devices and engines allow, of which
    `evaluated` went through all passes. No other takes less than `bound` seconds. `optimal`: nothing is better,
    according to the plan's own cost model.
    """

    candidates: int
    evaluated: int
    seconds: float
    bound: float
    optimal: bool
    ended: str  # what ended the search early
    best: Candidate
    runners: tuple[Candidate, ...] = ()
    rival: Rival | None = None

    @property
    def hopeless(self) -> bool:
        """Whether the search is complete and nothing fits."""
        return not self.seconds and self.ended == NOTHING_FITS

    @property
    def gap(self) -> float:
        """The largest possible gain of another candidate, as a share of the seconds."""
        return 0.0 if self.optimal or not self.seconds else max(0.0, 1 - self.bound / self.seconds)

    @property
    def percent(self) -> str:
        """The gap as text, with two digits."""
        return f"{max(0.01, 100 * self.gap):.2g} %"
