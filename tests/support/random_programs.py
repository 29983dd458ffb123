"""Programs drawn at random: nodes of all kinds, over rows of any level, with filters, states, updates and pools.

Invariant: what is drawn is written such that most of it compiles; what a check refuses is refused with its diagnostic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

FILE = "f.py"
STATES = {"step": "f32", "rate": "f32 per prompt"}
FUNCTIONS = """
class Place:
    def reset(self): ...
    def step(self, text): ...
def keep(*columns) -> bool: ...
def places(*columns) -> list[int]: ...
def count(value): ...
def likely(rate): ...
def term(logp): return -logp
def weighed(logp, number): return -logp * number
def squared(values): return values * values
"""
for call, gives in (("numbers", "float"), ("lists", "list[float]"), ("text", "str")):
    FUNCTIONS += f"def {call}(*columns) -> {gives}: ...\n"
    FUNCTIONS += "".join(f"def {call}_{state}({state}, *columns) -> {gives}: ...\n" for state in STATES)
CHANCE = st.integers(0, 99)


@dataclass(frozen=True)
class Made:
    """A column: its type, what it is (tokens, text, number, a list as long as `like`), the generations above its rows,
    its writer."""

    name: str
    type: str
    kind: str
    path: tuple[str, ...]
    writer: str
    like: str = ""


@dataclass
class Program:
    draw: st.DrawFn
    columns: list[Made] = field(default_factory=list)
    nodes: list[tuple[str, str]] = field(default_factory=list)  # name, text
    states: list[str] = field(default_factory=list)
    edges: list[tuple[str, str, str]] = field(default_factory=list)  # source, destination, attributes
    before: dict[str, set[str]] = field(default_factory=dict)
    filters: list[str] = field(default_factory=list)
    verbs: dict[str, list[str]] = field(default_factory=dict)  # by `worker.verb`: nodes
    looped: list[str] = field(default_factory=list)  # filters that refill
    growing: list[str] = field(default_factory=list)  # a generation whose responses may go on in the next iteration
    stale: list[str] = field(default_factory=list)  # a generation that may be behind, and the update of its weights

    def often(self, percent: int) -> bool:
        return self.draw(CHANCE) < percent

    def one(self, some: Any) -> Any:
        return self.draw(st.sampled_from(list(some)))

    def some(self, of: list[Any], most: int) -> list[Any]:
        return self.draw(st.lists(st.sampled_from(of), max_size=most, unique=True)) if of else []

    def known(self, *kinds: str) -> list[Made]:
        return [c for c in self.columns if c.kind in kinds]

    def chosen(self, first: Made, most: int, *kinds: str) -> list[Made]:
        """A column and others whose rows lie above its rows, or below."""
        found = [first]
        for other in self.some([c for c in self.known(*kinds) if c != first], most):
            paths = sorted([c.path for c in found] + [other.path], key=len)
            if all(longest[: len(p)] == p for p in paths for longest in [paths[-1]]):
                found.append(other)
        return found

    def wrote(self, node: str, name: str, type: str, kind: str, path: tuple[str, ...], like: str = "") -> str:
        self.columns.append(Made(name, type, kind, path, node, like))
        return name

    def node(self, worker: str, verb: str, text: str, reads: list[Made], after: list[str] = ()) -> str:  # type: ignore[assignment]
        """Takes a node, with the edges that its columns need and some more."""
        name = f"{worker}.{verb}"
        if name in self.verbs:
            label = f"n{len(self.nodes)}"
            text = f"{label}: {worker}.{verb}{text}"
            name = label
        else:
            text = f"{worker}.{verb}{text}"
        self.verbs.setdefault(f"{worker}.{verb}", []).append(name)
        needed = {c.writer for c in reads} | {*after}
        others = [
            n
            for n, _ in self.nodes
            if n not in needed and n not in self.verbs.get("actor.update", []) + self.verbs.get("critic.update", [])
        ]
        extra = {*self.some(others, 1)} if self.often(30) else set()
        extra |= {f for f in self.filters if self.often(50)}
        if not needed | extra:
            extra = {self.one(["source", *others])}
        plain = "per" in text or "partial" in text
        for src in sorted(needed | extra):
            through = [e for e in sorted(extra) if src in self.before.get(e, set())]
            if src in needed and through and self.often(50):
                continue  # the rows arrive past another node
            attributes = [f"stream = {self.draw(st.integers(1, 4))}"] if self.often(15) and not plain else []
            if any(c.kind == "tokens" for c in reads) and not plain and self.often(15):
                attributes += [f"stream_tokens = {self.draw(st.integers(1, 4))}"]
            attributes += ["balance = tokens"] if self.often(10) else []
            self.edges.append((src, name, f" {{ {', '.join(attributes)} }}" if attributes else ""))
        self.before[name] = (needed | extra).union(*(self.before.get(n, set()) for n in needed | extra))
        self.nodes.append((name, text))
        return name

    def rename(self, node: str, columns: list[int]) -> None:
        for at in columns:
            c = self.columns[at]
            self.columns[at] = Made(c.name, c.type, c.kind, c.path, node, c.like)

    # Nodes of each kind.

    def generate(self) -> None:
        worker = self.one(("actor", "actor", "judge"))
        reads = [self.one(self.known("tokens", "text") if worker == "judge" else self.known("tokens"))]
        if reads[0].path and self.often(50):
            above = [
                c
                for c in self.known("tokens")
                if len(c.path) < len(reads[0].path) and reads[0].path[: len(c.path)] == c.path
            ]
            reads = [self.one(above), *reads] if above else reads
        at = len(self.columns)
        path = max((c.path for c in reads), key=len)
        name = f"g{at}"
        self.wrote("", name, "i32[<= 4]", "tokens", (*path, name))
        writes = [name]
        if self.often(30):
            writes.append(self.wrote("", f"l{at}", f"f32[{name}]", "list", (*path, name), name))
        attributes = f"samples = {self.draw(st.integers(1, 3))}"
        drops = False
        if not path and worker == "actor" and not self.growing and not self.looped and self.often(30):
            attributes += f", partial = {self.one((0.3, 1))}, cuts = {self.draw(st.integers(1, 2))}"
            attributes += f", overdue = {self.one(('wait', 'drop_group'))}"
            self.growing.append(name)
            drops = True
        elif drops := self.often(30) and all(c.kind == "tokens" for c in reads):
            attributes += f', environment = "{FILE}:Place", on_failure = {self.one(("drop_row", "drop_group"))}'
        text = f"({self.names(reads)}) -> {', '.join(writes)} {{ {attributes} }}"
        node = self.node(worker, "generate", text, reads)
        self.rename(node, list(range(at, len(self.columns))))
        self.filters += [node] * drops

    def infer(self) -> None:
        response = self.one(self.known("tokens"))
        if not response.path:
            return
        prompt = self.one([c for c in self.known("tokens") if c.path == ()])
        worker = self.one(("actor", "reference", "critic", "reward"))
        at = len(self.columns)
        if worker == "reward":
            self.wrote("", f"s{at}", "f32", "number", response.path)
        else:
            self.wrote("", f"s{at}", f"f32[{response.name}]", "list", response.path, response.name)
        node = self.node(worker, "infer", f"({prompt.name}, {response.name}) -> s{at}", [prompt, response])
        self.rename(node, [at])

    def function(self) -> None:
        reads = self.chosen(self.one(self.columns), 3, "tokens", "text", "number", "list")
        path = max((c.path for c in reads), key=len)
        at = len(self.columns)
        kind = self.one(("number", "number", "number", "list", "text"))
        responses = [c for c in reads if c.kind == "tokens" and c.path == path]
        state, per = self.one((None, None, *self.states)), self.one(("row", "row", "batch", "column"))
        if kind == "list" and responses:
            call = self.wrote("", f"c{at}", f"f32[{responses[0].name}]", "list", path, responses[0].name) and "lists"
        elif kind == "text":
            call = self.wrote("", f"c{at}", "text", "text", path) and "text"
        else:
            above = path[: self.draw(st.integers(0, len(path)))] if self.often(25) else path
            shared = self.marks(above)
            self.wrote("", f"c{at}", f"f32 per {shared}" if above != path else "f32", "number", above)
            call = "numbers"
            if above != path:
                per = shared if per == "column" else "batch"
        if per == "column":
            per = self.marks(path[: self.draw(st.integers(0, len(path)))])
        scope = f", per = {per}" if per != "row" else ""
        given = self.names(reads)
        if state and not (state == "rate" and per == "batch" and path):
            given = f"{given}, {state}"
            call = f"{call}_{state}"
        scope += ", on_failure = leave" if (fails := self.often(20)) else ""
        node = self.node("host", f"f{at}", f'({given}) -> c{at} {{ call = "{FILE}:{call}"{scope} }}', reads)
        self.rename(node, [at])
        self.filters += [node] * fails

    def setter(self) -> None:
        """A node that gives the next value of a state; it may read nothing else."""
        free = [s for s in self.states if s not in self.before.get("set", set())]
        if not free:
            return
        state = self.one(free)
        self.before.setdefault("set", set()).add(state)
        reads = [] if self.often(50) else self.chosen(self.one(self.columns), 2, "tokens", "text", "number")
        per = "prompt" if state == "rate" else "batch"
        call = f"numbers_{state}" if reads else "count"
        given = ", ".join([*(c.name for c in reads), state])
        self.node("host", f"set_{state}", f'({given}) -> {state} {{ call = "{FILE}:{call}", per = {per} }}', reads)

    def counter(self) -> None:
        """A node that reads only a state, and writes a column."""
        if not self.states:
            return
        at = len(self.columns)
        state = self.one(self.states)
        per = self.one(("row", "prompt", "batch"))
        scope = f", per = {per}" if per != "row" else ""
        self.wrote("", f"c{at}", "f32", "number", ())
        node = self.node("host", f"f{at}", f'({state}) -> c{at} {{ call = "{FILE}:count"{scope} }}', [])
        self.rename(node, [at])

    def filter(self) -> None:
        reads = self.chosen(self.one(self.columns), 1, "number", "tokens")
        path = max((c.path for c in reads), key=len)
        prompts = False  # whether it chooses whole prompts
        if self.often(25) and self.states:
            reads = []
            given = self.one(self.states)
            attributes = f"keep = {given} < 3"
        else:
            given = self.names(reads)
            attributes = f'{self.one(("keep", "select"))} = "{FILE}:'
            attributes += "keep" if attributes.startswith("keep") else "places"
            attributes += '"'
            per = self.one(("row", "batch", "column", "column"))
            if per == "row" and "places" in attributes:
                per = "column"
            if per != "row":
                depth = self.draw(st.integers(0, len(path)))
                attributes += f", per = {'batch' if per == 'batch' else self.marks(path[:depth])}"
                prompts = per == "column" and not depth
        if self.often(50) and not self.looped and not self.growing and "batch" not in attributes:
            attributes += f", refill = {self.draw(st.integers(1, 3))}"
            attributes += ", adaptive = true" if prompts and self.often(70) else ""
        name = f"k{len(self.nodes)}"
        node = self.node("host", name, f"({given}) {{ {attributes} }}", reads)
        self.filters.append(node)
        if "refill" in attributes:
            self.looped.append(node)

    def update(self) -> None:
        responses = [c for c in self.known("tokens") if c.path]
        if not responses:
            return
        response = self.one(responses)
        reads = [self.one([c for c in self.known("tokens") if c.path == ()]), response]
        worker, call = self.one((("actor", "term"), ("actor", "weighed"), ("critic", "squared")))
        options = ""
        if call == "weighed":
            numbers = [
                c for c in self.known("number", "list") if c.path == response.path and c.like in ("", response.name)
            ]
            if not numbers:
                return
            reads.append(self.one(numbers))
            options = f"(number = {reads[-1].name})"
        given = self.names(reads)
        if self.states and self.often(20) and "step" in self.states:
            given = f"{given}, step"
            options = options
        attributes = [f'loss = "{FILE}:{call}"{options}', "optimizer = adamw(lr = 1e-6)"]
        attributes += [f"mini_batch = {self.one((1, 2, 4))}"] if self.often(50) else []
        attributes += ["epochs = 2"] if self.often(25) else []
        attributes += [f"after = {self.one((1, 2))}"] if self.often(25) else []
        attributes += ["every = 2"] if self.often(25) else []
        others = [n for w in ("actor.update", "critic.update") for n in self.verbs.get(w, []) if self.often(30)]
        self.node(worker, "update", f"({given}) {{ {', '.join(attributes)} }}", reads, [*self.filters, *others])

    def marks(self, path: tuple[str, ...]) -> str:
        """A column that stands for the rows under so many generations."""
        return path[-1] if path else "prompt"

    def names(self, reads: list[Made]) -> str:
        return ", ".join(dict.fromkeys(c.name for c in reads))

    def text(self) -> str:
        prompts = self.one((1, 2, 3, 4, 4, 4))
        if self.often(50):
            self.states.append("step")
        if self.often(30):
            self.states.append("rate")
        self.wrote("source", "prompt", "i32[<= 8]", "tokens", ())
        self.wrote("source", "answer", "text", "text", ())
        kinds = (
            self.generate,
            self.function,
            self.function,
            self.infer,
            self.filter,
            self.filter,
            self.setter,
            self.counter,
            self.update,
            self.update,
        )
        if self.often(85):
            self.generate()
        for _ in range(self.one((1, 2, 3, 4, 5, 6, 7, 8, 9, 10))):
            self.one(kinds)()
        if not self.verbs.get("actor.update") and not self.verbs.get("critic.update") and self.often(70):
            self.update()
        weights = (
            ' { weights = "f.py:likely" }' if "rate" in self.states and not self.growing and self.often(30) else ""
        )
        for update in self.verbs.get("actor.update", []) + self.verbs.get("critic.update", []):
            self.edges += [(f, update, "") for f in self.filters if f not in self.before[update]]
        lines = [
            "algorithm a {",
            f"  columns {{ {' '.join(f'{c.name} : {c.type},' for c in self.columns)} }}",
            *(f"  state {s} : {STATES[s]} = 0" for s in self.states),
            *(f"  worker {w}" for w in self.workers()),
            f"  source({prompts}) -> prompt, answer{weights}",
            *(f"  node {text}" for _, text in self.nodes),
            *(f"  {a} -> {b}{attributes}" for a, b, attributes in self.edges),
        ]
        if updates := self.verbs.get("actor.update"):
            generations = self.verbs.get("actor.generate", [])
            self.stale = generations[:1] + updates[:1] if generations and self.often(30) else []
            behind = [self.behind() if g in self.stale else "" for g in generations]
            lines += [f"  {updates[0]} => {g}{b}" for g, b in zip(generations, behind, strict=True)]
        return "\n".join([*lines, "}", *self.deployed()]) + "\n"

    def behind(self) -> str:
        """How old a generation's weights may be, and which of them are sent: as seldom as that allows."""
        versions = self.one((1, 1, 2, 3))
        every = f", every = {self.one(range(2, versions + 2))}" if self.often(50) else ""
        return f" {{ staleness = {versions}{every} }}"

    def workers(self) -> list[str]:
        known = {
            "actor": "policy",
            "judge": "policy frozen { model = judge }",
            "reference": "policy frozen",
            "critic": "value",
            "reward": "reward_model frozen { model = reward }",
            "host": "function",
        }
        used = {key.split(".")[0] for key in self.verbs}
        return [f"{w} : {kind}" for w, kind in known.items() if w in used]

    def deployed(self) -> list[str]:
        nodes = self.one((1, 1, 2))
        each = 2 if self.stale else self.one((1, 2))
        devices = nodes * each
        found = [f'cluster c {{ device = "cpu", nodes = {nodes}, devices_per_node = {each} }}', "deploy a on c {"]
        used = {key.split(".")[0] for key in self.verbs}
        models = {"policy": {"actor", "reference"}, "value": {"critic"}, "judge": {"judge"}, "reward": {"reward"}}
        found += [f'  model {m} = "tiny"' for m, workers in models.items() if used & workers]
        found += ['  data source = "tiny.jsonl"']
        states = [n for key, some in self.verbs.items() for n in some if not key.startswith("host.")]
        generations = [n for key, some in self.verbs.items() for n in some if key.endswith(".generate")]
        others = [n for n in states if n not in generations]
        updates = self.verbs.get("actor.update", []) + self.verbs.get("critic.update", [])
        if self.stale:  # on devices of its own, or ahead of itself
            found.append(
                f"  place {', '.join(self.stale)} together" if self.often(35) else f"  apart {', '.join(self.stale)}"
            )
        elif devices > 1 and len(states) > 1 and self.often(60):
            found.append(f"  apart {', '.join(self.draw(st.permutations(states))[: self.one((2, 2, 3))])}")
        elif states and self.often(80):
            for group in (generations, others):
                tp = self.one([n for n in (1, 2) if devices % n == 0])
                zero = f", zero = {self.one((0, 1, 3))}" if group is others and tp == 1 and updates else ""
                found += [f"  layout {', '.join(group)} {{ dp = {devices // tp}, tp = {tp}{zero} }}"] if group else []
        if self.often(30):
            found.append(f"  dock {{ {self.one(('imbalance = 1.5', 'mode = central'))} }}")
        if generations and self.often(30):
            reported = [c.name for c in self.known("number") if c.type.startswith("f32")]
            if reported:
                column = self.one(reported)
                found += [
                    '  data test = "tiny.jsonl"',
                    f"  evaluate test {{ every = {self.one((1, 2))}, samples = 2, report = [{column}] }}",
                ]
        run = f"iterations = {self.draw(st.integers(1, 6 if self.stale else 4))}"
        if self.stale and self.often(50):
            run += f", save = {self.one((2, 3))}, deterministic = true"
        elif not self.stale and self.often(50):
            run += f", save = {self.one((1, 2))}"
        return [*found, f"  run {{ {run} }}", "}"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    return Program(draw).text()
