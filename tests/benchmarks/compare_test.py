"""What benchmarks/compare makes of what its programs answer. They are not run here."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import shlex
import sys
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.dont_write_bytecode = True
sys.path.insert(0, str(BENCHMARKS))

from comparison import hosts, overhead, prediction  # noqa: E402
from comparison.processes import Failure  # noqa: E402
from comparison.row import Row, at_least_ratio, without_bound  # noqa: E402

PROGRAMS = SimpleNamespace(ours=lambda name: [f"/a folder/{name}"], peer=lambda name: ["python", name])


def compare():
    """The script without an ending, as a module."""
    loader = importlib.machinery.SourceFileLoader("compare", str(BENCHMARKS / "compare"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("compare", loader))
    loader.exec_module(module)
    return module


class Suites(unittest.TestCase):
    def run_with(self, suites):
        """The status, what was printed, and the rows in the file."""
        script, errors = compare(), io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "rows.json"
            with (mock.patch.object(script, "SUITES", suites), mock.patch.object(script, "Programs", lambda build: PROGRAMS),
                  mock.patch.object(sys, "argv", ["compare", "--suite", "all", "--json", str(file)]),
                  contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors)):
                status = script.main()
            return status, errors.getvalue(), [row["case"] for row in json.loads(file.read_text())]

    def test_one_that_cannot_run_costs_no_rows_of_the_others(self):
        def fails(programs, quick):
            yield Row("fails", "before", 1.0, None, "s")
            raise Failure("namespaces are not permitted here")

        def succeeds(programs, quick):
            yield Row("succeeds", "after", 1.0, None, "s")

        status, errors, cases = self.run_with({"fails": fails, "succeeds": succeeds})
        self.assertEqual((status, cases), (1, ["before", "after"]))
        self.assertIn("compare: fails: namespaces are not permitted here", errors)
        self.assertEqual(self.run_with({"succeeds": succeeds})[0], 0)

    def test_the_gpus_are_not_among_all(self):
        suite = {"gpu-host": lambda programs, quick: self.fail("it ran")}
        self.assertEqual(self.run_with(suite), (0, "", []))


class Rows(unittest.TestCase):
    def test_a_cost_that_is_lost_in_noise_has_no_ratio(self):
        for ours in (0.0, -0.5):
            row = at_least_ratio("suite", "case", ours, 450.0, "us", 900)
            self.assertEqual((row.ratio, row.holds), (None, False))
            self.assertIsNone(without_bound("suite", "case", ours, 450.0, "us").ratio)
        self.assertTrue(at_least_ratio("suite", "case", 0.5, 450.0, "us", 900).holds)

    def test_a_link_whose_times_do_not_grow_has_a_row_for_alpha_alone(self):
        with (mock.patch.object(prediction, "MODELS", {}), mock.patch.object(prediction, "run_program"),
              mock.patch.object(prediction, "on_both_hosts"),
              mock.patch.object(prediction, "fit", return_value={"alpha": 0.0, "beta": 0})):
            self.assertEqual([row.case[:5] for row in prediction.run(PROGRAMS)], ["alpha", "alpha"])

    def test_a_host_without_namespaces_has_the_predictions_for_itself(self):
        rows = []
        with (mock.patch.object(prediction, "run_program"), mock.patch.object(prediction, "fit", return_value={"alpha": 0.0, "beta": 0}),
              mock.patch.object(prediction, "step_of_host", return_value=(1.0, 1.0)),
              mock.patch.object(prediction, "on_both_hosts", side_effect=Failure("namespaces are not permitted here")),
              self.assertRaises(Failure)):
            for row in prediction.run(PROGRAMS):
                rows.append(row)
        self.assertEqual(len([row for row in rows if row.bound]), 2 * len(prediction.MODELS))

    def test_every_collective_between_hosts_has_a_bound(self):
        times = {name: {"ours": 1.0, "c10d": 1.0} for name in ("all_gather", "reduce_scatter", "all_reduce")}
        with mock.patch.object(hosts, "seconds_of", return_value=times):
            self.assertEqual(len([row for row in hosts.run(PROGRAMS, quick=True) if row.bound]), 3)

    def test_a_further_parameter_stands_beside_fsdp2s_own(self):
        microseconds = {("ours", 9): 10, ("ours", 45): 28, ("peer", 9): 450, ("peer", 45): 810}  # a group

        class Answers(contextlib.nullcontext):
            def __init__(self, command, count):
                super().__init__(self)
                side = "peer" if command[0] == "python" else "ours"
                self.added = microseconds[side, int(command[-1])]

            def wait_until_ready(self):
                pass

            def ask(self, name):
                return [1e-3 + (0 if name == "plain" else 1e-6 * self.added * overhead.GROUPS)]

        with mock.patch.object(overhead, "Ranks", Answers):
            ours, peer = overhead.costs(PROGRAMS, 1, 3)
        self.assertAlmostEqual(ours["further"], 0.5)
        self.assertAlmostEqual(peer["further"], 10)
        self.assertAlmostEqual(peer["group"], 450)


class Commands(unittest.TestCase):
    def test_a_folders_name_may_hold_a_space(self):
        with mock.patch.object(hosts, "on_both_hosts", return_value="") as started:
            hosts.seconds_of(PROGRAMS, "gloo", 3)
        self.assertEqual(shlex.split(started.call_args.args[0])[0], "/a folder/collectives_bench")


if __name__ == "__main__":
    unittest.main()
