"""Fails where an internal header of the library declares a name outside of tessera::internal.

Usage: namespaces_test.py ROOT   (the project's root)

The public headers are tessera.h and those that it includes, directly or not: `cmake --install` installs them alone. They declare
public names in `tessera` and `tessera::checkpoint`, and what their templates need in `tessera::internal`. Any other header, and a
header that begins with "// Internal" though a public one includes it, may only name classes of other namespaces in advance.
"""
import pathlib
import re
import sys

FOLDERS = ("base", "collectives", "offload", "activations", "mesh", "dtensor", "reads", "mixed_precision", "optim", "nn", "fsdp", "parallel", "checkpoint", "data", "plan", "training")
INCLUDE = re.compile(r"^#include <tessera/([^>]+)>", re.MULTILINE)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INTERNAL = re.compile(r"^// Internal", re.MULTILINE)
IN_ADVANCE = re.compile(r"\s*(?:(?:class|struct) \w+;\s*)*")


def public_headers(root):
    found, waiting = set(), ["tessera.h"]
    while waiting:
        header = waiting.pop()
        if header not in found:
            found.add(header)
            waiting += INCLUDE.findall((root / header).read_text())
    return found


def problems_of(text, public):
    """The namespaces in which a header declares what it must not."""
    for name, body in NAMESPACE.findall(text):
        internal = name.startswith("tessera::internal")
        ours = public and not INTERNAL.search(text) and name in ("tessera", "tessera::checkpoint", "internal")
        if not internal and not ours and not IN_ADVANCE.fullmatch(body):
            yield name


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    public = public_headers(root)
    headers = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.h"))]
    problems = [f"{header} declares names in {name}"
                for header in headers for name in problems_of((root / header).read_text(), str(header) in public)]
    print(*(f"  {problem}" for problem in problems), sep="\n")
    print(f"{len(headers)} headers, {len(public)} of them public: {len(problems)} declare names where they must not")
    sys.exit(1 if problems else 0)


main()
