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

    def test_sources_of_a_batch_are_checked_as_it(self):
        lint = script("lint")
        with tempfile.TemporaryDirectory() as temporary:
            batch = pathlib.Path(temporary) / "Unity/unity_0_cxx.cxx"
            batch.parent.mkdir()
            batch.write_text(f'#include "{ROOT}/mesh/device_mesh.cpp"\n#include "{ROOT}/dtensor/api/api.cpp"\n')
            single = ROOT / "python/call.cpp"
            compiled, members = lint.batches([{"file": str(batch)}, {"file": str(single)}])
            name = lint.from_root(batch)
        mesh, api, call = (pathlib.Path(file) for file in ("mesh/device_mesh.cpp", "dtensor/api/api.cpp", "python/call.cpp"))
        self.assertEqual(compiled, {mesh: name, api: name, call: call})
        self.assertEqual(members, {name: [mesh, api]})

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


class Remembered(unittest.TestCase):
    """The interpreter needs PyTorch's name and version alone, which a folder on its path stands for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.script = self.folder / "script.py"
        self.script.write_text("import sys, time\nopen(sys.argv[1], 'w').write('written')\nprint(time.time_ns())\n")
        torch = self.folder / "torch-1.0.dist-info"
        torch.mkdir()
        (torch / "METADATA").write_text("Name: torch\nVersion: 1.0\n")

    def answer(self, *keys, **environment):
        out = self.folder / "out"
        out.unlink(missing_ok=True)
        command = [sys.executable, ROOT / "tests/support/remembered.py", *(word for key in keys for word in ("--key", key)), "--file", out, "--",
                   sys.executable, self.script, out]
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "PYTHONPATH": str(self.folder), "TESSERA_TEST_FULL": "",
                       **environment}
        printed = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=True).stdout
        self.assertEqual(out.read_text(), "written")
        return printed

    def test_an_answer_is_kept_for_its_keys_script_and_pytorch(self):
        first = self.answer("a")
        self.assertEqual(self.answer("a"), first)
        self.assertNotEqual(self.answer("b"), first)
        anew = self.answer("a", TESSERA_ANSWERS="anew")
        self.assertNotEqual(anew, first)
        self.assertEqual(self.answer("a"), anew)
        (self.folder / "torch-1.0.dist-info/METADATA").write_text("Name: torch\nVersion: 1.1\n")
        self.assertNotEqual(self.answer("a"), anew)
        self.script.write_text(self.script.read_text() + "# changed\n")
        self.assertNotEqual(self.answer("a"), anew)

    def test_an_error_is_not_kept(self):
        self.script.write_text("import sys\nsys.exit(3)\n")
        for _ in range(2):
            with self.assertRaises(subprocess.CalledProcessError) as raised:
                self.answer("a")
            self.assertEqual(raised.exception.returncode, 3)


class TestTimes(unittest.TestCase):
    def report(self, entries):
        """A report as ctest writes it, of {entry: (seconds, what it printed)}."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        file = pathlib.Path(folder.name) / "tests.xml"
        tests = [f'<testcase name="{name}" time="{seconds}" status="run"><system-out>{text}</system-out></testcase>'
                 for name, (seconds, text) in entries.items()]
        file.write_text(f'<testsuite>{"".join(tests)}<testcase name="left out" time="0" status="notrun"/></testsuite>')
        return file

    def test_cases_are_those_of_their_entry_and_world(self):
        text = "[  WORLD   ] 3 ranks\n[       OK ] A.B (1500 ms)\n[  WORLD   ] 4 ranks\n[       OK ] C.D/x, where GetParam() = 1 (20 ms)\n"
        times, cases = script("test-times").entries(self.report({"fsdp.setup": (2.5, text)}))
        self.assertEqual(times, {"fsdp.setup": 2.5})
        self.assertEqual(cases, [(1.5, "A.B", "fsdp.setup", "3 ranks"), (0.02, "C.D/x", "fsdp.setup", "4 ranks")])

    def test_an_entry_may_take_its_share_of_a_whole_run(self):
        test_times = script("test-times")
        times = {f"entry{i}": 1.0 for i in range(100)}
        self.assertEqual(test_times.over_budget(times), [])
        found = test_times.over_budget({**times, "slow": 10.0, "fsdp.reads": 10.0})
        self.assertEqual(len(found), 1)
        self.assertIn("slow took 8.3% of the 120 s", found[0])
        self.assertEqual(test_times.over_budget({"slow": 10.0}), [], "of a part of the tests")


if __name__ == "__main__":
    unittest.main()
