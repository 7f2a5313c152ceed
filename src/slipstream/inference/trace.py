"""A model traced on fake tensors and cut into stages, and which arguments have one row per sample.

`trace` returns the stage of this process: a program from flat tensors to flat tensors. All inputs pass through the first stage and all
outputs through the last, as views, so a later stage may use an input; what goes from stage to stage is made contiguous. A mask of shape
(T, T) looks like one row per sample when the batch has T samples: `resolve_rows` runs the model on fake tensors with other numbers of
rows to find out, and `check_rows` refuses a model whose rows depend on each other. Nothing here communicates, and the model is unchanged
but for `free_weights`.
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from traceback import extract_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.pipelining import Pipe, pipe_split, pipeline

from slipstream.distributed import pytree
from slipstream.distributed.call_site import format_site, is_package_frame
from slipstream.errors import ConfigError
from slipstream.inference.microbatches import STATIC_TYPES, PipelineBatch
from slipstream.logging import get_logger

__all__ = [
    "TracedStage", "check_rows", "explain_misfit", "fill_stage_weights", "free_weights", "list_called_modules", "resolve_rows", "trace",
]


_PREFIX = "model."
_DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_EXPECTED_WARNINGS = (
    "Accessing the data pointer of FakeTensor is deprecated",  # a tied weight is copied for each stage: a fake one, so without memory
    "`isinstance(treespec, LeafSpec)` is deprecated",  # torch's own copying of its specification
)
"""Warnings that torch gives itself while it traces, and that say nothing about the model."""


@dataclass
class TracedStage:
    """A program for inputs of one form, in pieces of `rows` rows."""

    rows: int
    info: Any
    """torch's description of the whole pipeline."""
    module: torch.nn.Module
    """The stage of this process."""
    gives: list[tuple[torch.Size, torch.dtype]]
    """The outputs of this process's stage for one microbatch."""
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
        """Return tensors of the shapes of the output for so many rows."""
        return [torch.empty((rows, *shape[1:]), dtype=dtype, device=device) for shape, dtype in self.shapes]

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output in the structure of the model, with these tensors."""
        supply = iter(tensors)
        pairs = zip(pytree.flatten(self.frame), self.is_tensor, strict=True)
        return pytree.unflatten(self.frame, [next(supply) if tensor else leaf for leaf, tensor in pairs])


class _FlatModel(torch.nn.Module):
    """The model as a function of tensors; `record` is called with the output."""

    def __init__(self, model: torch.nn.Module, batch: PipelineBatch, record: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self._build = batch.build()
        self._cut = batch.is_cut
        self._record = record  # a callback, because the tracer would restore a changed attribute

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._build(
            [tensor.view(tensor.shape) if cut else tensor[0] for tensor, cut in zip(tensors, self._cut, strict=True)]
        )
        output = self.model(*args, **kwargs)
        self._record(output)
        return tuple(leaf.view(leaf.shape) for leaf in pytree.flatten(output) if isinstance(leaf, torch.Tensor))


def list_called_modules(model: torch.nn.Module, batch: PipelineBatch, rows: int, device: torch.device) -> dict[str, int] | None:
    """Return the modules that are called for such a batch, in the order of their first calls, without computing anything.

    Return None if that depends on values. Errors of the model are not caught.
    """
    called: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules()}

    def record(module: torch.nn.Module, _: Any) -> None:
        called.setdefault(names[module], len(called))

    try:
        with _hooked(list(names), record):
            _run_on_fakes(model, batch, rows, device)
    except _DATA_DEPENDENT_ERRORS:
        return None
    return called


def _run_on_fakes(model: torch.nn.Module, batch: PipelineBatch, rows: int, device: torch.device) -> Any:
    """Return the output of the model for a batch of so many rows, with fake tensors."""
    given: list[Any] = []
    with _quiet_torch(), torch.inference_mode(False), torch.no_grad(), _fake_tensors(model, device) as mode, mode:
        _FlatModel(model, batch, given.append)(*_examples(batch, rows, device))
    return given[-1]


def explain_misfit(model: torch.nn.Module, batch: PipelineBatch, rows: int, device: torch.device) -> str | None:
    """Return why the model does not run with so many rows in the tensors that are cut, or does not return as many; nothing is computed."""
    try:
        output = _run_on_fakes(model, batch, rows, device)
    except Exception as error:  # of any kind: shapes that do not go together are reported in many ways
        return f"{type(error).__name__}: {error}"
    shapes = [leaf.shape for leaf in pytree.flatten(output) if isinstance(leaf, torch.Tensor)]
    return next((f"an output of shape {tuple(shape)} for {rows} rows" for shape in shapes if shape[:1] != (rows,)), None)


def trace(model: torch.nn.Module, batch: PipelineBatch, rows: int, device: torch.device, points: Sequence[str], stage: int) -> TracedStage:
    """Trace a model, cut where the modules of these names are first called."""
    given: list[Any] = []
    program = _FlatModel(model, batch, given.append)
    split: set[torch.nn.Module] = set()

    def cut(module: torch.nn.Module, _: Any) -> None:
        if module not in split:
            split.add(module)
            pipe_split()  # type: ignore[no-untyped-call]

    modules = [model.get_submodule(name) for name in points]
    with _quiet_torch(), torch.inference_mode(False), torch.no_grad(), _hooked(modules, cut), _fake_tensors(model, device) as mode:
        with mode:
            examples = _examples(batch, rows, device)
        try:
            pipe: Pipe = pipeline(program, tuple(examples))
        except Exception as error:  # the tracer reports the same problem with many types of errors
            if given:
                _output(given[-1], rows)  # the model ran to its end: its output may be the reason
            raise ConfigError(_untraceable(model, batch, rows, error)) from error
    _check_count(pipe, model, points, split)
    frame, is_tensor, shapes = _output(given[-1], rows)
    modules = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    wires = _connect_stages(pipe.info().graph, modules)
    _run_as_code(modules[stage])
    names = [frozenset(name for name, _, _, _ in _stage_fakes(module)) for module in modules]
    first = next(node for node in pipe.info().graph.nodes if node.op == "call_module")
    taken = [node for node in pipe.info().graph.nodes if node.op == "placeholder"]
    inputs = [taken.index(node) for node in first.args]
    return TracedStage(rows, pipe.info(), modules[stage], _stage_outputs(modules[stage]), inputs, names, wires, frame, is_tensor, shapes)


def fill_stage_weights(module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Put the weights of the model into a traced stage, where the tracer has left fakes."""
    for name, tensors, key, _ in list(_stage_fakes(module)):
        tensor = _tensor(model, name)
        if tensor.is_meta:
            raise ConfigError(
                f"this process has no memory for {name!r}, which its stage needs: if the model was made without weights, load them "
                "before prepare_pippy; if it was prepared already, its example did not use this weight, so it was freed. Prepare it "
                "with an example that does."
            )
        tensors[key] = tensor


