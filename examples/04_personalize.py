"""Give every client its own model with pFedPara, and compare it with FedAvg, FedPer and local training.

Data: scikit-learn's digits, split unevenly among 30 clients. Takes about ten seconds on a CPU.
"""

# --8<-- [start:data]
import torch

import fedpara as fp
from fedpara import algorithms, data, models

train, test = data.load("digits")
split = data.dirichlet(train.targets, clients=30, alpha=0.3, seed=0)
own_tests = data.personal_test(test.targets, split, train.targets)
clients = fp.FederatedData(train, split, personal=(test, own_tests))
# --8<-- [end:data]

# --8<-- [start:run]
methods = {
    "FedAvg": (None, "all"),
    "Local": (None, "none"),
    "FedPer": (None, "fedper"),
    "pFedPara": (fp.PFedPara(gamma=0.5), "all"),
}

runs = {}
for name, (scheme, share) in methods.items():
    torch.manual_seed(0)
    model = models.mlp(inputs=64, classes=10)
    if scheme is not None:
        model = fp.factorize(model, scheme)
    runs[name] = fp.simulate(
        fp.Task(model),
        clients,
        algorithms.fedavg(lr=0.1, epochs=2, batch_size=10, clip=5.0),
        share=share,
        personal=True,
        evaluate_every=5,
        rounds=12,
        cohort=10,
    )
# --8<-- [end:run]

# --8<-- [start:print]
for name, run in runs.items():
    accuracy = run.rounds[-1].everyone.score
    print(f"{name:8}  {accuracy:.1%} on each client's own digits, {run.bytes / 1e6:5.2f} MB sent")
# --8<-- [end:print]

# --8<-- [start:client]
merged = fp.merge(model, runs["pFedPara"].client_state(3))
mine = clients.client_test(3)
inputs = data.normalise(mine.inputs, mine.mean, mine.std)
correct = (merged(inputs).argmax(1) == mine.targets).float().mean()
print(f"client 3's merged model: {correct:.1%} of its {len(mine)} test digits")
# --8<-- [end:client]
