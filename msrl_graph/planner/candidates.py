"""The possible layouts and engines of an owner in its pool.

An owner is a set of nodes that share a layout and an engine. A choice is one layout and one engine for an owner.
Invariant: the layout of a choice divides the model and the devices evenly. Choices that do not fit into memory are
dropped. If no choice of an owner fits, the choice that exceeds the memory least is returned. To test whether a choice
fits, it is assumed that the owner's nodes are alone on their devices, and that they use the smallest micro-batch and
full recomputation. The seconds of a choice are lower bounds: they use the best micro-batch that fits if the nodes are
alone, and exclude the time of offloading. If the choice is combined with choices of other owners, the owner's nodes can
only be slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..backends import can_build
from ..backends.divisibility import find_misfits, rows_in_step
from ..backends.spec import EngineSpec, can_compile, is_compiled
from ..cost import holdings
from ..ir.graph import Node, Value
from ..ir.plan import FUNCTIONS, MICRO_BATCH, EngineChoice, Placement, Plan, Pool
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory
from ..sharding.layout import Layout
from .owners import Owner, engines, has_open_layout
from .place import PlaceNodes
from .pools import Division
from .simplicity import Simplicity


@dataclass(frozen=True)
class Choice:
    """A layout and an engine for an owner's nodes, and their costs.

    - `seconds`: a lower bound of the seconds of each node.
    - `peaks`: the bytes per device in each phase, if the owner's nodes are alone on their devices.
    - `resident`: the smallest number of bytes that remain on a device while nodes of other owners compute.
    - `weights`: the bytes of the weights on a device. Resharding by swap removes the weights from the device while a
      generation runs.
    - `unoffloaded_bytes`: like `resident`, but without offloading.
    - `excess_bytes`: the bytes by which the choice exceeds the memory; 0 or less if the choice fits.
    """

    layout: Layout
    engine: str
    seconds: Mapping[str, float]
    peaks: Mapping[str, int]
    resident: int
    weights: int
    unoffloaded_bytes: int
    excess_bytes: int


@dataclass(frozen=True)
class Choices:
    """The generator of all choices of an owner.

    `place` is the pass that completes each placement. If `wide` is True, layouts that span hosts are generated even if
    other layouts fit.
    """

    place: PlaceNodes
    wide: bool = False

    def __call__(self, skeleton: Plan, division: Division, owner: Owner) -> list[Choice]:
        """Return the choices of an owner in its pool, the fastest first.

        `skeleton` is a plan whose nodes are placed in the pools of `division`; the nodes' layouts do not matter. If no
        choice fits, the result is only the choice that exceeds the memory least.
        """
        choices: list[Choice] = []
        fitting: list[Choice] = []
        tried: set[tuple[Layout, str]] = set()
        for wide in (False, True):
            for placement in self._possible_placements(skeleton, division, owner, wide):
                if (placement.layout, placement.engine.name) not in tried:
                    tried.add((placement.layout, placement.engine.name))
                    choices.append(self._evaluate(skeleton, owner, placement))
            fitting = [choice for choice in choices if choice.excess_bytes <= 0]
            if fitting and not self.wide:
                break
        if fitting:
            return sorted(fitting, key=lambda choice: math.fsum(choice.seconds.values()))
        if not choices:  # the engines allow none: the checks report that
            choices.append(self._evaluate(skeleton, owner, skeleton.placement(owner.node)))
        return sorted(choices, key=lambda choice: choice.excess_bytes)[:1]

    def _possible_placements(self, plan: Plan, division: Division, owner: Owner, wide: bool) -> Iterator[Placement]:
        node = plan.graph.node(owner.node)
        pool = division.pool_of(owner.node)
        now = plan.placement(owner.node)
        specs = engines(plan, owner, self.place.engines)
        if not has_open_layout(plan, owner):
            stated = plan.deploy.layouts[owner.node]
            for spec in specs:
                layout = self.place.resolve(plan, owner.node, stated, spec.name, pool.devices)[0]
                yield replace(now, layout=layout, engine=self._stated_engine(plan, node, spec))
            return
        for spec in specs:
            for layout in layouts(plan, node, spec, pool, wide):
                choice = replace(now, layout=layout, engine=self._stated_engine(plan, node, spec))
                if self._is_allowed(plan, owner, spec, choice):
                    yield choice

    def _stated_engine(self, plan: Plan, node: Node, spec: EngineSpec) -> EngineChoice:
        return plan.deploy.engines.get(node.name, EngineChoice(spec.name))

    def _is_allowed(self, plan: Plan, owner: Owner, spec: EngineSpec, choice: Placement) -> bool:
        layout = choice.layout
        model = plan.model(owner.node)
        rows = (rows_in_step(plan.graph, plan.graph.node(node)) for node in owner.nodes)
        stated = (replace(choice, engine=plan.deploy.engines.get(node, choice.engine)) for node in owner.nodes)
        return (
            not any(count is not None and count % layout.dp for count in rows)
            and not any(find_misfits(model, spec, layout))
            and (can_compile(model, layout) or not any(map(is_compiled, stated)))
        )

    def _evaluate(self, skeleton: Plan, owner: Owner, placement: Placement) -> Choice:
        """Return the costs of a placement if only the owner's nodes use their devices."""
        engines = self.place.engines
        name = owner.node
        placements = tuple(self._place_alone(skeleton, owner, other, placement) for other in skeleton.placements)
        plan = replace(skeleton, placements=placements, pools=(skeleton.pool(placement.pool),), reshards=())

        def count_memory(offload: str) -> tuple[Plan, int]:
            least = tuple(
                _with_least_memory(engines, other, offload) if other.node in owner.nodes else other
                for other in placements
            )
            counted_plan = CountMemory(engines).apply(replace(plan, placements=least))
            return counted_plan, max(phase.total - int(phase.capacity.value) for phase in counted_plan.memory)

        gains = not plan.cluster.device.kind.shares_host_memory
        least, excess = count_memory("all" if gains else "none")
        peaks: dict[str, int] = {}
        for phase in least.memory:
            if phase.place == "device":
                peaks[phase.phase] = phase.total
        if excess > 0 and max(peaks.values()) <= holdings.capacity(plan.cluster).value:
            excess = min(excess, count_memory("none")[1])  # the hosts may lack memory for offloading
        seconds = {}
        if excess <= 0:
            roomy = replace(
                plan,
                placements=tuple(
                    _with_offloading(engines, other) if gains and other.node in owner.nodes else other
                    for other in placements
                ),
            )
            fastest = replace(self.place, is_fastest=True)
            for node in owner.nodes:
                done = fastest.complete(roomy, roomy.placement(node))
                if done.engine.options.get("offload") != plan.placement(node).engine.options.get("offload"):
                    done = holdings.with_options(done, {"offload": "none"})
                seconds[node] = math.fsum(
                    figure.value for figure in EstimateTime(engines).of_node(replace(plan, placements=(done,)), node)
                )
        weights = holdings.weights(plan, engines, name)
        update = plan.graph.node(name).verb == "update"
        states = holdings.optimizer(plan, engines, name) if update else 0
        offloaded = {kind: holdings.offloads(least, name, kind) for kind in ("weights", "optimizer")}
        resident = weights * (not offloaded["weights"]) + states * (not offloaded["optimizer"])
        stays = name not in {edge.dst for edge in plan.graph.reshards()}
        return Choice(
            placement.layout,
            placement.engine.name,
            seconds,
            peaks,
            resident * stays,
            weights,
            (weights + states) * stays,
            excess,
        )

    def _place_alone(self, plan: Plan, owner: Owner, other: Placement, placement: Placement) -> Placement:
        if other.node not in owner.nodes:
            return other if other.pool == FUNCTIONS else replace(other, pool=FUNCTIONS)
        stated = plan.deploy.engines.get(other.node)
        options = {} if stated is None else stated.options
        if stated is not None and stated.name != placement.engine.name:
            return replace(placement, node=other.node, engine=stated)
        engine = EngineChoice(placement.engine.name, {**placement.engine.shared(), **options})
        return replace(placement, node=other.node, engine=engine)


