"""Random training programs: as data, as a script that a user could have written, and as its meaning in plain PyTorch.

`script(program)` is what runs on the ranks, and what is shown when a program fails. `expected(program, world)` is the definition, without a
line of ours: the gradient of an update is the mean over all samples of its window (or the sum over all weights) for each model that a
loss reaches; optimizers step where windows end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from problems import Net
from torch.distributed.tensor import DTensor

SAMPLES = 40
GLOBAL = 6
"""Samples of a global batch, on one process or three."""


@dataclass(frozen=True)
class Loss:
    """A loss over some models: a mean over the batch, or a sum with its weight."""

    models: tuple[int, ...]
    way: str = "forward"
    """forward, method or parts: how the models are called."""
    again: bool = False
    """Whether a second loss is made of the same outputs (retain_graph)."""


@dataclass(frozen=True)
class Program:
    """What a training script does."""

    widths: tuple[int, ...]
    """The hidden width of each model."""
    optimizers: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    """Kind, and which parts of which models ("all", "inner", "outer") it updates."""
    losses: tuple[Loss, ...]
    blocks: str
    """"together" (one `accumulate` for all models), "apart" (one for each), "follow" (only the first is named), "none"."""
    steps: int
    samples: int
    epochs: int
    weighs: bool = False
    clears_first: bool = False
    clips: bool = False
    sync_each_batch: bool = False
    follows_loader: bool = True
    read: str = "plain"
    """plain, list, windows, ahead: how the loader is read."""
    skips: int = 0
    """Batches skipped in the first epoch."""
    leaves: int | None = None
    """After how many batches the first epoch is left by `break`."""
    cut: tuple[int, int] | None = None
    """(epoch, batch) after which the run is saved, and resumed by a new one."""
    evaluates: bool = False
    companion: int = 0
    """Samples of a second loader that is read side by side; 0 for none."""
    sizes: tuple[int, ...] = ()
    """Sizes of the batches of a batch sampler; empty for batches of one size."""


CALLS = {"forward": "{0}(x)", "method": "{0}.score(x)", "parts": "{0}.outer(torch.tanh({0}.inner(x)))"}


def data(samples: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(11), dtype=torch.float64)[:samples]


def groups(program: Program) -> list[tuple[tuple[int, ...], tuple[Loss, ...], tuple[int, ...]]]:
    """What is done with a batch, block by block: the models that are named, the losses, and the optimizers."""
    models = tuple(range(len(program.widths)))
    every = tuple(range(len(program.optimizers)))
    if program.blocks != "apart":
        return [(models[:1] if program.blocks == "follow" else models, program.losses, every)]
    found = []
    for model in models:
        own = tuple(number for number in every if program.optimizers[number][1][0][0] == model)
        found.append(((model,), tuple(loss for loss in program.losses if loss.models == (model,)), own))
    return found


# -- as a script ------------------------------------------------------------------------------------------------------


def script(program: Program) -> str:
    """The program as a user would write it."""
    models, optimizers = range(len(program.widths)), range(len(program.optimizers))
    names = [*(f"net{number}" for number in models), *(f"opt{number}" for number in optimizers), "loader"]
    lines = [
        "accelerator = Accelerator(",
        "    gradient_accumulation_plugin=GradientAccumulationPlugin(",
        f"        num_steps={program.steps}, sync_each_batch={program.sync_each_batch}, sync_with_dataloader={program.follows_loader}))",
        *(f"net{number} = Net({program.widths[number]}, {number})" for number in models),
        *(f"opt{number} = {_optimizer(*program.optimizers[number])}" for number in optimizers),
        f"dataset = TensorDataset(data({program.samples}))",
        f"loader = DataLoader(dataset, {_batching(program)})",
        f"{', '.join(names)} = accelerator.prepare({', '.join(names)})",
    ]
    if program.companion:
        lines += [f"second = accelerator.prepare(DataLoader(TensorDataset(data({program.companion})), batch_size=1))"]
    if program.evaluates:
        lines += [f"evaluation = accelerator.prepare(DataLoader(dataset, batch_size={GLOBAL} // accelerator.num_processes))"]
    lines += ["begin = 0", "if resumed:", "    accelerator.load_state(folder)", f"    begin = {program.cut[0] if program.cut else 0}"]
    lines += ["metrics = []", f"for epoch in range(begin, {program.epochs}):", *_indented(_epoch(program))]
    lines += [f"result = flat([{', '.join(f'accelerator.unwrap_model(net{number})' for number in models)}]), metrics"]
    return "\n".join(lines) + "\n"


def _optimizer(kind: str, parts: tuple[tuple[int, str], ...]) -> str:
    spelled = [f"*net{model}{'' if part == 'all' else '.' + part}.parameters()" for model, part in parts]
    options = "lr=0.1, momentum=0.5" if kind == "SGD" else "lr=0.01"
    return f"torch.optim.{kind}([{', '.join(spelled)}], {options})"


def _batching(program: Program) -> str:
    return f"batch_sampler=Batches({program.sizes})" if program.sizes else f"batch_size={GLOBAL} // accelerator.num_processes"


def _epoch(program: Program) -> list[str]:
    source = "loader"
    if program.skips:
        source = f"(accelerator.skip_first_batches(loader, {program.skips}) if epoch == 0 and not resumed else loader)"
    if program.companion:
        source = f"(batch for batch, _ in zip({source}, second))"
    if program.read != "plain":
        source = {"list": "list({})", "windows": "in_windows({})", "ahead": "one_ahead({})"}[program.read].format(source)
    first = program.skips
    lines = [f"for number, (x,) in enumerate({source}, ({first} if epoch == 0 else 0) if not (resumed and epoch == begin) else offset):"]
    lines += _indented(_batch(program))
    if program.evaluates:
        lines += [
            "with torch.no_grad():",
            "    for (x,) in evaluation:",
            "        metrics.append(accelerator.gather_for_metrics(net0(x)))",
        ]
    return lines


def _batch(program: Program) -> list[str]:
    lines: list[str] = []
    for models, losses, optimizers in groups(program):
        body = [f"opt{number}.zero_grad()" for number in optimizers] if program.clears_first else []
        for loss in losses:
            body += _loss(program, loss)
        for number in optimizers:
            if program.clips:
                parts = program.optimizers[number][1]
                spelled = ", ".join(f"*net{model}{'' if part == 'all' else '.' + part}.parameters()" for model, part in parts)
                body += [f"accelerator.clip_grad_norm_([{spelled}], 0.5)"]
            body += [f"opt{number}.step()"]
        body += [] if program.clears_first else [f"opt{number}.zero_grad()" for number in optimizers]
        if program.blocks != "none":
            body = [f"with accelerator.accumulate({', '.join(f'net{model}' for model in models)}):", *_indented(body)]
        lines += body
    if program.leaves is not None:
        lines += [f"if epoch == 0 and number == {program.skips + program.leaves - 1}:", "    break"]
    if program.cut is not None:
        lines += [f"if cuts and (epoch, number) == {program.cut}:", "    accelerator.save_state(folder)", "    raise Cut"]
    return lines


def _loss(program: Program, loss: Loss) -> list[str]:
    lines = [f"out = {' * '.join(CALLS[loss.way].format(f'net{model}') for model in loss.models)}"]
    end, weight = ("sum()", ", weight=len(x)") if program.weighs else ("mean()", "")
    if loss.again:
        lines += [f"accelerator.backward(out.{end}{weight}, retain_graph=True)"]
    return [*lines, f"accelerator.backward(out.square().{end}{weight})"]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# -- what it means ----------------------------------------------------------------------------------------------------


def global_batches(program: Program, world: int) -> list[tuple[int, int]]:
    """Where the global batches of a pass begin and end."""
    if not program.sizes:
        return [(start, min(start + GLOBAL, program.samples)) for start in range(0, program.samples, GLOBAL)]
    ends = [sum(program.sizes[: place + 1]) for place in range(len(program.sizes))]
    starts = [0, *ends[:-1]]
    return [(starts[place], ends[min(place + world, len(ends)) - 1]) for place in range(0, len(ends), world)]


def blocks_of(program: Program, world: int) -> list[tuple[int, int, bool]]:
    """Every batch of the run: where it begins and ends, and whether it ends its pass."""
    batches, found = global_batches(program, world), []
    shorter = -(-program.companion // world) if program.companion else len(batches)  # zip ends with the shorter one
    for epoch in range(program.epochs):
        skips = program.skips if epoch == 0 else 0
        for place in range(skips, min(len(batches), skips + shorter)):
            found.append((*batches[place], place == len(batches) - 1))
            if epoch == 0 and program.leaves is not None and place == skips + program.leaves - 1:
                break
    return found


def windows(program: Program, world: int) -> list[list[int]]:
    """The batches of each update, by their places in `blocks_of`; the last window may have stayed open."""
    found: list[list[int]] = [[]]
    for place, (_, _, end) in enumerate(blocks_of(program, world)):
        found[-1].append(place)
        if len(found[-1]) == program.steps or (end and program.follows_loader):
            found.append([])
    return found


def expected(program: Program, world: int) -> torch.Tensor:
    """The weights after the program."""
    nets = [Net(width, number) for number, width in enumerate(program.widths)]
    optimizers = [_plain_optimizer(nets, kind, parts) for kind, parts in program.optimizers]
    x, blocks, updates = data(program.samples), blocks_of(program, world), windows(program, world)
    for window in updates:
        is_whole = len(window) == program.steps or (bool(window) and blocks[window[-1]][2] and program.follows_loader)
        if not is_whole:
            continue
        for _, losses, numbers in groups(program):
            gradient = _gradients(program, nets, losses, [x[blocks[place][0] : blocks[place][1]] for place in window])
            for number in numbers:
                parameters = _parameters(nets, program.optimizers[number][1])
                for parameter in parameters:
                    parameter.grad = gradient.get(parameter)
                if program.clips:
                    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizers[number].step()
    return flat(nets)


def _gradients(program: Program, nets: list[Net], losses: tuple[Loss, ...], batches: list[torch.Tensor]) -> dict[Any, torch.Tensor]:
    """The gradient of each parameter: the mean over the samples of the window, or the sum over the weights of the losses that reach it."""
    total: dict[Any, torch.Tensor] = {}
    for number, net in enumerate(nets):
        reaching = [loss for loss in losses if number in loss.models]
        together = program.weighs and program.blocks != "none"  # outside of `accumulate` every loss is divided by its own weight
        count = sum(map(len, batches)) * (sum(1 + loss.again for loss in reaching) if together else 1)
        for loss in reaching:
            for x in batches:
                out = torch.stack([nets[model](x) for model in loss.models]).prod(0)
                value = out.square().sum() + (out.sum() if loss.again else 0.0)
                for parameter, gradient in zip(net.parameters(), torch.autograd.grad(value, list(net.parameters())), strict=True):
                    total[parameter] = total.get(parameter, 0.0) + gradient / count
    return total


def _plain_optimizer(nets: list[Net], kind: str, parts: tuple[tuple[int, str], ...]) -> torch.optim.Optimizer:
    parameters = _parameters(nets, parts)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5) if kind == "SGD" else torch.optim.AdamW(parameters, lr=0.01)


def _parameters(nets: list[Net], parts: tuple[tuple[int, str], ...]) -> list[torch.nn.Parameter]:
    chosen = [nets[model] if part == "all" else getattr(nets[model], part) for model, part in parts]
    return [parameter for module in chosen for parameter in module.parameters()]


def flat(nets: list[Any]) -> torch.Tensor:
    """The parameters of models in one line; sharded ones are gathered."""
    held = [parameter.detach() for net in nets for parameter in net.parameters()]
    return torch.cat([(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).reshape(-1) for tensor in held])
