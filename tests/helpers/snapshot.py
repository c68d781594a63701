"""A small network of every kind of layer, and a picture of a model that says whether a call changed it."""

import torch
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(72, 10), nn.LSTM(10, 8)
    )


class Snapshot:
    """Everything of a model that a failed call could have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.parameters = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
        self.classes = [type(m) for m in model.modules()]
        self.attributes = [sorted(vars(m)) for m in model.modules()]
        self.hooks = [
            (len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks), len(m._forward_pre_hooks))
            for m in model.modules()
        ]

    def assert_unchanged(self) -> None:
        now = Snapshot(self.model)
        assert list(now.state) == list(self.state)
        assert all(torch.equal(now.state[name], tensor) for name, tensor in self.state.items())
        assert now.parameters == self.parameters
        assert now.classes == self.classes
        assert now.attributes == self.attributes
        assert now.hooks == self.hooks
