"""Tables and pictures of a study, from what study.json has of it."""
import re

from . import svg


def megabytes(value):
    return "" if value is None else f"{value / 1e6:.0f}"


def time_of(seconds):
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.1f} h"


def off(predicted, measured):
    return "" if not predicted or not measured else f"{100 * (predicted / measured - 1):+.1f} %"


def failure(row):
    fails = row.get("fails")
    return "" if not fails else f"{fails['batch']}: {fails['status']}"


def batch(row):
    rows = row["largest_batch"]
    return "does not fit" if rows == 0 else f"{'≥ ' if row.get('reached_most_rows') else ''}{rows}"


COLUMNS = [
    ("method", lambda row, base: row["method"]),
    ("largest batch, rows a rank", lambda row, base: batch(row)),
    ("`explain` said", lambda row, base: str(row.get("predicted_largest_batch", ""))),
    ("the next fails with", lambda row, base: failure(row)),
    ("tokens / s", lambda row, base: f"{row['items_per_second']:.0f}" if "items_per_second" in row else ""),
    ("an epoch", lambda row, base: time_of(row.get("epoch_seconds"))),
    ("of the first's time", lambda row, base: f"{row['epoch_seconds'] / base:.2f}" if base and "epoch_seconds" in row else ""),
    ("peak MB", lambda row, base: megabytes(row.get("peak_bytes"))),
    ("`explain`'s peak MB", lambda row, base: megabytes(row.get("explained_peak_bytes"))),
    ("off", lambda row, base: off(row.get("explained_peak_bytes"), row.get("peak_bytes"))),
    ("`tessera-plan`'s peak MB", lambda row, base: megabytes(row.get("planned_peak_bytes"))),
    ("state MB", lambda row, base: megabytes(row.get("state_bytes"))),
    ("process MB", lambda row, base: megabytes(row.get("process_peak_bytes"))),
]


def base_of(rows):
    """The time of an epoch of the first method that fits."""
    return next((row["epoch_seconds"] for row in rows if "epoch_seconds" in row), None)


def table(study):
    """In Markdown. A column that no row fills is left out."""
    rows, base = study["rows"], base_of(study["rows"])
    cells = [[text(row, base) for row in rows] for _, text in COLUMNS]
    used = [i for i, column in enumerate(cells) if any(column)]
    lines = ["| " + " | ".join(COLUMNS[i][0] for i in used) + " |", "|" + "---|" * len(used)]
    lines += ["| " + " | ".join(cells[i][j] for i in used) + " |" for j in range(len(rows))]
    return "\n".join(lines)


def heading(study, ranks):
    return (f"{study['parameters'] / 1e6:.1f} million parameters ({study['layers']} layers, width {study['width']}), rows of {study['sequence']} tokens, "
            f"{ranks} ranks, {study['limit_mb']} MB a rank")


def pictures(study):
    """{name: SVG}"""
    rows = study["rows"]
    fits = lambda row, name, scale=1: row[name] / scale if row.get(name) is not None and row["largest_batch"] else None
    name = study["name"]
    return {
        f"study_{name}_batch": svg.bars("Largest batch that fits", [(row["method"], [float(row["largest_batch"]) or None], "does not fit") for row in rows],
                                        ["rows a rank"], "rows"),
        f"study_{name}_memory": svg.bars("Peak memory of a rank at that batch",
                                         [(row["method"], [fits(row, "peak_bytes", 1e6), row.get("explained_peak_bytes", 0) / 1e6 or None], "does not fit with one row")
                                          for row in rows], ["measured", "explain predicted"], "MB", ("the limit", study["limit_mb"])),
        f"study_{name}_epoch": svg.bars("Time of an epoch at that batch", [(row["method"], [fits(row, "epoch_seconds", 60)], "does not fit") for row in rows],
                                        ["minutes"], "min"),
    }


def put_into(page, tables):
    """The page with each table between its two marks, `<!-- study: a -->` and `<!-- end -->`."""
    for name, text in tables.items():
        page, count = re.subn(rf"(<!-- study: {name} -->\n).*?(<!-- end -->)", lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} places for the table of study {name}, but must have 1")
    return page
