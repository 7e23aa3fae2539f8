"""What a suite reports."""
import dataclasses
from typing import Optional


@dataclasses.dataclass
class Row:
    """One case. `ratio` is above 1 where ours is better; `peer`, `ratio`, `bound` and `holds` are absent where there is none."""

    suite: str
    case: str
    ours: float
    peer: Optional[float]
    unit: str
    ratio: Optional[float] = None
    bound: Optional[str] = None
    holds: Optional[bool] = None


def ratio_of(peer, ours):
    """The peer's cost over ours; none where there is no peer, and where ours is a difference that was lost in noise."""
    return peer / ours if peer is not None and ours > 0 else None


def at_most(suite, case, ours, largest, unit, peer=None):
    return Row(suite, case, ours, peer, unit, ratio_of(peer, ours), f"<= {largest:.6g} {unit}", bool(ours <= largest))


def equal(suite, case, ours, expected, unit):
    return Row(suite, case, ours, None, unit, None, f"== {expected} {unit}", ours == expected)


def at_least_ratio(suite, case, ours, peer, unit, smallest):
    """For costs: the peer's over ours. Without a ratio it does not hold."""
    ratio = ratio_of(peer, ours)
    return Row(suite, case, ours, peer, unit, ratio, f"ratio >= {smallest}", ratio is not None and bool(ratio >= smallest))


def without_bound(suite, case, ours, peer, unit):
    return Row(suite, case, ours, peer, unit, ratio_of(peer, ours))


def table(rows):
    """The rows as text."""
    def number(value):
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [("suite", "case", "ours", "peer", "unit", "ratio", "bound", "holds")]
    for row in rows:
        holds = "" if row.holds is None else "yes" if row.holds else "NO"
        cells.append((row.suite, row.case, number(row.ours), number(row.peer), row.unit,
                      "" if row.ratio is None else f"{row.ratio:.2f}", row.bound or "", holds))
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)
