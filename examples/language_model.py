"""Train a transformer language model with AdamW. Each client holds documents of different lengths.

A small grammar writes the documents, so the best possible perplexity is known: 1.75. Takes about twenty seconds
on a CPU.
"""

# --8<-- [start:data]
import math
import random

import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms

TOPICS = {
    "farm": (["cow", "hen", "horse", "farmer"], ["feeds", "sees", "follows", "calls"]),
    "sea": (["whale", "crab", "gull", "sailor"], ["hunts", "sees", "follows", "hears"]),
    "city": (["tram", "cat", "baker", "judge"], ["stops", "sees", "passes", "calls"]),
}
WORDS = sorted({word for parts in TOPICS.values() for words in parts for word in words})
VOCABULARY = ["<begin>", "<end>", ".", "the", "a", *WORDS]
ID = {word: i for i, word in enumerate(VOCABULARY)}
LENGTH = 40


def document(topic, chance):
    """Two to six sentences. Each sentence begins with the noun that ended the last one."""
    nouns, verbs = TOPICS[topic]
    words, subject = ["<begin>"], chance.choice(nouns)
    for _ in range(chance.randint(2, 6)):
        last = chance.choice([noun for noun in nouns if noun != subject])
        words += ["the", subject, chance.choice(verbs), "a", last, "."]
        subject = last
    return [*words, "<end>"]


def pad(documents):
    """Inputs and targets [N, 40]. A target of -100 does not count."""
    inputs = torch.full((len(documents), LENGTH), ID["<end>"])
    targets = torch.full((len(documents), LENGTH), -100)
    for row, words in enumerate(documents):
        inputs[row, : len(words)] = targets[row, : len(words)] = torch.tensor([ID[word] for word in words])
    return inputs, targets


def load(clients=12, documents=30):
    """Every client writes about one topic."""
    chance, topics = random.Random(0), list(TOPICS)
    held = [[document(topics[client % 3], chance) for _ in range(documents)] for client in range(clients)]
    test = [document(topic, chance) for topic in topics for _ in range(50)]
    return fp.FederatedData.of(held, test=test, collate=pad)


# --8<-- [end:data]


# --8<-- [start:model]
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without a bias: the keys' bias cancels in the softmax, and AdamW would amplify its rounding errors.
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, later):
        parts = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(later, -1e9)
        x = x + self.mix((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids [N, L] -> logits of the next token [N, L, V]."""

    def __init__(self, width=32, layers=2, heads=4):
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(VOCABULARY))
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, ids):
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x, self.later)
        return self.head(self.norm(x))


# --8<-- [end:model]

# --8<-- [start:run]
if __name__ == "__main__":
    data = load()
    algorithm = algorithms.fedavg(
        lr=0.01, optimizer="adamw", schedule=fp.cosine(warmup=2), epochs=2, batch_size=10
    )
    runs = {}
    for name, scheme in {"original": None, "FedPara": fp.FedPara(gamma=0.3)}.items():
        torch.manual_seed(0)
        model = Transformer() if scheme is None else fp.factorize(Transformer(), scheme)
        task = fp.Task(model, loss="next-token", metrics=["perplexity"])
        runs[name] = run = fp.simulate(task, data, algorithm, rounds=15, cohort=4)
        print(f"{name:8}  perplexity {run.score:.2f}, {run.bytes / 1e6:.2f} MB sent")
# --8<-- [end:run]