def free_weights(model: torch.nn.Module, names: Collection[str]) -> None:
    """Move every tensor of the model that is not named to the meta device."""
    kept = {id(_tensor(model, name)) for name in names}
    gone: dict[int, torch.Tensor] = {}
    for _, tensors, key, tensor in list(_tensor_places(model)):
        if id(tensor) not in kept:
            if id(tensor) not in gone:
                meta = tensor.detach().to("meta")
                gone[id(tensor)] = torch.nn.Parameter(meta, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else meta
            tensors[key] = gone[id(tensor)]


# -- running the model on fakes ---------------------------------------------------------------------------------------


def _examples(batch: PipelineBatch, rows: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in batch.shapes(rows)]


@contextmanager
def _fake_tensors(model: torch.nn.Module, device: torch.device) -> Iterator[FakeTensorMode]:
    """Replace the tensors of the model by fakes inside of the block: same shapes, no memory; one for each that is shared."""
    # torch internals: fake tensors have no public home yet. Tried on torch 2.13; tests/inference/test_pipeline.py notices a change.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    places = [(tensors, key, tensor) for _, tensors, key, tensor in _tensor_places(model)]
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


def _tensor_places(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield every tensor of a module with its name and the dict that holds it; shared ones under each of their names."""
    for prefix, entry in module.named_modules(remove_duplicate=False):
        for tensors in (entry._parameters, entry._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield f"{prefix}.{key}".lstrip("."), tensors, key, tensor


def _stage_fakes(stage: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield the tensors of a stage that stand for one of the model, by their names there; constants are real."""
    for name, tensors, key, tensor in _tensor_places(stage):
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
def _quiet_torch() -> Iterator[None]:
    """Silence what torch logs of errors that are raised here too, and its warnings about itself."""
    with ExitStack() as after, warnings.catch_warnings():
        for name in ("torch", *(name for name in logging.root.manager.loggerDict if name.startswith("torch."))):
            logger = logging.getLogger(name)
            if not logger.disabled:
                logger.disabled = True
                after.callback(setattr, logger, "disabled", False)
        # torch internals: torch.export prints the graph up to an error, and has no switch for it. Tried on torch 2.13;
        # tests/inference/test_pipeline_failures.py notices a change. It can go when torch logs instead.
        tracer = vars(importlib.import_module("torch.export._trace"))
        tracer["print"] = lambda *words, **options: None  # in that module alone: what a model prints is shown
        after.callback(tracer.pop, "print", None)
        for text in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=re.escape(text))
        yield


# -- outputs and errors --------------------------------------------------------------------------------------------------


def _untraceable(model: torch.nn.Module, batch: PipelineBatch, rows: int, error: Exception) -> str:
    cause = error.__cause__ or error
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    values = isinstance(cause, _DATA_DEPENDENT_ERRORS) or "data-dependent" in str(cause).lower() or type(cause).__name__.startswith("Guard")
    advice = (
        "A forward that is traced may not look at the values of tensors (`if mask.any()`, `x.item()`, `x.tolist()`), nor change the "
        "model: use torch.where, or decide outside of the model."
        if values
        else "Its forward does not run with these arguments, in pieces of the batch: check their number, names and shapes."
    )
    tensors = zip(batch.labels(model), batch.tensors(), batch.is_cut, strict=True)
    cut = [f"{name} {tuple(tensor.shape)}" for name, tensor, is_cut in tensors if is_cut]
    pieces = f"Cut into pieces of {rows}, because the first dimension is that of the batch, {batch.rows}: {', '.join(cut)}."
    return (
        f"{type(model).__name__} cannot be cut into stages, as torch's tracer stopped{_model_line(cause)}: {type(cause).__name__}: "
        f"{reason}\n"
        f"{advice}\n{pieces} A tensor without a row per entry is recognised if its first dimension differs from the rows of the example."
    )


def _model_line(error: BaseException) -> str:
    """Return the line of the model at which an error was raised."""
    inside = os.path.dirname(torch.__file__) + os.sep
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not is_package_frame(frame.filename) and not frame.filename.startswith((inside, "<string>", "<eval"))
    ]
    return f" at {format_site(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)}" if frames else " in its forward"


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
    """Return the structure of an output for a microbatch, which leaves are tensors, and their shapes."""
    leaves = pytree.flatten(output)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *STATIC_TYPES)):
            raise ConfigError(
                f"the model returns a {type(leaf).__name__}, which cannot be joined from the pieces of a batch: only tensors can, in "
                "lists, tuples and dicts. Leave it out of the output (for a transformers model: use_cache=False)."
            )
    for shape, _ in shapes:
        if not shape or shape[0] != rows:
            raise ConfigError(
                f"the model returns a tensor of shape {tuple(shape)} for {rows} rows. A batch goes through the stages in pieces, and only "
                "outputs with one entry per row can be joined again: return those, and compute means and losses from them."
            )
    if not shapes:
        raise ConfigError("the model returns no tensor, so the last stage has no output")
    return pytree.unflatten(output, [None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]), is_tensor, shapes


