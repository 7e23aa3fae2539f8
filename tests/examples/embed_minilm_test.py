"""Runs embed_minilm as a user does, on a small BERT with random weights. The arguments are the program's path and unittest's."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch

from small_bert import CONFIG, VOCABULARY, WORDS, weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peer"))
import minilm

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
TIMEOUT = 120
BOUND = 1e-5
SENTENCES = ["w1 w2 w3", "w4", "", "w5 w6 w7 w8 w9 w10 w11 w12", "nothing w58", "w2 w2", " ".join(WORDS)]
PAIRS = [(f"w{i} w{i + 1}", f"w{i + 20} w{i} w{i + 7}") for i in range(30)]
TRAINING = ["--steps=6", "--global-batch=12", "--lr=1e-3"]


def pieces(text):
    ids = [VOCABULARY.index(word) if word in VOCABULARY else 1 for word in text.split()]
    return [2, *ids[:CONFIG["max_position_embeddings"] - 2], 3]


class EmbedMinilmTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.model = self.folder / "model"
        self.model.mkdir()
        self.write_config()
        (self.model / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
        safetensors.torch.save_file(weights(), self.model / "model.safetensors")
        self.sentences = self.write("sentences.txt", "".join(text + "\n" for text in SENTENCES))
        self.pairs = self.write("pairs.tsv", "".join(f"{first}\t{second}\n" for first, second in PAIRS))

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def write_config(self, **changes):
        (self.model / "config.json").write_text(json.dumps(CONFIG | changes))

    def run_program(self, *flags):
        command = [PROGRAM, f"--model={self.model}", f"--input={self.sentences}", f"--log={self.folder}/log.jsonl", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=self.folder)

    def succeed(self, *flags):
        done = self.run_program(*flags)
        self.assertEqual(done.returncode, 0, f"{flags}: {done.stderr}")
        return done.stdout

    def embeddings(self, *flags):
        output = self.folder / "embeddings"
        self.succeed(f"--output={output}", *flags)
        return safetensors.torch.load_file(output / "model.safetensors")["embeddings"]

    def expected(self, sentences=SENTENCES):
        with torch.no_grad():
            return minilm.Model(self.model).embed([pieces(text) for text in sentences])

    def losses(self, *flags):
        self.succeed(f"--pairs={self.pairs}", *TRAINING, *flags)
        return [json.loads(line)["loss"] for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def assert_close(self, actual, expected, case):
        self.assertEqual(actual.shape, expected.shape, case)
        self.assertLessEqual((actual - expected).abs().max().item(), BOUND, case)

    def assert_error(self, message, *flags):
        for ranks in (0, 2):
            done = self.run_program(f"--ranks={ranks}", *flags)
            self.assertEqual(done.returncode, 1, f"{flags}: {done.stdout} {done.stderr}")
            self.assertIn(message, done.stderr)

    def test_embeddings_are_those_of_pytorch(self):
        expected = self.expected()
        self.assert_close(self.embeddings("--strategy=none"), expected, "one process")
        for ranks in (1, 2, 3, 4):
            for layout in ("ragged", "per-parameter"):
                flags = (f"--ranks={ranks}", f"--layout={layout}", "--batch=2")
                self.assert_close(self.embeddings(*flags), expected, flags)
        for flags in (("--ranks=4", "--strategy=hybrid", "--mesh=2x2"), ("--ranks=3", "--strategy=no-shard"), ("--ranks=2", "--batch=100")):
            self.assert_close(self.embeddings(*flags), expected, flags)

    def test_fewer_sentences_than_ranks(self):
        self.write("sentences.txt", "w3 w4\n")
        self.assert_close(self.embeddings("--ranks=4"), self.expected(["w3 w4"]), "one sentence")

    def test_bf16_follows_fp32(self):
        self.assertLess((self.embeddings("--ranks=2", "--precision=bf16") - self.expected()).abs().max().item(), 0.05)

    def test_long_sentences_are_cut_off(self):
        room = CONFIG["max_position_embeddings"] - 2
        self.write("sentences.txt", " ".join(WORDS) + "\n" + " ".join(WORDS[:room]) + "\n" + " ".join(WORDS[:room - 1]) + "\n")
        embeddings = self.embeddings("--ranks=2")
        self.assert_close(embeddings[0], embeddings[1], "cut off")
        self.assertGreater((embeddings[0] - embeddings[2]).abs().max().item(), 1e-3)

    def test_every_rank_holds_its_part_only(self):
        parameters = sum(weight.numel() for weight in minilm.Model(self.model).parameters())
        for ranks in (1, 2, 4):
            found = re.match(rf"{parameters} parameters on {ranks} ranks?, strategy full: (.*) MB a rank", self.succeed(f"--ranks={ranks}"))
            self.assertLessEqual(float(found[1]), 1.05 * 4e-6 * parameters / ranks)

    def test_losses_do_not_depend_on_ranks_strategy_or_layout(self):
        expected = self.losses("--strategy=none")
        self.assertEqual(len(expected), 6)
        self.assertLess(expected[-1], expected[0])
        for flags in (("--ranks=1",), ("--ranks=2",), ("--ranks=3",), ("--ranks=4",), ("--ranks=2", "--layout=per-parameter"),
                      ("--ranks=4", "--strategy=hybrid", "--mesh=2x2"), ("--ranks=2", "--strategy=no-shard")):
            losses = self.losses(*flags)
            self.assertEqual(len(losses), len(expected), flags)
            for loss, reference in zip(losses, expected):
                self.assertLessEqual(abs(loss - reference), BOUND, flags)

    def test_the_trained_model_is_one_that_can_be_read(self):
        saved = self.folder / "saved" / "model"
        output = self.succeed("--ranks=2", f"--pairs={self.pairs}", f"--save={saved}/", *TRAINING)
        self.assertIn("the second sentence found from the first:", output)
        before = self.expected()
        self.model = saved
        after = self.expected()
        self.assertGreater((after - before).abs().max().item(), 1e-3)
        self.assert_close(self.embeddings("--ranks=3"), after, "saved")
        self.assert_error(f"--save {saved} exists already", f"--pairs={self.pairs}", f"--save={saved}", *TRAINING)

    def test_a_model_that_is_not_there(self):
        self.assert_error("the model's folder /nowhere has no config.json; `scripts/setup --minilm` puts", "--model=/nowhere")
        (self.model / "model.safetensors").unlink()
        self.assert_error(f"{self.model} has no model.safetensors", "--ranks=2")

    def test_files_of_another_kind(self):
        weights_file = self.model / "model.safetensors"
        content = weights_file.read_bytes()
        weights_file.write_bytes(b"\x80\x02ctorch\nnot safetensors")
        self.assert_error("model.safetensors")
        weights_file.write_bytes(content[:-1])
        self.assert_error("model.safetensors")
        safetensors.torch.save_file({"w": torch.ones(2)}, weights_file)
        self.assert_error("encoder.layer.0.attention.self.query.weight")
        safetensors.torch.save_file(weights() | {"classifier.weight": torch.ones(2)}, weights_file)
        self.assert_error('holds "classifier.weight", which the model of config.json does not have')
        weights_file.write_bytes(content)
        (self.model / "vocab.txt").write_text("\n".join(VOCABULARY[:-1]))
        self.assert_error("vocab.txt has 63 word pieces, but by config.json the model knows 64")

    def test_configurations_that_do_not_fit(self):
        for changes, message in (({"hidden_act": "relu"}, 'config.json: hidden_act is "relu", but only "gelu" is supported'),
                                 ({"model_type": "gpt2"}, 'config.json: model_type is "gpt2", but only "bert" is supported'),
                                 ({"num_attention_heads": 3}, "hidden_size 20 is no multiple of num_attention_heads 3"),
                                 ({"hidden_size": "20"}, 'config.json: hidden_size is "20", but must be a size'),
                                 ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, but must be a size"),
                                 ({"num_hidden_layers": 4}, "encoder.layer.3.attention.self.query.weight"),
                                 ({"num_hidden_layers": 2}, 'holds "encoder.layer.2.'),
                                 ({"intermediate_size": 35}, "encoder.layer.0.intermediate.dense.weight")):
            self.write_config(**changes)
            self.assert_error(message)
        (self.model / "config.json").write_text("{")
        self.assert_error("config.json is no JSON object")

    def test_texts_that_cannot_be_read(self):
        self.assert_error("the file of sentences /nowhere.txt does not exist", "--input=/nowhere.txt")
        self.write("sentences.txt", "")
        self.assert_error(f"the file of sentences {self.sentences} is empty")
        self.write("sentences.txt", b"fine\nnot \xff\n")
        self.assert_error(f"{self.sentences}, line 2: not UTF-8 at byte 4")
        training = (f"--pairs={self.pairs}", *TRAINING)
        self.write("pairs.tsv", "a\tb\nc\n")
        self.assert_error(f"{self.pairs}, line 2: two sentences with one tab between them are needed, but it has 0 tabs", *training)
        self.write("pairs.tsv", "a\tb\n")
        self.assert_error("has 1 pairs, fewer than --global-batch 12", *training)

    def test_outputs_that_cannot_be_written(self):
        for flags in ((f"--output={self.pairs}/x",), (f"--save={self.pairs}/x/y", f"--pairs={self.pairs}"),
                      (f"--log={self.pairs}/log.jsonl", f"--pairs={self.pairs}")):
            self.assert_error(f"cannot make the folder of {self.pairs}/", *flags)
        for output in (self.model, self.pairs):
            self.assert_error(f"--output {output} is there and holds something else than model.safetensors", f"--output={output}")
        self.assertTrue((self.model / "config.json").exists())

    def test_bad_flags(self):
        self.assert_error("--batch is 0, but must be at least 1", "--batch=0")
        self.assert_error("--lr is nan, but must be positive", "--lr=nan")
        self.assert_error("--save needs --pairs", "--save=x")
        done = self.run_program("--ranks=5", f"--pairs={self.pairs}")
        self.assertIn("--global-batch 12 does not divide among 5 ranks", done.stderr)
        self.assertEqual(done.returncode, 1)

    def test_a_loss_that_is_not_finite(self):
        done = self.run_program("--ranks=2", f"--pairs={self.pairs}", *TRAINING, "--lr=1e30")
        self.assertEqual(done.returncode, 1)
        self.assertIn("a smaller --lr may help", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
