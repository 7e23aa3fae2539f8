"""A small BERT with random weights, for the tests of programs that read MiniLM's folder."""
import torch

CONFIG = {"model_type": "bert", "hidden_act": "gelu", "vocab_size": 64, "max_position_embeddings": 40, "type_vocab_size": 2, "hidden_size": 20,
          "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "layer_norm_eps": 1e-12}
WORDS = [f"w{i}" for i in range(CONFIG["vocab_size"] - 5)]  # whole words only, and a word's id is 5 + its number
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def weights():
    generator = torch.Generator().manual_seed(1)
    width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {f"embeddings.{part}_embeddings.weight": (CONFIG[size], width) for part, size in
              (("word", "vocab_size"), ("position", "max_position_embeddings"), ("token_type", "type_vocab_size"))}
    norms = ["embeddings.LayerNorm"]
    linears = {"pooler.dense": (width, width)}  # which the program does without
    for layer in (f"encoder.layer.{i}" for i in range(CONFIG["num_hidden_layers"])):
        linears |= {f"{layer}.attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        linears |= {f"{layer}.attention.output.dense": (width, width), f"{layer}.intermediate.dense": (hidden, width),
                    f"{layer}.output.dense": (width, hidden)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"embeddings.position_ids": torch.arange(CONFIG["max_position_embeddings"])[None]}
