"""The plots of a report: each is drawn anew for a width and a theme."""
import base64
import dataclasses
import io
import textwrap
import typing

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402

THEMES = {"light": {"text": "#1c1c1e", "grid": "#d8d8dc", "page": "#ffffff"}, "dark": {"text": "#ececf0", "grid": "#48484e", "page": "#1c1c1f"}}
# Okabe and Ito's colours, which people tell apart whatever colours they see.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d1f", "#7f7f7f"]
HATCHES = ["", "//", "..", "xx", "\\\\", "++"]
WIDE, NARROW = 11.0, 4.2  # inches


@dataclasses.dataclass
class Plot:
    """`draw(figure, wide)` draws it; `rows(wide)` is its height in lines of text or bars."""
    name: str
    title: str
    note: str
    draw: typing.Callable
    rows: typing.Callable

    def figure(self, wide, theme):
        colours = THEMES[theme]
        style = {"font.size": 10 if wide else 9.2, "text.color": colours["text"], "axes.labelcolor": colours["text"], "axes.edgecolor": colours["grid"],
                 "xtick.color": colours["text"], "ytick.color": colours["text"], "grid.color": colours["grid"], "axes.facecolor": colours["page"],
                 "figure.facecolor": colours["page"], "legend.frameon": False, "svg.fonttype": "path", "svg.hashsalt": "tessera", "text.parse_math": False,
                 "hatch.color": colours["page"], "hatch.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(WIDE if wide else NARROW, 1.3 + 0.27 * self.rows(wide)), layout="constrained")
            self.draw(figure, wide)
            buffer = io.BytesIO()
            yield figure, buffer

    def write(self, wide, theme, kind, **options):
        for figure, buffer in self.figure(wide, theme):
            figure.savefig(buffer, format=kind, **options)
            return buffer.getvalue()

    def png(self):
        return self.write(True, "light", "png", dpi=110)

    def svg_url(self, wide, theme):
        text = self.write(wide, theme, "svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(text).decode()


def varying(cases, names):
    """Those of `names` in which the cases differ."""
    return [name for name in names if len({case.settings[name] for case in cases}) > 1]


class Labels:
    """Names for the cases of a plot, from the settings in which they differ, apart from ranks. Cases that differ in none get numbers."""

    def __init__(self, cases, besides=(), always=("strategy",)):
        names = ["layout", "reshard", "precision", "transport", "offload", "recompute", "mesh", "layers", "width", "sequence", "batch", "steps",
                 "memory_limit_mb"]
        self.names = [name for name in varying(cases, names) if name not in besides]
        self.kinds = [name for name in ("model", "strategy") if name in always or varying(cases, [name])]
        self.files = len({case.file for case in cases}) > 1
        alike = {}
        for case in cases:
            alike.setdefault((case.measure, case.transition, case.ranks, self.differences(case)), []).append(case)
        self.labels = {id(case): f"{text} ({number})".strip() if len(same) > 1 else text
                       for (*_, text), same in alike.items() for number, case in enumerate(same, 1)}

    def of(self, case):
        return self.labels[id(case)]

    def differences(self, case):
        parts = [case.settings[name] for name in self.kinds]
        for name in self.names:
            value = case.settings[name]
            if isinstance(value, bool):
                parts += [name] if value else []
            elif isinstance(value, str):
                parts += [f"{name} {value}" if value in ("auto", "true", "false", "none", "host", "files") else value] if value else []
            else:
                parts.append(f"{name} {value}")
        return ", ".join(parts + ([case.file] if self.files else []))


def wrapped(names, wide):
    """In lines that leave room for what they name."""
    return ["\n".join(textwrap.wrap(name, 60 if wide else 20)) for name in names]


def lines_of(names, wide):
    """How many lines each takes, of those that take most."""
    return max(text.count("\n") + 1 for text in wrapped(names, wide))


def count_of(ranks):
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def in_order(values):
    return list(dict.fromkeys(values))


def bars(cases, figure, wide, value, unit, lower=None, labels=None):
    """A bar for each label and number of ranks; `lower` is a part of it, hatched."""
    axes = figure.subplots()
    labels = labels or Labels(cases)
    names = in_order(labels.of(case) for case in cases)
    ranks = sorted({case.ranks for case in cases})
    height = 0.8 / len(ranks)
    for i, count in enumerate(ranks):
        mine = {labels.of(case): case for case in cases if case.ranks == count}
        at = [(j + (i + 0.5) * height, mine[name]) for j, name in enumerate(names) if name in mine]
        places, values = [place for place, _ in at], [value(case) for _, case in at]
        axes.barh(places, values, 0.92 * height, color=COLOURS[i % len(COLOURS)], label=count_of(count))
        if lower:
            axes.barh(places, [lower(case) for _, case in at], 0.92 * height, color="none", hatch="///", edgecolor=matplotlib.rcParams["hatch.color"], linewidth=0)
    axes.set_yticks([j + 0.4 for j in range(len(names))], wrapped(names, wide))
    axes.set_ylim(len(names), -0.2)
    axes.set_xlim(left=0, right=None if any(value(case) > 0 for case in cases) else 1)
    axes.grid(False, axis="y")
    axes.set_xlabel(unit)
    figure.legend(loc="outside upper left", ncols=len(ranks) if wide else 3)


def rows_of_bars(cases, labels=None):
    """The height of `bars`, by width."""
    labels = labels or Labels(cases)
    names, ranks = {labels.of(case) for case in cases}, {case.ranks for case in cases}
    return lambda wide: len(names) * max(1, 0.75 * len(ranks), 0.7 * lines_of(names, wide))


def step_time(cases):
    return Plot("step_time", "Time of a step", "Median of the runs, of which each counts as its slowest rank took. Shorter is better.",
                lambda figure, wide: bars(cases, figure, wide, lambda case: case.milliseconds, "ms"), rows_of_bars(cases))


def memory(cases):
    return Plot("memory", "Memory of a rank",
                "The whole bar is the most that the largest rank held at once; hatched is what it keeps between steps: parameters, gradients and optimizer state.",
                lambda figure, wide: bars(cases, figure, wide, lambda case: case.measured["peak_bytes"] / 1e6, "MB",
                                          lower=lambda case: min(case.measured["state_bytes"], case.measured["peak_bytes"]) / 1e6), rows_of_bars(cases))


def front_of(cases):
    """Those that no other case beats in both throughput and memory."""
    front, best = [], -1
    for case in sorted(cases, key=lambda case: (case.measured["peak_bytes"], -case.measured["items_per_second"])):
        if case.measured["items_per_second"] > best:
            best = case.measured["items_per_second"]
            front.append(case)
    return front


def fronts_of(cases):
    """One of each model, with its sizes: throughput of one says nothing of another's."""
    models = {}
    for case in cases:
        models.setdefault((case.model, case.layers, case.width, case.sequence), []).append(case)
    return [front_of(same) for same in models.values()]


def draw_pareto(cases, figure, wide):
    axes = figure.subplots()
    labels = Labels(cases)
    names = in_order(case.strategy for case in cases)
    marks = {count: "os^Dv*"[i % 6] for i, count in enumerate(sorted({case.ranks for case in cases}))}
    for case in cases:
        axes.plot(case.measured["peak_bytes"] / 1e6, case.measured["items_per_second"], marks[case.ranks], markersize=7 if wide else 5,
                  color=COLOURS[names.index(case.strategy) % len(COLOURS)], alpha=0.85)
    for front in fronts_of(cases):
        axes.step([case.measured["peak_bytes"] / 1e6 for case in front], [case.measured["items_per_second"] for case in front], where="post",
                  linewidth=1.2, color=matplotlib.rcParams["text.color"], zorder=0)
    numbered = [case for front in fronts_of(cases) for case in front]
    for number, case in enumerate(numbered, 1):
        axes.annotate(str(number), (case.measured["peak_bytes"] / 1e6, case.measured["items_per_second"]), fontsize=9, fontweight="bold",
                      xytext=(-5, 5), textcoords="offset points", ha="right")
    keys = [textwrap.fill(f"{number}: {labels.of(case)}, {count_of(case.ranks)}", 130 if wide else 45) for number, case in enumerate(numbered, 1)]
    axes.set_xlabel("\n".join(["peak MB of a rank", "", *keys]))
    axes.set_ylabel("tokens or rows a second, all ranks")
    axes.margins(0.08)
    handles = [axes.plot([], [], "s", color=COLOURS[i % len(COLOURS)], label=name)[0] for i, name in enumerate(names)]
    handles += [axes.plot([], [], mark, color=matplotlib.rcParams["text.color"], label=count_of(count))[0] for count, mark in marks.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=9 if wide else 3)


def pareto(cases):
    return Plot("pareto", "Throughput against memory",
                "A line is the Pareto front of a model: no measured case has more throughput with less memory than those on it. Up and left is better. "
                "The axes begin where the cases do.",
                lambda figure, wide: draw_pareto(cases, figure, wide), lambda wide: (15 if wide else 12) + (0.7 if wide else 1.2) * sum(map(len, fronts_of(cases))))


def shares_of(case):
    """Milliseconds of a step: what is computed, waited for, and the optimizer's. Clipping counts as the optimizer's."""
    parts, total = case.measured.get("parts", {}), case.measured["milliseconds"]["mean"]
    optimizer = min(total, parts.get("optimizer", 0) + parts.get("clip", 0))
    exposed = min(total - optimizer, case.measured["exposed_milliseconds"])
    return {"forward and backward": total - optimizer - exposed, "waiting for gathers and reductions": exposed, "clipping and optimizer": optimizer}


def draw_shares(cases, figure, wide):
    axes = figure.subplots()
    labels = Labels(cases)
    names = [f"{labels.of(case)}, {case.ranks}" for case in cases]
    left = [0.0] * len(cases)
    for i, part in enumerate(shares_of(cases[0])):
        widths = [100 * shares_of(case)[part] / case.measured["milliseconds"]["mean"] for case in cases]
        axes.barh(range(len(cases)), widths, 0.75, left=left, color=COLOURS[i], hatch=HATCHES[i], label=part, linewidth=0)
        left = [a + b for a, b in zip(left, widths)]
    axes.set_yticks(range(len(cases)), wrapped(names, wide))
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")
    axes.set_xlabel("% of a step")
    figure.legend(loc="outside upper left", ncols=3 if wide else 1)


def shares(cases):
    cases = sorted(cases, key=lambda case: case.ranks)
    return Plot("shares", "Where a step goes", "The number behind a name is that of the ranks. Waiting is what was not hidden behind computation.",
                lambda figure, wide: draw_shares(cases, figure, wide),
                lambda wide: max(0.9, 0.7 * lines_of(map(Labels(cases).of, cases), wide)) * len(cases) + (0 if wide else 2))


def largest_batches(cases):
    """The largest batch that fits, of each set of cases that differ in nothing else and have a limit, or one that does not fit."""
    sets = {}
    for case in cases:
        key = tuple((name, value) for name, value in case.settings.items() if name != "batch")
        sets.setdefault((case.file, key), []).append(case)
    largest = []
    for group in sets.values():
        fitting = [case for case in group if case.ok]
        if group[0].memory_limit_mb > 0 or any(case.status == "does not fit" for case in group):
            largest.append(max(fitting, key=lambda case: case.batch) if fitting else dataclasses.replace(group[0], settings={**group[0].settings, "batch": 0}))
    return largest


def largest_batch(cases):
    found = largest_batches(cases)
    if not found:
        return None
    labels = Labels(found, besides=("batch",))
    return Plot("largest_batch", "Largest batch that fits", "Rows a rank, of those that were tried, within the memory limit of the cases.",
                lambda figure, wide: bars(found, figure, wide, lambda case: case.batch, "rows a rank", labels=labels), rows_of_bars(found, labels))


def named_others(cases):
    """Pairs of a name and a case, in order."""
    moves = [case for case in cases if case.measure == "redistribution"]
    rest = [case for case in cases if case.measure != "redistribution"]

    def named(some):
        labels = Labels(some, always=())
        whats = [case.transition if case.measure == "redistribution" else case.measure.replace("_", " ") for case in some]
        return [(", ".join(filter(None, (what, labels.of(case), str(case.ranks)))), case) for what, case in zip(whats, some)]
    return sorted(named(moves) + named(rest), key=lambda pair: (pair[1].measure, pair[0]))


def draw_others(named, figure, wide):
    axes = figure.subplots()
    names, cases = zip(*named)
    measures = in_order(case.measure for case in cases)
    axes.barh(range(len(cases)), [case.milliseconds for case in cases], 0.75, color=[COLOURS[measures.index(case.measure) % len(COLOURS)] for case in cases])
    axes.set_yticks(range(len(cases)), wrapped(names, wide))
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.grid(False, axis="y")
    axes.set_xlabel("ms, on a logarithmic scale")


def others(cases):
    named = named_others(cases)
    names = [name for name, _ in named]
    return Plot("others", "What else was measured", "Medians. The number behind a name is that of the ranks. Redistributions are of a square of the case's width.",
                lambda figure, wide: draw_others(named, figure, wide), lambda wide: max(0.9 if wide else 1.4, 0.7 * lines_of(names, wide)) * len(cases))


def all_plots(cases):
    steps = [case for case in cases if case.measure == "step"]
    done, rest = [case for case in steps if case.ok], [case for case in cases if case.ok and case.measure != "step"]
    done = [case for case in done if case.memory_limit_mb == 0] or done  # the others try batches
    drawn = [step_time(done), memory(done), pareto(done), shares(done)] if done else []
    drawn += [plot for plot in [largest_batch(steps)] if plot]
    return drawn + ([others(rest)] if rest else [])
