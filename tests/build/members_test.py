"""Counts the data members of every class, and fails where one has more than the bound.

Usage: members_test.py ROOT   (the project's root)

What counts is what an object holds by itself: public and private members, those of a union too, and neither static ones, nor those of its
bases and of the classes that are declared in it. A class that is larger stands in LARGER with its number of members, which can only
shrink. The text is as clang-format leaves it.
"""
import pathlib
import re
import sys

from functions_test import sources, without_nested, without_noise

FOLDERS = ["fsdp", "dtensor"]
BOUND = 12
LARGER = {  # a class's file and name, and how many members it has
    "fsdp/options.h: FullyShardOptions": 14,  # users fill it by designated initializers
}
MOST_LARGER = 3

CLASS = re.compile(r"\b(?:class|struct|union)\s+(?:alignas\(\)\s*)?([\w:]+)[^;(){}=]*$")
NO_MEMBER = re.compile(r"^(?:using|friend|typedef|static|template|enum|class|struct|union|explicit|virtual|constexpr static)\b|.*\boperator\b")


def bodies(text):
    """(name, line, body) of every class; a body has "{}" in place of what nested braces hold."""
    opened = []
    for position, character in enumerate(text):
        if character == "{":
            start = max(text.rfind(mark, 0, position) for mark in "{};")
            found = CLASS.search(re.sub(r"\b(?:public|private|protected):", "", text[start + 1:position]))
            is_class = found and not re.search(r"\benum\s+$", text[start + 1:position][:found.start() or None])
            opened.append([found[1] if is_class else None, text.count("\n", 0, position) + 1, []])
        elif character == "}":
            name, line, body = opened.pop()
            if name:
                yield name, line, "".join(body)
            if opened:
                opened[-1][2].append("{}")
        elif opened:
            opened[-1][2].append(character)


def declarators(statement):
    """How many data members a statement of a class's body declares."""
    statement = re.sub(r"^(?:\s*(?:public|private|protected):)+", "", statement).strip()
    statement = re.sub(r"\[\[[^\]]*\]\]\s*", "", statement)
    if not statement or NO_MEMBER.match(statement):
        return 0
    plain = without_nested(statement.replace("->", "").replace("<=>", ""), "<>")
    declared = plain.split("=")[0].split("{}")[0]
    if "(" in declared or not re.search(r"[\w\]>*&]\s+[*&]*[\w:*]+", declared + " x" if declared.count(" ") == 0 else declared):
        return 0
    return 1 + without_nested(plain, "()").count(",")


def members(body):
    # A function's body, and the end of an initializer list, end a statement.
    body = re.sub(r"(\)[^;{}=]*?)\{\}(?!\s*[;,])", r"\1;", re.sub(r"\s+", " ", body))
    return sum(declarators(statement) for statement in body.split(";"))


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    found = {f"{path.relative_to(root)}: {name}": (members(body), line)
             for path in sources(root, FOLDERS) for name, line, body in bodies(without_noise(path.read_text()))}
    if "--all" in sys.argv:
        print(*(f"{count:3} {name}" for name, (count, _) in sorted(found.items(), key=lambda each: -each[1][0])), sep="\n")
    failed = len(LARGER) > MOST_LARGER
    for name, (count, line) in found.items():
        if count > LARGER.get(name, BOUND):
            failed = True
            print(f"  {name.replace(':', f':{line}:', 1)} has {count} members (at most {LARGER.get(name, BOUND)})")
    for name, count in LARGER.items():
        if found.get(name, (0,))[0] < count:
            failed = True
            print(f"  {name} has {found.get(name, (0,))[0]} members: LARGER says {count}")
    larger = sum(count > BOUND for count, _ in found.values())
    print(f"{', '.join(FOLDERS)}: {larger} of {len(found)} classes have more than {BOUND} members (at most {MOST_LARGER})")
    sys.exit(failed)


if __name__ == "__main__":
    main()
