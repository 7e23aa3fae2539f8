"""Writes what finetune_torchscript reads: a model as TorchScript, and sequences that it learns to tell apart.

Usage: export_model.py [--traced] FOLDER
"""
import argparse
import pathlib

import torch
from torch import nn

CHANNELS, WIDTH, HEADS, LAYERS, CLASSES, LENGTH, ROWS = 6, 24, 4, 2, 5, 16, 120


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(x)))


class Classifier(nn.Module):
    """A convolution with batch norm, a GRU, and attention over its outputs."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.norm(self.convolution(x))).transpose(1, 2)
        x = self.gru(x)[0]
        for layer in self.encoder:
            x = layer(x)
        return self.head(x.mean(1))


def sequences():
    """Sine waves, whose class is their pitch, with noise."""
    labels = torch.arange(ROWS) % CLASSES
    pitch = (labels + 1).view(-1, 1, 1) * 0.2
    phase = torch.rand(ROWS, CHANNELS, 1) * 6
    return torch.sin(pitch * torch.arange(LENGTH) + phase) + 0.3 * torch.randn(ROWS, CHANNELS, LENGTH), labels


def export(folder, traced):
    torch.manual_seed(0)
    model = Classifier()
    x, y = sequences()
    with torch.no_grad():
        for _ in range(20):
            model(x)  # gives the batch norm its statistics
    script = torch.jit.trace(model, x[:2], check_trace=False) if traced else torch.jit.script(model)
    script.save(str(folder / "model.pt"))
    torch.save({"x": x, "y": y}, folder / "sequences.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traced", action="store_true", help="torch.jit.trace in place of torch.jit.script")
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    export(arguments.folder, arguments.traced)