def _with_least_memory(engines: Mapping[str, EngineSpec], placement: Placement, offload: str) -> Placement:
    """Return a placement with the engine options that need the least memory.

    `offload` is the value for the option of this name. Options that the file states are not changed.
    """
    known = engines[placement.engine.name].capabilities.options
    options = placement.engine.options
    least: dict[str, Value] = {"recompute": "full", "offload": offload}
    if not options.keys() & {*MICRO_BATCH}:
        least |= {"micro_batch_tokens" if "micro_batch_tokens" in known else "micro_batch": 1}
    added = {option: value for option, value in least.items() if option in known and option not in options}
    return holdings.with_options(placement, added)


def _with_offloading(engines: Mapping[str, EngineSpec], placement: Placement) -> Placement:
    """Return a placement whose engine offloads all that it can offload.

    If the file states `offload`, the placement is not changed.
    """
    engine = placement.engine
    if "offload" not in engines[engine.name].capabilities.options or "offload" in engine.options:
        return placement
    return holdings.with_options(placement, {"offload": "all"})


def layouts(plan: Plan, node: Node, spec: EngineSpec, pool: Pool, wide: bool) -> Iterator[Layout]:
    """Yield the layouts of a node on all devices of a pool.

    Tensor-parallel groups are within one host. If `wide` is True, layouts are added that are only useful if no other
    layout fits:
    - tensor parallelism across hosts,
    - context parallelism,
    - other meshes of experts,
    - layouts that this version can plan but not run.
    """
    model = plan.model(node.name)
    devices = pool.devices
    host = pool.each or plan.cluster.devices_per_node
    # ZeRO 0 needs more memory than ZeRO 1 and gains nothing. Where weights are sharded, ZeRO 2 is ZeRO 3 or is worse.
    zero = [stage for stage in (1, 3) if stage in spec.capabilities.zero and node.verb != "generate"] or [1]
    here = can_build(spec.name)
    planned = spec.list_plan_only(plan.cluster.device.kind.where)
    axes = [axis for axis in spec.capabilities.axes if not (here and axis in planned)]
    for tp in _divisors(devices, spec, "tp", devices if wide else host):
        for cp in _divisors(devices // tp, spec, "cp", devices if wide else 1):
            for pp in _divisors(devices // tp // cp, spec, "pp", model.layers):
                dp = devices // (tp * cp * pp)
                last = 0  # the ep of the previous mesh: of meshes that differ in etp, the narrow search uses the first
                for mesh in spec.sharding.spread.meshes(Layout(tp=tp, cp=cp, pp=pp, dp=dp), model):
                    if all(axis in axes for axis in ("ep", "etp") if getattr(mesh, axis) > 1) and (
                        wide or mesh.ep > last
                    ):
                        last = mesh.ep
                        # Layouts that the engine can only plan are for programs where nothing else fits.
                        if spec.sharding.spread.can_run(mesh, model) or not here or wide:
                            yield from (replace(mesh, zero=stage) for stage in (zero if dp > 1 else zero[:1]))


def _divisors(number: int, spec: EngineSpec, axis: str, most: int) -> Iterable[int]:
    return (
        [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
        if axis in spec.capabilities.axes
        else [1]
    )


def drop_dominated(choices: list[Choice], measure: Callable[[Choice], Simplicity]) -> list[Choice]:
    """Drop choices that another choice beats or equals.

    Choices are compared in seconds, in memory and in simplicity.

    Two kinds of memory are compared: the peaks if the owner's nodes are alone on their devices, and the bytes that
    remain on a device while nodes of other owners compute. Do not pass choices of an owner with a resharding edge to
    this function.
    """
    remaining: list[Choice] = []
    for choice in choices:
        if not any(
            other.resident <= choice.resident
            and other.unoffloaded_bytes <= choice.unoffloaded_bytes
            and all(other.seconds[node] <= seconds for node, seconds in choice.seconds.items())
            and all(other.peaks[phase] <= peak for phase, peak in choice.peaks.items())
            and measure(other) <= measure(choice)
            for other in remaining
        ):
            remaining.append(choice)
    return remaining
