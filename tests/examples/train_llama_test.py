"""train_llama on several meshes, its weights under Hugging Face's names, and its loss beside the same arithmetic in Python.

    train_llama_test.py <train_llama> [unittest's flags]
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch
from torch.nn import functional as F

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
ROWS, LENGTH, HEADS, KEY_HEADS, LAYERS, STRIDE = 4, 24, 8, 2, 2, 7919
SMALL = [f"--rows={ROWS}", f"--sequence={LENGTH}", "--steps=4", "--sample-bytes=12", "--prompt=the "]
TIMEOUT = 300


def text():
    state, words = 1, []
    for _ in range(3000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        words.append(("the", "cat", "sat", "on", "a", "mat", "and", "ran")[state >> 16 & 7])
    return " ".join(words)


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x, angles):
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()


def loss_in_python(weights, tokens):
    """LlamaForCausalLM's loss, from the tensors of its file."""
    width = weights["model.norm.weight"].shape[0]
    size = width // HEADS
    angles = torch.outer(torch.arange(LENGTH).double(), 10000.0 ** (-torch.arange(0, size, 2).double() / size)).repeat(1, 2).float()
    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        own = {name.removeprefix(f"model.layers.{layer}."): value for name, value in weights.items()}

        def heads(y, name, own=own):
            return (y @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2)

        y = norm(x, own["input_layernorm.weight"])
        q, k, v = rotate(heads(y, "q"), angles), rotate(heads(y, "k"), angles), heads(y, "v")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        x = x + (F.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    logits = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


class TrainLlamaTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = text()
        (self.folder / "text.txt").write_text(self.text)

    def run_program(self, *flags):
        return subprocess.run([PROGRAM, f"--data={self.folder}/text.txt", *SMALL, *flags], capture_output=True, text=True,
                              timeout=TIMEOUT, cwd=self.folder)

    def train(self, *flags):
        """The losses, and what the model wrote."""
        done = self.run_program(*flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        return losses, done.stdout[done.stdout.index("text: "):]

    def test_every_mesh_trains_and_writes_alike(self):
        expected, written = self.train("--ranks=1", f"--export={self.folder}/one")
        self.assertEqual(len(expected), 4)
        self.assertLess(expected[-1], expected[0])
        weights = safetensors.torch.load_file(self.folder / "one" / "model.safetensors")
        for number, flags in enumerate((["--ranks=2", "--mesh=2", "--dims=tp", "--sequence-parallel"],
                                        ["--ranks=4", "--mesh=4", "--dims=tp", "--sequence-parallel"],  # key heads are shared
                                        ["--ranks=4", "--mesh=4", "--dims=tp"],
                                        ["--ranks=4", "--mesh=1x2x2", "--dims=dp,cp,tp", "--ring", "--sequence-parallel"],
                                        ["--ranks=4", "--mesh=2x2", "--dims=dp,tp"])):
            exported = self.folder / f"exported-{number}"
            losses, text_of_mesh = self.train(*flags, f"--export={exported}")
            for loss, reference in zip(losses, expected, strict=True):
                self.assertLessEqual(abs(loss - reference), 1e-5, flags)
            self.assertEqual(text_of_mesh, written, flags)
            of_mesh = safetensors.torch.load_file(exported / "model.safetensors")
            self.assertEqual({name: value.shape for name, value in of_mesh.items()}, {name: value.shape for name, value in weights.items()})

    def test_weights_have_hugging_faces_names(self):
        exported = self.folder / "exported"
        self.train("--ranks=4", "--mesh=2x2", "--dims=cp,tp", f"--export={exported}")
        weights = safetensors.torch.load_file(exported / "model.safetensors")
        config = json.loads((exported / "config.json").read_text())
        self.assertEqual(config["num_key_value_heads"], KEY_HEADS)
        self.assertEqual(len(weights), 3 + 9 * LAYERS)
        self.assertEqual(tuple(weights["model.layers.1.self_attn.k_proj.weight"].shape), (64 // HEADS * KEY_HEADS, 64))
        rows = [[ord(c) for c in self.text[row * STRIDE % (len(self.text) - LENGTH):][:LENGTH]] for row in range(ROWS)]
        expected = loss_in_python(weights, torch.tensor(rows))
        for flags in (["--ranks=1"], ["--ranks=4", "--mesh=4", "--dims=tp"]):
            losses, _ = self.train(*flags, "--steps=1", f"--import={exported}")
            self.assertLessEqual(abs(losses[0] - expected), 1e-5, flags)

    def test_heads_that_do_not_divide(self):
        done = self.run_program("--ranks=3", "--mesh=3", "--dims=tp")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("num_attention_heads 8 do not divide among 3 ranks of tp; numbers of ranks that fit: 1, 2, 4, 8", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
