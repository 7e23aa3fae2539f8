"""Runs train_from_config as a user does. The arguments are the program's path, the example's config, the virtual environment's, and
unittest's."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM, CONFIG = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
EXECUTED = os.environ.get("TESSERA_TEST_FORKED", PROGRAM)
TORCHRUN = pathlib.Path(sys.argv.pop(1)) / "bin" / "torchrun"
TIMEOUT = 120


class TrainFromConfigTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        # 800 rows to train on, 50 steps of 16: other numbers would repeat other rows at an epoch's end on other ranks.
        self.text.write_text(("the cat sat on a mat and ran to the other cat. " * 300)[:13475])
        self.settings = json.loads(CONFIG.read_text().replace("// the program's own", ""))
        self.settings["tessera"]["model"] = {"layers": 1, "width": 16, "heads": 2, "sequence": 16}
        self.settings["tessera"]["evaluate"] = {"every": "4 steps"}
        self.settings["tessera"]["stop_after"] = "8 steps"
        self.settings["scheduler"]["params"] = {"warmup_num_steps": 2, "total_num_steps": 8}

    def write_config(self, **settings):
        path = self.folder / "config.json"
        path.write_text(json.dumps({**self.settings, **settings}))
        return path

    def run_program(self, *arguments):
        return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=TIMEOUT, cwd=self.folder)

    def records(self):
        lines = (self.folder / "runs/from_config/log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def train(self, *arguments):
        done = self.run_program(*arguments, str(self.text))
        self.assertEqual(done.returncode, 0, done.stderr)
        return {record["step"]: record["loss"] for record in self.records() if record["kind"] == "step"}

    def begin_anew(self):
        subprocess.run(["rm", "-rf", self.folder / "runs"], check=True)

    def assert_same(self, losses, expected):
        self.assertEqual(losses.keys(), expected.keys())
        self.assertLessEqual(max(abs(losses[step] - expected[step]) for step in expected), 1e-5)

    def test_the_curve_does_not_depend_on_ranks_or_stage(self):
        expected = self.train("--config", self.write_config(), "--ranks=1")
        self.assertLess(expected[8], expected[1])
        for ranks, stage in ((2, 3), (4, 2), (2, 1), (2, 0)):
            self.begin_anew()
            losses = self.train("--ranks", str(ranks), "--deepspeed", self.write_config(zero_optimization={"stage": stage}))
            self.assert_same(losses, expected)
            self.assertTrue((self.folder / "runs/from_config/best/index.json").exists())
            self.assertEqual(len([record for record in self.records() if "valid.loss" in record]), 2)

    def test_a_signal_saves_what_other_ranks_go_on_from(self):
        steps = 300
        self.settings["tessera"]["stop_after"] = f"{steps} steps"
        expected = self.train(f"--config={self.write_config()}", "--ranks=1")
        self.begin_anew()
        log = self.folder / "runs/from_config/log.jsonl"
        command = [PROGRAM, f"--config={self.write_config()}", "--ranks=2", self.text]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder) as training:
            try:
                deadline = time.monotonic() + TIMEOUT
                while training.poll() is None and not (log.exists() and '"step"' in log.read_text()):
                    self.assertLess(time.monotonic(), deadline, "no step was logged")
                    time.sleep(0.001)
                training.send_signal(signal.SIGTERM)
                error = training.communicate(timeout=TIMEOUT)[1]
            finally:
                training.kill()  # nothing, once it has ended
        self.assertEqual(training.returncode, 143, error)
        self.assert_same(self.train(f"--config={self.write_config()}", "--ranks=4"), expected)

    def assert_survives_a_dead_rank(self, command, find_rank):
        """Kills the rank whose pid `find_rank(pid of the launcher)` says, after the second checkpoint."""
        steps = 300
        self.settings["tessera"].update(stop_after=f"{steps} steps", evaluate={"every": "100 steps"})
        self.settings["tessera"]["save"].update(every="20 steps")
        config = self.write_config()
        expected = self.train(f"--config={config}", "--ranks=1")
        self.begin_anew()
        runs = self.folder / "runs/from_config"
        with subprocess.Popen(command(config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder) as training:
            try:
                deadline = time.monotonic() + TIMEOUT
                while training.poll() is None and not (runs / "step-000040/index.json").exists():
                    self.assertLess(time.monotonic(), deadline, "no checkpoint was saved")
                    time.sleep(0.001)
                os.kill(find_rank(training.pid), signal.SIGKILL)
                error = training.communicate(timeout=TIMEOUT)[1]
            finally:
                training.kill()  # nothing, once it has ended
        self.assertEqual(training.returncode, 0, error)
        records = self.records()
        self.assertIn("resume", [record["kind"] for record in records])
        self.assert_same({record["step"]: record["loss"] for record in records if record["kind"] == "step"}, expected)
        return error

    def test_torchrun_starts_a_job_again_from_the_newest_checkpoint(self):
        pids = self.folder / "pids"

        def command(config):
            # torchrun makes one $ of two.
            worker = ["/bin/sh", "-c", 'echo $$$$ $RANK >> "$0"; exec "$@"', pids, PROGRAM, f"--config={config}", self.text]
            return [TORCHRUN, "--standalone", "--no-python", "--nproc-per-node=2", "--max-restarts=1", "--", *worker]

        self.assert_survives_a_dead_rank(
            command, lambda _: int(next(line.split()[0] for line in pids.read_text().splitlines() if line.endswith(" 1"))))
        self.assertEqual(len(pids.read_text().splitlines()), 4)

    def test_launch_goes_on_with_fewer_ranks(self):
        def command(config):
            return [EXECUTED, f"--config={config}", "--ranks=2", "--max-restarts=1", "--min-ranks=1", self.text]

        def second(launcher):
            threads = pathlib.Path(f"/proc/{launcher}/task").iterdir()
            return max(int(pid) for thread in threads for pid in (thread / "children").read_text().split())

        error = self.assert_survives_a_dead_rank(command, second)
        self.assertIn("restart 1, with 1 rank, after this: rank ", error)
        self.assertIn("was killed by signal 9 (SIGKILL)", error)

    def test_what_is_wrong_is_named(self):
        for status, words, arguments in ((2, "--config is needed", []), (2, "--ranks is 'two'", ["--config=x", "--ranks=two"]),
                                         (2, "--device is 'tpu'", ["--config=x", "--device=tpu"]),
                                         (2, "--max-restarts is '-1'", ["--config=x", "--ranks=1", "--max-restarts=-1"]),
                                         (2, "--max-restarts needs --ranks", ["--config=x", "--max-restarts=1"]),
                                         (1, "min_ranks is 2", ["--config=x", "--ranks=1", "--min-ranks=2"]),
                                         (1, "nowhere.json", ["--config=nowhere.json", "--ranks=1"]),
                                         (1, "does not exist", ["--config", self.write_config(), "--ranks=1", "nowhere.txt"])):
            done = self.run_program(*arguments)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(words, done.stderr)
        wrong = self.write_config(zero_optimisation={"stage": 3})
        done = self.run_program("--config", wrong, "--ranks=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("zero_optimization", done.stderr)
        self.assertEqual(self.run_program("--help").returncode, 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
