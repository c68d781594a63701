"""Factorize a network, train it in an ordinary loop, and merge it back to plain layers.

Data: scikit-learn's digits. Takes about ten seconds on a CPU.
"""

# --8<-- [start:model]
import torch
import torch.nn.functional as F
from torch import nn

import fedpara as fp
from fedpara import data


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, 32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, 64)
        self.hidden = nn.Linear(256, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


# --8<-- [end:model]


# --8<-- [start:train]
def accuracy(model):
    with torch.no_grad():
        return (model(x_test).argmax(1) == test.targets).float().mean().item()


def trained(model):
    """Accuracy after each of five epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scores = []
    for _ in range(5):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), train.targets[batch]).backward()
            optimizer.step()
        scores.append(accuracy(model))
    return scores


train, test = data.load("digits")
x, x_test = (data.normalise(part.inputs, train.mean, train.std) for part in (train, test))
# --8<-- [end:train]

# --8<-- [start:factorize]
torch.manual_seed(0)
original = Network()
factorized = fp.factorize(Network(), fp.FedPara(gamma=0.1))

sizes = {
    "original": sum(p.numel() for p in original.parameters()),
    "FedPara": sum(p.numel() for p in factorized.parameters()),
}
print(f"original: {sizes['original']:,} parameters")
print(f"FedPara:  {sizes['FedPara']:,} parameters, {sizes['original'] / sizes['FedPara']:.1f} times fewer")
for name, factor in factorized.state_dict().items():
    if name.startswith("conv2.weight"):
        print(f"  {name} {tuple(factor.shape)}")
# --8<-- [end:factorize]

# --8<-- [start:compare]
curves = {"original": trained(original), "FedPara": trained(factorized)}
for name, scores in curves.items():
    print(f"{name}: {scores[-1]:.1%} of the test digits")
# --8<-- [end:compare]

# --8<-- [start:merge]
plain = fp.merge(factorized)
with torch.no_grad():
    difference = (plain(x_test) - factorized(x_test)).abs().max()
count = sum(p.numel() for p in plain.parameters())
print(f"merged: a plain {type(plain).__name__} with {count:,} parameters")
print(f"largest difference between the two models' outputs: {difference:.0e}")
# --8<-- [end:merge]
