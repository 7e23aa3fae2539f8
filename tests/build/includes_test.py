"""Reads every #include between the project's files, and fails on a circle of files or on an include that points up.

Usage: includes_test.py ROOT   (the project's root)

A header and its source count as one file: `plan.cpp` belongs to `plan.h`. The order of the folders is the table of
CONTRIBUTING.md: a folder may use those above it there, so an include of a folder in the same row or below points up.
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<tessera/([^>]+)>|"([^"]+)")', re.MULTILINE)
ROW = re.compile(r"^\| ((?:`\w+/`(?:, )?)+) \|", re.MULTILINE)


def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))


def layers(root):
    """{folder: the number of its row in the table of CONTRIBUTING.md}, for those with C++ in them."""
    rows = [re.findall(r"`(\w+)/`", row) for row in ROW.findall((root / "CONTRIBUTING.md").read_text())]
    return {name: number for number, row in enumerate(rows) for name in row if sources(root / name)}


def unit_of(path):
    return str(path.with_suffix(""))


def target_of(root, file, tessera, quoted):
    """The file that an include names: `<tessera/…>` from the root, `"…"` from beside the file or from its top folder."""
    top = root / file.relative_to(root).parts[0]
    candidates = [root / tessera] if tessera else [file.parent / quoted, top / quoted]
    for path in candidates:
        if path.is_file():
            return unit_of(path.resolve().relative_to(root))
    sys.exit(f"{file} includes {tessera or quoted}, which is not there")


def includes(root, folders):
    """{unit: {unit that it includes: the file that says so}}"""
    graph = {}
    for folder in folders:
        for file in sources(root / folder):
            edges = graph.setdefault(unit_of(file.relative_to(root)), {})
            for tessera, quoted in INCLUDE.findall(file.read_text()):
                edges.setdefault(target_of(root, file, tessera, quoted), file.relative_to(root))
    for unit, edges in graph.items():
        edges.pop(unit, None)
    return graph


def circles(graph):
    """Tarjan's strongly connected components of more than one unit."""
    number, low, stack, found = {}, {}, [], []

    def visit(unit):
        number[unit] = low[unit] = len(number)
        stack.append(unit)
        for other in graph.get(unit, ()):
            if other not in number:
                visit(other)
            if other in stack:
                low[unit] = min(low[unit], low[other])
        if low[unit] == number[unit]:
            component = stack[stack.index(unit):]
            del stack[stack.index(unit):]
            if len(component) > 1:
                found.append(sorted(component))

    for unit in graph:
        if unit not in number:
            visit(unit)
    return found


def upward(graph, layer):
    """Lines for the includes of a folder that is not above the file's own."""
    found = []
    for unit, edges in graph.items():
        folder = unit.split("/")[0]
        for other, file in edges.items():
            target = other.split("/")[0]
            if target in layer and target != folder and layer[target] >= layer[folder]:
                found.append(f"{file} includes {other}, and {folder}/ may not use {target}/")
    return found


def edges_of(circle, graph):
    return [f"{graph[unit][other]} includes {other}" for unit in circle for other in sorted(set(graph[unit]) & set(circle))]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    layer = layers(root)
    graph = includes(root, layer)
    problems = upward(graph, layer)
    problems += ["a circle of includes:\n    " + "\n    ".join(edges_of(circle, graph)) for circle in circles(graph)]
    print(*(f"  {problem}" for problem in problems), sep="\n")
    print(f"{len(graph)} files in {len(layer)} folders: {len(problems)} circles and includes that point up")
    sys.exit(1 if problems else 0)


main()
