"""Nested data is taken apart and put together without losing its types, its order or the input."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.distributed import pytree

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclass
class WithDefault:
    a: Any
    made: list[Any] = field(init=False, default_factory=list)


class Batch(UserDict):  # type: ignore[type-arg]
    pass


leaves = st.integers()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(Batch)
    ),
    max_leaves=12,
)


@given(trees)
def test_flatten_unflatten_round_trip(data: Any) -> None:
    """Flatten and unflatten give the data back."""
    before = copy.deepcopy(data)
    assert pytree.unflatten(data, pytree.flatten(data)) == data
    assert data == before


@given(trees)
def test_map_leaves_equals_flat_map(data: Any) -> None:
    """Mapping over leaves is the same as over the flat list."""
    doubled = pytree.map_leaves(lambda leaf: leaf * 2, data)
    assert pytree.flatten(doubled) == [leaf * 2 for leaf in pytree.flatten(data)]
    assert type(doubled) is type(data)


@given(st.dictionaries(st.text(), st.integers(), max_size=6), st.randoms())
def test_leaves_independent_of_dict_order(data: dict[str, int], random: Any) -> None:
    """The order in which a dict was filled does not change its leaves."""
    items = list(data.items())
    random.shuffle(items)
    other = dict(items)
    assert pytree.flatten(data) == pytree.flatten(other)
    assert pytree.describe_structure(data, str) == pytree.describe_structure(other, str)
    assert list(pytree.map_leaves(lambda leaf: leaf, other)) == list(other)


def test_subclass_attributes_kept() -> None:
    """Subclasses and their attributes are kept."""
    counted: defaultdict[str, Any] = defaultdict(list, a=1)
    back = pytree.map_leaves(str, counted)
    assert type(back) is defaultdict
    assert back["new"] == []
    assert "new" not in counted
    made = WithDefault(1)
    made.made.append(2)
    assert pytree.map_leaves(str, made) == WithDefault("1") or pytree.map_leaves(str, made).made == ["2"]
    assert made.made == [2]
    proxy = pytree.map_leaves(str, types.MappingProxyType({"a": 1}))
    assert dict(proxy) == {"a": "1"}


def test_mixed_keys_have_one_order() -> None:
    """Keys of several types have one order."""
    assert pytree.flatten({1: "one", "a": "text"}) == pytree.flatten({"a": "text", 1: "one"})


def test_helpers_on_nested_tensors() -> None:
    data = {"x": torch.arange(4).reshape(4, 1), "p": Point(torch.ones(4), "name")}
    assert pytree.find_batch_size(data) == 4
    assert pytree.slice_tensors(data, slice(1, 3))["x"].tolist() == [[1], [2]]
    joined = pytree.concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(2)}])
    assert joined["x"].tolist() == [1, 0, 0]
    assert pytree.listify(data)["p"] == Point([1.0] * 4, "name")
    assert pytree.get_shape(data)["x"] == [4, 1]
    structure = pytree.get_data_structure(data)
    assert pytree.initialize_tensors(structure)["x"].shape == (4, 1)
    assert pytree.find_device(data) == torch.device("cpu")
    assert pytree.ignorant_find_batch_size({"a": 1}) is None


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match="no tensor"):
        pytree.find_batch_size({"a": 1})
    with pytest.raises(TypeError, match="got a str"):
        pytree.recursively_apply(torch.abs, {"a": "text"}, error_on_other_type=True)
    with pytest.raises(TypeError, match="same structure"):
        pytree.concatenate([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(TypeError, match="str"):
        pytree.concatenate(["a", "b"])


def test_send_to_device_skip_keys() -> None:
    """Send to device moves tensors and leaves keys that are skipped."""
    data = {"x": torch.ones(1), "keep": torch.ones(1), "deep": [{"keep": torch.ones(1), "y": torch.ones(1)}]}
    moved = pytree.send_to_device(data, "meta", skip_keys="keep")
    assert moved["x"].is_meta
    assert not moved["keep"].is_meta
    assert moved["deep"][0]["y"].is_meta
    assert not moved["deep"][0]["keep"].is_meta
    assert not data["x"].is_meta


def test_fp32_outputs_refuse_pickling() -> None:
    """Outputs are converted and refuse to be pickled."""
    import pickle  # noqa: TID251 - to see that it is refused

    forward = pytree.convert_outputs_to_fp32(lambda x: {"y": x.bfloat16()})
    assert forward(torch.ones(1))["y"].dtype == torch.float32
    with pytest.raises(TypeError, match="unwrap"):
        pickle.dumps(pytree.ConvertOutputsToFp32(abs))


def test_pad_input_repeats_last_row() -> None:
    """Padding a batch repeats the last row."""
    assert pytree.pad_input_tensors(torch.arange(5), 5, 4).tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert pytree.pad_input_tensors(torch.arange(4), 4, 4).tolist() == [0, 1, 2, 3]
