"""States become JSON and tensors and come back the same; what cannot is refused with its place; what was not written by us is refused."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from enum import Enum
from pathlib import Path

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from slipstream.checkpoint.deserialize import read_file, read_part, rebuild
from slipstream.checkpoint.serialize import flatten, write_part
from slipstream.checkpoint.tensor_bytes import BYTE_VIEWED_DTYPES, DTYPES, from_buffer, load_tensors, tensor_bytes
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.disk import FileEntry
from slipstream.files.safetensors_layout import ITEM_SIZE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def written(value, name="part"):
    """The one file of a state: its name and its bytes."""
    files = {}

    def add(file, chunks, size):
        files[file] = b"".join(bytes(chunk) for chunk in chunks)
        assert len(files[file]) == size
        return FileEntry(size, "")

    file, entry = write_part(add, name, value, "the state")
    assert list(files) == [file]
    assert entry.size == len(files[file])
    return file, files[file]


def round_trip(value):
    file, data = written(value)
    return read_part(file, bytearray(data))


def same(entry, two):
    """Equal in type, order and bits."""
    if type(entry) is not type(two):
        return False
    if isinstance(entry, torch.Tensor):
        alike = entry.dtype == two.dtype and entry.shape == two.shape and entry.requires_grad == two.requires_grad
        return alike and bytes(tensor_bytes(entry)) == bytes(tensor_bytes(two))
    if isinstance(entry, numpy.ndarray):
        return entry.dtype == two.dtype and entry.shape == two.shape and entry.tobytes() == two.tobytes()
    if isinstance(entry, numpy.generic):
        return entry.dtype == two.dtype and entry.tobytes() == two.tobytes()
    if isinstance(entry, float):
        return struct.pack("d", entry) == struct.pack("d", two) or (math.isnan(entry) and math.isnan(two))
    if isinstance(entry, complex):
        return same(entry.real, two.real) and same(entry.imag, two.imag)
    if isinstance(entry, (list, tuple, deque)):
        sizes = getattr(entry, "maxlen", None) == getattr(two, "maxlen", None)
        return sizes and len(entry) == len(two) and all(map(same, entry, two))
    if isinstance(entry, dict):
        factories = getattr(entry, "default_factory", None) is getattr(two, "default_factory", None)
        return factories and len(entry) == len(two) and all(same(a, b) and same(entry[a], two[b]) for a, b in zip(entry, two, strict=True))
    return entry == two


# -- what comes back ---------------------------------------------------------------------------------------------------

_texts = st.text(st.characters(), max_size=8)
_dtypes = st.sampled_from([*DTYPES, *BYTE_VIEWED_DTYPES.values()])


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(_dtypes)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    made = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


@st.composite
def arrays(draw):
    dtype = numpy.dtype(draw(st.sampled_from(["<f8", ">f4", "<i2", "|b1", "<u8", "<c16", "<U3", "|S2", "<M8[s]", "<f2"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    made = numpy.zeros(shape, dtype)
    if made.size and dtype.kind in "iufc":
        made.flat[0] = draw(st.integers(0, 100))
    if made.size and dtype.kind == "U":
        made.flat[0] = draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3))
    return made


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**90),
    st.floats(),
    st.complex_numbers(),
    _texts,
    st.text(st.sampled_from("a\ud800\udfff$\0é\U0001f600"), max_size=4),
    st.binary(max_size=9),
    st.binary(max_size=5).map(bytearray),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.Size([])]),
    st.sampled_from(
        [
            numpy.float32(1.1),
            numpy.int8(-3),
            numpy.bool_(True),
            numpy.str_("é"),
            numpy.float64("nan"),
            numpy.frombuffer(b"\x01\0\0\0\0\0\xf0\xff")[0],
            numpy.datetime64("2020"),
        ]
    ),
)
_hashable = st.one_of(
    st.none(), st.integers(), _texts, st.binary(max_size=3), st.tuples(st.integers(), _texts), st.sampled_from(["$a", "$tensor"])
)


@st.composite
def scalars(draw):
    return draw(_scalars)


@st.composite
def hashable(draw):
    """Its name is what hypothesis shows of it, not all that it is made of."""
    return draw(_hashable)


@st.composite
def texts(draw):
    return draw(_texts)


def _containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts(), inner, max_size=4),
        st.dictionaries(hashable(), inner, max_size=3),
        st.dictionaries(hashable(), inner, max_size=3).map(OrderedDict),
        st.dictionaries(texts(), inner, max_size=3).map(lambda value: defaultdict(list, value)),
        st.lists(inner, max_size=3).map(lambda value: deque(value, 5)),
        st.lists(hashable(), max_size=3).map(set),
        st.lists(hashable(), max_size=3).map(frozenset),
        st.lists(texts(), max_size=3).map(Counter),
    )


@settings(max_examples=250, deadline=None)
@given(st.recursive(st.one_of(scalars(), tensors(), arrays()), _containers, max_leaves=12))
def test_any_plain_value_comes_back_same(value):
    """Any plain value comes back the same."""
    assert same(round_trip(value), value)


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.one_of(scalars(), tensors()), _containers, max_leaves=8))
def test_tree_strict_json_and_file_safetensors(value):
    """The tree is strict JSON and the file is safetensors."""
    file, data = written(value)
    if file.endswith(".json"):
        json.loads(data)
    else:
        held = dict(safetensors.deserialize(data))
        assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["format"] == "pt"
        assert held.keys() == load_tensors(data, "part").tensors.keys()


def test_shared_tensor_stored_once():
    """A tensor in two places is stored once and is one tensor again."""
    weight = torch.randn(3, 3)
    back = round_trip({"a": weight, "b": [weight, weight.detach()], "c": weight.t()})
    assert back["a"] is back["b"][0] is back["b"][1]
    assert back["c"] is not back["a"]
    assert len(flatten([weight, weight.detach()], "the state")[1]) == 1


def test_empty_tensors_are_distinct():
    """Tensors of no size are not taken for each other."""
    entry, two = torch.empty(0, 3), torch.empty(0)
    back = round_trip([entry, two, entry])
    assert [tuple(tensor.shape) for tensor in back] == [(0, 3), (0,), (0, 3)]


def test_nothing_copied_on_way_out():
    """Nothing is copied on the way out."""
    weight = torch.randn(4)
    assert flatten({"w": weight}, "the state")[1]["w"].data_ptr() == weight.data_ptr()
    assert tensor_bytes(weight).nbytes == 16


def test_result_owns_its_memory():
    """What is read does not share the bytes of the file."""
    file, data = written({"w": torch.arange(4.0)})
    buffer = bytearray(data)
    back = read_part(file, buffer)["w"]
    buffer[-4:] = struct.pack("<f", 9.0)
    assert back.tolist() == [0, 1, 2, 3]


def test_parameters_and_requires_grad():
    """Parameters and gradients are kept apart from plain tensors."""
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    back = round_trip([weight, torch.ones(2, requires_grad=True), torch.ones(2)])
    assert [type(tensor).__name__ for tensor in back] == ["Parameter", "Tensor", "Tensor"]
    assert [tensor.requires_grad for tensor in back] == [False, True, False]


def test_module_state_dict_keeps_versions():
    """The state dict of a module keeps the versions of its layers."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert round_trip(state)._metadata == state._metadata


