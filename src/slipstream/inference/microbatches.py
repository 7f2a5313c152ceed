"""The arguments of a pipeline call: the number of rows, what identifies the traced program, and the microbatches.

A tensor whose first dimension is the number of rows is cut along it, unless `resolve_rows` finds that it has no row per sample. Other
tensors go to every microbatch whole; numbers, strings and None are part of the traced program. All microbatches have the same number of
rows: the last is padded by repeating its last row, and the padding is dropped from the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slipstream.distributed import pytree
from slipstream.errors import ConfigError

__all__ = ["PipelineBatch", "STATIC_TYPES", "find_pippy_batch_size", "has_rows", "pad_rows"]

STATIC_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Values that become part of a traced program."""
_Build = Callable[[Sequence[torch.Tensor]], Any]


def find_pippy_batch_size(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows in the arguments of a call: the first dimension of the first tensor that has one, else None.

    >>> find_pippy_batch_size((3, torch.ones(8, 2)), {"mask": torch.ones(4)})
    8
    """
    return _count_rows(leaf for value in (*args, *(kwargs or {}).values()) for leaf in pytree.flatten(value))


class PipelineBatch:
    """The arguments of one call. `cut` is that of an earlier call: for arguments of the same structure it says which tensors are cut.
    `context` is text for anything else that the traced program depends on.

    >>> batch = PipelineBatch((torch.ones(3, 2),), {"scale": 2.0, "bias": torch.ones(2)})
    >>> batch.rows, batch.form
    (3, '((float32(*, 2)), {bias: float32(whole, 2), scale: 2.0})')
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        cut: Mapping[str, tuple[bool, ...]] | None = None,
        *,
        context: str = "",
    ) -> None:
        self.data = (tuple(args), dict(kwargs or {}))
        self.leaves: list[Any] = pytree.flatten(self.data)
        self._context = context
        structure = pytree.describe_structure(self.data, _describe_leaf)
        known = (cut or {}).get(structure)
        self.is_known = known is not None
        """Whether an earlier call said which tensors are cut; else their sizes decide."""
        tensors = self.tensors()
        rows = find_pippy_batch_size(*self.data)
        if known is not None:
            rows = _count_rows(tensor for tensor, is_cut in zip(tensors, known, strict=False) if is_cut)
        if rows is None:
            raise ConfigError(
                "there is no tensor with rows among the arguments of a pipeline: pass at least one tensor with a batch dimension, to "
                "prepare_pippy as example_args=(tensor,) or example_kwargs, and to every call"
            )
        if rows == 0:
            raise ConfigError("a pipeline was called with a batch of no rows: pass at least one, or do not call it")
        self.rows = rows
        self.is_cut = known or tuple(has_rows(tensor, rows) for tensor in tensors)
        """For each tensor, whether it is cut into pieces."""
        self.cut = {structure: self.is_cut}
        for tensor, is_cut in zip(tensors, self.is_cut, strict=True):
            if is_cut and not has_rows(tensor, rows):
                raise ConfigError(
                    f"a pipeline was called with a tensor of shape {tuple(tensor.shape)} in a batch of {rows} rows: in the example that it "
                    "was prepared with, this one had a row for each of the batch"
                )
        supply = iter(zip(tensors, self.is_cut, strict=True))
        spelled = pytree.describe_structure(
            self.data, lambda leaf: _describe_static(*next(supply)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        )
        self.form = spelled + context
        """Equal for calls that can use the same traced program: everything but the number of rows and the values."""

    def read_as(self, is_cut: tuple[bool, ...]) -> PipelineBatch:
        """Return the same arguments with these tensors cut."""
        return PipelineBatch(*self.data, dict.fromkeys(self.cut, is_cut), context=self._context)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order that all processes use, detached."""
        return [leaf.detach() for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def labels(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the tensors in the signature of the model.

        >>> PipelineBatch((torch.ones(2, 3),), None).labels(torch.nn.Linear(3, 1))
        ['input']
        """
        args, kwargs = self.data
        try:
            names = [*inspect.signature(type(model).forward).bind_partial(model, *args).arguments][1:]
        except (TypeError, ValueError):
            names = []
        positional = [names[place] if place < len(names) else f"argument {place + 1}" for place in range(len(args))]
        numbers = pytree.unflatten(self.data, range(len(self.leaves)))
        owners = (*zip(positional, numbers[0], strict=True), *numbers[1].items())
        found = {number: name for name, part in owners for number in pytree.flatten(part)}
        return [str(found[number]) for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def needs_gradients(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def shapes(self, rows: int) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shape and dtype of every tensor in a microbatch of `rows` rows; a tensor that is not cut is one row."""
        pairs = zip(self.tensors(), self.is_cut, strict=True)
        return [(torch.Size((rows, *tensor.shape[1:]) if cut else (1, *tensor.shape)), tensor.dtype) for tensor, cut in pairs]

    def pieces(self, rows: int, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors padded to whole microbatches; those that are not cut, as one row for each microbatch."""
        count = self.count(rows)
        there = [tensor.to(device).contiguous() for tensor in self.tensors()]
        return [
            pad_rows(tensor, count * rows) if cut else tensor.expand(count, *tensor.shape)
            for tensor, cut in zip(there, self.is_cut, strict=True)
        ]

    def count(self, rows: int) -> int:
        """Return the number of microbatches of `rows` rows."""
        return -(-self.rows // rows)

    def build(self) -> _Build:
        """Return a function that builds the arguments with other tensors; it holds none of these."""
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in self.leaves]
        plain = [None if tensor else leaf for leaf, tensor in zip(self.leaves, is_tensor, strict=True)]
        frame = pytree.unflatten(self.data, plain)

        def build(tensors: Sequence[torch.Tensor]) -> Any:
            supply = iter(tensors)
            return pytree.unflatten(frame, [next(supply) if tensor else leaf for leaf, tensor in zip(plain, is_tensor, strict=True)])

        return build


def _count_rows(leaves: Iterable[Any]) -> int | None:
    return next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)


def has_rows(leaf: Any, rows: int) -> bool:
    """Return whether a leaf is a tensor with `rows` rows."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    if isinstance(leaf, STATIC_TYPES):
        return "plain"
    raise ConfigError(
        f"a pipeline was called with a {type(leaf).__name__}: its arguments are tensors, numbers, texts and None, in lists, tuples "
        "and dicts. Convert it, or leave it out."
    )


def _describe_static(tensor: torch.Tensor, is_cut: bool) -> str:
    first, rest = ("*", tensor.shape[1:]) if is_cut else ("whole", tensor.shape)
    return f"{str(tensor.dtype).partition('.')[2]}({', '.join((first, *map(str, rest)))})"


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor padded to `rows` rows by repeating its last row.

    >>> pad_rows(torch.tensor([1, 2]), 4)
    tensor([1, 2, 2, 2])
    """
    missing = rows - tensor.shape[0]
    return tensor if missing <= 0 else torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
