"""Graphviz text of a picture: what `dot -Tsvg` reads.

Invariant: every name is a quoted string, whatever it holds, so that no name can end another or be taken for a keyword;
the same picture gives the same bytes.
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
    """A digraph: a cluster for each group, sample edges solid, resharding edges dashed, states dotted."""
    lines = [
        f"digraph {_quoted([picture.title])} {{",
        '  graph [fontname="sans-serif", newrank=true]',
        '  node [fontname="sans-serif", fontsize=11, shape=box, style=rounded]',
        '  edge [fontname="sans-serif", fontsize=9]',
    ]
    for number, (group, what) in enumerate(picture.groups):
        # Graphviz takes a subgraph for a cluster by the beginning of its name.
        lines += [
            f"  subgraph cluster_{number} {{",
            f"    label={_quoted([group, what])}",
            "    fontsize=11",
            "    color=gray",
        ]
        lines += [f"    {_box(b)}" for b in picture.boxes if b.group == group]
        lines.append("  }")
    lines += [f"  {_box(b)}" for b in picture.boxes if not b.group]
    for a in picture.arrows:
        more = [f"label={_quoted(a.lines)}"] if a.lines else []
        # Weights, and what is kept, go back to the start of an iteration: they say nothing of the order of states.
        more += [f"style={STYLES[a.kind]}", "constraint=false"] if a.kind in STYLES else []
        attributes = f" [{', '.join(more)}]" if more else ""
        lines.append(f"  {_quoted([a.src])} -> {_quoted([a.dst])}{attributes}")
    return "\n".join([*lines, "}"]) + "\n"


def _box(box: Box) -> str:
    shape = SHAPES.get(box.kind)
    more = f', shape={shape}, style=""' if shape else ""
    return f"{_quoted([box.name])} [label={_quoted([box.name, *box.lines])}{more}]"


def _quoted(lines: Sequence[str]) -> str:
    """A quoted string of lines; a backslash is one, and begins no escape of Graphviz's."""
    plain = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    shown = (line.replace("\\", "\\\\").replace('"', '\\"') for line in plain)
    return '"' + "\\n".join(shown) + '"'
