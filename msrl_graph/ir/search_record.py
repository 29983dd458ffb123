"""What a search over layouts found, for a person to read: how far it went, what it took and what it left, and why.

Invariant: plain data; the same program gives the same record, unless a budget of seconds ended the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING_FITS = "nothing fits"


@dataclass(frozen=True)
class Candidate:
    """Layouts that were looked at: pools in words, layout and engine by node. `seconds` of an iteration, or where
    `exact` is False a bound below it; `loses` by phase against the plan (negative: gains); `wrong` says why it cannot
    be taken."""

    pools: tuple[str, ...]
    layouts: dict[str, str]
    seconds: float = 0.0
    exact: bool = True
    loses: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Rival:
    """Where a program allows staleness, and the file leaves open which pools there are, the best of the other kind:
    with pools that may be `ahead`, or with all in step, though the program allows more. `seconds` of an iteration, 0
    where none fits. With those that are ahead, be it the rival or what was chosen, the weights that generate are `mean`
    versions old on average, and a row is at most `bound` versions old."""

    ahead: bool
    seconds: float
    best: Candidate
    mean: float = 0.0
    bound: int = 0


@dataclass(frozen=True)
class SearchRecord:
    """`candidates` are all combinations of divisions and layouts that the devices and engines allow, of which
    `evaluated` went through all passes; no other takes less than `bound` seconds. `optimal`: nothing is better, in the
    plan's own model."""

    candidates: int
    evaluated: int
    seconds: float
    bound: float
    optimal: bool
    ended: str  # what ended it before all was known
    best: Candidate
    runners: tuple[Candidate, ...] = ()
    rival: Rival | None = None

    @property
    def hopeless(self) -> bool:
        """Whether it went through all there is, and nothing fits."""
        return not self.seconds and self.ended == NOTHING_FITS

    @property
    def gap(self) -> float:
        """The share of the seconds that another might be better by, at most."""
        return 0.0 if self.optimal or not self.seconds else max(0.0, 1 - self.bound / self.seconds)

    @property
    def percent(self) -> str:
        """The gap in words, no finer than anyone needs."""
        return f"{max(0.01, 100 * self.gap):.2g} %"
