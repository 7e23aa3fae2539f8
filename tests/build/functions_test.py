"""Counts the lines of every C++ function, and fails where more functions are long than the bounds allow.

Usage: functions_test.py ROOT   (the project's root)

A function's lines are those from the brace that opens its body to the one that closes it, with comments and blank lines. A lambda counts
with the function it stands in, and by itself only outside of functions. The text is as clang-format leaves it: a space stands before the
brace of a body, and none before the brace of an initializer.
"""
import pathlib
import re
import sys

LIBRARY = ["base", "collectives", "offload", "activations", "mesh", "dtensor", "reads", "mixed_precision", "optim", "nn", "fsdp", "parallel", "checkpoint", "data", "plan", "training"]
PROGRAMS = ["examples", "benchmarks", "tools", "python"]
# folders: {lines: how many functions may have more}. Those of tests over 40 lines are mostly tables of cases.
BOUNDS = [(LIBRARY, {40: 0, 30: 10}), (PROGRAMS, {40: 0}), (["tests"], {40: 18})]

NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|^[ ]*#(?:[^\n]*\\\n)*[^\n]*',
                   re.DOTALL | re.MULTILINE)
SCOPE = re.compile(r"(?:^|[\s>])(?:namespace|class|struct|union)\b|extern \"\"")
BODY = re.compile(r"[)\]](?: (?:const|override|final|mutable|noexcept|try)| ->[^{};=]*)* $")


def without_noise(text):
    """The text without comments, literals and preprocessor lines, with the same lines."""
    return NOISE.sub(lambda match: ('""' if '"' in match[0][:2] else "") + "\n" * match[0].count("\n"), text)


def without_nested(text, brackets):
    """The text without what stands inside the outermost of a pair of brackets."""
    kept, depth = [], 0
    for character in text:
        depth = max(0, depth - (character == brackets[1]))
        if depth == 0:
            kept.append(character)
        depth += character == brackets[0]
    return "".join(kept)


def kind_of(head, outer):
    """What a brace opens, from the text before it up to the last brace or semicolon: a scope, a function or data."""
    if outer != "scope":
        return "function" if BODY.search(head) else "data"
    if head.count("(") > head.count(")"):
        return "data"
    plain = without_nested(without_nested(re.sub(r"operator\W+\(", "operator_(", head), "()"), "<>")
    if SCOPE.search(plain) and "(" not in plain.replace("alignas()", ""):
        return "scope"
    if "=" in plain:
        return "function" if BODY.search(head) else "data"
    return "function" if "(" in plain and re.search(r"\s$", head) else "data"


def functions(text):
    """(line, lines, head) of every function."""
    text = without_noise(text)
    opened, found, start, line = [], [], 0, 1
    for position, character in enumerate(text):
        if character == "\n":
            line += 1
        elif character == "{":
            head = re.sub(r"\s+", " ", text[start:position]).lstrip()
            outer = opened[-1][0] if opened else "scope"
            kind = "function" if outer == "function" else kind_of(head, outer)
            opened.append((kind, line, head, outer))
            if kind == "data" and outer == "scope":
                continue  # an initializer before a body: the head goes on
        elif character == "}":
            kind, first, head, outer = opened.pop()
            if kind == "function" and outer != "function":
                found.append((first, line - first + 1, head.strip()))
            if kind == "data" and outer == "scope":
                continue
        if character in "{};":
            start = position + 1
    assert not opened
    return found


def sources(root, folders):
    return [path for folder in folders for path in sorted((root / folder).rglob("*")) if path.suffix in (".h", ".cpp")]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    failed = False
    for folders, bounds in BOUNDS:
        found = [(lines, f"  {path.relative_to(root)}:{line}: {lines} lines: {head[-80:]}")
                 for path in sources(root, folders) for line, lines, head in functions(path.read_text())]
        print(*(where for lines, where in found if lines > min(bounds)), sep="\n")
        for limit, most in bounds.items():
            long = sum(lines > limit for lines, _ in found)
            failed |= long > most
            print(f"{', '.join(folders)}: {long} of {len(found)} functions have more than {limit} lines (at most {most})")
    sys.exit(failed)


if __name__ == "__main__":
    main()
