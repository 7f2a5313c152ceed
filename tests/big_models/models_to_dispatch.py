"""A small model that is hard to dispatch (ties, buffers, lists of layers), and helpers around it."""

import torch
from torch import nn

from slipstream.big_models.empty_weights import init_empty_weights


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Small(nn.Module):
    """An embedding that is tied to the head, layers in a list, a norm with buffers, a buffer that is not saved, a parameter of its own."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def small(seed=0):
    torch.manual_seed(seed)
    model = Small()
    nn.init.normal_(model.scale)
    model.norm.running_mean.normal_()
    return model.eval()


def empty_model():
    with init_empty_weights():
        return Small().eval()


TOKENS = torch.arange(12).reshape(3, 4)


def run(model):
    with torch.inference_mode():
        return model(TOKENS)


def meta_names(model):
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.is_meta}
