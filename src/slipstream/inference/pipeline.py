"""Pipeline inference: one model over several processes, each of which holds a part of it.

`prepare_pippy` cuts a model into as many stages as there are processes, keeps the weights of one stage on each, and replaces the model's
`forward` by one that passes a batch through all of them, in pieces, so that the stages work at the same time. It runs on
`torch.distributed.pipelining`: its tracer takes the model apart, its stages and its GPipe schedule run it.

What it promises: the output is that of the plain model, with exactly the rows that were given, on the last process, and on all with
`gather_output=True`. One process runs the plain model and opens no group. All processes call with the same arguments; the values that
count are those of the first. What it never does: train. There are no gradients, and the model is put into eval mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from slipstream.comm import ops, tree
from slipstream.comm.guarded import refuse
from slipstream.config.names import nearest
from slipstream.errors import ConfigError
from slipstream.inference.batches import Batch, filled_up, find_pippy_batch_size
from slipstream.inference.cutting import blocks_in_order, cut_evenly, generate_device_map, whole_classes
from slipstream.inference.readings import check, settled
from slipstream.inference.stages import Pipeline, casting, own_device, own_forward
from slipstream.inference.tracing import called_modules, let_go
from slipstream.logging import get_logger
from slipstream.offload.planning.tied import find_tied_parameters
from slipstream.runtime.state import AcceleratorState

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]

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
    """Cuts a model into one stage per process and gives it back, ready to be called by all of them with the same arguments.

    `split_points`: "auto" for stages of sizes that are as even as can be, or the names of the modules at whose beginning a new stage
    begins, one fewer than there are processes. `example_args` and `example_kwargs` show what the model is called with; their number of
    rows, dealt into `num_chunks` pieces (as many as there are processes, if not given), is the size of piece that the stages work on. Give
    an example as large as the batches that follow: more rows are more pieces. Only the last process gets the output, and the others None,
    unless `gather_output` is true.

    The weights of the other stages are let go: they become tensors on the meta device.

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
        raise ConfigError("this model is a pipeline already, and its other stages are gone: make it again to cut it in another way")
    if not state.use_distributed:
        model.hf_split_points = []  # type: ignore[assignment]  # any attribute may be put on a module
        return _replace_forward(model, torch.no_grad()(model.forward))
    try:
        points = _split_points(model, split_points, no_split_module_classes, example_args or (), example_kwargs, num_chunks, state)
    except Exception as error:  # of this process alone, maybe: the others must hear of it
        raise refuse(state.channel(), state.limits, _PREPARE, error) from error.__cause__
    tied = find_tied_parameters(model)
    pipeline = build_pipeline(model, points, example_args or (), example_kwargs, num_chunks)
    pipeline.gather_output = bool(gather_output)
    for names in tied:
        stages = [number for number, held in enumerate(pipeline.names) if not held.isdisjoint(names)]
        if len(stages) > 1:
            logger.warning("%s is one weight, used in the stages %s: each of them holds a copy", " = ".join(names), _listed(stages))
    let_go(model, pipeline.names[state.process_index])
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
    """The stage of this process, of a model that is cut at the beginning of the named modules: `step(*args, **kwargs)` runs a batch.

    All processes call it, and every `step`, with the same arguments. The model keeps its weights; those of this stage are shared with it.
    """
    state = AcceleratorState()
    if not state.use_distributed:
        raise ConfigError("build_pipeline needs two processes or more; one runs the model as it is (prepare_pippy does)")
    try:
        with own_forward(model):
            batch = settled(model, Batch(args, kwargs, note=casting(own_device(state))), own_device(state))
        chunks = _chunks(num_chunks, state)
        points = _checked(model, split_points, state.num_processes)
    except Exception as error:
        raise refuse(state.channel(), state.limits, _PREPARE, error) from error.__cause__
    pipeline = Pipeline(model, points, chunks, state)
    pipeline.prepare(batch)
    try:
        with own_forward(model):
            check(model, batch)
    except Exception as error:
        raise refuse(state.channel(), state.limits, _PREPARE, error) from error.__cause__
    return pipeline


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """One call of a pipeline's `step` with as many rows as `num_chunks` divides, the last repeated, and those dropped from the output.

    With `gather_output` the output of the last process is given to all.
    """
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise ConfigError("pippy_forward was called without a tensor that has rows: pass at least one tensor with a batch dimension")
    target = -(-rows // num_chunks) * num_chunks

    def fill(leaf: Any) -> Any:
        return filled_up(leaf, target) if _has_rows(leaf, rows) else leaf

    output = forward(*tree.map_leaves(fill, args), **tree.map_leaves(fill, kwargs))
    output = tree.map_leaves(lambda leaf: leaf[:rows] if _has_rows(leaf, target) else leaf, output)
    state = AcceleratorState()
    if not gather_output or not state.use_distributed:
        return output
    return ops.broadcast_objects(state.channel(), state.limits, [output], state.num_processes - 1, operation="pipeline output")[0]


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


# -- decisions of prepare ---------------------------------------------------------------------------------------------


def _split_points(
    model: torch.nn.Module,
    given: str | Sequence[str] | None,
    no_split: Collection[str] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int | None,
    state: AcceleratorState,
) -> list[str]:
    count = state.num_processes
    if given is not None and given != "auto":
        return _checked(model, given, count)
    with own_forward(model):
        batch = settled(model, Batch(args, kwargs), own_device(state), silent=True)  # it is said when the stages are built
        called = called_modules(model, batch, -(-batch.rows // _chunks(num_chunks, state)), own_device(state))
    blocks = blocks_in_order(model, whole_classes(model, no_split), at_least=count, called=called)
    return [blocks[start].name for start in cut_evenly(blocks, count)[1:]]


def _checked(model: torch.nn.Module, given: str | Sequence[str], count: int) -> list[str]:
    if isinstance(given, str):
        raise ConfigError(f'split_points={given!r} is one text: write "auto", or a list of names of modules, [{given!r}]')
    points = list(given)
    known = dict(model.named_modules(remove_duplicate=False))
    for name in points:
        if name not in known or name == "":
            raise ConfigError(f"split_points names {name!r}, which is no module of this {type(model).__name__}. {_hint(str(name), known)}")
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
    """What was meant, or what there is."""
    same = [one for one in known if one and one.rpartition(".")[2] == name.rpartition(".")[2]]
    if same:
        return f"Did you mean {same[0]!r}?"
    beside = [one for one in known if one and one.rpartition(".")[0] == name.rpartition(".")[0]]
    there = beside if "." in name and beside else [one for one in known if one and "." not in one]
    shown = [*there[:3], "...", there[-1]] if len(there) > 5 else there
    near = nearest(name, [one for one in known if one])
    meant = f"Did you mean {near[0]!r}? " if near and not beside else ""
    return f"{meant}There are: {', '.join(shown) or 'no modules in it'}."


def _chunks(given: int | None, state: AcceleratorState) -> int:
    if given is None:
        return state.num_processes
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"num_chunks={given!r} is no number of pieces: write 1 or more, or leave it out for one per process")
    return given


def _replace_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> torch.nn.Module:
    original = model.forward

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = run
    return model


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
