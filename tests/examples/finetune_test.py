"""Runs finetune as a user does, on a small BERT with random weights. The arguments are the program's path and unittest's."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch

from small_bert import CONFIG, VOCABULARY, weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(sys.argv[1]).resolve()
BOUND = 1e-5
STEPS = 16
LEARNING_RATES = 1e-3, 1e-2  # of all weights, of adapters
PAIRS = [(f"w{i} w{i + 1}", f"w{i + 20} w{i} w{i + 7}") for i in range(30)]
RANK, ALPHA = 4, 12
ADAPTERS = {"lora_r": RANK, "lora_alpha": ALPHA, "target_modules": ["query", "intermediate.dense"]}
LAYERS = [f"encoder.layer.{i}.{part}" for i in range(CONFIG["num_hidden_layers"]) for part in ("attention.self.query", "intermediate.dense")]


def base():
    """Weights under which sentences differ, so that training does not amplify rounding before it learns."""
    return {name: tensor + 1 if name.endswith("LayerNorm.weight") else tensor for name, tensor in weights().items()}


def without_key_biases(tensors):
    """A softmax does not depend on them: their gradients are rounding alone, which AdamW makes large."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("self.key.bias")}


class FinetuneTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.model = self.folder / "model"
        (self.model / "1_Pooling").mkdir(parents=True)
        (self.model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        (self.model / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
        safetensors.torch.save_file(base(), self.model / "model.safetensors")
        (self.folder / "pairs.tsv").write_text("".join(f"{first}\t{second}\n" for first, second in PAIRS))

    def config(self, model=None, steps=STEPS, **tessera):
        """The example's file, with other steps, folders and data."""
        return {
            "train_batch_size": 12, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATES[model is not None]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": STEPS}},
            "tessera": {
                "stop_after": f"{steps} steps", "evaluate": {"every": "4 steps"}, "save": {"folder": "runs"},
                "log": {"jsonl": "log.jsonl", "progress": False}, "model": model or {}, "data": {"pairs": "pairs.tsv", "held_out": 6},
            } | tessera,
        }

    def run_program(self, config, *flags):
        return self.run_with(json.dumps(config), *flags)

    def run_with(self, config, *flags):
        (self.folder / "finetune.json").write_text(config)
        command = [PROGRAM, "--config=finetune.json", f"--model={self.model}", "--output=output", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=self.folder)

    def train(self, config, *flags):
        done = self.run_program(config, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.records()

    def records(self):
        """The numbers of each step, and of the evaluations that every run has, wherever it was interrupted."""
        records = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        wanted = ("loss", "grad_norm", "found", "held out.loss", "held out.found")
        return {(record["kind"], record["step"]): [record[name] for name in wanted if name in record]
                for record in records if record["kind"] == "step" or (record["kind"] == "evaluation" and record["step"] % 4 == 0)}

    def begin_anew(self):
        for name in ("runs", "output", "merged", "early"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "log.jsonl").unlink(missing_ok=True)

    def read(self, name, file="model.safetensors"):
        return safetensors.torch.load_file(self.folder / name / file)

    def adapters(self):
        return self.read("output", "adapter_model.safetensors")

    def assert_close(self, actual, expected, case):
        self.assertEqual(actual.keys(), expected.keys(), case)
        for key, numbers in expected.items():
            self.assertEqual(len(actual[key]), len(numbers), key)
            for one, other in zip(actual[key], numbers):
                self.assertLessEqual(abs(one - other), BOUND * max(1, abs(other)), f"{case}: {key}")

    def assert_same_tensors(self, actual, expected, bound=0.0):
        self.assertEqual(actual.keys(), expected.keys())
        for name, tensor in expected.items():
            self.assertEqual((actual[name].shape, actual[name].dtype), (tensor.shape, tensor.dtype), name)
            self.assertLessEqual((actual[name].double() - tensor.double()).abs().max().item(), bound, name)

    def assert_learns(self, records):
        losses = [records["step", step][0] for step in range(1, STEPS + 1)]
        self.assertLess(losses[-1], 0.9 * losses[0])
        self.assertIn(("evaluation", STEPS), records)

    def assert_model_folder(self, name):
        """All that lay beside the weights; weights of the same names and shapes, what the program does without unchanged."""
        for file in ("config.json", "vocab.txt", "1_Pooling/config.json"):
            self.assertEqual((self.folder / name / file).read_bytes(), (self.model / file).read_bytes())
        actual, before = self.read(name), base()
        self.assertEqual({key: (tensor.shape, tensor.dtype) for key, tensor in actual.items()},
                         {key: (tensor.shape, tensor.dtype) for key, tensor in before.items()})
        for key in ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"):
            self.assertTrue(torch.equal(actual[key], before[key]), key)
        return actual

    def test_all_weights_on_one_and_two_ranks_and_resumed(self):
        expected = self.train(self.config(), "--ranks=1")
        self.assert_learns(expected)
        trained = self.assert_model_folder("output")
        changed = [name for name, tensor in base().items() if not torch.equal(tensor, trained[name])]
        self.assertEqual(len(changed), 5 + 16 * CONFIG["num_hidden_layers"])
        for ranks, first in ((2, STEPS), (1, 3)):
            self.begin_anew()
            if first < STEPS:
                self.train(self.config(steps=first), f"--ranks={ranks}", "--output=early")
            self.assert_close(self.train(self.config(), "--ranks=2"), expected, f"2 ranks, from step {first % STEPS}")
            self.assert_same_tensors(*(without_key_biases(tensors) for tensors in (self.read("output"), trained)), 1e-4)

    def test_adapters_on_one_and_two_ranks_and_resumed(self):
        expected = self.train(self.config(ADAPTERS), "--ranks=1", "--merged=merged")
        self.assert_learns(expected)
        adapters = self.adapters()
        self.check_files_of_peft(adapters)
        self.check_merged(adapters)
        self.assertFalse((self.folder / "output" / "model.safetensors").exists())
        self.begin_anew()
        self.assert_close(self.train(self.config(ADAPTERS), "--ranks=2"), expected, "2 ranks")
        self.assert_same_tensors(self.adapters(), adapters, 1e-4)
        self.begin_anew()
        self.train(self.config(ADAPTERS, steps=3), "--ranks=0", "--output=early")
        self.check_checkpoint("step-000003")
        self.assertEqual(self.train(self.config(ADAPTERS), "--ranks=0"), expected)
        self.assert_same_tensors(self.adapters(), adapters)

    def check_files_of_peft(self, adapters):
        width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        shapes = {}
        for layer in LAYERS:
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (RANK, width)
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (hidden if layer.endswith("intermediate.dense") else width, RANK)
        self.assertEqual({name: tuple(tensor.shape) for name, tensor in adapters.items()}, shapes)
        about = json.loads((self.folder / "output" / "adapter_config.json").read_text())
        known = {key: about[key] for key in ("peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path")}
        self.assertEqual(known, {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ADAPTERS["target_modules"],
                                 "base_model_name_or_path": str(self.model)})

    def check_merged(self, adapters):
        """base + B · A · alpha / rank, and to the bit the base where no adapter is."""
        expected = base()
        for layer in LAYERS:
            a, b = (adapters[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            self.assertGreater(b.abs().max().item(), 1e-3)
            expected[f"{layer}.weight"] += b @ a * (ALPHA / RANK)
        merged = self.assert_model_folder("merged")
        self.assert_same_tensors(merged, expected, 1e-6)
        adapted = {f"{layer}.weight" for layer in LAYERS}
        for name, tensor in base().items():
            self.assertEqual(torch.equal(merged[name], tensor), name not in adapted, name)

    def check_checkpoint(self, name):
        """Adapters alone, with the optimizer's state of these alone."""
        tensors = {}
        for file in (self.folder / "runs" / name).glob("*.safetensors"):
            tensors |= safetensors.torch.load_file(file)
        prefix = "optimizer.state."
        weights_there = {key for key in tensors if key.startswith("encoder.")}
        self.assertEqual(weights_there, {f"{layer}.lora_{part}.weight" for layer in LAYERS for part in "AB"})
        states = {key.removeprefix(prefix).rpartition(".")[0] for key in tensors if key.startswith(prefix)}
        self.assertEqual(states, weights_there)

    def test_the_best_weights_are_written(self):
        config = self.config(ADAPTERS, save={"folder": "runs", "best": "held out"}, evaluate={"every": "1 steps"})
        config["optimizer"]["params"]["lr"] = 0.3  # far too high: a later step is worse
        self.train(config, "--ranks=2")
        records = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        losses = {record["step"]: record["held out.loss"] for record in records if record["kind"] == "evaluation"}
        self.assertEqual(len(losses), STEPS)
        best = min(losses, key=losses.get)
        self.assertLess(best, STEPS)
        adapters = self.adapters()
        self.begin_anew()
        self.train(config | {"tessera": config["tessera"] | {"stop_after": f"{best} steps"}}, "--ranks=2")
        self.assert_same_tensors(self.adapters(), adapters)

    def test_the_files_of_the_example_are_configs(self):
        (self.folder / "examples").symlink_to(ROOT / "examples")
        for name, written in (("finetune", "model.safetensors"), ("lora", "adapter_model.safetensors")):
            config = (ROOT / "examples" / "finetune" / f"{name}.json").read_text()
            done = self.run_with(config.replace('"stop_after": "60 steps"', '"stop_after": "7 steps"'), "--ranks=0", f"--output={name}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("ends after 7 steps", done.stdout)
            self.assertIn("held out after 6 steps", done.stdout)
            self.assertTrue((self.folder / name / written).exists())

    def test_errors_say_what_is_wrong(self):
        for message, config, flags in (
            ('no module of the model is called "querry"', self.config(ADAPTERS | {"target_modules": ["querry"]}), ()),
            ("embeddings.LayerNorm is torch::nn::LayerNormImpl, which cannot be adapted",
             self.config(ADAPTERS | {"target_modules": ["embeddings.LayerNorm"]}), ()),
            ("an adapter of rank 21 for a layer of 20 inputs and 20 outputs", self.config(ADAPTERS | {"lora_r": 21}), ()),
            ("lora_r is -1", self.config({"lora_r": -1}), ()),
            ("lora_alpha is 0", self.config(ADAPTERS | {"lora_alpha": 0}), ()),
            ("target_modules is empty", self.config(ADAPTERS | {"target_modules": []}), ()),
            ("lora_alpha", self.config({"lora_alhpa": 1}), ()),
            ("31 of 30 pairs", self.config(data={"pairs": "pairs.tsv", "held_out": 31}), ()),
            ("splits no layers or sequences", self.config(mesh={"tp": 2}), ()),
            (f"{self.model} exists already", self.config(), (f"--output={self.model}",)),
            ("--merged is for adapters", self.config(), ("--merged=merged",)),
        ):
            done = self.run_program(config, f"--ranks={2 if 'mesh' in config['tessera'] else 0}", *flags)
            self.assertEqual(done.returncode, 1, message)
            self.assertIn(message, done.stderr)
        self.assert_same_tensors(safetensors.torch.load_file(self.model / "model.safetensors"), base())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