def _run_as_code(stage: torch.nn.Module) -> None:
    """Run the parts of a stage as generated Python; torch would interpret their graphs, which takes five times as long."""
    # torch internals: `_run_with_interpreter` of torch.distributed.pipelining. Tried on torch 2.13; without it stages are slower, and
    # tests/inference/test_pipeline.py compares the outputs. It can go when pipelining runs generated code.
    for part in stage.modules():
        if "_run_with_interpreter" in vars(part) and "self" not in part._modules:  # its result would be called self in that Python
            vars(part)["_run_with_interpreter"] = False


def _connect_stages(graph: torch.fx.Graph, modules: Sequence[Any]) -> list[str]:
    """Make what goes from stage to stage contiguous, and received in the order in which each other stage sends it.

    Torch's stages send what they give in the order of their outputs and receive in the order of their inputs; nothing but the order
    says which is which, so between two stages it has to be the same.
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    for call, module in zip(calls[:-1], modules, strict=False):
        call.users = dict.fromkeys(sorted(call.users, key=_index))  # torch numbers the outputs by the order of their users
        numbers = [_index(user) for user in call.users if user.target is operator.getitem]
        if numbers != list(range(len(numbers))):
            raise ConfigError(f"a stage returns more values than the {len(numbers)} that are used: name other split points")
        _send_contiguous(module)
    return [_receive_in_order(call, module, calls) for call, module in zip(calls[1:], modules[1:], strict=True)]


def _index(node: Any) -> int:
    """Return which of a stage's outputs a node of the outer graph is."""
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


