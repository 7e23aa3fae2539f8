"""The scripts say what is wrong with what they are asked for, and what this machine lacks."""
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True


def script(name):
    """A Python script without an ending, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


class Lint(unittest.TestCase):
    def test_a_file_is_named_as_seen_from_the_current_folder(self):
        lint = script("lint")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(ROOT / "mesh")
        for given in ("device_mesh.cpp", "../mesh/device_mesh.cpp", ROOT / "mesh/device_mesh.cpp"):
            self.assertEqual(str(lint.from_root(pathlib.Path(given))), "mesh/device_mesh.cpp")

    @unittest.skipUnless((ROOT / ".git").exists() and shutil.which("git"), "not a clone")
    def test_an_unknown_file_is_an_error(self):
        done = subprocess.run([ROOT / "scripts/lint", "device_mesh.cpp"], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("lint: no C++ file of the project: device_mesh.cpp", done.stderr)


class TwoHosts(unittest.TestCase):
    def missing(self, rate, installed):
        with mock.patch("shutil.which", lambda program: program if program in installed else None):
            return script("two-hosts").missing_program(SimpleNamespace(rate=rate))

    def test_what_is_not_installed_is_named(self):
        self.assertEqual(self.missing("", []), "ip")
        self.assertEqual(self.missing("1gbit", ["ip"]), "tc")
        self.assertIsNone(self.missing("", ["ip"]))
        self.assertIsNone(self.missing("1gbit", ["ip", "tc"]))


class TestGpu(unittest.TestCase):
    def test_a_program_that_is_not_built_is_a_row(self):
        test_gpu = script("test-gpu")
        stage = test_gpu.Stage([test_gpu.Command("train_gpt")])
        with contextlib.redirect_stdout(io.StringIO()):
            rows, _ = test_gpu.run_stage(ROOT / "docs", "load", stage, {})
        self.assertEqual(rows, ["| load | `train_gpt` | FAILED: not built | 0 |  |"])

    def test_a_command_is_shown_with_its_timeout(self):
        command = script("test-gpu").Command("program", environment={"TESSERA_TIMEOUT_SECONDS": "30"}, ranks=2)
        self.assertEqual(str(command), "TESSERA_TIMEOUT_SECONDS=30 program --ranks 2")

    def test_a_program_that_runs_out_of_time_is_ended(self):
        process = subprocess.Popen(["sh", "-c", "echo begun; exec sleep 100"], stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.assertEqual(script("test-gpu").end_of(process, 5), (None, "begun\n"))
        self.assertEqual(process.returncode, -signal.SIGKILL)

    def test_what_any_rank_prints_is_what_a_command_expects(self):
        test_gpu = script("test-gpu")
        with tempfile.TemporaryDirectory() as temporary:
            program = pathlib.Path(temporary) / "bin/program"
            program.parent.mkdir()
            program.write_text("#!/bin/sh\necho rank $RANK\nexit $RANK\n")
            program.chmod(0o755)
            for expects, end in (("rank 0", "passed"), ("rank 1", "passed"), ("rank 2", "FAILED with status 1")):
                command = test_gpu.Command("program", environment={"HOST": "host{rank}"}, ranks=2, expects=expects)
                self.assertEqual(test_gpu.run_command(pathlib.Path(temporary), command, {})[::2], (end, "rank 0\nrank 1\n"))


if __name__ == "__main__":
    unittest.main()
