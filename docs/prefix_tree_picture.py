"""Draws docs/prefix_tree.svg: four rows, their tree, its layout in one sequence, and the mask; from the real layout.

python docs/prefix_tree_picture.py
"""

from pathlib import Path

import numpy as np

from actionopd_jax.learning.prefix_tree import PrefixTree, lay_out, sort_rows

_CELL = 26
_COLOURS = {"s": "#cfd8dc", "a": "#90caf9", "b": "#a5d6a7", "o": "#ffe082", "c": "#f48fb1", "d": "#ce93d8"}
# A prompt s, candidates a and b; a is executed, the environment answers o; candidates c and d.
_ROWS = ("s1 s2 s3 a1 a2", "s1 s2 s3 b1 b2", "s1 s2 s3 a1 a2 o1 c1 c2", "s1 s2 s3 a1 a2 o1 d1")


def _tree() -> tuple[list[str], list[list[str]], PrefixTree]:
    rows = [row.split() for row in _ROWS]
    names = sorted({name for row in rows for name in row}, key=lambda name: ("sabocd".index(name[0]), name))
    ids = [np.array([names.index(name) for name in row], np.int32) for row in rows]
    ordered = sort_rows(ids)
    tree = lay_out([ids[i] for i in ordered.order], ordered.shared.tolist(), [0] * len(ids))
    return names, rows, tree


def _box(x: float, y: float, name: str, fill: str | None = None) -> str:
    colour = fill or _COLOURS[name[0]]
    text = f'<text x="{x + _CELL / 2}" y="{y + 17}" text-anchor="middle">{name}</text>' if name else ""
    return f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour}" stroke="#555"/>{text}'


def _title(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-weight="bold">{text}</text>'


def draw() -> str:
    """The picture as SVG."""
    names, rows, tree = _tree()
    laid = [names[token] for token in tree.tokens]
    parts = [_title(10, 22, f"Rows: {sum(map(len, rows))} tokens")]
    for i, row in enumerate(rows):
        parts += [_box(10 + j * _CELL, 32 + i * 34, name) for j, name in enumerate(row)]
    top = 200
    parts.append(_title(10, top, f"One tree in preorder: {len(laid)} tokens"))
    for label, offset in (("token", 0), ("position", 1), ("end", 2)):
        y = top + 10 + offset * 30
        parts.append(f'<text x="10" y="{y + 17}">{label}</text>')
        for i, name in enumerate(laid):
            number = {"position": tree.positions[i], "end": tree.end[i]}.get(label)
            text = name if number is None else str(number)
            parts.append(_box(80 + i * _CELL, y, text, None if number is None else "#fff"))
    left, top = 80 + (len(laid) + 2) * _CELL, 32
    parts.append(_title(left, 22, "Mask: query i sees key j when j ≤ i &lt; end[j]"))
    for i, query in enumerate(laid):
        parts.append(f'<text x="{left + 20}" y="{top + 44 + i * 20}" text-anchor="end">{query}</text>')
        parts.append(f'<text x="{left + 38 + i * 20}" y="{top + 24}" text-anchor="middle">{query}</text>')
        for j, key in enumerate(laid):
            fill = _COLOURS[key[0]] if j <= i < tree.end[j] else "#fff"
            place = f'x="{left + 28 + j * 20}" y="{top + 30 + i * 20}"'
            parts.append(f'<rect {place} width="20" height="20" fill="{fill}" stroke="#bbb"/>')
    width, height = left + 60 + len(laid) * 20, 320
    style = "font-family='sans-serif' font-size='13'"
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_name("prefix_tree.svg").write_text(draw())
