"""The combinations of layouts and engines for one division into pools.

Each owner (a set of nodes that share a layout) has a list of choices. A combination has one choice from each list.
Invariant: a combination's lower bound of the seconds of an iteration is also valid for every combination that has, from
each list, the same choice or a later choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost import holdings
from ..cost.transfers import function_overhead
from ..ir.plan import FUNCTIONS, Plan
from ..passes.spec import Passes
from ..passes.throughput import estimate_pace
from .candidates import Choice, Choices, drop_dominated
from .owners import Owner, owners
from .place import PlacementDecision, PlaceNodes
from .pools import Division
from .simplicity import measure_choice


@dataclass
class Space:
    """The combinations for one division into pools: one choice for each owner.

    `skeleton` is a plan with the division's pools, a schedule and traffic. `lists` has the list of choices of each
    owner. A position identifies a combination: it is a tuple with one index for each of these lists.
    """

    division: Division
    skeleton: Plan
    owners: tuple[Owner, ...]
    lists: list[list[Choice]]
    functions: dict[tuple[str, str], float]
    # The least seconds of each node from each position of its owner's list on: a bound for all later choices.
    least_later: list[list[dict[str, float]]]

    @property
    def size(self) -> int:
        number = 1
        for choices in self.lists:
            number *= len(choices)
        return number

    @property
    def can_fit(self) -> bool:
        """Whether each owner has a choice that fits alone on its devices."""
        return all(choice.excess_bytes <= 0 for own in self.lists for choice in own[:1])

    def bound(self, position: Sequence[int]) -> float:
        """Return a lower bound of an iteration's seconds for one combination.

        Resharding is not included.
        """
        return self.least(
            {("RUN", node): seconds for choice in self.chosen(position) for node, seconds in choice.seconds.items()}
        )

    def least(self, seconds: Mapping[tuple[str, str], float]) -> float:
        """Return a lower bound of an iteration's seconds, from the seconds of its nodes.

        The keys of `seconds` are (instruction, node). The seconds of functions, and the seconds to start and end the
        iteration, are added. These seconds are the same for every layout.
        """
        # The cost of the dock's processes also depends on the layouts: only an iteration's start and end are certain.
        turn = self.skeleton.cluster.device.overheads.turn.value
        return estimate_pace(self.skeleton, {**self.functions, **seconds}, turn).seconds

    def bound_from(self, position: Sequence[int]) -> float:
        """Return a lower bound of an iteration's seconds for a set of combinations.

        The set has all combinations with choices at or after `position`. For each node, the least seconds of all these
        choices are taken, and added along the critical path. The nodes of one pool run one after the other, so the
        bound is at least the sum of the seconds of each pool's nodes.
        """
        seconds = {
            ("RUN", node): least
            for index, own in zip(position, self.least_later, strict=True)
            for node, least in own[index].items()
        }
        busy = dict.fromkeys(self.division.pools, 0.0)
        for owner, choice in zip(self.owners, self.chosen(position), strict=True):
            busy[self.division.pool_of(owner.node)] += math.fsum(choice.seconds.values())
        return max(self.least(seconds), *busy.values())

    def chosen(self, position: Sequence[int]) -> list[Choice]:
        return [choices[index] for choices, index in zip(self.lists, position, strict=True)]

    def start(self) -> tuple[int, ...]:
        """Return the position of a fast combination that may fit; () if there is none.

        Owners choose one after another. An owner takes its fastest choice that fits together with the choices of
        earlier owners and, for each later owner, the choice with the least resident memory.
        """
        position = [min(range(len(own)), key=lambda index, own=own: own[index].resident) for own in self.lists]  # type: ignore[misc]
        if self.describe_overflow(position):
            return ()
        for number, own in enumerate(self.lists):
            position[number] = next(
                index
                for index in range(len(own))
                if not self.describe_overflow([*position[:number], index, *position[number + 1 :]])
            )
        return tuple(position)

    def describe_overflow(self, position: Sequence[int]) -> str:
        """Return why a combination cannot fit into memory; "" if it may fit.

        For each owner, the peak memory is added to the resident bytes of all other owners in its pool.
        """
        swap = self.skeleton.deploy.reshard.mode == "swap"
        source = {edge.dst: edge.src for edge in self.skeleton.graph.reshards()}
        capacity = holdings.capacity(self.skeleton.cluster).value
        chosen = list(zip(self.owners, self.chosen(position), strict=True))
        for owner, choice in chosen:
            pool = self.division.pool_of(owner.node)
            others = [
                (other, other_choice)
                for other, other_choice in chosen
                if other.node in pool.nodes and other.node != owner.node
            ]
            for phase, peak in choice.peaks.items():
                others_resident = sum(other_choice.resident for _, other_choice in others) if phase != "load" else 0
                if phase == "generate" and swap:
                    others_resident -= sum(
                        other_choice.weights for other, other_choice in others if source.get(owner.node) == other.node
                    )
                if peak + others_resident > capacity:
                    size = holdings.gigabytes
                    return f"{phase} needs {size(peak + others_resident)} a device of {size(capacity)}"
        return ""

    def must_offload(self, position: Sequence[int]) -> bool:
        """Return whether a combination cannot fit without offloading."""
        held = dict.fromkeys(self.division.pools, 0)
        for owner, choice in zip(self.owners, self.chosen(position), strict=True):
            held[self.division.pool_of(owner.node)] += choice.unoffloaded_bytes
        return max(held.values()) > holdings.capacity(self.skeleton.cluster).value


# The lists of choices of owners, by the owner's nodes and the size and position of its pool.
ChoiceLists = dict[tuple[tuple[str, ...], int, int, int], list[Choice]]


@dataclass
class SpaceBuilder:
    """The builder of spaces. `lists` are the choices that are known already.

    If `wide` is True, layouts that span hosts are included.
    """

    plan: Plan
    place: PlaceNodes
    passes: Passes
    wide: bool
    lists: ChoiceLists

    def build(self, division: Division) -> Space:
        skeleton = self.place.apply(self.plan, PlacementDecision(division), numbered=False)
        skeleton = self.passes.only("dock", "schedule", "traffic").apply(skeleton)
        space_owners = owners(self.plan, division)
        lists = [self._list_choices(skeleton, division, owner) for owner in space_owners]
        later = []
        for own in lists:
            least: list[dict[str, float]] = []
            for choice in reversed(own):
                least.append(
                    {node: min(bound, least[-1][node]) if least else bound for node, bound in choice.seconds.items()}
                )
            later.append(least[::-1])
        hosted = [
            node.name
            for node in skeleton.graph.nodes
            if node.verb != "source" and skeleton.placement(node.name).pool == FUNCTIONS
        ]
        functions = {
            ("RUN", name): function_overhead(skeleton, holdings.row_count(skeleton, name)).value for name in hosted
        }
        return Space(division, skeleton, space_owners, lists, functions, later)

    def _list_choices(self, skeleton: Plan, division: Division, owner: Owner) -> list[Choice]:
        """Return the choices of an owner; a choice is one layout and one engine.

        Choices are cached. Pools of equal size at equal positions on their hosts have the same choices.
        """
        pool = division.pool_of(owner.node)
        key = (owner.nodes, pool.devices, pool.first % self.plan.cluster.devices_per_node, pool.each)
        if key not in self.lists:
            choices = Choices(self.place, self.wide)(skeleton, division, owner)
            moved = {node for edge in self.plan.graph.reshards() for node in (edge.src, edge.dst)}
            if not moved & set(owner.nodes):
                specs = self.place.engines
                choices = drop_dominated(
                    choices, lambda choice: measure_choice(skeleton, owner, specs, choice.layout, choice.engine)
                )
            self.lists[key] = choices
        return self.lists[key]
