"""The record of a search over layouts: its candidates, its choice and the reasons.

Invariant: a record is plain data. The same program gives the same record, unless a budget of seconds ended the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING_FITS = "nothing fits"
# A plan may be chosen because it is simpler, if it is slower than the fastest plan by at most this fraction.
MARGIN = 0.1


@dataclass(frozen=True)
class Candidate:
    """A combination of pools and layouts that the search considered.

    - `pools`: a text about each pool. `layouts`: the layout and engine of each node, as text.
    - `seconds`: the time of an iteration. If `exact` is False, it is a lower bound of this time.
    - `loses`: for each phase, the seconds by which this candidate is slower than the chosen plan (negative: faster).
    - `wrong`: the reason why this candidate cannot be used.
    """

    pools: tuple[str, ...]
    layouts: dict[str, str]
    seconds: float = 0.0
    exact: bool = True
    loses: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Rival:
    """The best candidate of the kind that the search did not choose.

    There are two kinds of candidates. An asynchronous candidate has pools that may run ahead of the updates. In a
    synchronous candidate, all pools are in step with the updates. A record has a rival if the program allows staleness
    and does not state all pools.

    - `ahead`: whether the rival is asynchronous.
    - `seconds`: the time of an iteration of the rival; 0 if no candidate of its kind fits.
    - `mean`, `bound`: the staleness of the asynchronous candidate; this candidate is either the rival or the chosen
      one. Its weights for generation are `mean` versions old on average, and its rows are at most `bound` versions old.
    """

    ahead: bool
    seconds: float
    best: Candidate
    mean: float = 0.0
    bound: int = 0


@dataclass(frozen=True)
class SearchRecord:
    """The record of a search.

    - `candidates`: the number of combinations of pools and layouts that the devices and engines allow.
    - `evaluated`: the number of candidates that went through all passes of the compiler.
    - `seconds`: the time of an iteration with the chosen candidate, `best`; 0 if no candidate fits.
    - `bound`: a lower bound of the time of an iteration, in seconds, for all candidates.
    - `optimal`: whether every other candidate is slower than the chosen one by more than the margin within which the
      search takes the simplest plan (`MARGIN`), according to the plan's own cost model.
    - `fastest`: the fastest candidate that was found, if a simpler one was chosen; `reason` says what is simpler.
    - `is_simplest`: whether the search has shown that no simpler candidate is within the margin.
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
    fastest: Candidate | None = None
    reason: str = ""
    is_simplest: bool = True

    @property
    def hopeless(self) -> bool:
        """Whether the search is complete and no candidate fits."""
        return not self.seconds and self.ended == NOTHING_FITS

    @property
    def fastest_seconds(self) -> float:
        """The time of an iteration with the fastest candidate that was found."""
        return self.seconds if self.fastest is None else self.fastest.seconds

    @property
    def is_proven(self) -> bool:
        """Whether no candidate is faster than the fastest one that was found.

        Seconds are those of the cost model.
        """
        return bool(self.seconds) and self.bound >= self.fastest_seconds

    @property
    def gap(self) -> float:
        """The largest time that another candidate could save, as a fraction of `seconds`."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0

    @property
    def percent(self) -> str:
        """The result of `gap` in percent, as a text with two significant digits."""
        return f"{max(0.01, 100 * self.gap):.2g} %"
