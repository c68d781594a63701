"""Fine-tune a pretrained network with adapters in FedPara's and LoRA's form, and compare them with full fine-tuning.

Data: scikit-learn's digits. The network learns the digits 0 to 4 first; the clients then bring all ten digits. Takes
about ten seconds on a CPU.
"""

# --8<-- [start:pretrain]
from functools import cache

import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(128, 10)

    def forward(self, x):
        return self.classifier(self.encoder(x))


@cache
def weights():
    """The state of a network that was trained on the digits 0 to 4."""
    train, _ = data.load("digits")
    known = train.subset((train.targets < 5).nonzero()[:, 0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(10):
            for batch in torch.randperm(len(known)).split(32):
                some = known.subset(batch)
                loss = nn.functional.cross_entropy(network(some.normalised()), some.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return network.state_dict()


def pretrained():
    network = Network()
    network.load_state_dict(weights())
    return network


# --8<-- [end:pretrain]

# --8<-- [start:run]
if __name__ == "__main__":
    train, test = data.load("digits")
    clients = fp.FederatedData(train, data.dirichlet(train.targets, clients=20, alpha=0.5, seed=0))
    methods = {
        "full fine-tuning": (None, 0.01),
        "LoRA's form": (fp.LowRank(rank=8), 0.04),
        "FedPara's form": (fp.FedPara(rank=4), 0.04),
    }
    runs = {}
    for name, (scheme, lr) in methods.items():
        torch.manual_seed(0)
        model = pretrained()
        if scheme is not None:
            fp.factorize(model, scheme, onto="frozen", train=("classifier",))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        algorithm = algorithms.fedavg(lr=lr, optimizer="adamw", schedule=fp.cosine(), batch_size=16)
        runs[name] = run = fp.simulate(fp.Task(model, test=test), clients, algorithm, rounds=20, cohort=8)
        print(f"{name:16}  {run.accuracy:.1%}, {trained:6,} trained numbers, {run.bytes / 1e6:.1f} MB sent")
    # --8<-- [end:run]

    # --8<-- [start:merge]
    merged = fp.merge(model, run.state)
    with torch.no_grad():
        right = (merged(test.normalised()).argmax(1) == test.targets).float().mean()
    print(f"merged into plain layers: {right:.1%}")
    # --8<-- [end:merge]