def _stage_outputs(stage: Any) -> list[tuple[torch.Size, torch.dtype]]:
    output = next(node for node in stage.graph.nodes if node.op == "output")
    fakes: list[torch.Tensor] = []
    torch.fx.map_arg(output.args, lambda node: fakes.append(node.meta["val"]))
    return [(fake.shape, fake.dtype) for fake in fakes]


def _send_contiguous(stage: Any) -> None:
    """Make the outputs of a stage contiguous, which sending needs."""
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


_MOST_TRIED = 5
"""Up to this many tensors every combination is tried; with more, only those that leave out one or two."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The tolerance relative to the largest number, by the coarsest dtype involved; 0.1 for all others."""


def resolve_rows(model: torch.nn.Module, batch: PipelineBatch, device: torch.device, *, silent: bool = False) -> PipelineBatch:
    """Return the batch with those tensors whole that have no row per sample although their first dimension is that of the batch.

    >>> batch = PipelineBatch((torch.ones(4, 2), torch.ones(4, 2)), None)
    >>> resolve_rows(torch.nn.Bilinear(2, 2, 1), batch, torch.device("cpu")).is_cut
    (True, True)
    """
    if sum(batch.is_cut) < 2:
        return batch
    rows = _unused_row_count(model, batch)
    fitting = _possible_readings(model, map(batch.read_as, _readings(batch)), lambda tried: explain_misfit(model, tried, rows, device))
    if not fitting:
        return batch  # none that is better: the tracer says why, or `check_rows` does
    if len(fitting) > 1 and not _can_run(model):
        ways = zip(*(reading.is_cut for reading in fitting), strict=True)
        names = [name for name, cut in zip(batch.labels(model), ways, strict=True) if len(set(cut)) > 1]
        raise ConfigError(
            f"it is unknown whether {' and '.join(names)} has a row for each of the {batch.rows} entries of the batch: the model runs "
            "either way, and the weights needed to find out are on other processes. Prepare it with an example that has this argument."
        )
    agreeing = _possible_readings(model, fitting, lambda tried: _disagrees(model, tried)) if len(fitting) > 1 else fitting
    chosen = (agreeing or fitting)[0]  # where none agrees, `check_rows` says how
    whole = [name for name, was, cut in zip(batch.labels(model), batch.is_cut, chosen.is_cut, strict=True) if was and not cut]
    if whole and not silent:
        get_logger(__name__).warning(
            f"{' and '.join(whole)}: the first dimension is {batch.rows}, as that of the batch, but has no entry per row of it: "
            f"{'it goes' if len(whole) == 1 else 'they go'} to every piece of the batch whole"
        )
    return chosen


def _possible_readings(
    model: torch.nn.Module, tried: Iterable[PipelineBatch], objection: Callable[[PipelineBatch], str | None]
) -> list[PipelineBatch]:
    """Return the readings without an objection; objections to the others are logged at debug level."""
    left = []
    for reading in tried:
        why = objection(reading)
        if why is None:
            left.append(reading)
        else:
            cut = [name for name, is_cut in zip(reading.labels(model), reading.is_cut, strict=True) if is_cut]
            get_logger(__name__).debug("not read with rows in %s alone: %s", ", ".join(cut), why)
    return left


def _readings(batch: PipelineBatch) -> Iterator[tuple[bool, ...]]:
    """Yield which of the tensors may be cut: more before fewer."""
    places = [place for place, cut in enumerate(batch.is_cut) if cut]
    count = len(places)
    for size in range(count, 0, -1) if count <= _MOST_TRIED else (count, count - 1, count - 2, 1):
        for chosen in combinations(places, size):
            yield tuple(place in chosen for place in range(len(batch.is_cut)))


