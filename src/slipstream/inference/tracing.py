"""A model taken apart by torch's tracer: `trace` gives the stage of this process, and what is known of the others.

The tracer sees no weights: while it works, every tensor of the model is replaced by a fake one of the same shape, so nothing is
copied, and a model whose other stages have been let go can be traced again for inputs of another shape. The program that is traced takes
tensors and gives tensors: nested arguments, numbers and texts are put around it and taken off again.

Two things that torch's stages do not do are settled in that program. All inputs pass through the first stage and all outputs
through the last (as views, which cost nothing), so a later stage may use an input and an early one may make an output. And what goes from
stage to stage is made contiguous, as it has to be to be sent.
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.pipelining import Pipe, pipe_split, pipeline

from slipstream.comm import tree
from slipstream.comm.sites import is_ours, spell
from slipstream.errors import ConfigError
from slipstream.inference.batches import PLAIN, Batch

__all__ = ["Traced", "called_modules", "fill", "let_go", "misfit", "trace"]

_PREFIX = "model."
_VALUE_WANTED = (DataDependentOutputException, DynamicOutputShapeException)
_EXPECTED = (
    "Accessing the data pointer of FakeTensor is deprecated",  # a tied weight is copied for each stage: a fake one, so without memory
    "`isinstance(treespec, LeafSpec)` is deprecated",  # torch's own copying of its specification
)
"""Warnings that torch gives itself while it traces, and that say nothing about the model."""


@dataclass
class Traced:
    """A program for inputs of one form, in pieces of `rows` rows."""

    rows: int
    info: Any
    """What torch knows of the whole pipeline."""
    module: torch.nn.Module
    """The stage of this process."""
    gives: list[tuple[torch.Size, torch.dtype]]
    """What the stage of this process gives for one piece."""
    inputs: list[int]
    """Which tensors of a call the first stage takes."""
    names: list[frozenset[str]]
    """The tensors of the model that each stage uses, by name."""
    wires: list[str]
    """What every stage receives, in the order in which it is sent: the same on all processes, or gloo would end them."""
    frame: Any
    """The structure of the output."""
    is_tensor: list[bool]
    shapes: list[tuple[torch.Size, torch.dtype]]
    """Of the tensors of the output for one piece."""

    def empty(self, rows: int, device: torch.device) -> list[torch.Tensor]:
        """Tensors of the shapes of the output for so many rows."""
        return [torch.empty((rows, *shape[1:]), dtype=dtype, device=device) for shape, dtype in self.shapes]

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The output as the model gives it, with these tensors."""
        supply = iter(tensors)
        pairs = zip(tree.flatten(self.frame), self.is_tensor, strict=True)
        return tree.unflatten(self.frame, [next(supply) if tensor else leaf for leaf, tensor in pairs])


class _Program(torch.nn.Module):
    """The model as a function of tensors; notes the structure of what it gives."""

    def __init__(self, model: torch.nn.Module, batch: Batch, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self._build = batch.build()
        self._cut = batch.is_cut
        self._note = note  # not an attribute that changes: the tracer would put that back

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._build([one.view(one.shape) if cut else one[0] for one, cut in zip(tensors, self._cut, strict=True)])
        output = self.model(*args, **kwargs)
        self._note(output)
        return tuple(leaf.view(leaf.shape) for leaf in tree.flatten(output) if isinstance(leaf, torch.Tensor))


def called_modules(model: torch.nn.Module, batch: Batch, rows: int, device: torch.device) -> dict[str, int] | None:
    """The modules that are called for such a batch, in the order of their first calls, without computing anything.

    None if that cannot be known without values. Errors of the model's own come out as they are.
    """
    called: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules()}

    def note(module: torch.nn.Module, _: Any) -> None:
        called.setdefault(names[module], len(called))

    with _quiet(), _hooked(list(names), note), torch.inference_mode(False), torch.no_grad(), _faked(model, device) as mode, mode:
        try:
            _Program(model, batch, lambda _: None)(*_examples(batch, rows, device))
        except _VALUE_WANTED:
            return None
    return called


