"""Runs train_gpt as a user does. The arguments are the program's path, the virtual environment's, and unittest's."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM, VENV = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
SMALL = ["--layers=2", "--width=16", "--heads=2", "--sequence=8", "--steps=3", "--global-batch=12", "--lr=1e-2", "--warmup=1",
         "--validation-batches=2", "--sample-bytes=5"]
TIMEOUT = 120


def sequence_of_bytes():
    """A text that has something to learn, and is the same on every machine."""
    state, words = 1, []
    for _ in range(3000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        words.append(("the", "cat", "sat", "on", "a", "mat", "and", "ran")[state >> 16 & 7])
    return " ".join(words)


class TrainGptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.data = self.folder / "text.txt"
        self.data.write_text(sequence_of_bytes())

    def run_program(self, *flags, launcher=()):
        command = [*launcher, PROGRAM, f"--data={self.data}", f"--log={self.folder}/log.jsonl", f"--samples={self.folder}/samples.txt"]
        return subprocess.run([*command, *SMALL, *flags], capture_output=True, text=True, timeout=TIMEOUT, cwd=self.folder)

    def train(self, *flags, launcher=()):
        """The records of the log, by kind, and what the program printed."""
        done = self.run_program(*flags, launcher=launcher)
        self.assertEqual(done.returncode, 0, done.stderr)
        records = {}
        for line in (self.folder / "log.jsonl").read_text().splitlines():
            record = json.loads(line)
            records.setdefault(record["kind"], []).append(record)
        return records, done.stdout

    def losses(self, *flags, launcher=()):
        return [record["loss"] for record in self.train(*flags, launcher=launcher)[0]["step"]]

    def assert_same_curve(self, losses, expected, case):
        self.assertEqual(len(losses), len(expected), case)
        for loss, reference in zip(losses, expected):
            self.assertLessEqual(abs(loss - reference), 1e-5, case)

    def assert_error(self, message, *flags):
        done = self.run_program(*flags)
        self.assertEqual(done.returncode, 1, f"{flags}: {done.stderr}")
        self.assertIn(message, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_every_optimizer_gives_the_same_curve_on_all_ranks(self):
        for name in ("fused-adamw", "sgd", "lamb", "adafactor", "adamw-8bit", "muon"):
            flags = (f"--optimizer={name}", "--lr=3e-2" if name == "adafactor" else "--lr=1e-2")
            expected = self.losses("--ranks=1", *flags)
            self.assertLess(expected[-1], expected[0], name)
            self.assert_same_curve(self.losses("--ranks=2", *flags), expected, name)
        self.train("--ranks=2", "--optimizer=lion", "--lr=1e-3") # a sign near 0 depends on rounding
        self.train("--ranks=2", "--optimizer=adamw-bf16", "--lr=1e-3") # and so does what a moment is rounded to
        self.assert_error("--optimizer is 'adam', but must be one of adamw fused-adamw sgd lion ", "--ranks=1", "--optimizer=adam")

    def test_steps_in_backward_give_the_same_curve(self):
        flags = ("--ranks=2", "--clip=0", "--optimizer=fused-adamw")
        self.assert_same_curve(self.losses(*flags, "--step-in-backward"), self.losses(*flags), "steps in backward")
        self.assert_error("it needs --clip=0", "--ranks=1", "--step-in-backward")

    def test_optimizers_of_one_bit_train_whole_models(self):
        for name in ("onebit-adam", "onebit-lamb", "zero-one-adam"):
            losses = self.losses("--ranks=2", "--strategy=no-shard", "--clip=0", f"--optimizer={name}", "--lr=1e-3")
            self.assertLess(losses[-1], losses[0] + 0.1, name)
            self.assert_error("it needs --strategy=no-shard", "--ranks=2", f"--optimizer={name}")

    def test_sequences_that_are_split_over_ranks_give_the_same_curve(self):
        expected = self.losses("--ranks=1")
        for flags in (["--ranks=2", "--context-ranks=2"], ["--ranks=2", "--context-ranks=2", "--context=ring", "--recompute"],
                      ["--ranks=2", "--context-ranks=2", "--context=ulysses", "--strategy=no-shard"],
                      ["--ranks=4", "--context-ranks=2", "--context=ring", "--strategy=hybrid"]):
            self.assert_same_curve(self.losses(*flags), expected, flags)
        self.assert_error("--sequence 8 does not divide into 6 chunks", "--ranks=3", "--context-ranks=3")
        self.assert_error("--heads 2 do not divide among --context-ranks 4", "--ranks=4", "--context-ranks=4", "--context=ulysses")
        self.assert_error("--context is 'zigzag', but must be all-gather, ring or ulysses", "--ranks=1", "--context=zigzag")
        self.assert_error("--context-ranks 2 does not divide 3 ranks", "--ranks=3", "--context-ranks=2")

    def test_the_curve_does_not_depend_on_ranks_strategy_or_layout(self):
        expected = self.losses("--strategy=none")
        self.assertLess(expected[-1], expected[0])
        for ranks in (1, 2, 4):
            for layout in ("ragged", "per-parameter"):
                flags = (f"--ranks={ranks}", f"--layout={layout}")
                self.assert_same_curve(self.losses(*flags), expected, flags)
        for flags in (("--ranks=3",), ("--ranks=4", "--strategy=hybrid", "--mesh=2x2"), ("--ranks=2", "--strategy=no-shard"),
                      ("--ranks=2", "--reshard-after-forward=false"), ("--ranks=2", "--recompute"),
                      ("--strategy=none", "--recompute")):
            self.assert_same_curve(self.losses(*flags), expected, flags)

    def test_the_curve_does_not_depend_on_tensor_parallelism(self):
        expected = self.losses("--strategy=none")
        for ranks, mesh, dims, *others in ((2, "2", "tp"), (4, "2x2", "dp,tp"), (2, "1x2", "dp,tp", "--recompute"),
                                           (4, "2x1x2", "replicate,shard,tp", "--strategy=hybrid")):
            for sequence in ("false", "true"):
                flags = (f"--ranks={ranks}", f"--mesh={mesh}", f"--dims={dims}", f"--sequence-parallel={sequence}", *others)
                self.assert_same_curve(self.losses(*flags), expected, flags)

    def test_sequences_and_layers_are_split_together(self):
        expected = self.losses("--strategy=none")
        for ranks, mesh, dims, *others in ((4, "1x2x2", "dp,cp,tp"), (4, "2x2", "cp,tp", "--context=ring", "--recompute"),
                                           (4, "2x2x1", "dp,cp,tp", "--context=ulysses"), (2, "2", "cp", "--context=ring"),
                                           (4, "2x1x2x1", "replicate,shard,cp,tp", "--strategy=hybrid"),
                                           (4, "1x1x2x2", "replicate,shard,cp,tp", "--strategy=hybrid", "--context=ring")):
            for sequence in ("false", "true") if dims.endswith("tp") else ("false",):
                flags = (f"--ranks={ranks}", f"--mesh={mesh}", f"--dims={dims}", f"--sequence-parallel={sequence}", *others)
                self.assert_same_curve(self.losses(*flags), expected, flags)
        self.assert_error("--heads 2 do not divide among --context-ranks 2 in the ranks of tp", "--ranks=4", "--mesh=2x2",
                          "--dims=cp,tp", "--context=ulysses")
        self.assert_error("--context-ranks 4, but the dim cp has 2", "--ranks=4", "--mesh=2x2", "--dims=dp,cp", "--context-ranks=4")
        self.assert_error("cp must be the last dim, or before ep and tp", "--ranks=4", "--mesh=2x2", "--dims=cp,dp")

    def test_the_curve_does_not_depend_on_pipelines(self):
        expected = self.losses("--strategy=none", "--layers=6", "--steps=4")
        for ranks, mesh, dims, schedule, *others in ((2, "2", "pp", "1f1b"), (4, "2x2", "pp,dp", "zb-h1"), (4, "4x1", "pp,dp", "zb-v"),
                                                     (4, "2x2", "pp,tp", "zb-h1", "--recompute"), (3, "3", "pp", "gpipe")):
            flags = (f"--ranks={ranks}", f"--mesh={mesh}", f"--dims={dims}", f"--schedule={schedule}", "--layers=6", "--steps=4", *others)
            self.assert_same_curve(self.losses(*flags), expected, flags)
        saved = self.folder / "stages"
        self.train("--ranks=4", "--mesh=2x2", "--dims=pp,dp", "--layers=6", "--steps=4", f"--checkpoint={saved}", "--save-every=2")
        (saved / "step-000004").rename(self.folder / "last")
        (self.folder / "log.jsonl").unlink()
        rest = self.losses("--ranks=3", "--mesh=3", "--dims=pp", "--layers=6", "--steps=4", f"--checkpoint={saved}", "--resume")
        self.assert_same_curve(rest, expected[2:], "pp 2 and dp 2, then pp 3")

    def test_the_curve_does_not_depend_on_expert_parallelism(self):
        experts = ("--experts=4", "--balance-loss=0.1")
        expected = self.losses("--ranks=1", *experts)
        self.assertLess(expected[-1], expected[0])
        for ranks, mesh, dims, *others in ((4, "2x2", "dp,ep", "--recompute"), (4, "2x2", "dp,tp"),
                                           (4, "1x2x2", "dp,ep,tp", "--sequence-parallel"), (4, "2x2", "cp,ep"),
                                           (4, "2x1x2", "replicate,shard,ep", "--strategy=hybrid"),
                                           (2, "2", "ep", "--strategy=no-shard")):
            flags = (f"--ranks={ranks}", f"--mesh={mesh}", f"--dims={dims}", *experts, *others)
            self.assert_same_curve(self.losses(*flags), expected, flags)
        piped = ("--layers=4", "--steps=4", "--experts=4", "--balance-loss=0")
        expected = self.losses("--ranks=1", *piped)
        for mesh, dims in (("2x1x2", "pp,dp,ep"), ("2x2", "pp,tp")):
            flags = ("--ranks=4", f"--mesh={mesh}", f"--dims={dims}", "--schedule=zb-h1", *piped)
            self.assert_same_curve(self.losses(*flags), expected, flags)
        saved = self.folder / "experts"
        self.train("--ranks=4", "--mesh=1x4", "--dims=dp,ep", *piped, f"--checkpoint={saved}", "--save-every=2")
        (saved / "step-000004").rename(self.folder / "after")
        (self.folder / "log.jsonl").unlink()
        rest = self.losses("--ranks=2", "--mesh=2", "--dims=ep", *piped, f"--checkpoint={saved}", "--resume")
        self.assert_same_curve(rest, expected[2:], "resumed on other ranks")

    def test_a_checkpoint_goes_from_one_mesh_to_another(self):
        whole = self.losses("--strategy=none", "--steps=4")
        saved = self.folder / "saved"
        self.train("--ranks=4", "--mesh=2x2", "--dims=dp,tp", "--steps=4", f"--checkpoint={saved}", "--save-every=2")
        (saved / "step-000004").rename(self.folder / "elsewhere")
        (self.folder / "log.jsonl").unlink()
        rest = self.losses("--ranks=2", "--mesh=2", "--dims=tp", "--steps=4", f"--checkpoint={saved}", "--resume")
        self.assert_same_curve(rest, whole[2:], "dp 2 and tp 2, then tp 2")

    def test_runs_under_torchrun(self):
        launcher = [VENV / "bin" / "torchrun", "--no-python", "--nproc-per-node=2", "--standalone", "--"]  # or it takes --log for its own
        self.assert_same_curve(self.losses(launcher=launcher), self.losses("--strategy=none"), "torchrun")

    def test_bf16_follows_fp32(self):
        expected = self.losses("--strategy=none")
        for reduce in ("fp32", "bf16"):
            losses = self.losses("--ranks=2", "--precision=bf16", f"--reduce-precision={reduce}")
            for loss, reference in zip(losses, expected):
                self.assertLess(abs(loss - reference), 0.05)
            self.assertNotEqual(losses, expected)

    def test_fp16_follows_fp32(self):
        expected = self.losses("--strategy=none")
        flags = ("--ranks=2", "--precision=fp16", f"--checkpoint={self.folder}/run", "--save-every=2")
        losses = self.losses(*flags)
        for loss, reference in zip(losses, expected):
            self.assertLess(abs(loss - reference), 0.05)
        self.assertNotEqual(losses, expected)
        second, last = sorted(path.name for path in (self.folder / "run").glob("step-*"))
        (self.folder / "run" / last).rename(self.folder / last)  # goes on from the second, with its scale
        (self.folder / "run" / "latest").unlink()
        (self.folder / "run" / "latest").symlink_to(second)
        self.assertEqual(self.losses(*flags, "--resume")[-1], losses[-1])

    def test_the_log_holds_what_was_measured(self):
        records, output = self.train("--ranks=2")
        self.assertEqual([record["step"] for record in records["step"]], [1, 2, 3])
        for record in records["step"]:
            self.assertGreater(record["loss"], 0)
            self.assertGreater(record["grad_norm"], 0)
            self.assertGreater(record["counts_per_second"], 0)
            self.assertGreater(record["resident_bytes"], 1 << 20)
        self.assertGreater(records["evaluation"][-1]["validation.loss"], 0)
        self.assertEqual(records["evaluation"][-1]["step"], 3)
        parameters = int(re.search(r"^(\d+) parameters on 2 ranks, strategy full", output, re.MULTILINE)[1])
        megabytes = float(re.search(r"optimizer state: ([\d.]+) MB a rank", output)[1])
        self.assertLessEqual(megabytes, 1.05 * 16 * parameters / 2 / 1e6 + 0.005)
        self.assertIn(f"log: {self.folder}/log.jsonl", output)
        self.assertIn("entropy of a single byte of the text: 2.", output)
        self.assertTrue((self.folder / "samples.txt").read_bytes().startswith(b"It is a truth "))

    def test_a_resumed_run_goes_on_as_if_uninterrupted(self):
        whole = self.losses("--ranks=4", "--steps=4")
        saved = self.folder / "saved"
        self.train("--ranks=4", "--steps=4", f"--checkpoint={saved}", "--save-every=2")
        self.assertEqual(sorted(path.name for path in saved.glob("step-*")), ["step-000002", "step-000004"])
        (saved / "step-000004").rename(self.folder / "elsewhere")
        (self.folder / "log.jsonl").unlink()
        rest = self.losses("--ranks=2", "--steps=4", f"--checkpoint={saved}", "--resume")
        self.assert_same_curve(rest, whole[2:], "resumed on 2 ranks")

    def test_a_signal_saves_what_is_resumed(self):
        saved, log = self.folder / "saved", self.folder / "log.jsonl"
        command = [PROGRAM, f"--data={self.data}", f"--log={log}", "--samples=", *SMALL, "--ranks=2", f"--checkpoint={saved}",
                   "--validate-every=0", "--steps=1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder) as training:
            try:
                deadline = time.monotonic() + TIMEOUT
                while training.poll() is None and not (log.exists() and '"step"' in log.read_text()):
                    self.assertLess(time.monotonic(), deadline, "no step was logged")
                    time.sleep(0.01)
                training.send_signal(signal.SIGTERM)
                output, error = training.communicate(timeout=TIMEOUT)
            finally:
                training.kill()  # nothing, once it has ended
        self.assertEqual(training.returncode, 0, error)
        self.assertIn("stopped by SIGTERM; --resume goes on", output)
        (folder,) = saved.glob("step-*")
        done = int(folder.name.removeprefix("step-"))
        log.unlink()
        rest = self.train("--ranks=4", f"--steps={done + 2}", f"--checkpoint={saved}", "--resume")[0]["step"]
        self.assertEqual([record["step"] for record in rest], [done + 1, done + 2])

    def test_a_torn_checkpoint_is_named(self):
        saved = self.folder / "saved"
        self.train("--ranks=2", f"--checkpoint={saved}")
        torn = next((saved / "step-000003").glob("*.safetensors"))
        size = torn.stat().st_size
        os.truncate(torn, size - 5)
        self.assert_error(f"{torn.name} has {size - 5} bytes where the checkpoint wrote {size}", "--ranks=2",
                          f"--checkpoint={saved}", "--resume")

    def test_resume_without_a_checkpoint_starts_at_the_beginning(self):
        self.assert_same_curve(self.losses(f"--checkpoint={self.folder}/none", "--resume"), self.losses(), "nothing to resume")

    def test_resume_refuses_other_flags_of_the_model(self):
        saved = self.folder / "saved"
        self.train("--ranks=2", f"--checkpoint={saved}")
        for flag, here, there in (("heads", 4, 2), ("layers", 3, 2), ("width", 32, 16), ("sequence", 4, 8)):
            self.assert_error(f"--{flag} is {here}, but {saved}/step-000003 was saved with --{flag} {there}", "--ranks=2",
                              f"--checkpoint={saved}", "--resume", f"--{flag}={here}")

    def test_a_new_training_leaves_the_checkpoints_of_another_alone(self):
        saved = self.folder / "saved"
        self.train(f"--checkpoint={saved}")
        before, log = (saved / "step-000003" / "index.json").read_bytes(), (self.folder / "log.jsonl").read_text()
        self.assert_error(f"--checkpoint {saved} holds step-000003 already: --resume goes on from the newest; a new training needs "
                          "another folder", f"--checkpoint={saved}", "--ranks=2")
        self.assertEqual((saved / "step-000003" / "index.json").read_bytes(), before)
        self.assertEqual((self.folder / "log.jsonl").read_text(), log)

    def test_what_is_no_link_called_latest_is_found_before_the_training(self):
        saved = self.folder / "saved"
        (saved / "latest").mkdir(parents=True)
        self.assert_error(f"{saved}/latest is no link to a checkpoint", f"--checkpoint={saved}", "--ranks=2")
        self.assertFalse((self.folder / "log.jsonl").exists())

    def test_a_trace_shows_computation_and_collectives_of_one_step(self):
        self.train("--ranks=2", f"--trace={self.folder}/trace", "--validate-every=0")
        for rank in range(2):
            events = json.loads((self.folder / f"trace/rank-{rank}.json").read_text())["traceEvents"]
            spans = [event for event in events if event.get("ph") == "X" and "ts" in event]
            forward = [event for event in spans if event["name"] == "aten::mm"]
            gathers = [event for event in spans if event.get("cat") == "collective" and event["name"].startswith("all_gather ")]
            self.assertTrue(any(event["name"].startswith("FSDP::all_gather (blocks.0: ") for event in spans))
            self.assertIn("all_gather blocks.1", {event["name"] for event in gathers})
            first, last = min(event["ts"] for event in forward), max(event["ts"] + event["dur"] for event in forward)
            self.assertTrue(any(first < event["ts"] < last for event in gathers), "on one clock")
            rows = {event["tid"] for event in gathers}
            named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            self.assertEqual({named[row] for row in rows}, {"fsdp.all_gather [0,1]"})

    def test_a_trace_that_cannot_be_written(self):
        self.assert_error(str(self.data), f"--trace={self.data}")

    def test_stops_in_time(self):
        records, _ = self.train("--ranks=2", "--steps=1000000", "--max-seconds=1")
        self.assertLess(len(records["step"]), 1000000)
        self.assertEqual(records["stop"][0]["step"], len(records["step"]))

    def test_missing_data(self):
        for ranks in (0, 2):
            self.assert_error("the data file /nowhere.txt does not exist", "--data=/nowhere.txt", f"--ranks={ranks}")

    def test_bad_dims(self):
        self.assert_error("names 1 dims, but --mesh has 2", "--ranks=4", "--mesh=2x2", "--dims=tp")
        self.assert_error("pp must be the first dim", "--ranks=4", "--mesh=2x2", "--dims=dp,pp")
        self.assert_error("each needs one", "--ranks=2", "--mesh=2", "--dims=pp", "--micro-batches=13")
        self.assert_error("tp must be the last dim", "--ranks=4", "--mesh=2x2", "--dims=tp,dp")
        self.assert_error("--sequence-parallel needs a dim tp", "--ranks=2", "--sequence-parallel")
        self.assert_error("--heads 2 does not divide among the 4 ranks of tp", "--ranks=4", "--mesh=4", "--dims=tp")

        self.assert_error("--dims with ep needs --experts", "--ranks=2", "--mesh=2", "--dims=ep")
        self.assert_error("--experts 3 do not divide among the 2 ranks of ep and tp", "--ranks=2", "--mesh=2", "--dims=ep", "--experts=3")
        self.assert_error("ep must be the last dim, or before tp", "--ranks=4", "--mesh=2x2", "--dims=ep,dp", "--experts=4")

    def test_bad_flags(self):
        self.assert_error("--mesh is '2y2', but must be sizes joined by x", "--mesh=2y2")
        self.assert_error("--width 16 is no multiple of --heads 3", "--heads=3")
        self.assert_error("--mesh 3 holds 3 ranks, but there are 2", "--mesh=3", "--ranks=2")
        self.assert_error("--global-batch 12 does not divide among 5 ranks", "--ranks=5")
        self.assert_error("--strategy none is for one process", "--strategy=none", "--ranks=2")
        self.assert_error("Unknown command line flag 'no_such_flag'", "--no-such-flag")

    def test_a_loss_that_is_not_finite(self):
        self.assert_error("Trainer: in step 2 the loss is", "--lr=1e30", "--warmup=0", "--ranks=2")

    def test_a_log_that_cannot_be_written(self):
        self.assert_error(f"cannot make the folder {self.data} of a log", f"--log={self.data}/log.jsonl", "--ranks=2")

    def test_outputs_that_cannot_be_written_are_found_before_the_training(self):
        for flag in (f"--samples={self.data}/samples.txt", f"--checkpoint={self.data}"):
            self.assert_error(f"cannot make the folder of {self.data}/", flag, "--ranks=2")
            self.assertFalse((self.folder / "log.jsonl").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