def _unused_row_count(model: torch.nn.Module, batch: PipelineBatch) -> int:
    """Return a number of rows larger than the batch's that is neither a size of any tensor here nor a multiple of one."""
    sizes = {size for tensor in (*batch.tensors(), *model.parameters(), *model.buffers()) for size in tensor.shape if size > 1}
    number = batch.rows + 1
    while number < 3 or any(number % size == 0 for size in sizes):
        number += 1
    return number


# -- with values ------------------------------------------------------------------------------------------------------


def check_rows(model: torch.nn.Module, batch: PipelineBatch) -> None:
    """Raise if a model computes something else for the last rows of a batch alone than within the whole batch.

    A model of which a part has no memory, or that is on several devices, is not run.
    """
    apart = _row_difference(model, batch) if _can_run(model) else None
    if apart is None:
        return
    labels = list(zip(batch.labels(model), batch.is_cut, strict=True))
    cut, others = ([name for name, is_cut in labels if is_cut is wanted] for wanted in (True, False))
    raise ConfigError(
        f"{type(model).__name__} returns different numbers for a part of the example than for all of it ({apart}), so a batch cannot go "
        f"through its stages in pieces. Taken as rows of the batch: {', '.join(cut)} ({batch.rows} of them); as whole: "
        f"{', '.join(others) or 'nothing'}. If that is wrong, give an example whose number of rows equals no other size in it; if it is "
        "right, the model mixes rows of its first dimension: call it with a batch dimension in front."
    )


def _can_run(model: torch.nn.Module) -> bool:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return len(devices) == 1 and devices != {torch.device("meta")}


def _disagrees(model: torch.nn.Module, batch: PipelineBatch) -> str | None:
    """Return why this is not how the batch is to be read."""
    try:
        return _row_difference(model, batch)
    except Exception as error:  # of any type: a reading that does not run is wrong
        return f"{type(error).__name__}: {error}"


def _row_difference(model: torch.nn.Module, batch: PipelineBatch) -> str | None:
    """Return how the output for the last half of the rows differs from these rows of the whole output; None if it does not."""
    tensors = [*model.parameters(), *model.buffers()]
    here, rows = tensors[0].device, batch.rows // 2
    if not rows:
        return None
    pairs = zip(batch.tensors(), batch.is_cut, strict=True)
    given = [_with_distinct_rows(tensor.to(here)) if cut else tensor.to(here) for tensor, cut in pairs]
    part = [tensor[-rows:] if cut else tensor for tensor, cut in zip(given, batch.is_cut, strict=True)]
    whole = _outputs(model, batch, given)
    types = {tensor.dtype for tensor in (*tensors, *whole) if tensor.is_floating_point() or tensor.dtype is torch.int8}
    close = 0.1 if torch.is_autocast_enabled(here.type) else max((_TOLERANCE.get(dtype, 0.1) for dtype in types), default=0.1)
    apart = _describe_difference([tensor[-rows:] for tensor in whole], _outputs(model, batch, part), close)
    if apart is None or _describe_difference(whole, _outputs(model, batch, given), close) is not None:
        return None  # equal, or the model is not deterministic
    return apart


def _with_distinct_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Make equal rows differ, as in an example of zeros: they would hide that the model mixes rows."""
    if not tensor.is_floating_point() or not bool((tensor == tensor[:1]).all()):
        return tensor
    steps = torch.linspace(0.0, 0.5, tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
    return tensor + steps.view(-1, *[1] * (tensor.dim() - 1))


def _outputs(model: torch.nn.Module, batch: PipelineBatch, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = batch.build()([tensor.clone() for tensor in tensors])
    with torch.no_grad():
        output: Any = model(*args, **kwargs)
    return [leaf for leaf in pytree.flatten(output) if isinstance(leaf, torch.Tensor)]


def _describe_difference(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], close: float) -> str | None:
    """Return how two outputs differ by more than rounding; None if they do not."""
    for entry, other in zip(whole, part, strict=True):
        if entry.shape != other.shape:
            return f"shape {tuple(other.shape)} where {tuple(entry.shape)} was expected"
        if not entry.is_floating_point() or not entry.numel():
            continue
        wide = entry.double().nan_to_num(0.0, 0.0, 0.0)
        difference = float((wide - other.double().nan_to_num(0.0, 0.0, 0.0)).abs().max())
        if difference > close * max(float(wide.abs().max()), 1e-12):
            return f"apart by {difference:.3g}"
    return None
