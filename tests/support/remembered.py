#!/usr/bin/env python3
"""Runs a command whose answer depends on its keys and on the PyTorch of this interpreter alone, or prints what it answered before.

Usage: remembered.py [--key FILE_OR_TEXT]... [--environment VARIABLE]... [--folder FOLDER | --file FILE] -- COMMAND...

The answer is what the command prints, and the files that it writes to FOLDER, which is emptied before, or FILE. Its keys are those that
are named, the values of the variables, and the contents of the command's scripts. It is kept in the user's cache folder, where it was
no error. With TESSERA_ANSWERS=anew, and with TESSERA_TEST_FULL=1, the command runs in any case, and what it
answers takes the place of what was kept.
"""
import argparse
import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

KEPT = 40  # answers; the oldest go


def cache():
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tessera/answers"


def digest_of(keys, command):
    """Of the command, the contents of its scripts count, and no other words: these may name temporary files."""
    parts = [importlib.metadata.version("torch").encode()]
    parts += [pathlib.Path(word).read_bytes() for word in command if word.endswith(".py")]
    parts += [pathlib.Path(key).read_bytes() if pathlib.Path(key).is_file() else key.encode() for key in keys]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def run_anew():
    return os.environ.get("TESSERA_ANSWERS") == "anew" or os.environ.get("TESSERA_TEST_FULL") == "1"


def copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def keep(place, output, written):
    """As a whole, also where others do the same at this time."""
    place.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(dir=place.parent))
    (made / "output").write_bytes(output)
    if written is not None:
        copy(written, made / "written")
    shutil.rmtree(place, ignore_errors=True)
    try:
        made.rename(place)
    except OSError:  # somebody else has put the same there
        shutil.rmtree(made)
    for old in sorted(place.parent.iterdir(), key=lambda path: -path.stat().st_mtime)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def answer(keys, written, command):
    """What the command prints; ends with its status where that is an error. `written` is what it writes, a folder or a file."""
    place = cache() / digest_of(keys, command)
    if not run_anew() and (place / "output").exists():
        if written is not None:
            copy(place / "written", written)
        return (place / "output").read_bytes()
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.stdout.buffer.write(done.stdout)
        sys.exit(done.returncode if done.returncode > 0 else 1)
    keep(place, done.stdout, written)
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--environment", action="append", default=[])
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--file", type=pathlib.Path)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        shutil.rmtree(arguments.folder, ignore_errors=True)
        arguments.folder.mkdir(parents=True)
    keys = arguments.key + [f"{name}={os.environ.get(name)}" for name in arguments.environment]
    sys.stdout.buffer.write(answer(keys, arguments.folder or arguments.file, arguments.command))


if __name__ == "__main__":
    main()