def test_long_lists_of_numbers_become_tensors():
    order, weights = list(range(10_000)), [0.5] * 4000 + [-0.0, math.nan] * 200
    tree, held = flatten({"order": order, "weights": weights, "mixed": [1, 2.0] * 3000}, "the state")
    assert tree["order"] == {"$numbers": "order"}
    assert isinstance(tree["mixed"], list)
    assert held["order"].dtype == torch.int64
    back = round_trip({"order": order, "weights": weights})
    assert back["order"] == order
    assert same(back["weights"], weights)


def test_sets_written_in_fixed_order():
    """Sets are written in the same order in every run."""
    words = {f"word {number}" for number in range(20)}
    assert flatten(words, "it")[0]["$set"] == sorted(words)


def test_flat_mapping_is_plain_safetensors():
    """A flat mapping of tensors is an ordinary safetensors file."""
    state = {"layer.weight": torch.randn(2, 2), 'odd name/\n"é': torch.ones(1), "$x": torch.zeros(1)}
    held = safetensors.torch.load(written(state)[1])
    assert held.keys() == state.keys()
    assert all(torch.equal(held[name], state[name]) for name in state)


def test_elements_are_aligned():
    """Every element begins at a multiple of its size."""
    state = [torch.ones(3, dtype=torch.int8), torch.ones(1, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16), torch.ones(1)]
    layout = load_tensors(written(state)[1], "state").layout
    assert all((layout.data_start + entry.start) % ITEM_SIZE[entry.dtype] == 0 for entry in layout.entries.values())


