"""What those who watch a run are told: one set of facts for the terminal, the page and Prometheus.

Invariant: whoever watches asks, and the driver looks at the docks only then (`wanted`): nobody who watches costs a
message. Any thread may ask; the driver's alone tells.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...emit.html import colours
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..dock.messages import Status
from ..process.task import Task, numbers
from ..process.task_report import Report

EVERY = 0.5  # seconds between two looks at the docks, at least
SAID = 30  # messages that are kept
POINTS = 1000  # of a curve, at most
WAYS = (" get away", " get here", " get", " put")  # what is done with rows, as metrics name it


@dataclass(frozen=True)
class NodeStatus:
    """A worker state in the task under way, in rows that it makes (of one that makes none, that it reads): those that
    it was handed what they are made of, those that there are as far as is known (each once an epoch), and those that it
    is done with. `colour`: of its pool in the picture, None: of none."""

    node: str
    colour: int | None
    handed: int
    of: int
    done: int
    runs: bool


@dataclass(frozen=True)
class Process:
    name: str
    memory: int  # resident bytes, 0: not known
    does: str
    seconds: float  # for how long


@dataclass(frozen=True)
class HostStatus:
    """`held`: bytes of rows in its warehouse, None where it has none; `used` and `total`: its memory."""

    number: int
    held: int | None
    used: int
    total: int
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Waiting:
    """Who waits in which task for what, in words, and for how many seconds."""

    who: str
    task: str
    missing: str
    seconds: float


@dataclass(frozen=True)
class RunSnapshot:
    """All of it at one moment. `task` is under way for `seconds`; `phase` says what is done of it, `figures` what the
    last iteration came to, `curves` of what there are curves. `ended` is how an attempt ended, "" while it runs."""

    name: str
    total: int
    done: int
    restarts: int
    elapsed: float
    task: str
    seconds: float
    phase: str
    figures: tuple[tuple[str, str], ...]
    states: tuple[NodeStatus, ...]
    hosts: tuple[HostStatus, ...]
    waits: tuple[Waiting, ...]
    said: tuple[tuple[float, str], ...]  # since the epoch, and text
    curves: tuple[str, ...]
    ended: str
    reason: str


def figures(line: Mapping[str, Any], scalars: Sequence[str]) -> list[tuple[str, str]]:
    """What an iteration came to, by name; `scalars` are the columns whose means are shown."""
    shown = [(name, f"{line[name]:.3f}") for name in scalars if name in line]
    # How far the policy is from the reference, or else from the policy that drew the tokens.
    kl = next((k for k in ("loss/kl", "clip/kl") if k in line), "")
    for name, key in (("loss", "loss"), ("kl", kl), ("grad_norm", "grad_norm"), ("length", "response_length")):
        # With several updates the line has a figure of each, `NODE/loss`, and one of all, which says little.
        each = [k for k in line if k.endswith(f".update/{key}")]
        name = key if name in scalars else name  # a column that the program calls so
        for label, of in [(f"{name} {k.partition('.')[0]}", k) for k in each] or [(name, key)]:
            shown += [(label, f"{line[of]:.3g}")] if of in line else []
    return [*shown, ("tokens/s", f"{line['tokens_per_second']:,.0f}"), ("s", f"{line['seconds']:.2f}")]


class RunFacts:
    """`restarts`: how often the run was started anew; it has gone on for a while before this attempt (`elapsed`)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.total = plan.deploy.run.iterations
        of = colours(plan)
        self._colours = {n.name: of.get(plan.placement(n.name).pool) for n in plan.graph.nodes}
        self._changed = threading.Condition()
        self.over = threading.Event()
        self.started = time.monotonic()
        self.restarts: Counter[str] = Counter()  # by what was started anew
        self.done = 0
        self.phase = "starting"
        self.ended = ""
        self.reason = ""
        self.task = ""
        self._since = time.monotonic()
        self.said: deque[tuple[float, str]] = deque(maxlen=SAID)
        self.lines: list[dict[str, Any]] = []  # of metrics.jsonl
        self.evaluations: list[dict[str, Any]] = []
        self.figures: list[tuple[str, str]] = []
        self.totals: Counter[tuple[str, ...]] = Counter()  # since this attempt began, by what and of what
        self._rows = rowsets(plan.graph)
        self._fans: dict[str, float] = {}  # by node, rows that it makes of one that it is handed
        self._states: tuple[NodeStatus, ...] = ()
        self._hosts: tuple[HostStatus, ...] = ()
        self._waits: tuple[Waiting, ...] = ()
        self._docks: dict[int, int] = {}  # by host the id of its dock's process
        self._asked = False
        self._looked = 0.0
        self._looks = 0

    # What the driver tells.

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a look at the docks."""
        return self._asked and time.monotonic() - self._looked >= EVERY

    def begin(self, task: Task) -> None:
        """The ranks are on this task now."""
        self.task = task.key
        self._since = time.monotonic()
        rows = self._rows
        size = numbers(self._rows.sets, self._rows.refilling, task).size
        made = {n.name: [rows.columns[c] for c in n.writes if c in rows.columns] for n in self.plan.graph.nodes}
        self._fans = {
            node: size[max(sets, key=lambda s: size[s])] / size[rows.nodes[node]] for node, sets in made.items() if sets
        }
        self._states = tuple(NodeStatus(n, c, 0, 0, 0, False) for n, c in self._colours.items())

    def iteration(self, line: dict[str, Any], scalars: Sequence[str], reports: Sequence[Report]) -> None:
        self.done = line["iteration"] + 1
        self.figures = figures(line, scalars)
        self.totals["iterations",] += 1
        for kind in ("prompt", "response"):
            self.totals["tokens", kind] += line.get(f"{kind}_tokens", 0)
        self.totals["rows",] += line.get("rows", 0)
        self.totals["messages",] += line.get("dock_messages", 0)
        for what, size in line.get("dock_bytes", {}).items():
            way = next(w for w in WAYS if what.endswith(w))
            self.totals["moved", what.removesuffix(way), way.strip()] += size
        for report in reports:
            waited = report.seconds.get("dock wait", 0.0) + report.seconds.get("wait", 0.0)
            self.totals["waited", report.process] += waited  # type: ignore[assignment]

    def look(self, statuses: Sequence[Status]) -> None:
        """What the docks answered; of those that were asked for it, what they have seen."""
        doing = {name: told for s in statuses for name, told in s.doing.items()}
        seen = [s.seen for s in statuses if s.seen is not None]
        self._waits = tuple(
            Waiting(w.who, w.key, w.missing, w.seconds)
            for w in sorted((w for s in statuses for w in s.waits), key=lambda w: -w.seconds)
        )
        if not seen:
            return
        here = {name: told.what.removesuffix(f" in {self.task}") for name, told in doing.items()}
        ours = [here[name] for name, told in doing.items() if told.what != here[name]]
        rows = {n: r for s in seen for n, r in s.rows.get(self.task, {}).items()}
        done: Counter[str] = Counter()
        for s in seen:
            done.update(s.done.get(self.task, {}))
        states = []
        for node, colour in self._colours.items():
            fan = self._fans.get(node, 1)
            handed, of = (round(fan * r) for r in rows.get(node, (0, 0)))
            if node not in rows:  # the source is handed nothing
                handed = of = done[node]
            runs = (node in ours or f"RUN {node}" in ours) and not done[node] >= of > 0
            states.append(NodeStatus(node, colour, handed, of, done[node], runs))
        hosts = []
        for s in seen:
            names = dict.fromkeys([*s.memory, *(n for st in statuses if st.seen is s for n in st.doing)])
            processes = tuple(
                Process(n, s.memory.get(n, 0), str(doing[n]), doing[n].seconds)
                if n in doing
                else Process(n, s.memory.get(n, 0), "", 0.0)
                for n in sorted(names, key=_order)
            )
            hosts.append(HostStatus(s.host, s.held, s.used, s.total, processes))
            if self._docks.setdefault(s.host, s.pid) != s.pid:
                self._docks[s.host] = s.pid
                self.restarts[f"dock of host {s.host}"] += 1
        with self._changed:
            self._states = tuple(states)
            self._hosts = tuple(hosts)
            working = dict.fromkeys(w.removeprefix("RUN ") for w in ours if w.startswith(("RUN ", "RESHARD ")))
            self.phase = ", ".join(w.replace("RESHARD ", "resharding to ") for w in working) or self.phase
            self._asked = False
            self._looked = time.monotonic()
            self._looks = self._looks + 1
            self._changed.notify_all()

    def end(self, kind: str, reason: str) -> None:
        """How the attempt ended."""
        if kind == "done":
            self._waits = ()
        self._states = tuple(replace(s, runs=False) for s in self._states)
        self.ended = kind
        self.reason = reason
        self.over.set()

    # What those ask who watch.

    def now(self) -> RunSnapshot:
        """What is known, and asks for a look."""
        self._asked = True
        return RunSnapshot(
            name=self.plan.deploy.name,
            total=self.total,
            done=self.done,
            restarts=self.restarts["run"],
            elapsed=time.monotonic() - self.started,
            task=self.task,
            seconds=time.monotonic() - self._since,
            phase=self.phase,
            figures=tuple(self.figures),
            states=self._states,
            hosts=self._hosts,
            waits=self._waits,
            said=tuple(self.said),
            curves=self.curves(),
            ended=self.ended,
            reason=self.reason,
        )

    def fresh(self, patience: float) -> RunSnapshot:
        """What is known after the next look, or after so many seconds without one."""
        with self._changed:
            self._asked = True
            before = self._looks
            self._changed.wait_for(lambda: self._looks != before or self.over.is_set(), patience)
        return self.now()

    def curves(self) -> tuple[str, ...]:
        """Of what there are curves."""
        last = self.lines[-1] if self.lines else {}
        return tuple(k for k, v in last.items() if isinstance(v, int | float) and k not in ("iteration", "prompts"))

    def curve(self, key: str) -> dict[str, Any]:
        """The values of a metric by iterations that are done, means of neighbours where there are many, and what
        evaluations gave."""
        points = [(x["iteration"] + 1, x[key]) for x in list(self.lines) if isinstance(x.get(key), int | float)]
        step = -(-len(points) // POINTS) or 1
        some = [points[i : i + step] for i in range(0, len(points), step)]
        means = [(part[-1][0], sum(v for _, v in part) / len(part)) for part in some]
        held = [(e["evaluation"], e["after_iterations"], e[key]) for e in list(self.evaluations) if key in e]
        return {"points": means, "evaluations": held}


def _order(name: str) -> tuple[str, int]:
    """Ranks by their numbers."""
    kind, _, number = name.rpartition(" ")
    return kind, int(number) if number.isdecimal() else 0
