"""The differences between two plans, or between two algorithms.

Invariant: a plan has no difference from itself. If the two plans are swapped, each numeric difference changes its sign.
Values that are equal in both plans are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ..diagnostics.quantities import duration, plural
from ..diagnostics.text_page import WIDTH, Page
from ..ir.graph import Graph
from ..ir.plan import FORMAT_VERSION, Plan
from ..passes.facts import Fact, Section, Value, format_value
from .facts import facts, graph_facts


@dataclass(frozen=True)
class Change:
    """A difference between two plans: one property of one item, with both values.

    - `part`: the section of the plan, such as Memory.
    - `item` and `what`: the item in that section (a node, an edge, a phase), and the item's property.
    - `old` and `new`: the property's value in each plan, or None for a plan without the property.
    - `difference`: `new` minus `old`, if the values are numbers with a `unit`.
    - `percent`: the difference in percent of the old value. None if the old value is 0.
    - `detail`: whether the change only follows from other changes of the same item.
    """

    part: str
    item: str
    what: str
    old: Value
    new: Value
    unit: str = ""
    difference: float | None = None
    percent: float | None = None
    detail: bool = False


def difference(old: Plan, new: Plan) -> tuple[Change, ...]:
    """Return all differences between two plans, in the order of a plan's sections.

    If only one of the plans has an item, there is a single change for all properties of the item.
    """
    return tuple(_changes(facts(old), facts(new)))


def _changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> Iterator[Change]:
    for part, section in after.items():
        for item in _merge_keys(section, before[part]):
            was = before[part].get(item)
            now = section.get(item)
            if (was is None or now is None) and len(was or now or ()) != 1:
                only = was if now is None else now
                assert only is not None
                words = _summarize_item(only)
                yield Change(part, item, "", None if was is None else words, None if now is None else words)
                continue
            now = now or {}
            was = was or {}
            changes = [
                change
                for name in _merge_keys(now, was)
                for change in _compare_facts(part, item, name, was.get(name), now.get(name))
            ]
            alone = all(change.detail for change in changes)
            yield from (replace(change, detail=change.detail and not alone) for change in changes)


def _merge_keys(new: Mapping[str, object], old: Mapping[str, object]) -> list[str]:
    """Return the keys that occur in either of two mappings, without duplicates.

    The keys are in the order of the new mapping. A key that only the old mapping has follows the key that precedes it
    in the old mapping.
    """
    order = list(new)
    before = ""
    for key in old:
        if key not in new:
            order.insert(order.index(before) + 1 if before else 0, key)
        before = key
    return order


def _summarize_item(item: dict[str, Fact]) -> str:
    shown_facts = {name: fact for name, fact in item.items() if not fact.detail and fact.value not in (None, "", False)}
    return ", ".join(f"{name} {format_value(fact.value, fact.unit)}".strip() for name, fact in shown_facts.items())


def _compare_facts(part: str, item: str, name: str, old: Fact | None, new: Fact | None) -> Iterator[Change]:
    was, now = (None if fact is None else fact.value for fact in (old, new))
    if was == now and (old is None) == (new is None):
        return
    units = {fact.unit for fact in (old, new) if fact is not None}
    unit = units.pop() if len(units) == 1 else ""
    detail = any(fact.detail for fact in (old, new) if fact is not None)
    if not unit:
        yield Change(part, item, name, was, now, detail=detail)
        return
    # A missing value counts as 0: the bytes of an item of memory that only the new plan has.
    one = float(was or 0)
    two = float(now or 0)
    yield Change(part, item, name, was, now, unit, two - one, 100 * (two - one) / one if one else None, detail)


def diff_text(changes: tuple[Change, ...], old: str, width: int = WIDTH, colour: bool = False) -> str:
    """Format changes as text, with one table for each section of the plan.

    `old` is the name of the old plan in the text.
    """
    page = Page(width, colour)
    if not changes:
        page.closing(
            f"No differences from {old}: the same program, placements, docks, resharding, bytes, memory and seconds."
        )
        return page.text()
    shown = [change for change in changes if not change.detail]
    for part in dict.fromkeys(change.part for change in shown):
        part_changes = [change for change in shown if change.part == part]
        page.heading(part, plural(len(part_changes), "change"))
        page.table(("item", "property", "old", "new", "change"), _rows(part_changes), (4,), ())
    rest = len(changes) - len(shown)
    more = f", and {rest} that follow from these (`--format json` lists all)" if rest else ""
    page.closing(f"{plural(len(shown), 'change')} from {old}{more}.{_summarize_iteration(changes)}")
    return page.text()


def extension_text(base: Graph, graph: Graph, width: int = WIDTH, colour: bool = False) -> str:
    """Format the changes that an algorithm makes to its `base`.

    The base is the algorithm that it extends.
    """
    page = Page(width, colour)
    changes = [
        replace(change, item=f"param {change.item}") if change.part == "Params" else change
        for change in _changes(graph_facts(base), graph_facts(graph))
    ]
    page.heading(f"Changes from {base.name}", plural(len(changes), "change"))
    if changes:
        page.table(("item", "property", base.name, graph.name, "change"), _rows(changes), (4,), ())
    return page.text()


def _rows(changes: Iterable[Change]) -> Sequence[Sequence[str]]:
    """Return the rows of a table of changes.

    Only the first row of an item has the item's name.
    """
    rows = []
    item = None
    for change in changes:
        cells = (
            format_value(change.old, change.unit),
            format_value(change.new, change.unit),
            _format_difference(change),
        )
        rows.append((change.item if change.item != item else "", change.what, *cells))
        item = change.item
    return rows


def _summarize_iteration(changes: tuple[Change, ...]) -> str:
    """Return a sentence that says how the time of an iteration changed."""
    for change in changes:
        if change.part == "Seconds" and change.item == "an iteration" and change.difference is not None:
            percent = f" ({_format_percent(change)})" if change.percent is not None else ""
            return (
                f" An iteration takes {duration(abs(change.difference))} "
                f"{'more' if change.difference > 0 else 'less'}{percent}."
            )
    return " An iteration takes as long as before."


def _format_difference(change: Change) -> str:
    if change.difference is None:
        return "added" if change.old is None else "removed" if change.new is None else ""
    sign = "+" if change.difference > 0 else "-"
    return f"{sign}{format_value(abs(change.difference), change.unit)}" + (
        f" ({_format_percent(change)})" if change.percent is not None else ""
    )


def _format_percent(change: Change) -> str:
    assert change.percent is not None
    digits = ".1f" if abs(change.percent) >= 0.05 else ".1g"
    return f"{change.percent:+{digits}} %"


def diff_json(changes: tuple[Change, ...], old: str) -> str:
    """Format changes as JSON.

    Each `difference` is a number in the `unit` of its change. Each `percent` is relative to the old value.
    """
    content = {"format_version": FORMAT_VERSION, "stage": "diff", "old": old, "changes": changes}
    return msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"
