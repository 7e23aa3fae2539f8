"""Writes docs/dtensor_coverage.md from the reports of opinfo_test: coverage_table.py FOLDER OUTPUT [LINE...]; lines are added to
its heading."""

import collections
import pathlib
import re
import sys


def sections(path):
    """The lists of a report by title: "Working overloads: 2" and the indented lines below it."""
    result, title = collections.defaultdict(list), None
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("  "):
            result[title].append(line.strip())
        else:
            title = line.split(":")[0]
    return result


def by_operator(names):
    """aten::add.Tensor, aten::add.Scalar -> {"add": ["Tensor", "Scalar"]}."""
    grouped = collections.defaultdict(list)
    for name in sorted(names):
        base, _, overload = name.removeprefix("aten::").partition(".")
        grouped[base].append(overload or "default")
    return grouped


def shorten(error):
    """An error without the shapes, placements and meshes of its case."""
    operator, _, text = error.partition(": ")
    text = re.split(r"; | \(| \[|, not ", text.removeprefix(operator + ": "))[0]
    text = re.sub(r"\[[^]]*\]?|\([^)]*\)?", "…", text)
    return f"`{operator.removeprefix('aten::')}`: {text}"


def main():
    folder, output = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    reports = [sections(path) for path in sorted(folder.glob("report-*.txt"))]
    working = set().union(*(report["Working overloads"] for report in reports))
    missing = collections.Counter()
    errors = collections.Counter()
    for report in reports:
        for line in report["Operators without a rule"]:
            count, name = re.match(r"(\d+) x (.*)", line).groups()
            missing[name] += int(count)
        for line in report["Errors"]:
            count, text = re.match(r"(\d+) x (.*)", line).groups()
            errors[shorten(text)] += int(count)
    lines = [
        "# Operators that run on sharded DTensors", "",
        "Made by `tests/dtensor/opinfo/coverage_table.py` from a replay of PyTorch's OpInfo samples (`scripts/test-full opinfo`). An overload",
        "counts when a sample of it passes, forward and backward, with an argument that is split, without the fallback to whole tensors.",
        *sys.argv[3:], "", f"**{len(working)} overloads work.**", "", "| operator | overloads |", "|---|---|",
    ]
    lines += [f"| `{name}` | {', '.join(overloads)} |" for name, overloads in by_operator(working).items()]
    lines += ["", f"## Without a rule: run on whole tensors where that is safe, else and under StrictSharding an error: {len(missing)}", "",
              ", ".join(f"`{name.removeprefix('aten::')}`" for name in sorted(missing)), "",
              f"## Errors: {len(errors)}", "", "| products | error |", "|---|---|"]
    lines += [f"| {count} | {text.replace('|', chr(92) + '|')} |" for text, count in sorted(errors.items())]
    output.write_text("\n".join(lines) + "\n")
    print(f"{len(working)} overloads work, {len(missing)} have no rule, {len(errors)} errors -> {output}")


if __name__ == "__main__":
    main()
