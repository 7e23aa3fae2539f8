"""The BERT encoder of examples/embed_minilm in plain PyTorch, on the weights that the example reads.

The texts' word pieces come from word_pieces.json (made with Hugging Face's `tokenizers`), so nothing here is the example's own.

  minilm.py --model M --pieces P embed SENTENCES EMBEDDINGS   prints the largest absolute difference of the embeddings in the
                                                              safetensors file EMBEDDINGS from those computed here
  minilm.py --model M --pieces P train PAIRS --steps n ...    prints the losses of fine-tuning, as a JSON list
"""
import argparse
import json
import pathlib

import safetensors.torch
import torch
from torch.nn import functional as F

SCALE = 20


class Model:
    """Weights by name; functions of word pieces."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = safetensors.torch.load_file(folder / "model.safetensors")

    def parameters(self):
        """What the example trains."""
        return [weight for name, weight in self.weights.items() if weight.is_floating_point() and not name.startswith("pooler.")]

    def linear(self, name, x):
        return F.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"], self.config["layer_norm_eps"])

    def attention(self, name, x, mask):
        heads = self.config["num_attention_heads"]
        query, key, value = (self.linear(f"{name}.{part}", x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in ("query", "key", "value"))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)

    def features(self, tokens, mask):
        embedding = {part: self.weights[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")}
        x = embedding["word"][tokens] + embedding["position"][:tokens.shape[1]] + embedding["token_type"][0]
        x = self.norm("embeddings.LayerNorm", x)
        for layer in (f"encoder.layer.{i}" for i in range(self.config["num_hidden_layers"])):
            attended = self.linear(f"{layer}.attention.output.dense", self.attention(f"{layer}.attention.self", x, mask))
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + attended)
            hidden = F.gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", hidden))
        return x

    def embed(self, sentences):
        """Unit vectors, one a row, of lists of word pieces."""
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sentences], batch_first=True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([len(ids) for ids in sentences])[:, None]
        x = self.features(tokens, mask) * mask[..., None]
        return F.normalize(x.sum(1) / mask.sum(1, keepdim=True))


def embed(model, pieces, arguments):
    sentences = [pieces[line] for line in arguments.sentences.read_text().splitlines()]
    with torch.no_grad():
        expected = model.embed(sentences)
    found = safetensors.torch.load_file(arguments.embeddings)["embeddings"]
    assert found.shape == expected.shape and found.dtype == expected.dtype, f"{found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
    print((found - expected).abs().max().item())


def train(model, pieces, arguments):
    pairs = [[pieces[text] for text in line.split("\t")] for line in arguments.pairs.read_text().splitlines()]
    parameters = [parameter.requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.lr)
    batches, losses = len(pairs) // arguments.global_batch, []
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(arguments.seed + step // batches)
        start = step % batches * arguments.global_batch
        batch = torch.randperm(len(pairs), generator=generator)[start:start + arguments.global_batch].tolist()
        first, second = (model.embed([pairs[i][side] for i in batch]) for side in (0, 1))
        loss = F.cross_entropy(SCALE * first @ second.T, torch.arange(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--pieces", type=pathlib.Path, required=True)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("embed")
    command.add_argument("sentences", type=pathlib.Path)
    command.add_argument("embeddings", type=pathlib.Path)
    command.set_defaults(run=embed)
    command = commands.add_parser("train")
    command.add_argument("pairs", type=pathlib.Path)
    for flag, kind in (("--steps", int), ("--global-batch", int), ("--lr", float), ("--seed", int)):
        command.add_argument(flag, type=kind, required=True)
    command.set_defaults(run=train)
    arguments = parser.parse_args()
    pieces = {entry["text"]: entry["ids"] for entry in json.loads(arguments.pieces.read_text())}
    arguments.run(Model(arguments.model), pieces, arguments)


if __name__ == "__main__":
    main()
