"""Has clang check what the annotations of the model's lock say: which members it guards, and which functions need it.

Usage: locks_test.py BUILD   (a build folder with compile_commands.json, of clang)

The analysis is clang's (-Wthread-safety), and part of the warnings that it is asked for. It does not see through a `Guarded` value or a
`Held` argument, which need no check of it. At the end, a copy of a source that leaves out a lock must fail.
"""
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["fsdp/schedule/schedule.cpp", "fsdp/schedule/schedule_actions.cpp", "fsdp/schedule/schedule_phases.cpp"]
WITHOUT_LOCK = ("fsdp/schedule/schedule.cpp", "  const ModelLock lock(mutex_);\n  refusal_ = ", "  refusal_ = ")


def command_of_library(build):
    """The arguments that compile a source of the library, up to the source, and the folder in which they hold."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if "tessera.dir" in entry["command"]:
            arguments = shlex.split(entry["command"])
            return arguments[:arguments.index("-o")], entry["directory"]
    sys.exit("no source of the library in compile_commands.json")


def check(arguments, folder, source):
    command = [*arguments, "-Wthread-safety", "-Werror", "-fsyntax-only", str(source)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def main():
    arguments, folder = command_of_library(pathlib.Path(sys.argv[1]).resolve())
    for source in SOURCES:
        done = check(arguments, folder, ROOT / source)
        if done.returncode:
            sys.exit(done.stderr)
    name, before, after = WITHOUT_LOCK
    text = (ROOT / name).read_text()
    assert text.count(before) == 1
    with tempfile.TemporaryDirectory() as temporary:
        copy = pathlib.Path(temporary) / "without_lock.cpp"
        copy.write_text(text.replace(before, after))
        done = check(arguments, folder, copy)
    if "requires holding mutex" not in done.stderr:
        sys.exit(f"a source without a lock was accepted: {done.stderr}")
    print(f"{len(SOURCES)} sources hold their locks")


if __name__ == "__main__":
    main()
