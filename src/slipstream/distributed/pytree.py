"""Take nested data apart and put it together again, and apply operations to the tensors in it.

Containers are dict, Mapping, list, tuple, namedtuple and dataclass. The result has the types, key order and attributes of the input, and
the input is never changed. Mappings are walked in the sorted order of their keys, so that ranks whose dicts were filled in different
orders agree on the leaves. The operations here (move, slice, concatenate, convert, describe) need no other process.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from typing import Any, NoReturn, TypeGuard

import torch

__all__ = [
    "CannotPadNestedTensorWarning", "ConvertOutputsToFp32", "TensorInformation", "children", "concatenate", "convert_outputs_to_fp32",
    "convert_to_fp32", "copy_with_values", "describe_structure", "find_batch_size", "find_device", "flatten", "get_data_structure",
    "get_shape", "honor_type", "ignorant_find_batch_size", "initialize_tensors", "is_dataclass_instance", "is_namedtuple", "is_node",
    "is_tensor_information", "is_torch_tensor", "listify", "local_part", "map_leaves", "pad_input_tensors", "rebuild", "recursively_apply",
    "send_to_device", "slice_tensors", "unflatten",
]


_Leaf = Any
_Tree = Any


def is_namedtuple(data: object) -> bool:
    """Whether this is an instance of a namedtuple class.

    >>> from collections import namedtuple
    >>> is_namedtuple(namedtuple("P", "x y")(1, 2)), is_namedtuple((1, 2))
    (True, False)
    """
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: object) -> bool:
    """Whether this is an instance (not the class) of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_node(data: Any) -> TypeGuard[Any]:
    """Whether this is a container, rather than a leaf."""
    return _is_node_type(type(data))  # type: ignore[arg-type]  # mypy does not take a class for hashable


@lru_cache(maxsize=1024)
def _is_node_type(kind: type) -> bool:
    return issubclass(kind, (list, tuple, Mapping)) or dataclasses.is_dataclass(kind)


def _sorted_keys(data: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(data)
    except TypeError:  # keys of several types have no order of their own
        return sorted(data, key=lambda key: (type(key).__name__, repr(key)))


def children(node: Any) -> list[tuple[Any, Any]]:
    """Return the (key, value) pairs of a container in the order in which every process walks them.

    >>> children({"b": 1, "a": 2})
    [('a', 2), ('b', 1)]
    """
    if isinstance(node, Mapping):
        return [(key, node[key]) for key in _sorted_keys(node)]
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if hasattr(node, field.name)]


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return a list, tuple or namedtuple of the type of `obj` with the items of `generator`.

    >>> honor_type((1, 2), [3, 4])
    (3, 4)
    """
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def rebuild(node: Any, values: list[Any]) -> Any:
    """Return a container like `node` that holds `values`, given in the order of `children(node)`.

    Where a class of the user's cannot be constructed with other items, the result is a plain list, tuple or dict.
    """
    if type(node) is list:
        return list(values)
    if isinstance(node, list):
        return _rebuild_list(node, values)
    if isinstance(node, tuple):
        return _rebuild_tuple(node, values)
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(_sorted_keys(node), values, strict=True)))
    new = copy.copy(node)
    for (name, _), value in zip(children(node), values, strict=True):
        object.__setattr__(new, name, value)  # frozen dataclasses too
    return new


_CONSTRUCTOR_REFUSED = (TypeError, ValueError, AttributeError, LookupError)
"""What the constructor of a class raises that takes something else than its items."""


def _rebuild_list(node: list[Any], values: list[Any]) -> Any:
    try:
        new = copy.copy(node)  # keeps attributes, and asks nothing of a constructor that takes other arguments
    except _CONSTRUCTOR_REFUSED:
        return list(values)
    if new is node or not isinstance(new, list):
        return list(values)
    list.__setitem__(new, slice(None), values)
    return new


def _rebuild_tuple(node: tuple[Any, ...], values: list[Any]) -> Any:
    if is_namedtuple(node):
        return type(node)._make(values)  # type: ignore[attr-defined]  # a subclass may have a constructor of its own
    try:
        new = honor_type(node, values)
    except _CONSTRUCTOR_REFUSED:
        return tuple(values)
    return new if _same_items(new, values) else tuple(values)


def _same_items(new: Any, values: list[Any]) -> bool:
    """Whether a constructor took the values as its items."""
    return len(new) == len(values) and all(entry is other for entry, other in zip(new, values, strict=True))


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    ordered = {key: values[key] for key in node}
    if type(node) is dict:
        return ordered
    if isinstance(node, types.MappingProxyType):
        return types.MappingProxyType(ordered)
    return copy_with_values(node, ordered) if isinstance(node, MutableMapping) else _construct(node, ordered)


def copy_with_values(mapping: MutableMapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping like this one with other values for its keys; the original stays as it is.

    A copy keeps default factories and attributes of subclasses. A copy that shares its storage with the original cannot be written to:
    then a new mapping is constructed from the values, or a plain dict if the class does not take them.

    >>> from collections import OrderedDict
    >>> copy_with_values(OrderedDict(a=1), {"a": 2}) == OrderedDict(a=2)
    True
    """
    new = copy.copy(mapping)
    for key, value in values.items():
        before = mapping[key]
        if mapping[key] is not before:  # values that are made when asked for: a change could not be told
            return _construct(mapping, values)
        new[key] = value
        if mapping[key] is not before:
            mapping[key] = before
            return _construct(mapping, values)
    return new


