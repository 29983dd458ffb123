"""Checks of whether an engine can shard a model by a layout.

Invariant: the compiler's checks reject exactly the layouts for which `find_misfits` yields a message, and the planner
does not propose these layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from ..model.architecture import Model
from ..model.layers import KV_HEADS
from ..sharding.layout import Layout
from .spec import EngineSpec


def find_misfits(model: Model, spec: EngineSpec, layout: Layout) -> Iterator[str]:
    """Yield a message for each reason why an engine cannot shard a model by a layout.

    For example, tp does not divide the model's number of heads. If the engine pads or replicates tensors along a
    dimension, the size of this dimension need not be divisible by the number of shards.
    """
    if uneven := _list_undivided(model, spec, layout.tp):
        yield f"tp = {layout.tp} does not divide {_join_with_and(uneven)} of `{model.name}`"
    stages = layout.pp * layout.vpp
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp = {layout.vpp} needs a pipeline, but pp is 1"
    elif stages > model.layers:
        yield (
            f"{'pp x vpp' if layout.vpp > 1 else 'pp'} = {stages} is more than the {model.layers} layers of "
            f"`{model.name}`"
        )
    elif layout.stages and sum(layout.stages) != model.layers:
        yield f"`stages` hold {sum(layout.stages)} layers, `{model.name}` has {model.layers}"
    elif 0 in layout.stages:
        yield "a stage of `stages` holds no layer"
    if layout.cp > 1 and model.recurrent_mixers:
        yield f"cp = {layout.cp} shards rows, but recurrent layers of `{model.name}` need whole rows: use dp or tp"
    for heads in dict.fromkeys(mixer.heads for mixer in model.attention_mixers):
        if layout.cp > 1 and layout.cp_kind == "ulysses" and heads % (layout.tp * layout.cp):
            yield (
                f"tp x cp = {layout.tp * layout.cp} does not divide the {heads} heads of `{model.name}`, as "
                "Ulysses attention must"
            )
    if not model.experts:
        if layout.ep * layout.etp > 1:
            yield f"{'ep' if layout.ep > 1 else 'etp'} divides experts, but `{model.name}` has none"
        return
    for experts in model.experts:
        if experts.number % layout.ep:
            yield f"ep = {layout.ep} does not divide the {experts.number} experts of `{model.name}`"
        if experts.intermediate % layout.etp:
            yield (
                f"etp = {layout.etp} does not divide the intermediate size of {experts.intermediate:,} of the experts "
                f"of `{model.name}`"
            )
    if layout.stage_devices % (layout.ep * layout.etp):
        product = f"ep x etp = {layout.ep} x {layout.etp}" if layout.etp > 1 else f"ep = {layout.ep}"
        yield (f"{product} does not divide the {layout.stage_devices} devices of a stage (tp x cp x dp)")
    elif not spec.sharding.spread.has(layout):
        candidates = spec.sharding.spread.meshes(layout, model)
        supported = [f"`ep = {candidate.ep}, etp = {candidate.etp}`" for candidate in candidates]
        yield (
            f"`{spec.name}` cannot place experts with ep = {layout.ep}, etp = {layout.etp} at tp = {layout.tp}, dp = "
            f"{layout.dp}{': it supports ' * bool(supported)}{_join_with_or(supported)}"
        )


def rows_in_step(graph: Graph, node: Node) -> int | None:
    """Return the number of rows of one optimizer step of `node`.

    Every rank needs an equal share of these rows. The result is None if `node` is not an update. The result is also
    None if the number of rows is unknown: if `node` has no `mini_batch` and a node of the graph filters rows.
    """
    attributes = UpdateAttributes.of(node)
    if node.verb != "update" or (attributes.mini_batch is None and any(other.filters for other in graph.nodes)):
        return None
    return attributes.step_rows(graph.rows[graph.level(node)])


def _list_undivided(model: Model, spec: EngineSpec, tp: int) -> list[str]:
    sizes = list(
        dict.fromkeys(
            (size, name)
            for part in (*model.mixers, *model.mlps)
            for size, name in part.list_divided()
            if not (name == KV_HEADS and spec.sharding.replicates_kv_heads and tp % size == 0)
        )
    )
    if spec.sharding.vocabulary_multiple == 1:
        sizes.append((model.vocabulary, "vocabulary"))
    elif spec.sharding.pads_whole:
        padded = -(-model.vocabulary // spec.sharding.vocabulary_multiple) * spec.sharding.vocabulary_multiple
        sizes.append((padded, "padded vocabulary"))
    return [
        f"the {size:,} {name}" if name.endswith("heads") else f"the {name} of {size:,}"
        for size, name in sizes
        if size % tp
    ]


def _join_with_or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""


def _join_with_and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
