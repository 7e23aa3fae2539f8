"""Reads every #include between the project's files, and fails on a circle of files or on an include that points up.

Usage: includes_test.py ROOT   (the project's root)

A header and its source count as one file: `plan.cpp` belongs to `plan.h`. The order of the folders is the first table of
CONTRIBUTING.md: a folder may use those above it there, so an include of a folder in the same row or below points up. The second
table has the rooms of each folder, from bottom to top: a room may use the rooms before it and the headers at the top of its folder.
These headers use no room, and sources at the top use them all. A room of this table that is not there, one that the table lacks,
and one with too many files fail as well. The headers in ROOT are above the library: programs include them, and no folder does that
they lead to, or that is above such a folder.
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<tessera/([^>]+)>|"([^"]+)")', re.MULTILINE)
ROW = re.compile(r"^\| ((?:`\w+/`(?:, )?)+) \|", re.MULTILINE)
ROOMS_ROW = re.compile(r"^\| `(\w+)/` \| ((?:`\w+/`(?:, )?)+) \|", re.MULTILINE)
MOST_FILES = 20  # of a room; what is in folders of the room's own does not count


def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))


def layers(root):
    """{folder: the number of its row in the table of CONTRIBUTING.md}, for those with C++ in them."""
    text = (root / "CONTRIBUTING.md").read_text().partition("### Rooms")[0]
    rows = [re.findall(r"`(\w+)/`", row) for row in ROW.findall(text)]
    return {name: number for number, row in enumerate(rows) for name in row if sources(root / name)}


def rooms_of(root):
    """{folder: the names of its rooms, from bottom to top}, from the table of CONTRIBUTING.md."""
    text = (root / "CONTRIBUTING.md").read_text().partition("### Rooms")[2]
    return {folder: re.findall(r"`(\w+)/`", row) for folder, row in ROOMS_ROW.findall(text)}


def unit_of(path):
    return str(path.with_suffix(""))


def in_root(unit):
    return "/" not in unit


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
    files = [*sorted(root.glob("*.h")), *(file for folder in folders for file in sources(root / folder))]
    for file in files:
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
    """Lines for the includes of a folder that is not above the file's own, and of a header of the root by the library."""
    found = []
    library = max(layer[other.split("/")[0]] for unit in graph if in_root(unit) for other in graph[unit] if not in_root(other))
    for unit, edges in graph.items():
        folder = unit.split("/")[0]
        if in_root(unit):
            continue
        found += [f"{file} includes {other}.h, which is for programs" for other, file in edges.items()
                  if in_root(other) and layer[folder] <= library]
        for other, file in edges.items():
            target = other.split("/")[0]
            if not in_root(other) and target in layer and target != folder and layer[target] >= layer[folder]:
                found.append(f"{file} includes {other}, and {folder}/ may not use {target}/")
    return found


def floor_of(unit, rooms):
    """The number of a unit's room in its folder; None at the top of the folder, and where the folder has no rooms."""
    parts = unit.split("/")
    return rooms[parts[0]].index(parts[1]) if len(parts) > 2 and parts[1] in rooms.get(parts[0], ()) else None


def climbs(unit, other, file, rooms):
    """Whether an include within a folder goes from a room, or from a header at the top, to a room that is not below."""
    target = floor_of(other, rooms)
    if in_root(unit) or unit.split("/")[0] != other.split("/")[0] or target is None:
        return False
    floor = floor_of(unit, rooms)
    return file.suffix == ".h" if floor is None else floor < target


def upward_rooms(graph, rooms):
    return [f"{file} includes {other}, whose room is not below its own"
            for unit, edges in graph.items() for other, file in edges.items() if climbs(unit, other, file, rooms)]


def wrong_rooms(root, rooms):
    """Lines for rooms that the table or the tree lacks, and for rooms with too many files."""
    found = []
    for folder, names in rooms.items():
        there = {path.name for path in (root / folder).iterdir() if path.is_dir() and sources(path)}
        found += [f"{folder}/{name} is in the table of rooms or in the tree alone" for name in there.symmetric_difference(names)]
        for place in [root / folder, *(path for path in (root / folder).rglob("*") if path.is_dir())]:
            count = sum(path.suffix in (".h", ".cpp") for path in place.iterdir())
            if count > MOST_FILES:
                found.append(f"{place.relative_to(root)}/ holds {count} files, more than {MOST_FILES}")
    return found


def edges_of(circle, graph):
    return [f"{graph[unit][other]} includes {other}" for unit in circle for other in sorted(set(graph[unit]) & set(circle))]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    layer = layers(root)
    graph = includes(root, layer)
    rooms = rooms_of(root)
    problems = upward(graph, layer) + upward_rooms(graph, rooms) + wrong_rooms(root, rooms)
    problems += ["a circle of includes:\n    " + "\n    ".join(edges_of(circle, graph)) for circle in circles(graph)]
    print(*(f"  {problem}" for problem in problems), sep="\n")
    print(f"{len(graph)} files in {len(layer)} folders: {len(problems)} circles and includes that point up")
    sys.exit(1 if problems else 0)


main()
