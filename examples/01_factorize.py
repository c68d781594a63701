"""Factorize a network, train it as usual, merge it back: scikit-learn's digits, under a minute on a CPU."""

import torch
import torch.nn.functional as F

import fedpara as fp
from fedpara import data, models

torch.manual_seed(0)
train, test = data.load("digits")
x, x_test = (data.normalise(part.inputs, train.mean, train.std) for part in (train, test))

model = models.cnn(classes=10, channels=1, size=8)
dense = sum(p.numel() for p in model.parameters())
model = fp.factorize(model, fp.FedPara(gamma=0.1), where=models.convolutions)
sent = sum(p.numel() for p in model.parameters())
print(f"{dense:,} parameters, as factors {sent:,}: {dense / sent:.1f} times fewer to send")

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for batch in torch.randperm(len(x)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), train.labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == test.labels).float().mean()
    print(f"epoch {epoch + 1}: {accuracy:.1%} of the test digits")

plain = fp.merge(model)
with torch.no_grad():
    difference = (plain(x_test) - model(x_test)).abs().max()
print(
    f"merged: a plain {type(plain).__name__} of {sum(p.numel() for p in plain.parameters()):,} parameters, ",
    end="",
)
print(f"whose outputs differ from the factorized one's by at most {difference:.0e}")
