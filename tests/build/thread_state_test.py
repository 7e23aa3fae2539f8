"""Lists what a thread has of its own, and fails where that is declared outside of base/per_thread, or is more than the bound.

Usage: thread_state_test.py ROOT   (the project's root)

State of a thread is an argument that no signature names, and a thread of autograd's does not have it. So a new scope or cache is rather
an argument, a member of an object, or a member of a state that is there already. BOUND can only shrink.
"""
import pathlib
import re
import sys

from functions_test import LIBRARY, PROGRAMS, sources, without_noise

BOUND = 20
FACILITY = "base/per_thread."
STATE = re.compile(r"\bconstinit\s+(?:const\s+)?(?:\w+::)*PerThread<(.*)>\s+(\w+);")


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    states, failed = [], False
    for path in sources(root, LIBRARY + PROGRAMS):
        name = str(path.relative_to(root))
        if name.startswith(FACILITY):
            continue
        for number, line in enumerate(without_noise(path.read_text()).splitlines(), 1):
            if re.search(r"\b(?:thread_local|__thread)\b", line):
                failed = True
                print(f"  {name}:{number}: {line.strip()}: a PerThread (base/per_thread.h) takes the place of it")
            elif re.search(r"\bPerThread<.*> \w+;", line):
                found = STATE.search(line)
                if not found:
                    failed = True
                    print(f"  {name}:{number}: {line.strip()}: a PerThread is a global, declared constinit")
                states.append(f"{name}:{number}: {line.strip()}")
    failed = failed or len(states) != BOUND
    if failed or "--all" in sys.argv:
        print(*(f"  {each}" for each in states), sep="\n")
    print(f"{len(states)} values of each thread (BOUND says {BOUND})")
    sys.exit(failed)


if __name__ == "__main__":
    main()
