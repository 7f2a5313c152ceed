"""One pipeline on this process: its traced programs, one for each form of input, and the steps that all processes take together.

Every step begins with a guarded call (`comm/channel.py`): processes that bring other shapes, or another number of rows, are told so
before anything is sent. Then torch's schedule passes the pieces of the batch from stage to stage, in a watched section
(`comm/engine.py`), as its waits are not ours. A process that fails in its stage tells the others, whose waits end with an error.

A program is traced for pieces of a fixed number of rows: those of the first batch of its form, dealt into `num_chunks`. A later batch of
another size is cut into as many such pieces as it needs, so nothing is traced again; only one that needs more than twice
`num_chunks` pieces is worth a program with larger ones. Inputs of another form (another length of sequences, another flag) are traced when
they first come, which takes seconds; the last 16 programs are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import ScheduleGPipe, build_stage

from slipstream.comm import ops
from slipstream.comm.channel import Body
from slipstream.comm.guarded import refuse
from slipstream.comm.sites import call_site
from slipstream.comm.verify import Call
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError, DistributedOperationException, StateError
from slipstream.inference.batches import Batch
from slipstream.inference.readings import settled
from slipstream.inference.tracing import Traced, fill, trace
from slipstream.logging import get_logger
from slipstream.runtime.state import AcceleratorState

__all__ = ["Pipeline", "casting", "own_device", "own_forward"]

_STEP = "pipeline"
_TRACE = "pipeline trace"
_KEPT = 16
_SETTLED = 256
_WORTH_TRACING = 2
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
        self.device = own_device(state)
        self._state = state
        self._cut: dict[str, tuple[bool, ...]] = {}
        self._settled: dict[str, tuple[bool, ...]] = {}
        self._programs: dict[str, _Program] = {}
        self._watch = state.runtime.watch(_STEP, state.limits)
        self._logger = get_logger(__name__)

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Traces the program for batches of this form, if there is none; all processes come here together."""
        self.names = self._program(batch).traced.names
        self._cut = batch.cut

    def _program(self, batch: Batch) -> _Program:
        found = self._programs.pop(batch.form, None)
        if found is None or batch.count(found.traced.rows) > _WORTH_TRACING * self.num_chunks:
            found = self._make(batch)
        self._programs[batch.form] = found  # as the one used last
        while len(self._programs) > _KEPT:
            del self._programs[next(iter(self._programs))]
            self._logger.warning_once(
                f"this pipeline has seen more than {_KEPT} forms of input, and traces each that it does not remember: pad sequences to a "
                "few lengths"
            )
        return found

    def _make(self, batch: Batch) -> _Program:
        state, channel = self._state, self._state.channel()
        rows = -(-batch.rows // self.num_chunks)
        if self._programs:
            self._logger.info(f"tracing the pipeline again, for {batch.form} in pieces of {rows} rows")
        try:
            with own_forward(self.model):
                traced = trace(self.model, batch, rows, self.device, self.split_points, state.process_index)
            fill(traced.module, self.model)
            made = _Program(traced, state.process_index, self.device)
        except Exception as error:  # the others must hear of it, whatever it is
            raise refuse(channel, state.limits, _TRACE, error) from error.__cause__
        text = f"{batch.form} {rows} {[sorted(names) for names in traced.names]} {traced.wires} {traced.shapes}"
        with channel.turn(Call(_TRACE, text, call_site(), lambda: f"{_TRACE} {text}"), state.limits) as turn:
            turn.exchange(Body())
        return made

    # -- a step ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this batch: on the last process, or with `gather_output` on all; elsewhere None."""
        traced, tensors, rows = self._step(args, kwargs)
        if self.gather_output:
            state, last = self._state, self._state.num_processes - 1
            own = traced.empty(rows, self.device) if tensors is None else tensors
            tensors = ops.broadcast(state.channel(), state.limits, own, last, operation="pipeline output")
        return None if tensors is None else traced.built(tensors)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this batch, on the last process; elsewhere None."""
        traced, tensors, _ = self._step(args, kwargs)
        return None if tensors is None else traced.built(tensors)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, list[torch.Tensor] | None, int]:
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
            self._tell(error)
            raise
        return program.traced, None if joined is None else [tensor[: batch.rows] for tensor in joined], batch.rows

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The batch, when every process has brought one of this form and size."""
        state = self._state
        try:
            batch = self._settle(Batch(args, kwargs, self._cut, note=casting(self.device)))
        except ConfigError as error:
            raise refuse(state.channel(), state.limits, _STEP, error) from None
        text = f"{batch.rows} rows of {batch.form}"
        with state.channel().turn(Call(_STEP, text, call_site(), lambda: f"{_STEP} {text}"), state.limits) as turn:
            turn.exchange(Body())
        if batch.needs_gradients:
            self._logger.warning_once("a pipeline is for inference: its output carries no gradients, although an input asks for them")
        return batch

    def _settle(self, batch: Batch) -> Batch:
        """A batch of another structure than the example's, with what is cut of it settled; once for each form."""
        if batch.is_known or sum(batch.is_cut) < 2:
            return batch
        key = f"{batch.rows} {batch.form}"
        if key not in self._settled:
            if len(self._settled) >= _SETTLED:
                self._settled.clear()
            with own_forward(self.model):
                self._settled[key] = settled(self.model, batch, self.device).is_cut
        return batch.read_as(self._settled[key])

    def _tell(self, error: BaseException) -> None:
        """Ends the waits of the other processes: they need what this stage did not give."""
        if not self._state.runtime.is_open:
            return  # nobody waits in a group that is closed
        channel: Any = self._state.channel()
        reason = f"rank {self._state.process_index} failed in its stage with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        channel.beacon.post("gave_up", generation=channel.generation, call=_STEP, because=reason)
        channel.give_up(reason)


def own_device(state: AcceleratorState) -> torch.device:
    """Where the stage of this process runs: its device, unless the processes talk over another family's backend."""
    settings = state.runtime.settings
    return state.device if settings is None or settings.backend == state.backend else torch.device(CPU.type)


def casting(device: torch.device) -> str:
    """The autocast that a call is made under, in words: the types of what goes from stage to stage depend on it."""
    return f" under autocast to {torch.get_autocast_dtype(device.type)}" if torch.is_autocast_enabled(device.type) else ""


@contextmanager
def own_forward(model: torch.nn.Module) -> Iterator[None]:
    """Within it a prepared model has the forward that it had before."""
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


class _Program:
    """A traced program at work: torch's stage, and a schedule for each number of pieces."""

    def __init__(self, traced: Traced, stage: int, device: torch.device) -> None:
        self.traced = traced
        self._stage = build_stage(traced.module, stage, traced.info, device)
        traced.module.register_forward_hook(self._check)
        self._schedules: dict[int, ScheduleGPipe] = {}

    def _check(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        """What this stage gives is what the next one has room for: gloo would end a process that gets more."""
        given = output if isinstance(output, (tuple, list)) else (output,)
        found = [(tensor.shape, tensor.dtype) for tensor in given]
        if found != self.traced.gives:
            raise StateError(
                f"a stage gives {found}, which was traced as {self.traced.gives}: what it gives depends on values. Cut elsewhere."
            )

    def run(self, tensors: list[torch.Tensor], count: int) -> list[torch.Tensor] | None:
        """Passes pieces through this stage; the joined output on the last."""
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
