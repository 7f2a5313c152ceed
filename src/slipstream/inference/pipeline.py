"""Pipeline inference on `torch.distributed.pipelining`: one model over several processes, each of which holds one stage.

`prepare_pippy` cuts a model into as many stages as there are processes, keeps the weights of one stage on each, and replaces `forward` by
one that passes a batch through all of them in microbatches. The output is that of the plain model, with exactly the rows that were given,
on the last process, or on all with `gather_output=True`. All processes call with the same arguments; every step begins with a guarded
call that compares shapes, and a process that fails in its stage ends the waits of the others. One process runs the plain model, on its
device. There are no gradients.

A program is traced for microbatches of a fixed number of rows; later batches are cut into as many as they need. Inputs of a new form are
traced on their first call; the last 16 programs are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import ScheduleGPipe, build_stage

from slipstream.big_models.device_map.sizes import find_tied_parameters
from slipstream.big_models.prepare import is_dispatched
from slipstream.config.handlers import check_count
from slipstream.config.names import nearest
from slipstream.devices.memory import available_memory
from slipstream.devices.table import CPU
from slipstream.distributed import collectives, pytree
from slipstream.distributed.call_site import call_site
from slipstream.distributed.guard import Body, CollectiveCall, announce_failure
from slipstream.distributed.state import AcceleratorState
from slipstream.errors import ConfigError, DistributedOperationException, StateError
from slipstream.inference.microbatches import PipelineBatch, find_pippy_batch_size, has_rows, pad_rows
from slipstream.inference.stage_plan import find_no_split_classes, generate_device_map, order_blocks, partition_evenly
from slipstream.inference.trace import TracedStage, check_rows, fill_stage_weights, free_weights, list_called_modules, resolve_rows, trace
from slipstream.logging import get_logger

__all__ = [
    "Pipeline", "build_pipeline", "describe_autocast", "find_pippy_batch_size", "find_stage_device", "generate_device_map",
    "original_forward", "pippy_forward", "prepare_pippy",
]


_STEP = "pipeline"
_TRACE = "pipeline trace"
_KEPT_PROGRAMS = 16
_KEPT_READINGS = 256
_RETRACE_FACTOR = 2
"""A batch of more than this many times `num_chunks` pieces is traced again, for larger ones."""


class Pipeline:
    """A model cut at `split_points`, with the stage of this process; `step` runs a batch through all of them."""

    def __init__(self, model: torch.nn.Module, split_points: list[str], num_chunks: int, state: AcceleratorState) -> None:
        self.model = model
        self.split_points = split_points
        self.num_chunks = num_chunks
        self.gather_output = False
        """Whether every process gets the output, and not only the last."""
        self.names: list[frozenset[str]] = []
        """The tensors of the model that each stage uses, by name."""
        self.device = find_stage_device(state)
        self._state = state
        self._cut: dict[str, tuple[bool, ...]] = {}
        self._readings: dict[str, tuple[bool, ...]] = {}
        self._programs: dict[str, _StageProgram] = {}
        self._watch = state.runtime.watch(_STEP, state.limits, point_to_point=True)
        self._logger = get_logger(__name__)

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, batch: PipelineBatch) -> None:
        """Trace the program for batches of this form, if there is none; a collective."""
        self.names = self._program(batch).traced.names
        self._cut = batch.cut

    def _program(self, batch: PipelineBatch) -> _StageProgram:
        found = self._programs.pop(batch.form, None)
        if found is None or batch.count(found.traced.rows) > _RETRACE_FACTOR * self.num_chunks:
            found = self._make(batch)
        self._programs[batch.form] = found  # as the one used last
        while len(self._programs) > _KEPT_PROGRAMS:
            del self._programs[next(iter(self._programs))]
            self._logger.warning_once(
                f"this pipeline has seen more than {_KEPT_PROGRAMS} forms of input, and traces each that it does not remember: pad "
                "sequences to a few lengths"
            )
        return found

    def _make(self, batch: PipelineBatch) -> _StageProgram:
        state = self._state
        rows = -(-batch.rows // self.num_chunks)
        if self._programs:
            self._logger.info(f"tracing the pipeline again, for {batch.form} in pieces of {rows} rows")
        try:
            with original_forward(self.model):
                traced = trace(self.model, batch, rows, self.device, self.split_points, state.process_index)
            fill_stage_weights(traced.module, self.model)
            made = _StageProgram(traced, state.process_index, self.device)
        except Exception as error:  # the others have to raise too
            raise announce_failure(state.channel(), state.limits, _TRACE, error) from error.__cause__
        _check_same(state, _TRACE, f"{batch.form} {rows} {[sorted(names) for names in traced.names]} {traced.wires} {traced.shapes}")
        return made

    # -- a step ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for this batch: on the last process, or with `gather_output` on all; elsewhere None."""
        traced, tensors, rows = self._step(args, kwargs)
        if self.gather_output:
            state, last = self._state, self._state.num_processes - 1
            own = traced.empty(rows, self.device) if tensors is None else tensors
            tensors = collectives.broadcast(state.channel(), state.limits, own, last, operation="pipeline output")
        return None if tensors is None else traced.built(tensors)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for this batch on the last process; elsewhere None."""
        traced, tensors, _ = self._step(args, kwargs)
        return None if tensors is None else traced.built(tensors)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TracedStage, list[torch.Tensor] | None, int]:
        batch = self._agree(args, kwargs)
        program = self._program(batch)
        rows = program.traced.rows
        try:
            with self._watch, torch.inference_mode(False), torch.no_grad():  # buffers are used in and out of inference mode
                given = batch.pieces(rows, self.device) if self._state.process_index == 0 else []
                joined = program.run(given, batch.count(rows))
        except DistributedOperationException:
            raise
        except BaseException as error:
            self._give_up(error)
            raise
        return program.traced, None if joined is None else [tensor[: batch.rows] for tensor in joined], batch.rows

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineBatch:
        """Return the batch, when every process has one of this form and size."""
        state = self._state
        try:
            batch = self._resolve(PipelineBatch(args, kwargs, self._cut, context=describe_autocast(self.device)))
        except ConfigError as error:
            raise announce_failure(state.channel(), state.limits, _STEP, error) from None
        _check_same(state, _STEP, f"{batch.rows} rows of {batch.form}")
        if batch.needs_gradients:
            self._logger.warning_once("a pipeline is for inference: its output has no gradients, although an input requires them")
        return batch

    def _resolve(self, batch: PipelineBatch) -> PipelineBatch:
        """Resolve which tensors are cut in a batch whose structure differs from the example's; once for each form."""
        if batch.is_known or sum(batch.is_cut) < 2:
            return batch
        key = f"{batch.rows} {batch.form}"
        if key not in self._readings:
            if len(self._readings) >= _KEPT_READINGS:
                self._readings.clear()
            with original_forward(self.model):
                self._readings[key] = resolve_rows(self.model, batch, self.device).is_cut
        return batch.read_as(self._readings[key])

    def _give_up(self, error: BaseException) -> None:
        """End the waits of the other processes, which need the output of this stage."""
        if not self._state.runtime.is_open:
            return  # no rank waits in a closed group
        channel: Any = self._state.channel()
        reason = f"rank {self._state.process_index} failed in its stage with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        channel.heartbeat.post("gave_up", generation=channel.generation, call=_STEP, because=reason)
        channel.abort(reason)


