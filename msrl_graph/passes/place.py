"""place: every node-state gets devices, a layout and an engine, each with its reason.

Invariant: states that share weights share their layout; the states of a pool share its devices (each process hosts them in turn);
functions run on the hosts' CPUs. A stated layout is kept as stated, right or wrong: checks/layout.py judges it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ..dividing import misfits
from ..engine import BYTES, EngineSpec
from ..graph import Node, Value
from ..layout import AXES, Layout, Side, held
from ..plan import EngineChoice, Model, Note, Placement, Plan, Pool
from ..redistribute import gather_block
from . import holdings
from .pools import FUNCTIONS, divide

# A micro-batch where none is stated: rows of at most this many tokens together.
MICRO_BATCH_TOKENS = 16384
# Prompts generated at once where memory holds more than an iteration has: an evaluation may bring more.
PROMPTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Place:
    """`engines` are the specs by name, `defaults` the engine of each verb where the file names none."""

    engines: Mapping[str, EngineSpec]
    defaults: Mapping[str, str]

    def __call__(self, plan: Plan) -> Plan:
        pools, beside = divide(plan)
        plan = replace(plan, pools=pools)
        pool_of = {n: p for p in pools for n in p.nodes}
        named = {n for p in plan.deploy.pools for n in p.nodes}
        found: dict[str, Placement] = {}
        # Updates first, since other states take their layouts.
        for verb in ("update", "generate", "infer"):
            for node in plan.graph.verb(verb):
                if plan.graph.worker(node.worker).kind != "function":
                    placed = self._on_devices(plan, node, pool_of[node.name], found)
                    if beside and node.name not in named:
                        placed = replace(placed, reason=f"{placed.reason}; unnamed, so beside {beside}")
                    found[node.name] = placed
        for node in plan.graph.nodes:
            if node.name not in found:
                found[node.name] = self._on_hosts(plan, node)
        whole = replace(plan, placements=tuple(found[n.name] for n in plan.graph.nodes))
        idle = plan.cluster.devices - sum(p.devices for p in pools)
        notes = (Note("place", f"{idle} of {plan.cluster.devices} devices are in no pool and stay idle"),) if idle > 0 else ()
        return replace(whole, placements=tuple(self._complete(whole, p) for p in whole.placements), notes=(*plan.notes, *notes))

    def _on_hosts(self, plan: Plan, node: Node) -> Placement:
        reason = (
            "the source runs once a run, beside the first host's functions" if node.verb == "source" else "functions run on the hosts' CPUs"
        )
        layout = Layout(dp=1 if node.verb == "source" else plan.cluster.nodes)
        return Placement(node.name, FUNCTIONS, layout, 0, EngineChoice("python", chosen="default"), reason)

    def _on_devices(self, plan: Plan, node: Node, pool: Pool, found: Mapping[str, Placement]) -> Placement:
        engine = self._engine(plan, node, found)
        update = holdings.update_of(plan, node.worker)
        stated = plan.deploy.layouts.get(node.name)
        owner = _first(plan, node, plan.deploy.layouts)
        if node.verb == "infer" and update is not None:
            layout, reason = found[update.name].layout, f"has the weights of {update.name}"
        elif stated is None and owner is not None:
            layout, reason = resolve(plan.deploy.layouts[owner], pool.devices)[0], f"has the weights of {owner}"
        elif stated is not None:
            layout, reason = resolve(stated, pool.devices)
            if node.verb == "generate":
                layout, reason = self._inner(plan, node, pool, found, engine, layout, reason)
        elif twin := self._twin(plan, node, pool, found):
            layout, reason = replace(found[twin].layout), f"as {twin}, which has the same model"
        else:
            layout, reason = self._planned(plan, node, pool, engine)
            if node.verb == "generate":
                layout, reason = self._inner(plan, node, pool, found, engine, layout, reason)
        return Placement(node.name, pool.name, layout, pool.first, engine, reason)

    def _engine(self, plan: Plan, node: Node, found: Mapping[str, Placement]) -> EngineChoice:
        stated = plan.deploy.engines.get(node.name)
        update = holdings.update_of(plan, node.worker) if node.verb == "infer" else None
        owner = update.name if update is not None else _first(plan, node, plan.deploy.engines)
        if owner is None or owner == node.name:
            return stated or self._default(plan, node)
        # The micro-batch is its own; what else it states, checks/sharing.py compares with the owner's.
        theirs = found[owner].engine if update is not None else plan.deploy.engines[owner]
        if stated is None:
            return replace(theirs, options=theirs.shared(), chosen=f"{owner}, whose weights it has")
        own = {k: v for k, v in stated.options.items() if k == "micro_batch"}
        return replace(stated, name=theirs.name, options={**theirs.shared(), **own})

    def _default(self, plan: Plan, node: Node) -> EngineChoice:
        """The default of a verb, or where it cannot do what is asked, the first engine that can."""
        family, layout = plan.model(node.name).family, plan.deploy.layouts.get(node.name, Layout())
        needed = [a for a in AXES if getattr(layout, a) > 1]
        first = self.engines[self.defaults[node.verb]]
        for spec in (first, *(e for e in self.engines.values() if node.verb in e.verbs)):
            if family in spec.families and set(needed) <= set(spec.axes):
                lacks = [f"no {family} models"] * (family not in first.families)
                lacks += [f"no {a}" for a in needed if a not in first.axes]
                return EngineChoice(spec.name, chosen=f"the plan: `{first.name}` has {', '.join(lacks)}" if lacks else "default")
        return EngineChoice(first.name, chosen="default")

    def _twin(self, plan: Plan, node: Node, pool: Pool, found: Mapping[str, Placement]) -> str | None:
        """The update of the same model and pool, whose layout a frozen state takes: its micro-batches then go to the same ranks."""
        model = plan.graph.worker(node.worker).model
        updates = (n.name for n in plan.graph.verb("update") if plan.graph.worker(n.worker).model == model)
        return next((n for n in updates if n in found and n in pool.nodes), None) if node.verb == "infer" else None

    def _planned(self, plan: Plan, node: Node, pool: Pool, engine: EngineChoice) -> tuple[Layout, str]:
        """The smallest power of two for tp that divides the heads and whose weights fit; dp takes the rest. Where an update fits with
        none, the smallest with which it fits if it recomputes."""
        model, devices = plan.model(node.name), pool.devices
        room = holdings.capacity(plan.cluster).value * (1 - holdings.RESERVE if node.verb == "update" else 0.5)
        choice = Layout(dp=devices)
        for tried in (engine, self._recomputing(node, engine)):
            for tp in (1 << i for i in range(devices.bit_length())):
                layout = Layout(tp=tp, dp=devices // tp)
                if layout.devices != devices or any(misfits(model, self.engines[engine.name], layout)):
                    continue
                choice = layout
                need, part = self._need(model, layout, node.verb, engine), "weights"
                if node.verb == "update":
                    need += self._working(plan, Placement(node.name, pool.name, layout, pool.first, tried, ""), 1)
                    need += self._frozen(plan, pool, model) * held(model.kinds, self.engines[engine.name].side(layout)) * BYTES[model.dtype]
                    part = f"weights, gradients, optimizer and one {'' if tried is engine else 'recomputed '}row"
                if need <= room:
                    return choice, f"planned: the smallest tp whose {part} of {holdings.gigabytes(need)} fit a device"
        return choice, "planned: the largest tp that divides the heads; what it holds may not fit"

    def _frozen(self, plan: Plan, pool: Pool, model: Model) -> int:
        """Frozen workers that will take the layout of an update of the same model."""
        nodes = [plan.graph.node(n) for n in pool.nodes if n not in plan.deploy.layouts]
        frozen = {n.worker for n in nodes if n.verb == "infer" and holdings.update_of(plan, n.worker) is None}
        return sum(plan.deploy.models[plan.graph.worker(w).model] == model for w in frozen)

    def _need(self, model: Model, layout: Layout, verb: str, engine: EngineChoice) -> int:
        spec = self.engines[engine.name]
        dtype = str(engine.options.get("dtype") or model.dtype)
        need = held(model.kinds, spec.side(layout)) * BYTES[dtype]
        if verb == "update":
            need += held(model.kinds, Side(layout, layout.zero >= 1)) * spec.optimizer_bytes(dtype)
        return need

    def _inner(
        self, plan: Plan, node: Node, pool: Pool, found: Mapping[str, Placement], engine: EngineChoice, layout: Layout, reason: str
    ) -> tuple[Layout, str]:
        """Numbers the ranks of a generation such that resharding gathers among the fewest neighbours."""
        source = next((found[e.src] for e in plan.graph.reshards() if e.dst == node.name and e.src in pool.nodes), None)
        if source is None or source.layout.devices != layout.devices or layout.devices != pool.devices:
            return layout, reason
        kinds = tuple(k for k in plan.model(node.name).kinds if not k.tensor.experts and not k.tensor.padded)
        at_rest = self.engines[source.engine.name].side(source.layout)

        def group(inner: int) -> int:
            return gather_block(kinds, at_rest, self.engines[engine.name].side(replace(layout, inner=inner)))

        # More than the update's tp neighbours never hold anything new.
        choices = [n for n in range(1, min(layout.dp, max(1, source.layout.tp)) + 1) if layout.dp % n == 0]
        sizes = {n: group(n) for n in choices}
        best = min(choices, key=lambda n: (sizes[n], n))
        if best > 1:
            reason += f"; dp in {best}s of neighbours, so that resharding gathers among {sizes[best]} ranks, not {sizes[1]}"
        return replace(layout, inner=best), reason

    def _complete(self, plan: Plan, placement: Placement) -> Placement:
        """States the weights' bytes, and the micro-batch where the file does not: the run then needs to choose nothing."""
        if placement.pool == FUNCTIONS:
            return placement
        placement = replace(placement, weight_bytes=holdings.weights(plan, self.engines, placement.node))
        node, options = placement.node, placement.engine.options
        if plan.graph.node(node).verb == "update":
            placement = self._recompute(plan, placement)
        if "micro_batch" in options or "micro_batch" not in self.engines[placement.engine.name].options:
            return placement
        if plan.graph.node(node).verb == "generate":
            # As many prompts, each with its samples, as memory holds: an evaluation may bring more than an iteration does.
            most, room = max(holdings.group_rows(plan, node), PROMPTS_AT_ONCE), holdings.kv_room(plan, self.engines, node)
        else:
            # As many rows as keep the device busy, fewer where memory holds fewer.
            most = min(holdings.group_rows(plan, node), MICRO_BATCH_TOKENS // max(1, holdings.row_tokens(plan, node)))
            room = self._room(plan, placement)
        return _with(placement, micro_batch=self._micro_batch(plan, placement, max(1, most), room))

    def _room(self, plan: Plan, placement: Placement) -> int:
        """Bytes that an infer or update may plan for beside what is resident."""
        usable = int(holdings.capacity(plan.cluster).value * (1 - holdings.RESERVE))
        return usable - sum(holdings.resident(plan, self.engines, placement.pool).values())

    def _recomputing(self, node: Node, engine: EngineChoice) -> EngineChoice:
        """The engine with full recomputation where the file does not say whether it recomputes."""
        if "recompute" in engine.options or "recompute" not in self.engines[engine.name].options:
            return engine
        return replace(engine, options={**engine.options, "recompute": "full"})

    def _recompute(self, plan: Plan, placement: Placement) -> Placement:
        """An update whose micro-batch, as stated or of one row, does not fit otherwise recomputes activations, unless the file says
        whether it does."""
        options = placement.engine.options
        if "recompute" in options or "recompute" not in self.engines[placement.engine.name].options:
            return placement
        stated = options.get("micro_batch")
        need, room = self._working(plan, placement, stated if isinstance(stated, int) else 1), self._room(plan, placement)
        if need <= room:
            return placement
        why = f"recomputes activations, which would take {holdings.gigabytes(need)} of {holdings.gigabytes(room)} otherwise"
        return replace(_with(placement, recompute="full"), reason=f"{placement.reason}; {why}")

    def _micro_batch(self, plan: Plan, placement: Placement, most: int, room: int) -> int:
        """The largest micro-batch up to `most` that leaves the state within `room`; 1 where none does."""
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._working(plan, placement, middle) <= room else (low, middle)
        return low

    def _working(self, plan: Plan, placement: Placement, micro_batch: int) -> int:
        """Bytes that a state holds at its peak with such a micro-batch, beside what is resident."""
        plan = replace(plan, placements=(_with(placement, micro_batch=micro_batch),))
        return sum(holdings.fullest(plan, self.engines, placement.node)[1].values())


def _with(placement: Placement, **options: Value) -> Placement:
    """The placement, its engine with more options."""
    return replace(placement, engine=replace(placement.engine, options={**placement.engine.options, **options}))


def _first(plan: Plan, node: Node, stated: Collection[str]) -> str | None:
    """The first infer that has a statement, of those that share the weights of an infer."""
    if node.verb != "infer":
        return None
    return next((n.name for n in plan.graph.sharing(node.worker) if n.name in stated), None)


def resolve(stated: Layout, devices: int) -> tuple[Layout, str]:
    """A stated layout with its dp: 0 stands for one that the file leaves to the placement."""
    if stated.dp:
        return stated, "stated"
    layout = replace(stated, dp=max(1, devices // (stated.tp * stated.cp * stated.pp)))
    return layout, f"stated; dp {layout.dp} from {devices} devices"
