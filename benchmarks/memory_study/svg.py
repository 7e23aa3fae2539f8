"""Bars as an SVG picture, for light and dark pages."""
from html import escape

BAR, GAP, LEFT, RIGHT, WIDTH, TOP = 15, 9, 215, 130, 760, 44
COLOURS = ["#0072b2", "#e69f00", "#009e73"]  # of Okabe and Ito
STYLE = ("text{font:12px sans-serif;fill:#1c1c1e}.line{stroke:#8e8e93}.none{fill:#8e8e93}"
         "@media(prefers-color-scheme:dark){text{fill:#ececf0}.none{fill:#aeaeb2}}")


def bars(title, rows, series, unit, limit=None, number="{:.0f}"):
    """A group of bars for each of `rows`, pairs of a name and a value of each of `series`; None is written as its text in `none`.
    `limit`, a pair of a text and a value, is a line across."""
    values = [value for _, group, _ in rows for value in group if value is not None] + ([limit[1]] if limit else [])
    scale = (WIDTH - LEFT - RIGHT) / max(values, default=1)
    height = len(series) * BAR + GAP
    bottom = TOP + len(rows) * height
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 26}" role="img"><title>{escape(title)}</title>',
             f"<style>{STYLE}</style>", f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    x = 0
    for name, colour in zip(series, COLOURS):
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="33">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    for i, (name, group, none) in enumerate(rows):
        y = TOP + i * height
        parts.append(f'<text x="{LEFT - 8}" y="{y + len(series) * BAR / 2 + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        for j, value in enumerate(group):
            top = y + j * BAR
            if value is None:
                parts.append(f'<text class="none" x="{LEFT + 4}" y="{top + 12}">{escape(none)}</text>' if j == 0 else "")
                continue
            parts.append(f'<rect x="{LEFT}" y="{top + 1}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{COLOURS[j]}"/>')
            text = f"{number.format(value)} {unit}"
            parts.append(f'<text x="{LEFT + value * scale + 5:.1f}" y="{top + 12}">{escape(text)}</text>')
    if limit:
        at = LEFT + limit[1] * scale
        parts.append(f'<path class="line" d="M{at:.1f} {TOP - 4}V{bottom}" stroke-dasharray="4 3" fill="none"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(limit[0])}</text>')
    return "\n".join(part for part in parts if part) + "\n</svg>\n"