def _check_same(state: AcceleratorState, operation: str, text: str) -> None:
    """Raise on every process if they do not all come here with the same text."""
    call = CollectiveCall(operation, text, call_site(), lambda: f"{operation} {text}")
    with state.channel().guard(call, state.limits) as guarded:
        guarded.exchange(Body())


@contextmanager
def _failure_announced(state: AcceleratorState) -> Iterator[None]:
    """Make all processes raise if one fails in the block."""
    try:
        yield
    except Exception as error:
        raise announce_failure(state.channel(), state.limits, _PREPARE, error) from error.__cause__


def find_stage_device(state: AcceleratorState) -> torch.device:
    """Return the device of this process's stage: its own device, unless the group uses the backend of a different device family."""
    settings = state.runtime.settings
    return state.device if settings is None or settings.backend == state.backend else torch.device(CPU.type)


def describe_autocast(device: torch.device) -> str:
    """Return the active autocast as text: the dtypes between stages depend on it."""
    return f" under autocast to {torch.get_autocast_dtype(device.type)}" if torch.is_autocast_enabled(device.type) else ""


@contextmanager
def original_forward(model: torch.nn.Module) -> Iterator[None]:
    """Restore the original forward of a prepared model inside the block."""
    prepared = vars(model).pop("forward", None)
    original = getattr(prepared, "__wrapped__", None)
    if original is not None and getattr(original, "__func__", None) is not type(model).forward:
        vars(model)["forward"] = original  # one that was put on the object itself, not that of its class
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if prepared is not None:
            vars(model)["forward"] = prepared


