"""Pictures as Graphviz text, for `dot -Tsvg`.

Invariant: every name is written as a quoted string, whatever characters the name contains. So no name can end its
quoted string or be read as a Graphviz keyword. The same picture gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .picture import Box, Picture

SHAPES = {
    "source": "cds",
    "function": "box",
    "dock": "cylinder",
    "allgather_swap": "hexagon",
    "send": "hexagon",
}
STYLES = {"reshard": "dashed", "kept": "dotted"}


def dot_text(picture: Picture) -> str:
    """Return a picture as a Graphviz digraph.

    Groups of boxes are clusters. Sample edges are solid lines, and resharding edges are dashed lines. A dotted line
    leads from the node that sets a state of the algorithm to a node that reads the state.
    """
    lines = [
        f"digraph {_quote([picture.title])} {{",
        '  graph [fontname="sans-serif", newrank=true]',
        '  node [fontname="sans-serif", fontsize=11, shape=box, style=rounded]',
        '  edge [fontname="sans-serif", fontsize=9]',
    ]
    for number, (group, remark) in enumerate(picture.groups):
        # To Graphviz a subgraph is a cluster if its name begins with `cluster`.
        lines += [
            f"  subgraph cluster_{number} {{",
            f"    label={_quote([group, remark])}",
            "    fontsize=11",
            "    color=gray",
        ]
        lines += [f"    {_format_box(box)}" for box in picture.boxes if box.group == group]
        lines.append("  }")
    lines += [f"  {_format_box(box)}" for box in picture.boxes if not box.group]
    for arrow in picture.arrows:
        more = [f"label={_quote(arrow.lines)}"] if arrow.lines else []
        # Arrows of weights and states lead back to the start of an iteration, so they must not order the nodes.
        more += [f"style={STYLES[arrow.kind]}", "constraint=false"] if arrow.kind in STYLES else []
        attributes = f" [{', '.join(more)}]" if more else ""
        lines.append(f"  {_quote([arrow.src])} -> {_quote([arrow.dst])}{attributes}")
    return "\n".join([*lines, "}"]) + "\n"


def _format_box(box: Box) -> str:
    shape = SHAPES.get(box.kind)
    more = f', shape={shape}, style=""' if shape else ""
    return f"{_quote([box.name])} [label={_quote([box.name, *box.lines])}{more}]"


def _quote(lines: Sequence[str]) -> str:
    """Return lines as one quoted Graphviz string.

    Backslashes in the lines are escaped, so that they do not begin Graphviz escape sequences.
    """
    plain = ("".join(letter if letter.isprintable() else " " for letter in line) for line in lines)
    shown = (line.replace("\\", "\\\\").replace('"', '\\"') for line in plain)
    return '"' + "\\n".join(shown) + '"'
