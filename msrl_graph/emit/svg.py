"""A picture as SVG, drawn without another program, for pages and notebooks.

Invariant: the result is well-formed XML. Text that comes from a program cannot become XML markup, whatever it contains.
Colors come from the CSS classes in drawing.html.j2, so the same drawing works on a light and on a dark page.
"""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from .layered_layout import Extent, draw
from .picture import COLOURS, Box, Picture

LETTER = 7.7  # the most pixels of a letter's width in a name
SMALL = 6.3  # the most pixels of a letter's width in other text
LINE = 15.0  # the height of a line in pixels
LONGEST = 40  # the most letters in a line
ARROWS = {"sample": "->", "reshard": "=>", "kept": "sets, for"}
MARGIN = 8.0


def clean(text: str) -> str:
    """Replace characters that XML cannot contain, and line breaks, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def svg(picture: Picture) -> str:
    """Return a picture as an SVG element.

    The CSS class of a box is `state` (a node of the graph) or `put` (inserted by a pass). A box of the N-th group also
    has the class `cN`. The class of an arrow is its kind.
    """
    boxes = {box.name: _measure_text(box.name, box.lines, 22, 14) for box in picture.boxes}
    labels = [
        _measure_text("", picture_arrow.lines, 6, 0) if picture_arrow.lines else (0.0, 0.0)
        for picture_arrow in picture.arrows
    ]
    drawn = draw(
        boxes,
        [
            (picture_arrow.src, picture_arrow.dst, label)
            for picture_arrow, label in zip(picture.arrows, labels, strict=True)
        ],
    )
    width = drawn.width + 2 * MARGIN
    height = drawn.height + 2 * MARGIN
    root = ET.Element("svg", {"viewBox": f"{-MARGIN:g} {-MARGIN:g} {width:.1f} {height:.1f}", "role": "img"})
    # Between the size of the drawing and the smallest readable size.
    root.set("style", f"width:100%;max-width:{width:.0f}px;min-width:{0.72 * width:.0f}px")
    ET.SubElement(root, "title").text = clean(picture.title)
    groups = {name: number % COLOURS for number, (name, _) in enumerate(picture.groups)}
    for picture_arrow, route in zip(picture.arrows, drawn.routes, strict=True):
        arrow = ET.SubElement(root, "g", {"class": picture_arrow.kind})
        ET.SubElement(arrow, "title").text = clean(
            f"{picture_arrow.src} {ARROWS[picture_arrow.kind]} {picture_arrow.dst}"
        )
        ET.SubElement(arrow, "path", {"d": _curve_path(route.points)})
        ET.SubElement(arrow, "path", {"class": "tip", "d": _tip_path(route.points)})
    for picture_arrow, route, extent in zip(picture.arrows, drawn.routes, labels, strict=True):
        if route.label is not None:
            _draw_label(root, route.label, extent, picture_arrow.lines)
    for box in picture.boxes:
        _draw_box(root, box, drawn.places[box.name], boxes[box.name], groups.get(box.group))
    return ET.tostring(root, encoding="unicode")


def shorten(text: str, most: int = LONGEST) -> str:
    """Shorten a text to the width of `most` letters by cutting out its middle.

    The beginning and the end of the text remain, because a node's name ends with its verb.
    """
    text = clean(text)
    if cell_len(text) <= most:
        return text
    tail = text[-(most // 2) :]
    while cell_len(tail) > most // 2:
        tail = tail[1:]
    return set_cell_size(text, most - cell_len(tail) - 1).rstrip() + "…" + tail


def _wrap_lines(lines: Sequence[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(clean(line), LONGEST, break_long_words=False, break_on_hyphens=False)
    ]


def _measure_text(name: str, lines: Sequence[str], more_width: float, more_height: float) -> Extent:
    facts = _wrap_lines(lines)
    widest = max([LETTER * cell_len(shorten(name)), *(SMALL * cell_len(shorten(fact)) for fact in facts)])
    return widest + more_width, (len(facts) + bool(name)) * LINE + more_height


def _draw_box(root: ET.Element, box: Box, centre: tuple[float, float], extent: Extent, colour: int | None) -> None:
    x, y = centre
    width, height = extent
    is_node = box.kind not in ("dock", "allgather_swap", "send")
    group = ET.SubElement(
        root, "g", {"class": f"{'state' if is_node else 'put'}{f' c{colour}' if colour is not None else ''}"}
    )
    ET.SubElement(group, "title").text = clean("\n".join([box.name, *box.lines]))
    radius = {"dock": height / 2, "function": 1, "source": 1, "allgather_swap": height / 2, "send": height / 2}.get(
        box.kind, 7
    )
    place = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height, "rx": min(radius, 16)}
    ET.SubElement(group, "rect", {name: f"{value:.1f}" for name, value in place.items()})
    _draw_text(group, x, y - height / 2 + 7, [box.name], "name")
    _draw_text(group, x, y - height / 2 + 7 + LINE, box.lines, "fact")


def _draw_label(root: ET.Element, centre: tuple[float, float], extent: Extent, lines: Sequence[str]) -> None:
    x, y = centre
    width, height = extent
    group = ET.SubElement(root, "g", {"class": "label"})
    place = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height}
    ET.SubElement(group, "rect", {name: f"{value:.1f}" for name, value in place.items()})
    ET.SubElement(group, "title").text = clean("\n".join(lines))
    _draw_text(group, x, y - height / 2, lines, "fact")


def _draw_text(root: ET.Element, x: float, top: float, lines: Sequence[str], kind: str) -> None:
    for number, line in enumerate(_wrap_lines(lines) if kind == "fact" else lines):
        ET.SubElement(
            root, "text", {"class": kind, "x": f"{x:.1f}", "y": f"{top + number * LINE + 11.5:.1f}"}
        ).text = shorten(line)


def _curve_path(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        if abs(to_x - x) < 0.05:
            parts.append(f"V{to_y:.1f}")
        else:
            middle = (y + to_y) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        x = to_x
        y = to_y
    return " ".join(parts)


def _tip_path(points: Sequence[tuple[float, float]]) -> str:
    """Return the SVG path of the tip of an arrow.

    The last segment of the arrow is vertical. The tip points down, or up for an arrow from a later box to an earlier
    one.
    """
    x, y = points[-1]
    offset = -7 if points[-1][1] >= points[0][1] else 7
    return f"M{x:.1f} {y:.1f} L{x - 4:.1f} {y + offset:.1f} L{x + 4:.1f} {y + offset:.1f} Z"
