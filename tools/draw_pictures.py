"""Draws the pictures of the documents: docs/pictures/NAME.svg out of docs/pictures/NAME.toml.

    python tools/draw_pictures.py            draws all of them

A picture has a `title`, a `size` in pixels, `boxes` as "name | x y width height | kind | text" with `/`
between lines, and `arrows` as "name -> name | text" (`<->` both ways, `..>` dashed). It follows the
reader's colours.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
LINE = 17  # pixels from one line of text to the next
GAP = 4  # pixels between an arrow's end and a box
STYLE = """
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1f2933;text-anchor:middle}
.label{font-size:12px;fill:#52606d;paint-order:stroke;stroke:#fff;stroke-width:5px;stroke-linejoin:round}
.name{font-weight:600;text-anchor:start}
rect{rx:8;stroke-width:1.5}
.page{fill:#fff;rx:0}
.group{fill:#f5f7fa;stroke:#9aa5b1;stroke-dasharray:5 4}
.task{fill:#d5f2ee;stroke:#0f8a7e}
.store{fill:#fdecc8;stroke:#b7791f}
.head{fill:#e3e0fb;stroke:#5b4fc7}
.plain{fill:#e8ecf0;stroke:#7b8794}
.note{fill:none;stroke:none}
line{stroke:#52606d;stroke-width:1.6}
.dashed{stroke-dasharray:5 4}
marker path{fill:#52606d}
@media (prefers-color-scheme:dark){
text{fill:#e4e7eb}.label{fill:#b8c2cc;stroke:#131416}
.page{fill:#131416}.group{fill:#1c1f24;stroke:#616e7c}.task{fill:#0b4f49;stroke:#3ec5b5}
.store{fill:#5a3e0c;stroke:#e0a63f}.head{fill:#332c73;stroke:#9d94f0}.plain{fill:#2c323a;stroke:#7b8794}
line{stroke:#b8c2cc}marker path{fill:#b8c2cc}}
"""


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str

    @property
    def center(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def parse_box(line: str) -> tuple[str, Box]:
    """Return a box and its name. Raises ValueError."""
    name, place, kind, text = (part.strip() for part in line.split("|"))
    x, y, width, height = map(float, place.split())
    return name, Box(x, y, width, height, kind, text)


def find_edge(box: Box, towards: tuple[float, float]) -> tuple[float, float]:
    """Return the point at which a line from the middle of a box leaves it, and a bit of room."""
    x, y = box.center
    dx, dy = towards[0] - x, towards[1] - y
    scale = min((side / 2 + GAP) / abs(d) for side, d in ((box.width, dx), (box.height, dy)) if d)
    return x + dx * scale, y + dy * scale


def draw_box(box: Box) -> Iterator[str]:
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    yield f'<rect class="{box.kind}" {place}/>'
    lines = [escape(line.strip()) for line in box.text.split("/")]
    if box.kind == "group":
        yield f'<text class="name" x="{box.x + 10:g}" y="{box.y + 20:g}">{lines[0]}</text>'
        return
    x, y = box.center
    first = y - (len(lines) - 1) * LINE / 2 + 5
    style = ' class="label"' if box.kind == "note" else ""
    for number, line in enumerate(lines):
        yield f'<text{style} x="{x:g}" y="{first + number * LINE:g}">{line}</text>'


def draw_arrow(line: str, boxes: dict[str, Box]) -> Iterator[str]:
    match = re.fullmatch(r"(\S+) (->|<->|\.\.>|--) (\S+)(?: \| (.*))?", line)
    if match is None:
        raise ValueError(f"An arrow is 'name -> name | text'. Received: {line!r}")
    start, kind, end, text = match.groups()
    a, b = boxes[start], boxes[end]
    (x1, y1), (x2, y2) = find_edge(a, b.center), find_edge(b, a.center)
    heads = "" if kind == "--" else ' marker-end="url(#head)"'
    heads += ' marker-start="url(#head)"' if kind == "<->" else ""
    dashed = ' class="dashed"' if kind == "..>" else ""
    yield f'<line{dashed} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{heads}/>'
    if text:
        lines = [escape(each.strip()) for each in text.split("/")]
        top = (y1 + y2) / 2 - (len(lines) - 1) * 7 + 4
        for number, each in enumerate(lines):
            yield f'<text class="label" x="{(x1 + x2) / 2:.1f}" y="{top + 14 * number:.1f}">{each}</text>'


def draw(picture: dict[str, Any]) -> str:
    """Return a picture as SVG."""
    width, height = picture["size"]
    boxes = dict(map(parse_box, picture["boxes"]))
    title = escape(picture["title"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>',
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for box in boxes.values():
        parts += draw_box(box)
    for line in picture.get("arrows", ()):
        parts += draw_arrow(line, boxes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Draw all pictures."""
    for source in sorted(PICTURES.glob("*.toml")):
        source.with_suffix(".svg").write_text(draw(tomllib.loads(source.read_text())))


if __name__ == "__main__":
    sys.exit(main())
