"""train_resnet trains as one process that shards nothing does, with every strategy, and goes on on other ranks.

Usage: train_resnet_test.py PROGRAM DATA. TESSERA_TEST_FULL=1 takes all strategies, 60 steps and all the data; otherwise a part of the
strategies, drawn with TESSERA_TEST_SEED, trains 6 steps on a part of the data.
"""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, DATA = (pathlib.Path(argument).resolve() for argument in (sys.argv.pop(1), sys.argv.pop(1)))
FULL = os.environ.get("TESSERA_TEST_FULL") == "1"
DRAW = random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1")))
STRATEGIES = {
    "ragged": [],
    "ragged, kept": ["--reshard-after-forward=false"],
    "per parameter": ["--per-parameter"],
    "per parameter, kept": ["--per-parameter", "--reshard-after-forward=false"],
    "replicate": ["--strategy=replicate"],
}
MESHES = {"1": ["--ranks=1"], "2": ["--ranks=2"], "4": ["--ranks=4"], "2 x 2": ["--ranks=4", "--replicas=2"]}
SIZE = ["--width=4", "--epochs=5" if FULL else "--epochs=3"]  # 12 or 2 steps an epoch
CUTS = [20, 40] if FULL else [1, 3]  # steps after which a run goes on on other ranks, both within an epoch
IN_DOUBLE = ["--dtype=double", "--dropout=0"]  # the ranks draw what they drop


def cases(meshes):
    """All strategies on these meshes, or one that is drawn."""
    every = [(strategy, mesh) for strategy in STRATEGIES for mesh in meshes if (strategy, mesh) != ("replicate", "2 x 2")]
    return every if FULL else DRAW.sample(every, 1)