def misfit(model: torch.nn.Module, batch: Batch, rows: int, device: torch.device) -> str | None:
    """Why the model does not run with so many rows in the tensors that are cut, and give as many of everything; nothing is computed."""
    given: list[Any] = []
    with _quiet(), torch.inference_mode(False), torch.no_grad(), _faked(model, device) as mode, mode:
        try:
            _Program(model, batch, given.append)(*_examples(batch, rows, device))
        except Exception as error:  # of any kind: shapes that do not go together are reported in many ways
            return f"{type(error).__name__}: {error}"
    shapes = [leaf.shape for leaf in tree.flatten(given[-1]) if isinstance(leaf, torch.Tensor)]
    return next((f"an output of shape {tuple(shape)} for {rows} rows" for shape in shapes if shape[:1] != (rows,)), None)


def trace(model: torch.nn.Module, batch: Batch, rows: int, device: torch.device, points: Sequence[str], stage: int) -> Traced:
    """The program of a model, cut where the modules of these names are first called."""
    given: list[Any] = []
    program = _Program(model, batch, given.append)
    split: set[torch.nn.Module] = set()

    def cut(module: torch.nn.Module, _: Any) -> None:
        if module not in split:
            split.add(module)
            pipe_split()  # type: ignore[no-untyped-call]

    modules = [model.get_submodule(name) for name in points]
    with _quiet(), torch.inference_mode(False), torch.no_grad(), _hooked(modules, cut), _faked(model, device) as mode:
        with mode:
            examples = _examples(batch, rows, device)
        try:
            pipe: Pipe = pipeline(program, tuple(examples))
        except Exception as error:  # whatever the tracer met: it says so in many ways, and all mean the same
            if given:
                _output(given[-1], rows)  # the model ran to its end: what it gives may be the reason
            raise ConfigError(_untraceable(model, batch, rows, error)) from error
    _check_count(pipe, model, points, split)
    frame, is_tensor, shapes = _output(given[-1], rows)
    modules = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    wires = _wires(pipe.info().graph, modules)
    _run_as_code(modules[stage])
    names = [frozenset(name for name, _, _, _ in _fakes(module)) for module in modules]
    first = next(node for node in pipe.info().graph.nodes if node.op == "call_module")
    taken = [node for node in pipe.info().graph.nodes if node.op == "placeholder"]
    inputs = [taken.index(node) for node in first.args]
    return Traced(rows, pipe.info(), modules[stage], _gives(modules[stage]), inputs, names, wires, frame, is_tensor, shapes)