class _StageProgram:
    """A running program: torch's stage, and a schedule for each number of microbatches."""

    def __init__(self, traced: TracedStage, stage: int, device: torch.device) -> None:
        self.traced = traced
        self._stage = build_stage(traced.module, stage, traced.info, device)
        traced.module.register_forward_hook(self._check)
        self._schedules: dict[int, ScheduleGPipe] = {}

    def _check(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        """Raise if this stage returns other shapes than the next one expects: gloo would abort a process that receives more."""
        given = output if isinstance(output, (tuple, list)) else (output,)
        found = [(tensor.shape, tensor.dtype) for tensor in given]
        if found != self.traced.gives:
            raise StateError(
                f"a stage returned {found}, which was traced as {self.traced.gives}: its output depends on values. Cut elsewhere."
            )

    def run(self, tensors: list[torch.Tensor], count: int) -> list[torch.Tensor] | None:
        """Run microbatches through this stage; return the joined output on the last."""
        schedule = self._schedules.get(count)
        if schedule is None:
            schedule = self._schedules[count] = ScheduleGPipe(self._stage, count)
        try:
            output = schedule.step(*(tensors[position] for position in self.traced.inputs) if tensors else ())
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch's stage puts the tensors around the error of the model
        finally:
            self._stage.clear_runtime_states()
        return None if output is None else list(output) if isinstance(output, (tuple, list)) else [output]


_PREPARE = "prepare_pippy"


def prepare_pippy(
    model: torch.nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Collection[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> torch.nn.Module:
    """Cut a model into one stage per process and return it, to be called by all of them with the same arguments.

    `split_points`: "auto" for stages that are as even as possible and fit on their devices, or the names of the modules at which a new
    stage begins, one fewer than there are processes. `example_args` and `example_kwargs` are example inputs; their number of rows, divided
    into `num_chunks` pieces (by default as many as processes), is the size of the microbatches. Give an example as large as the batches
    that follow: larger batches take more microbatches. Only the last process gets the output, and the others None, unless `gather_output`
    is true. Inputs may be on any device; outputs are on that of the process.

    The weights of the other stages are freed: they become tensors on the meta device.

    >>> model = prepare_pippy(torch.nn.Linear(3, 2).eval(), example_args=(torch.ones(4, 3),))
    >>> model(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"prepare_pippy was given a {type(model).__name__}. Pass a torch.nn.Module.")
    state = AcceleratorState()
    logger = get_logger(__name__)
    if model.training:
        model.eval()
        logger.warning("%s was in training mode: a pipeline is for inference, so it is in eval mode now", type(model).__name__)
    if getattr(model, "pippy_stage", None) is not None:
        raise ConfigError("this model is a pipeline already, and its other stages are gone: build it again to cut it differently")
    if not state.use_distributed:
        return _prepare_alone(model, find_stage_device(state))
    rooms = _measure_stages(model, state) if split_points in (None, "auto") else {}
    with _failure_announced(state):
        points = _split_points(model, split_points, no_split_module_classes, example_args or (), example_kwargs, num_chunks, state, rooms)
    tied = find_tied_parameters(model)
    pipeline = build_pipeline(model, points, example_args or (), example_kwargs, num_chunks)
    pipeline.gather_output = bool(gather_output)
    for names in tied:
        stages = [number for number, held in enumerate(pipeline.names) if not held.isdisjoint(names)]
        if len(stages) > 1:
            used = f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
            logger.warning("%s is one weight, used in the stages %s: each of them holds a copy", " = ".join(names), used)
    free_weights(model, pipeline.names[state.process_index])
    model.hf_split_points = points  # type: ignore[assignment]
    model.pippy_stage = pipeline  # type: ignore[assignment]
    return _replace_forward(model, pipeline)


def build_pipeline(
    model: torch.nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
) -> Pipeline:
    """Return the stage of this process, of a model cut at the beginning of the named modules: `step(*args, **kwargs)` runs a batch.

    All processes call it, and every `step`, with the same arguments. The model keeps its weights; those of this stage are shared with it,
    on the device of the stage.
    """
    state = AcceleratorState()
    if not state.use_distributed:
        raise ConfigError("build_pipeline needs two processes or more; one runs the model as it is (prepare_pippy does)")
    device = find_stage_device(state)
    mixing: Exception | None = None
    with _failure_announced(state), original_forward(model):
        batch = resolve_rows(model, PipelineBatch(args, kwargs, context=describe_autocast(device)), device)
        points = _checked_split_points(model, split_points, state.num_processes)
        pipeline = Pipeline(model, points, _chunks(num_chunks, state), state)
        try:
            check_rows(model, batch)  # now: the trace moves the weights of this stage to its device
        except Exception as error:  # whatever it is, the trace below says more about a model that does not run
            mixing = error
    pipeline.prepare(batch)
    with _failure_announced(state):
        if mixing is not None:
            raise mixing
    return pipeline


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Call a pipeline's `step` with rows padded to a multiple of `num_chunks`, and drop the padding from the output.

    With `gather_output` every process gets the output of the last one.
    """
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise ConfigError("pippy_forward was called without a tensor that has rows: pass at least one tensor with a batch dimension")
    target = -(-rows // num_chunks) * num_chunks

    def fill(leaf: Any) -> Any:
        return pad_rows(leaf, target) if has_rows(leaf, rows) else leaf

    output = forward(*pytree.map_leaves(fill, args), **pytree.map_leaves(fill, kwargs))
    output = pytree.map_leaves(lambda leaf: leaf[:rows] if has_rows(leaf, target) else leaf, output)
    state = AcceleratorState()
    if not gather_output or not state.use_distributed:
        return output
    return collectives.broadcast_objects(state.channel(), state.limits, [output], state.num_processes - 1, operation="pipeline output")[0]


def _prepare_alone(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Let one process run the whole model, on its device; a model that is dispatched by a device map stays where it is."""
    model.hf_split_points = []  # type: ignore[assignment]  # any attribute may be put on a module
    forward = torch.no_grad()(model.forward)
    if is_dispatched(model):
        return _replace_forward(model, forward)
    model.to(device)

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*pytree.send_to_device(args, device), **pytree.send_to_device(kwargs, device))

    return _replace_forward(model, run)


def _measure_stages(model: torch.nn.Module, state: AcceleratorState) -> dict[int, int]:
    """Return the bytes that each stage may hold, by what is free on its device, but for a tenth for activations; {} on the CPU.

    What the model has there already counts as free. On the CPU the processes share one memory. A collective on accelerators.
    """
    device = find_stage_device(state)
    free = None if device.type == CPU.type else available_memory(device)
    if device.type == CPU.type:
        return {}
    held = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device}
    own = None if free is None else (free + sum(held.values())) * 9 // 10
    rooms = collectives.gather_objects(state.channel(), state.limits, own, operation="memory of the stages") or []
    return {stage: room for stage, room in enumerate(rooms) if room is not None}


# -- decisions of prepare ---------------------------------------------------------------------------------------------


def _split_points(
    model: torch.nn.Module,
    given: str | Sequence[str] | None,
    no_split: Collection[str] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int | None,
    state: AcceleratorState,
    rooms: Mapping[int, int],
) -> list[str]:
    count = state.num_processes
    if given is not None and given != "auto":
        return _checked_split_points(model, given, count)
    with original_forward(model):
        batch = resolve_rows(model, PipelineBatch(args, kwargs), find_stage_device(state), silent=True)  # `build_pipeline` warns
        called = list_called_modules(model, batch, -(-batch.rows // _chunks(num_chunks, state)), find_stage_device(state))
    blocks = order_blocks(model, find_no_split_classes(model, no_split), at_least=count, called=called)
    starts = partition_evenly(blocks, count, rooms, "what is free on the devices")
    return [blocks[start].name for start in starts[1:]]


def _checked_split_points(model: torch.nn.Module, given: str | Sequence[str], count: int) -> list[str]:
    if isinstance(given, str):
        raise ConfigError(f'split_points={given!r} is one text: write "auto", or a list of names of modules, [{given!r}]')
    points = list(given)
    known = dict(model.named_modules(remove_duplicate=False))
    for name in points:
        if name not in known or name == "":
            hint = _hint(str(name), known)
            raise ConfigError(f"split_points names {name!r}, which is not a module of this {type(model).__name__}. {hint}")
        if points.count(name) > 1:
            raise ConfigError(f"split_points names {name!r} twice: a stage begins there once")
    if len(points) != count - 1:
        raise ConfigError(
            f"{len(points)} split {'point makes' if len(points) == 1 else 'points make'} {len(points) + 1} "
            f"{'stages' if points else 'stage'}, but there are {count} processes, and each has one: name {count - 1} "
            f'{"module" if count == 2 else "modules"} at which a new stage begins, or write "auto"'
        )
    return points


def _hint(name: str, known: Collection[str]) -> str:
    """Return the nearest name, or the names there are."""
    same = [path for path in known if path and path.rpartition(".")[2] == name.rpartition(".")[2]]
    if same:
        return f"Did you mean {same[0]!r}?"
    beside = [path for path in known if path and path.rpartition(".")[0] == name.rpartition(".")[0]]
    there = beside if "." in name and beside else [path for path in known if path and "." not in path]
    shown = [*there[:3], "...", there[-1]] if len(there) > 5 else there
    near = nearest(name, [path for path in known if path])
    meant = f"Did you mean {near[0]!r}? " if near and not beside else ""
    return f"{meant}There are: {', '.join(shown) or 'no modules in it'}."


def _chunks(given: int | None, state: AcceleratorState) -> int:
    if given is None:
        return state.num_processes
    check_count(given, f"num_chunks={given!r} is not a number of chunks: write 1 or more, or leave it out for one per process")
    return given


def _replace_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> torch.nn.Module:
    original = model.forward

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = run
    return model