def read_safetensors(path):
    """The tensors of a file, as {name: (dtype, shape, bytes)}."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, values = json.loads(data[8:8 + size]), data[8 + size:]
    header.pop("__metadata__", None)
    return {name: (about["dtype"], about["shape"], values[slice(*about["data_offsets"])]) for name, about in header.items()}


class TrainResnet(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # 249 of 311 are to train on, with 25 in the last batch: ranks have different numbers of rows.
        self.data = DATA if FULL else self.part_of_the_data(311)

    def part_of_the_data(self, lines):
        path = self.folder / "digits.csv"
        path.write_text("".join(DATA.read_text().splitlines(keepends=True)[:lines]))
        return path

    def run_program(self, *flags, data=None):
        command = [PROGRAM, f"--data={data or self.data}", "--log=log.jsonl", *flags]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)

    def train(self, *flags, data=None):
        """Trains, and returns the records of the folder's log."""
        done = self.run_program(*flags, data=data)
        self.assertEqual(done.returncode, 0, f"{flags}: {done.stderr}")
        return self.log()

    def log(self):
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def begin_anew(self):
        for path in (self.folder / "runs", self.folder / "log.jsonl"):
            subprocess.run(["rm", "-rf", path], check=True)

    def largest_difference(self, records, expected):
        """Of the numbers of all steps, and of the evaluations that both have."""
        def steps(some):
            return [record["step"] for record in some if record["kind"] == "step"]
        self.assertEqual(steps(records), steps(expected))
        known = {key: numbers for record in expected for key, numbers in self.results(record)}
        pairs = [(numbers, known[key]) for record in records for key, numbers in self.results(record) if key in known]
        return max(abs(one[name] - other[name]) for one, other in pairs for name in one)

    def results(self, record):
        """What a record says of the model, by the step and by what was computed; times and memory are not of the model."""
        wanted = ("loss", "accuracy", "grad_norm", "learning_rate", "rows")
        for prefix in ("", "weights.", "averaged."):
            numbers = {name: record[prefix + name] for name in wanted if prefix + name in record}
            if numbers:
                yield (prefix, record["step"]), numbers

    def reference(self):
        records = self.train("--strategy=none", *SIZE, *IN_DOUBLE)
        losses = [record["loss"] for record in records if record["kind"] == "step"]
        self.assertEqual(len(losses), 60 if FULL else 6)
        self.assertLess(losses[-1], losses[0])
        return records

    def test_every_strategy_trains_as_one_process(self):
        expected = self.reference()
        for strategy, mesh in cases(MESHES if FULL else ("2", "4", "2 x 2")):
            with self.subTest(strategy=strategy, mesh=mesh):
                self.begin_anew()
                records = self.train(*MESHES[mesh], *STRATEGIES[strategy], *SIZE, *IN_DOUBLE)
                difference = self.largest_difference(records, expected)
                print(f"{strategy} on {mesh}: {difference:.1e}", flush=True)
                self.assertLessEqual(difference, 1e-9)
        self.check_resumed(expected)

    def check_resumed(self, expected):
        for strategy, mesh in cases(("4", "2 x 2")):
            with self.subTest(strategy=strategy, mesh=mesh, resumed="4 to 2 to 1"):
                self.begin_anew()
                flags = [*STRATEGIES[strategy], *SIZE, *IN_DOUBLE, "--save-every=1"]
                self.train(*MESHES[mesh], f"--stop-after={CUTS[0]}", *flags)
                if FULL:
                    self.check_evaluation_after_load(*MESHES[mesh], f"--stop-after={CUTS[0]}", *flags)
                self.train("--ranks=2", f"--stop-after={CUTS[1]}", *flags)
                self.check_evaluation_after_load("--ranks=2", f"--stop-after={CUTS[1]}", *flags)
                records = self.train("--ranks=1", *flags)
                difference = self.largest_difference(records, expected)
                print(f"{strategy} on {mesh}, then 2, then 1: {difference:.1e}", flush=True)
                self.assertLessEqual(difference, 1e-9)
                self.check_what_is_left(max(record["step"] for record in records))

    def check_evaluation_after_load(self, *flags):
        """A run that has no step left evaluates what it loaded: to the bit what the one before evaluated ahead of its save."""
        before = self.evaluations()
        self.train(*flags)
        after = self.evaluations()
        self.assertEqual(["weights.loss" in after[0], "averaged.loss" in after[1]], [True, True])
        self.assertEqual(after, before)
        print(f"step {after[0]['step']}: the evaluations before the save and after the load are identical", flush=True)

    def evaluations(self):
        """The last of each."""
        return [record for record in self.log() if record["kind"] == "evaluation"][-2:]

    def check_what_is_left(self, step):
        """The two newest checkpoints, and the average as the last one has it."""
        runs = self.folder / "runs"
        self.assertEqual(sorted(path.name for path in (runs / "resnet").glob("step-*")), [f"step-{step - 1:06}", f"step-{step:06}"])
        saved = {}
        for path in (runs / "resnet" / "latest").glob("*.safetensors"):
            saved |= read_safetensors(path)
        exported = read_safetensors(runs / "resnet-averaged" / "model.safetensors")
        self.assertEqual(len(exported), 56)  # 29 parameters, 27 buffers
        bytes_of_all = sum(len(data) for _, _, data in exported.values())
        self.assertGreater((runs / "resnet-averaged.pt").stat().st_size, bytes_of_all)
        for name, tensor in exported.items():
            self.assertEqual(tensor, saved["average." + name], name)

    def test_learns_in_bfloat16_with_replicas(self):
        records = self.train("--ranks=2", "--replicas=2", "--dtype=bfloat16", "--width=8", "--epochs=5", data=DATA)
        losses = [record["loss"] for record in records if record["kind"] == "step"]
        averaged = [record["averaged.accuracy"] for record in records if "averaged.accuracy" in record]
        print(f"bfloat16: loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy of the average {averaged[-1]:.3f}", flush=True)
        self.assertLess(losses[-1], losses[0] / 5)
        self.assertGreater(averaged[-1], 0.88)

    def test_a_resumed_run_draws_the_same_dropout(self):
        flags = ["--ranks=2", "--dropout=0.5", "--save-every=3", *SIZE]
        whole = self.train(*flags)
        self.begin_anew()
        self.train(*flags, "--stop-after=3")
        resumed = [dict(self.results(record)) for record in self.train(*flags) if record["kind"] == "step"]
        self.assertEqual(resumed, [dict(self.results(record)) for record in whole if record["kind"] == "step"])

    def test_errors_say_what_to_do(self):
        for message, flags in {
            "/nowhere.csv does not exist; `scripts/setup --digits` makes .data/digits.csv": ["--data=/nowhere.csv", "--strategy=none"],
            "--batch 32 does not divide among 3 ranks": ["--ranks=3"],
        }.items():
            done = self.run_program(*flags)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(message, done.stderr)


if not DATA.exists():
    raise SystemExit(f"there is no {DATA}; run scripts/setup --digits")
unittest.main()