def _construct(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        new = type(mapping)(values)  # type: ignore[call-arg]
    except _CONSTRUCTOR_REFUSED:
        return values
    return new if new.keys() == values.keys() else values


def map_leaves(function: Callable[[_Leaf], Any], data: _Tree, stop: Callable[[Any], bool] | None = None) -> _Tree:
    """Return the same structure with `function` applied to every leaf; `stop(node)` makes a container count as a leaf.

    >>> map_leaves(str, {"a": [1, (2, 3)]})
    {'a': ['1', ('2', '3')]}
    """
    if is_node(data) and not (stop is not None and stop(data)):
        return rebuild(data, [map_leaves(function, value, stop) for _, value in children(data)])
    return function(data)


def flatten(data: _Tree, stop: Callable[[Any], bool] | None = None) -> list[_Leaf]:
    """Return all leaves in the order in which every process walks them.

    >>> flatten({"b": [1, 2], "a": 3})
    [3, 1, 2]
    """
    leaves: list[_Leaf] = []
    _collect(data, stop, leaves)
    return leaves


def _collect(data: _Tree, stop: Callable[[Any], bool] | None, leaves: list[_Leaf]) -> None:
    if is_node(data) and not (stop is not None and stop(data)):
        for _, value in children(data):
            _collect(value, stop, leaves)
    else:
        leaves.append(data)


def unflatten(data: _Tree, leaves: Iterable[_Leaf], stop: Callable[[Any], bool] | None = None) -> _Tree:
    """Return the structure of `data` with other leaves, given in the order of `flatten`.

    >>> unflatten({"b": [1, 2], "a": 3}, ["x", "y", "z"])
    {'b': ['y', 'z'], 'a': 'x'}
    """
    supply = iter(leaves)
    return map_leaves(lambda _: next(supply), data, stop)


def describe_structure(data: _Tree, leaf: Callable[[_Leaf], str], stop: Callable[[Any], bool] | None = None) -> str:
    """Return the structure as text, with `leaf` describing the leaves: what processes compare and messages show.

    >>> describe_structure({"b": [1, 2], "a": 3}, lambda value: type(value).__name__)
    '{a: int, b: [int, int]}'
    """
    if not is_node(data) or (stop is not None and stop(data)):
        return leaf(data)
    inner = [(key, describe_structure(value, leaf, stop)) for key, value in children(data)]
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in inner) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(text for _, text in inner) + "]"
    if isinstance(data, tuple) and not is_namedtuple(data):
        return "(" + ", ".join(text for _, text in inner) + ")"
    fields = ", ".join(f"{key}={text}" for key, text in inner)
    return f"{type(data).__name__}({fields})"


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
    """Return the same data with every tensor (and whatever else has a `.to(device)`) on a device; keys in `skip_keys` stay.

    >>> send_to_device({"x": torch.ones(1), "ids": [1, 2]}, "cpu")
    {'x': tensor([1.]), 'ids': [1, 2]}
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def move(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(device, non_blocking=non_blocking)
        is_sequence = isinstance(data, (list, tuple))
        mover = None if is_sequence or isinstance(data, type) else getattr(data, "to", None)
        if is_node(data) and (skipped or not callable(mover)):
            pairs = children(data)
            return rebuild(data, [value if not is_sequence and key in skipped else move(value) for key, value in pairs])
        return _move_object(mover, device, non_blocking) if callable(mover) else data

    return move(tensor)


def _move_object(mover: Callable[..., Any], device: Any, non_blocking: bool) -> Any:
    """Call an object's own `.to`, with `non_blocking` if it was asked for and the method takes it."""
    if non_blocking:
        try:
            return mover(device, non_blocking=True)
        except TypeError:  # a `.to` of one argument
            pass
    return mover(device)


def get_data_structure(data: Any) -> Any:
    """Return the same structure with `TensorInformation` in the place of tensors."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return the same structure with lists of sizes in the place of tensors.

    >>> get_shape([torch.ones(2, 3)])
    [[2, 3]]
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return empty tensors of the shapes and types that `get_data_structure` gave."""
    return recursively_apply(lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information)


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first tensor in the data.

    >>> find_batch_size({"x": torch.ones(4, 2)})
    4
    """
    size = ignorant_find_batch_size(data)
    if size is None:
        raise TypeError(f"there is no tensor with a first dimension in this {type(data).__name__}, so its batch size cannot be told")
    return size


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor in the data; None if there is none."""
    return next((int(leaf.shape[0]) for leaf in flatten(data) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)


def listify(data: Any) -> Any:
    """Return tensors as Python lists and numbers.

    >>> listify({"x": torch.tensor([1, 2])})
    {'x': [1, 2]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Slice every tensor along its first dimension; the last two arguments exist for compatibility and change nothing.

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
    """Join data of the same structure, tensor by tensor along `dim`.

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
    """Repeat the last row of tensors so that the batch divides by the number of processes.

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
    """Convert tensors in half precision to float32; others stay.

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
    """Return the decorator form of `ConvertOutputsToFp32`: a plain function, which can be bound as a method."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    update_wrapper(forward, model_forward)
    return forward


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in the data, or None."""
    return next((leaf.device for leaf in flatten(data) if isinstance(leaf, torch.Tensor)), None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all of it, unless it is sharded (torch's `DTensor`).

    >>> local_part(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local") else tensor
