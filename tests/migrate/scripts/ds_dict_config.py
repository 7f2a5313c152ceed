"""A classifier on DeepSpeed's engine, which also makes the optimizer and the loader; the configuration is a dict."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset


def add_argument():
    parser = argparse.ArgumentParser(description="classifier")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the launcher")
    # --deepspeed and --deepspeed_config
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_ds_config():
    return {}


args = add_argument()
deepspeed.init_distributed()
torch.manual_seed(0)

x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
trainset = TensorDataset(x, x[:, :4].argmax(1))
net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

ds_config = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2},
}

parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=trainset, config=ds_config
)
local_rank = model_engine.local_rank

for epoch in range(args.epochs):
    running_loss = 0.0
    for i, data in enumerate(trainloader):
        # inputs and labels
        inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
        outputs = model_engine(inputs)
        loss = F.cross_entropy(outputs, labels)

        model_engine.backward(loss)
        model_engine.step()

        running_loss += loss.item()

if model_engine.global_rank == 0:
    print(f"weights {sum(parameter.abs().sum().item() for parameter in model_engine.module.parameters()):.4f}")