@pytest.mark.parametrize(
    "wrap", [lambda value: OrderedDict({1: value}), lambda value: defaultdict(int, {1: value}), lambda value: (value,)]
)
def test_deepest_values(wrap):
    """Values as deep as they may be are read again."""
    value = 1
    for _ in range(60):
        value = wrap(value)
    assert same(round_trip(value), value)


def test_random_states_and_optimizers():
    """Random states and optimizers come back the same."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95))
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "numpy": numpy.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    assert same(round_trip(copy.deepcopy(state)), state)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


Pair = namedtuple("Pair", "left right")
_CYCLE: list = []
_CYCLE.append(_CYCLE)


def _deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lambda: 1, "function"),
        (lambda: torch.nn.Linear(1, 1), "state_dict"),
        (lambda: torch.nn.Linear, "class"),
        (lambda: (number for number in range(3)), "generator"),
        (lambda: Path("somewhere"), "str(path)"),
        (lambda: Colour.RED, ".value"),
        (lambda: Pair(1, 2), "_asdict"),
        (lambda: object(), "plain data"),
        (lambda: torch.Generator(), "get_state"),
        (lambda: torch.ones(2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.nn.LazyLinear(2).weight, "lazy"),
        (lambda: numpy.array([object()]), "object"),
        (lambda: numpy.zeros(2, dtype=[("a", "i4")]), "array"),
        (lambda: numpy.ma.array([1]), "numpy.ma"),
        (lambda: defaultdict(lambda: 1), "defaultdict"),
        (lambda: _CYCLE, "contains itself"),
        (lambda: _deep(100), "60 levels"),
        (lambda: {torch.ones(1): 1}, "tensor as a key"),
        (lambda: {torch.ones(1)}, "tensor as a key"),
        (lambda: memoryview(b"x"), "memoryview"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_refusals_name_place_and_remedy(make, said):
    """What cannot be kept is refused with its place and a remedy."""
    value = make()
    with pytest.raises(CheckpointError) as caught:
        flatten({"outer": [0, value]}, "custom object 0 (EMA)")
    message = str(caught.value)
    assert message.startswith("custom object 0 (EMA)['outer'][1]")
    assert said in message


def test_subclass_of_tensor_refused():
    """A subclass of tensor is refused."""
    class Fancy(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="Fancy, a tensor subclass with more than its elements"):
        flatten([torch.ones(2).as_subclass(Fancy)], "the state")


def test_too_large_state_not_written():
    """A state too large to be read again is not written."""
    with pytest.raises(CheckpointError, match="would be unreadable: .* Store long lists"):
        written({"text": "x" * (strict_json.LARGEST + 10)})


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "absent"},
        {"$tensor": ["w"]},
        {"$tensor": "w", "$tuple": []},
        {"$tensor": "w", "surprise": 1},
        {"$tensor": "w", "dtype": "complex128", "shape": [2**40]},
        {"$tensor": "w", "dtype": "complex128"},
        {"$tensor": "w", "dtype": "float32", "shape": [2]},
        {"$tensor": "w", "requires_grad": 1},
        {"$tensor": "i", "requires_grad": True},
        {"$array": "w", "dtype": "<f8", "shape": [1]},
        {"$array": "b", "dtype": "O", "shape": [1]},
        {"$array": "b", "dtype": "|O8", "shape": [1]},
        {"$array": "b", "dtype": "<f8", "shape": [2**61]},
        {"$array": "b", "dtype": "<f8", "shape": [-1]},
        {"$array": "b", "dtype": "<U2", "shape": [1]},
        {"$array": "b", "shape": [8]},
        {"$numbers": "w"},
        {"$numbers": "absent"},
        {"$scalar": ["<i1", 300]},
        {"$scalar": ["<i4", 1.5]},
        {"$scalar": ["<i4", True]},
        {"$scalar": ["<f4", "text"]},
        {"$scalar": ["O", {"$bytes": ""}]},
        {"$scalar": ["<f8", {"$bytes": "AA=="}]},
        {"$scalar": ["<f8"]},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$dict": [[{"$tensor": "w"}, 1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [["a"]]},
        {"$dict": {"a": 1}},
        {"$ordered": 3},
        {"$defaultdict": ["eval", []]},
        {"$defaultdict": [["int"], []]},
        {"$counter": [1]},
        {"$deque": [1, [1, 2]]},
        {"$deque": ["x", []]},
        {"$deque": [-1, []]},
        {"$set": [1, 1]},
        {"$set": [[]]},
        {"$frozenset": "abc"},
        {"$tuple": "abc"},
        {"$size": [-1]},
        {"$size": [1.0]},
        {"$float": "1e3"},
        {"$float": 1},
        {"$int": "12"},
        {"$int": "0x1g"},
        {"$int": 5},
        {"$complex": [1, 2]},
        {"$complex": [1.0]},
        {"$bytes": "not base64!"},
        {"$bytes": 3},
        {"$bytearray": None},
        {"$str": "/w=="},
        {"$dtype": "save"},
        {"$dtype": []},
        {"$device": "no such device"},
        {"$device": 0},
        {"$class": "os.system"},
        {"$": 1},
    ],
    ids=str,
)
def test_foreign_tree_refused(tree):
    """A tree that was not written by us is refused by name."""
    held = {"w": torch.zeros(4), "i": torch.zeros(2, dtype=torch.int64), "b": torch.full((8,), 255, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        rebuild([{"ok": tree}], held, "state.safetensors")


def test_tree_nested_too_deep_refused():
    """A tree nested too deep is refused."""
    with pytest.raises(CheckpointError, match="nested too deep"):
        rebuild(_deep(400), {}, "state.json")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["$tensor", "$array", "$dict", "$set", "$scalar", "$ordered", "$deque", "dtype", "shape", "x"]),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=8,
    )
)
def test_any_tree_is_value_or_refusal(tree):
    """Any tree gives a value or a refusal and nothing else."""
    with suppress(CheckpointError):
        rebuild(tree, {"x": torch.zeros(2)}, "state.json")


def test_tensors_without_state_refused_as_part():
    """Tensors without a state are refused as a part."""
    data = safetensors.torch.save({"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors has tensors but no state"):
        read_part("rank_0.safetensors", data)
    assert read_file(data, "model.safetensors")["w"].tolist() == [1, 1]


def test_messages_name_path_given():
    """Messages name the path that was given."""
    with pytest.raises(CheckpointError, match="/somewhere/training"):
        read_part("training.json", b"{", "/somewhere/training.json")


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("F32", (2,), 0, 4), "shape"),
        (("F32", (1,), 2, 8), "shape"),
        (("F32", (4,), 0, 16), "bytes"),
        (("F32", (-1,), 4, 0), "shape"),
        (("X9", (1,), 0, 4), "X9"),
        (("F32", (1,), -4, 0), "bytes"),
    ],
)
def test_tensor_not_those_bytes_refused(arguments, why):
    """A tensor that is not those bytes is refused."""
    with pytest.raises(CheckpointError, match=why):
        from_buffer(bytearray(8), *arguments)


def test_elements_not_aligned_copied_and_right():
    """Elements that are not aligned are copied and right."""
    buffer = bytearray(b"\0" + struct.pack("<2d", 1.5, -2.5))
    assert from_buffer(buffer, "F64", (2,), 1, 17).tolist() == [1.5, -2.5]


def test_bytes_cannot_written_copied():
    """Bytes that cannot be written are copied."""
    made = from_buffer(struct.pack("<2f", 1, 2), "F32", (2,), 0, 8)
    made += 1
    assert made.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_every_dtype_as_bytes(dtype):
    """Every type of elements survives as bytes."""
    raw = torch.arange(2 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 255)
    tensor = raw.view(dtype)
    data = bytearray(tensor_bytes(tensor))
    assert bytes(tensor_bytes(from_buffer(data, DTYPES[dtype], tensor.shape, 0, len(data)))) == bytes(data)


def test_strided_and_conjugated_tensors():
    """Expanded flipped and conjugated tensors are written as they look."""
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(tensor.resolve_conj().clone()))
    assert bytes(tensor_bytes(torch.ones(1).expand(3))) == struct.pack("<3f", 1, 1, 1)
    assert bytes(tensor_bytes(torch.ones(2, 3)[:, 1])) == struct.pack("<2f", 1, 1)
    assert bytes(tensor_bytes(torch.ones(3, 4)[1:2, 2:3])) == struct.pack("<f", 1)


def test_device_that_torch_does_not_know() -> None:
    """A device that a package would have to add to torch is named, with what to do."""
    with pytest.raises(CheckpointError, match=r"state.json holds torch.device\('elsewhere:1'\), which this torch does not know. If"):
        rebuild({"place": {"$device": "elsewhere:1"}}, {}, "state.json")
