"""What the dock knows beforehand: the tasks of a run, and of each node-state what its controller hears of.

Invariant: plain data, a function of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..plan import Plan
from ..rowsets import Numbers, Rowset, Sieve, looping, rowsets
from .wrong import comparison


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of `train`, or of an evaluation, which has no filters. `prompts` come at once (again
    with each refill), from row `position` of the data's endless sequence on; `fan` responses are drawn to each (0: as many as the program
    says). `states` are those of the run, as the iteration begins with them."""

    name: str
    number: int
    prompts: int
    fan: int = 0
    position: int = 0
    states: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"

    @property
    def trains(self) -> bool:
        return self.name == "train"


@dataclass(frozen=True)
class Reader:
    """What a controller needs to know of its node-state. `reads` are (column, set of rows, writer); `rows` and `unit` are the sets of its
    rows and units, `passed` the filters before it. Of the graph's filter that refills, if there is one: itself, the filters before it, and
    whether the node comes before it, or is it. `prompts` is a column of the source: a node that works round by round and reads nothing but
    states hears of it that a round has begun."""

    node: str
    reads: tuple[tuple[str, int, str], ...]
    sets: tuple[Rowset, ...]
    rows: int
    unit: int
    whole: bool  # per = batch: one unit holds all rows
    groups: int
    chunk: int
    balance: bool
    update: bool = False
    epochs: int = 1
    mini_batch: int = 0  # rows; 0: all
    seed: int = 0
    passed: tuple[Sieve, ...] = ()
    refilling: Sieve | None = None
    before_refill: tuple[Sieve, ...] = ()
    loops: bool = False
    prompts: str = ""

    @property
    def by_arrival(self) -> bool:
        """Whether what is decided depends on the order in which rows come: batches are cut from what is there. All else (all rows at once,
        or an update's mini-batches in their order) would be decided again alike: who writes a row again writes it to its warehouse."""
        return self.chunk > 0 and not self.update

    @cached_property
    def hears(self) -> dict[str, int]:
        """The columns whose rows concern the node, verdicts too, and the set that they are of."""
        verdicts = (*self.passed, *([self.refilling] if self.refilling else []), *self.before_refill)
        begun = {self.prompts: 0} if self.loops and not self.reads else {}
        return begun | {c: rows for c, rows, _ in self.reads} | {s.column: s.rows for s in verdicts}

    def numbers(self, task: Task) -> Numbers:
        """How the rows of a task are numbered."""
        rounds = 1 + self.refilling.refill if self.refilling and task.trains else 1
        return Numbers(self.sets, task.prompts * rounds, task.fan)


def readers(plan: Plan) -> list[Reader]:
    """One for each controller of the plan. Who compares log-probabilities reads those as drawn too, declared or not."""
    graph, found, compared, rows = plan.graph, [], comparison(plan), rowsets(plan.graph)
    balanced = {e.dst for e in graph.samples() if str(e.attributes.get("balance", "")) == "tokens"}
    refilling, repeated = rows.refilling, looping(graph)[1]
    for controller in plan.docks.controllers:
        node = graph.node(controller.node)
        reads = [(c, rows.columns[c], graph.writer(c).name) for c in node.reads]
        reads += [(s.name, 0, "source") for s in graph.states if s.per and s.name in node.states]
        if compared and compared.node == node.name and compared.column not in node.reads:
            reads.append((compared.column, rows.columns[compared.response], graph.writer(compared.response).name))
        found.append(
            Reader(
                node=node.name,
                reads=tuple(reads),
                sets=tuple(rows.sets),
                rows=rows.nodes[node.name],
                unit=rows.units[node.name],
                whole=node.per == "batch",
                groups=controller.groups,
                chunk=controller.chunk,
                balance=node.name in balanced,
                update=node.verb == "update",
                epochs=int(node.number("epochs", 1)),
                mini_batch=int(node.number("mini_batch", 0)),
                seed=plan.deploy.run.seed,
                passed=rows.passed[node.name],
                refilling=refilling,
                before_refill=rows.passed[refilling.node] if refilling else (),
                loops=node.name in repeated,
                prompts=graph.node("source").writes[0],
            )
        )
    return found


def home(plan: Plan, host: int, index: int) -> int:
    """The warehouse that a process of a host writes to, the `index`-th of its kind: its host's take turns."""
    near = [w for w, at in enumerate(plan.docks.warehouses) if at == host]
    return near[index % len(near)] if near else 0
