"""measure_simulated_step as benchmarks/compare drives it. The arguments are the program's path, and unittest's."""
import json
import pathlib
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
MODEL = ["--layers=2", "--width=32", "--heads=2", "--sequence=16", "--batch=1"]
LINK = {"alpha": 1e-5, "beta": 1e-10}


def run(commands, *arguments):
    return subprocess.run([PROGRAM, *arguments], input=commands, capture_output=True, text=True, timeout=120)


def step_of(ranks, **links):
    topology = json.dumps({"ranks": ranks, "ranks_per_node": max(1, ranks // 2), "in_node": LINK, **links})
    done = run("step\nstep\n", topology, *MODEL)
    assert done.returncode == 0, done.stderr
    ready, _, step = done.stdout.splitlines()
    assert ready == "ready"
    return json.loads(step)


class MeasureSimulatedStepTest(unittest.TestCase):
    def test_a_step_is_compute_and_what_is_exposed_of_communication(self):
        step = step_of(4, between_nodes=LINK)
        self.assertAlmostEqual(step["step"], step["compute"] + step["exposed"], delta=1e-9)
        self.assertLess(0, step["exposed"])
        self.assertLessEqual(step["exposed"], step["communication"] + 1e-9)

    def test_one_rank_sends_nothing(self):
        self.assertEqual(step_of(1)["communication"], 0)

    def test_slower_links_take_longer_by_their_factor(self):
        # By their latency alone: collectives that overlap wait for one another's bytes, and the measured compute decides which do.
        links = ({"alpha": factor * LINK["alpha"], "beta": 0} for factor in (1, 100))
        fast, slower = (step_of(2, between_nodes=link)["communication"] for link in links)
        self.assertAlmostEqual(slower / fast, 100, delta=1e-6)

    def test_bad_arguments_are_errors(self):
        for arguments, part in (([], "usage: measure_simulated_step TOPOLOGY"), (['{"ranks": 0}'], "0 ranks"), (["{"], "topology")):
            done = run("", *arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(part, done.stderr)
        done = run("walk\n", json.dumps({"ranks": 1}), *MODEL)
        self.assertEqual(done.returncode, 1)
        self.assertIn("there is no command 'walk'", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
