"""Operations on nested tensors that need no other process: move, slice, join, convert, describe.

They go through `tree.map_leaves`, so they keep the structure and never change their argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, NoReturn

import torch

from slipstream.comm.tree import children, flatten, is_dataclass_instance, is_node, map_leaves, rebuild

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


class CannotPadNestedTensorWarning(UserWarning):
    """A torch nested tensor has no dimension to pad; it is left as it is."""


@dataclass(frozen=True)
class TensorInformation:
    """The shape and type of a tensor, without its data."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether this is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`func(leaf, *args, **kwargs)` for every leaf that `test_type` accepts; others stay, or raise TypeError.

    >>> recursively_apply(lambda tensor: tensor * 2, {"x": torch.ones(2), "name": "a"})
    {'x': tensor([2., 2.]), 'name': 'a'}
    """

    def on_leaf(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", "this function")
            raise TypeError(f"{name} got a {type(leaf).__name__} inside the data: it takes nested containers of tensors only")
        return leaf

    return map_leaves(on_leaf, data, test_type)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Iterable[str] | None = None) -> Any:
    """The same data with every tensor (and whatever else has a `.to(device)`) on a device; keys in `skip_keys` stay.

    >>> send_to_device({"x": torch.ones(1), "ids": [1, 2]}, "cpu")
    {'x': tensor([1.]), 'ids': [1, 2]}
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if not skipped:
        return _send(tensor, device, non_blocking)
    if isinstance(tensor, Mapping) or is_dataclass_instance(tensor):
        pairs = children(tensor)
        return rebuild(tensor, [value if key in skipped else send_to_device(value, device, non_blocking, skipped) for key, value in pairs])
    if is_node(tensor):
        return rebuild(tensor, [send_to_device(value, device, non_blocking, skipped) for _, value in children(tensor)])
    return _send(tensor, device, non_blocking)


def _send(data: Any, device: Any, non_blocking: bool) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        mover = getattr(leaf, "to", None)
        return mover(device) if callable(mover) and not isinstance(leaf, type) else leaf

    return map_leaves(move, data, lambda node: not isinstance(node, (list, tuple)) and callable(getattr(node, "to", None)))


def get_data_structure(data: Any) -> Any:
    """The same structure with `TensorInformation` in the place of tensors."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The same structure with lists of sizes in the place of tensors.

    >>> get_shape([torch.ones(2, 3)])
    [[2, 3]]
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Empty tensors of the shapes and types that `get_data_structure` gave."""
    return recursively_apply(lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information)


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor in the data.

    >>> find_batch_size({"x": torch.ones(4, 2)})
    4
    """
    size = ignorant_find_batch_size(data)
    if size is None:
        raise TypeError(f"there is no tensor with a first dimension in this {type(data).__name__}, so its batch size cannot be told")
    return size


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`, but None where there is none."""
    return next((int(leaf.shape[0]) for leaf in flatten(data) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)


def listify(data: Any) -> Any:
    """Tensors as Python lists and numbers.

    >>> listify({"x": torch.tensor([1, 2])})
    {'x': [1, 2]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Every tensor sliced along its first dimension; the last two arguments are taken for compatibility and change nothing.

    >>> slice_tensors({"x": torch.arange(4)}, slice(1, 3))
    {'x': tensor([1, 2])}
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            raise TypeError(
                "slice_tensors got a tensor without dimensions, which has no rows to slice: give it one with .reshape(1), or leave it out"
            )
        return tensor[tensor_slice]

    return recursively_apply(cut, data)


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Several data of the same structure as one, tensor by tensor along `dim`.

    >>> concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
    {'x': tensor([1., 0.])}
    """
    if not data:
        raise TypeError("concatenate got nothing to join: pass a list or tuple of at least one item")
    first = data[0]
    if is_node(first):
        parts = [children(item) for item in data]
        if any([key for key, _ in part] != [key for key, _ in parts[0]] for part in parts):
            raise TypeError(
                f"concatenate needs data of the same structure, but these have keys {[[key for key, _ in part] for part in parts]}"
            )
        return rebuild(first, [concatenate([part[position][1] for part in parts], dim) for position in range(len(parts[0]))])
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"concatenate joins nested tensors, but there is a {type(first).__name__} among them")
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors with their last row repeated so that the batch divides by the number of processes.

    >>> pad_input_tensors(torch.arange(3), 3, 2)
    tensor([0, 1, 2, 2])
    """
    short = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() <= dim or short == 0:
            return leaf
        last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
        return torch.cat([leaf, *[last] * short], dim=dim)

    return recursively_apply(pad, tensor)


def convert_to_fp32(tensor: Any) -> Any:
    """Tensors in half precision as float32; others stay.

    >>> convert_to_fp32({"x": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(1)})
    {'x': tensor([1.]), 'n': tensor(1)}
    """
    return recursively_apply(
        lambda leaf: leaf.float(),
        tensor,
        test_type=lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16),
    )


class ConvertOutputsToFp32:
    """A forward whose outputs are float32 whatever it computed in."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a model whose outputs are converted to float32 cannot be pickled: "
            "unwrap it first with unwrap_model(model, keep_fp32_wrapper=False)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator form of `ConvertOutputsToFp32`; a plain function, so that it can be bound as a method."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    update_wrapper(forward, model_forward)
    return forward


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in the data, or None."""
    return next((leaf.device for leaf in flatten(data) if isinstance(leaf, torch.Tensor)), None)
