"""Numbers and layouts as short text for people.

Invariant: this module imports no drawing code, so it loads quickly for commands that only check a program.
"""

from __future__ import annotations

import msgspec

from ..ir.async_schedule import count_opening, lead_of_pools
from ..ir.graph import Worker
from ..ir.instruction import InstructionStream
from ..ir.plan import FUNCTIONS, Plan
from ..ir.search_record import Rival, SearchRecord
from ..model.architecture import Model
from ..model.layers import ExpertMlp, Layer
from ..sharding.layout import Layout


def size(number: float) -> str:
    """Format a number of bytes in decimal units (kB, MB, …), with three digits."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}" if number < 999.5 * one else f"{number / one:,.0f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds as s, ms or us, with three digits."""
    if seconds == 0:
        return "0"
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one:
            return f"{seconds / one:,.0f} {unit}" if seconds >= 100 * one else f"{seconds / one:.3g} {unit}"
    return "< 1 us"


def plural(number: int, noun: str) -> str:
    """Format a count with its noun: `1 host`, `2 hosts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_instructions(plan: Plan, stream: InstructionStream) -> str:
    """List the instructions that a pool runs in an iteration, in order.

    If the pool runs its first instructions for a later iteration, the text says for which iteration.
    """
    steps = [*map(str, stream.instructions)]
    first = count_opening(plan, stream)
    if not first:
        return ", ".join(steps)
    if stream.pool == FUNCTIONS:
        return f"{', '.join(steps[:first])}; after those of the iteration before: {', '.join(steps[first:])}"
    lead = lead_of_pools(plan)[stream.pool]
    iteration = "the next iteration" if lead == 1 else f"the iteration {lead} after this"
    return f"for {iteration}: {', '.join(steps[:first])}; then for this one: {', '.join(steps[first:])}"


def staleness(mean: float, bound: int) -> str:
    """Describe the average age of generations' weights, and the greatest age of a row.

    Both ages are in versions: `mean` is the average age, `bound` is the greatest age.
    """
    return f"{mean:.3g} version{'' if mean == 1 else 's'} old on average, and rows at most {bound}"


def format_parameters(number: int) -> str:
    return f"{number / 1e9:.4g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


def describe_frozen(worker: Worker, model: Model) -> str:
    """Return a text about how much of a worker's model is trained."""
    trained, every = (sum(tensor.elements for tensor in tensors) for tensors in (model.trained, model.weights))
    counts = f"{format_parameters(trained)} of {format_parameters(every)} parameters are trained"
    return f"worker {worker.name}: {counts}, frozen: {', '.join(worker.freeze)}"


def format_layout(layout: Layout) -> str:
    """Format a layout; the ZeRO stage is shown only if it is 2 or 3."""
    return f"{layout} zero{layout.zero}" if layout.zero > 1 else str(layout)


def describe_layers(stack: tuple[Layer, ...]) -> str:
    """Describe the layers of a model, in order; a repeated pattern is described once."""
    period = next(size for size in range(1, len(stack) + 1) if stack == stack[:size] * (len(stack) // size))
    pattern = "; ".join(map(_describe_layer, stack[:period]))
    return f"{len(stack) // period} x ({pattern})" if period < len(stack) else pattern


def _describe_layer(layer: Layer) -> str:
    """Describe layers of one kind: their number, sizes and options."""
    parts = []
    for part in (layer.mixer, layer.mlp):
        sizes = {name: value for name, value in msgspec.structs.asdict(part).items() if value}
        words = ", ".join(name if value is True else f"{name} {value}" for name, value in sizes.items())
        parts.append(f"{type(part).__struct_config__.tag} ({words})")
    return f"{layer.count} x {', '.join(parts)}"


def describe_experts(experts: ExpertMlp, layout: Layout) -> str:
    """Describe a rank's share of a layer's experts, and the mesh of the experts.

    The mesh has three sizes: `ep`, `etp` and `edp` (the number of copies of each expert in a pipeline stage).
    """
    part = f"1/{layout.etp} of each of " if layout.etp > 1 else ""
    number = f"{experts.number // layout.ep} of {experts.number}" if layout.ep > 1 else f"all {experts.number}"
    return f"{part}{number} a rank; ep {layout.ep} x etp {layout.etp} x edp {layout.edp}"


def compare_rival(record: SearchRecord, rival: Rival) -> str:
    """Compare the chosen plan with the best plan of the other kind, its rival.

    There are two kinds of plans. In a plan of the first kind, pools of generations run ahead of the updates (with
    staleness). In a plan of the second kind, all pools are in step. The search compares both kinds if the file does not
    say whether any pool may run ahead.
    """
    kind = "with pools ahead of the updates" if rival.ahead else "with all pools in step"
    if not rival.seconds:
        return f"{kind}, nothing fits"
    best = f"{kind}, the best plan found takes {duration(rival.seconds)}"
    old = staleness(rival.mean, rival.bound)
    if rival.ahead:
        more = rival.seconds / record.seconds - 1
        return f"{best}, {f'{100 * more:.3g} % more' if more > 0 else 'as long'}, with weights {old}"
    return f"{best}, of which staleness saves {100 * (1 - record.seconds / rival.seconds):.3g} %; weights are {old}"