def fill(module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Puts the weights of the model into a traced stage, where the tracer has left fakes."""
    for name, tensors, key, _ in list(_fakes(module)):
        tensor = _tensor(model, name)
        if tensor.is_meta:
            raise ConfigError(
                f"this process has no memory for {name!r}, which its stage needs: if the model was made without weights, load them "
                "before prepare_pippy; if it was prepared already, its example did not use this weight, so it was let go. Prepare it "
                "with an example that does."
            )
        tensors[key] = tensor


def let_go(model: torch.nn.Module, names: Collection[str]) -> None:
    """Frees the memory of every tensor of the model that is not one of the named: it becomes one on the meta device."""
    kept = {id(_tensor(model, name)) for name in names}
    gone: dict[int, torch.Tensor] = {}
    for _, tensors, key, tensor in list(_places(model)):
        if id(tensor) not in kept:
            if id(tensor) not in gone:
                meta = tensor.detach().to("meta")
                gone[id(tensor)] = torch.nn.Parameter(meta, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else meta
            tensors[key] = gone[id(tensor)]


# -- running the model on fakes ---------------------------------------------------------------------------------------


def _examples(batch: Batch, rows: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in batch.shapes(rows)]


@contextmanager
def _faked(model: torch.nn.Module, device: torch.device) -> Iterator[FakeTensorMode]:
    """Within it the model holds fakes in the place of its tensors: same shapes, no memory; one for each that is shared."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    places = [(tensors, key, tensor) for _, tensors, key, tensor in _places(model)]
    with mode:
        for _, _, tensor in places:
            if id(tensor) not in fakes:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                fakes[id(tensor)] = torch.nn.Parameter(fake, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else fake
    try:
        for tensors, key, tensor in places:
            tensors[key] = fakes[id(tensor)]
        yield mode
    finally:
        for tensors, key, tensor in places:
            tensors[key] = tensor


def _places(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Every tensor of a module with its name and where it is kept; shared ones under each of their names."""
    for prefix, one in module.named_modules(remove_duplicate=False):
        for tensors in (one._parameters, one._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield f"{prefix}.{key}".lstrip("."), tensors, key, tensor


def _fakes(stage: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """The tensors of a stage that stand for one of the model, by their names there; constants of the program are real."""
    for name, tensors, key, tensor in _places(stage):
        if isinstance(tensor, FakeTensor):
            yield name.removeprefix(_PREFIX), tensors, key, tensor


def _tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    found = module._parameters.get(key)
    return module._buffers[key] if found is None else found  # type: ignore[return-value]  # it was there when the model was traced


@contextmanager
def _hooked(modules: Sequence[torch.nn.Module], hook: Callable[[torch.nn.Module, Any], None]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook, prepend=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence for what torch logs of errors that come out of here too, and for warnings about itself."""
    with ExitStack() as after, warnings.catch_warnings():
        for name in ("torch", *(name for name in logging.root.manager.loggerDict if name.startswith("torch."))):
            logger = logging.getLogger(name)
            if not logger.disabled:
                logger.disabled = True
                after.callback(setattr, logger, "disabled", False)
        tracer = vars(importlib.import_module("torch.export._trace"))
        tracer["print"] = lambda *words, **options: None  # it prints the graph up to an error; what a model prints is shown
        after.callback(tracer.pop, "print", None)
        for text in _EXPECTED:
            warnings.filterwarnings("ignore", message=re.escape(text))
        yield


# -- what came of it --------------------------------------------------------------------------------------------------


def _untraceable(model: torch.nn.Module, batch: Batch, rows: int, error: Exception) -> str:
    cause = error.__cause__ or error
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    values = isinstance(cause, _VALUE_WANTED) or "data-dependent" in str(cause).lower() or type(cause).__name__.startswith("Guard")
    advice = (
        "A forward that is traced may not look at the values of tensors (`if mask.any()`, `x.item()`, `x.tolist()`), nor change the "
        "model: use torch.where, or decide outside of the model."
        if values
        else "Its forward does not run with these arguments, in pieces of the batch: check their number, names and shapes."
    )
    tensors = zip(batch.labels(model), batch.tensors(), batch.is_cut, strict=True)
    cut = [f"{name} {tuple(tensor.shape)}" for name, tensor, is_cut in tensors if is_cut]
    said = f"Cut into pieces of {rows}, as the first dimension is that of the batch, {batch.rows}: {', '.join(cut)}."
    return (
        f"{type(model).__name__} cannot be cut into stages, as torch's tracer stopped{_place(cause)}: {type(cause).__name__}: {reason}\n"
        f"{advice}\n{said} A tensor that has no row per entry is recognised where the example has another number of rows than it."
    )


def _place(error: BaseException) -> str:
    """The line of the model at which an error was raised."""
    inside = os.path.dirname(torch.__file__) + os.sep
    told = extract_tb(error.__traceback__)
    frames = [frame for frame in told if not is_ours(frame.filename) and not frame.filename.startswith((inside, "<string>", "<eval"))]
    return f" at {spell(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)}" if frames else " in its forward"


def _check_count(pipe: Pipe, model: torch.nn.Module, points: Sequence[str], reached: set[torch.nn.Module]) -> None:
    for name in points:
        if model.get_submodule(name) not in reached:
            raise ConfigError(
                f"the split point {name!r} is never called when {type(model).__name__} runs, so nothing can be cut there: name a module "
                "whose forward is used (not a ModuleList, whose items are)"
            )
    if pipe.num_stages != len(points) + 1:
        raise ConfigError(
            f"the split points {list(points)} give {pipe.num_stages} stages with something to compute, not {len(points) + 1}: "
            "there has to be work before, between and after them. Name others."
        )


def _output(output: Any, rows: int) -> tuple[Any, list[bool], list[tuple[torch.Size, torch.dtype]]]:
    """The structure of what a model gave for a piece, with nothing of the tensors but their shapes."""
    leaves = tree.flatten(output)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *PLAIN)):
            raise ConfigError(
                f"the model gives a {type(leaf).__name__}, which cannot be put together from the pieces of a batch: only tensors can, in "
                "lists, tuples and dicts. Have it leave that out (for a transformers model: use_cache=False)."
            )
    for shape, _ in shapes:
        if not shape or shape[0] != rows:
            raise ConfigError(
                f"the model gives a tensor of shape {tuple(shape)} for {rows} rows. A batch goes through the stages in pieces, and only "
                "outputs with one entry per row can be joined again: have the model give those, and compute means and losses from them."
            )
    if not shapes:
        raise ConfigError("the model gives no tensor, so there is nothing for the last stage to give back")
    return tree.unflatten(output, [None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]), is_tensor, shapes


def _run_as_code(stage: torch.nn.Module) -> None:
    """The parts of a stage run as the Python that was made of them; torch would walk their graphs, which takes five times as long."""
    for part in stage.modules():
        if "_run_with_interpreter" in vars(part) and "self" not in part._modules:  # its result would be called self in that Python
            vars(part)["_run_with_interpreter"] = False


def _wires(graph: torch.fx.Graph, modules: Sequence[Any]) -> list[str]:
    """Settles what goes from stage to stage: contiguous, and taken by a stage in the order in which each other stage gives it.

    Torch's stages send what they give in the order of their outputs and receive in the order of their inputs; nothing but the order
    says which is which, so between two stages it has to be the same.
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    for call, module in zip(calls[:-1], modules, strict=False):
        call.users = dict.fromkeys(sorted(call.users, key=_index))  # torch numbers the outputs by the order of their users
        numbers = [_index(user) for user in call.users if user.target is operator.getitem]
        if numbers != list(range(len(numbers))):
            raise ConfigError(f"a stage gives more values than the {len(numbers)} that are used: name other split points")
        _send_contiguous(module)
    return [_receive_in_order(call, module, calls) for call, module in zip(calls[1:], modules[1:], strict=True)]


def _index(node: Any) -> int:
    """Which of a stage's outputs a node of the outer graph is."""
    return int(node.args[1]) if node.target is operator.getitem else 0


def _receive_in_order(call: Any, module: Any, calls: list[Any]) -> str:
    def origin(node: Any) -> tuple[int, int]:
        return calls.index(node.args[0] if node.target is operator.getitem else node), _index(node)

    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    pairs = sorted(zip(call.args, placeholders, strict=True), key=lambda pair: origin(pair[0]))
    call.args = tuple(node for node, _ in pairs)
    for _, placeholder in reversed(pairs):
        next(iter(module.graph.nodes)).prepend(placeholder)
    for _, placeholder in pairs:
        placeholder.meta["val"] = _contiguous_like(placeholder.meta["val"])
    module.recompile()
    sent = [(origin(node), placeholder.meta["val"]) for node, placeholder in pairs]
    return "; ".join(f"{source} {fake.dtype} {tuple(fake.shape)}" for source, fake in sent)


def _gives(stage: Any) -> list[tuple[torch.Size, torch.dtype]]:
    output = next(node for node in stage.graph.nodes if node.op == "output")
    fakes: list[torch.Tensor] = []
    torch.fx.map_arg(output.args, lambda node: fakes.append(node.meta["val"]))
    return [(fake.shape, fake.dtype) for fake in fakes]


def _send_contiguous(stage: Any) -> None:
    """Whatever leaves a stage is contiguous, which sending needs."""
    output = next(node for node in stage.graph.nodes if node.op == "output")

    def contiguous(node: Any) -> Any:
        with stage.graph.inserting_before(output):
            made = stage.graph.call_function(torch.ops.aten.contiguous.default, (node,))
        made.meta["val"] = _contiguous_like(node.meta["val"])
        return made

    output.args = torch.fx.map_arg(output.args, contiguous)
    stage.recompile()


def _contiguous_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty(fake.shape, dtype=fake.dtype, device="meta")
