"""The page of a report."""
import html
import pathlib

TEMPLATE = pathlib.Path(__file__).resolve().parent / "page.html"
COLUMNS = ["file", "status", "measure", "model", "strategy", "layout", "ranks", "mesh", "reshard", "precision", "transport", "offload", "recompute",
           "layers", "width", "batch", "sequence", "steps", "memory_limit_mb", "ms", "p90 ms", "items/s", "waited ms", "sent MB", "state MB", "peak MB", "explained MB", "message"]


def cell(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:.0f}"
    return str(value)


def row_of(case):
    row = {name: case.settings.get(name, "") for name in COLUMNS} | {"file": case.file, "status": case.status, "message": case.message}
    if case.measure == "redistribution":
        row.update({name: "" for name in ("model", "strategy", "layout", "mesh", "reshard", "precision", "offload", "recompute", "layers", "batch", "sequence")})
        row["measure"] = f"redistribution {case.transition}"
    if case.ok:
        measured = case.measured
        row.update({"ms": float(case.milliseconds), "p90 ms": float(measured["milliseconds"].get("p90", case.milliseconds)),
                    "items/s": float(measured["items_per_second"]) if "items_per_second" in measured else "",
                    "waited ms": float(measured["exposed_milliseconds"]), "sent MB": case.sent_bytes / 1e6,
                    "state MB": measured["state_bytes"] / 1e6, "peak MB": measured["peak_bytes"] / 1e6,
                    "explained MB": measured["explained_peak_bytes"] / 1e6 if "explained_peak_bytes" in measured else ""})
    return row


def table(cases):
    rows = [row_of(case) for case in cases]
    shown = [name for name in COLUMNS if len({cell(row[name]) for row in rows}) > 1 or name in ("status", "strategy", "ranks", "ms", "peak MB")]
    head = "".join(f'<th scope="col"><button type="button">{html.escape(name)}</button></th>' for name in shown)
    body = []
    for row in rows:
        cells = (f'<td data-value="{html.escape(str(row[name]))}"{" class=number" if isinstance(row[name], (int, float)) else ""}>'
                 f"{html.escape(cell(row[name]))}</td>" for name in shown)
        body.append(f'<tr class="{"ok" if row["status"] == "ok" else "not-ok"}">{"".join(cells)}</tr>')
    return f'<table id="cases"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def picture(plot, theme):
    return (f'<picture class="{theme}"><source media="(max-width: 700px)" srcset="{plot.svg_url(False, theme)}">'
            f'<img src="{plot.svg_url(True, theme)}" alt="{html.escape(plot.title)}: {html.escape(plot.note)}"></picture>')


def section(plot):
    return (f'<section id="{plot.name}"><h2>{html.escape(plot.title)}</h2><p>{html.escape(plot.note)}</p>'
            f'{picture(plot, "light")}{picture(plot, "dark")}</section>')


def describe(file):
    facts = {**file.machine, **file.versions}
    if isinstance(facts.get("memory_bytes"), int):
        facts["memory"] = f'{facts.pop("memory_bytes") / 2**30:.0f} GiB'
    counts = {status: sum(case.status == status for case in file.cases) for status in {case.status: 0 for case in file.cases}}
    facts["cases"] = ", ".join(f"{count} {status}" for status, count in counts.items())
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items())
    return f"<details open><summary>{html.escape(file.name)}</summary><dl>{items}</dl></details>"


def render(files, plots):
    page = TEMPLATE.read_text(encoding="utf-8")
    parts = {"machines": "".join(describe(file) for file in files), "plots": "".join(section(plot) for plot in plots),
             "table": table([case for file in files for case in file.cases])}
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page
