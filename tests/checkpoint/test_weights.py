"""State dicts taken apart, dealt out to files, and put into models: what fits, what is said if not, and nothing changed in that case."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from slipstream.checkpoint.weights import (
    cast_weights,
    check_fit,
    index_bytes,
    load_into,
    plan_shards,
    shard_names,
    split_state_dict,
    write_weights,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.sizes import convert_file_size_to_int, parse_size


class Tied(nn.Module):
    """An embedding that is the output layer too, unless it is not to be."""

    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tie:
            self.head.weight = self.embed.weight


class Counting(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "shape": (2, 2)}

    def set_extra_state(self, state) -> None:
        self.seen = state["seen"]


class Renamed(nn.Module):
    """Reads files of the time when its layer was called `old`."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._translate)

    @staticmethod
    def _translate(module, state, prefix, *rest) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[f"{prefix}new.{name.removeprefix(f'{prefix}old.')}"] = state.pop(name)


def moved(model, by=1.0):
    """The same model with other values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(by if tensor.is_floating_point() else 1)
    return other


def values(model):
    return {name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in model.state_dict().items()}


def equal(entry, two):
    return entry.keys() == two.keys() and all(
        torch.equal(entry[name], two[name]) if isinstance(entry[name], torch.Tensor) else entry[name] == two[name] for name in entry
    )


def put(model, weights, **options):
    return load_into(model, weights.tensors, weights.aliases, weights.extra, **options)


# -- taking apart ------------------------------------------------------------------------------------------------------


def test_tied_weights_kept_once():
    """Tied weights are kept once."""
    weights = split_state_dict(Tied().state_dict(), "the weights")
    assert weights.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in weights.tensors
    assert "scratch" not in weights.tensors


def test_overlapping_views_kept_whole():
    """Views that overlap in part are each kept whole."""
    base = torch.arange(6.0)
    weights = split_state_dict({"all": base, "first": base[:4], "turned": base.view(2, 3).t(), "again": base[:4]}, "the weights")
    assert weights.aliases == {"again": "first"}
    assert list(weights.tensors) == ["all", "first", "turned"]


def test_tensors_without_elements_not_tied():
    """Tensors without elements are not tied."""
    weights = split_state_dict({"one": torch.empty(0, 2), "two": torch.empty(0, 2)}, "the weights")
    assert list(weights.tensors) == ["one", "two"]


def test_what_no_tensor_extra():
    """What is no tensor is extra."""
    model = Counting()
    model.seen = 7
    weights = split_state_dict(model.state_dict(), "the weights")
    assert weights.extra == {"_extra_state": {"seen": 7, "shape": (2, 2)}}
    fresh = Counting()
    assert put(fresh, weights)
    assert fresh.seen == 7


def test_byte_viewed_dtypes_round_trip():
    """Elements that safetensors has no name for are extra and come back."""
    model = nn.Module()
    model.wide = nn.Parameter(torch.randn(2, dtype=torch.complex128))
    weights = split_state_dict(model.state_dict(), "the weights")
    assert list(weights.extra) == ["wide"]
    fresh = moved(model)
    assert put(fresh, weights)
    assert torch.equal(fresh.wide, model.wide)
    assert check_fit(fresh, {}, {})  # whoever does not know what is extra does not miss it
    assert check_fit(fresh, {}, {}, {}).missing == ("wide",)


def test_versions_of_layers_kept_where_matter():
    """Versions of layers are kept where they matter."""
    assert split_state_dict(nn.Linear(1, 1).state_dict(), "the weights").extra == {}
    assert split_state_dict(nn.BatchNorm1d(1).state_dict(), "the weights").extra == {"_metadata": {"": {"version": 2}}}


def test_layer_learns_version_when_loaded():
    """A layer learns its version when it is loaded."""
    told = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
            told.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model = nn.Sequential(Versioned(1, 1), nn.Linear(1, 1))
    put(model, split_state_dict(model.state_dict(), "the weights"))
    assert told == [3]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({3: torch.ones(1)}, "the name 3"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"half \ud800": torch.ones(1)}, "cannot store"),
        ({"w": torch.ones(2).to_sparse()}, "'w' of the weights of Net is a sparse tensor"),
        ({"w": torch.ones(2, device="meta")}, "meta device"),
        ({"w": nn.LazyLinear(2).weight}, "Run one forward"),
    ],
)
def test_what_cannot_stored_named(state, said):
    """What cannot be stored is named."""
    with pytest.raises(CheckpointError) as caught:
        split_state_dict(state, "the weights of Net")
    assert said in str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def test_tensor_larger_than_shard_of_own():
    """A tensor larger than a shard has one of its own."""
    tensors = {"a": torch.zeros(2), "big": torch.zeros(100), "b": torch.zeros(2), "c": torch.zeros(2)}
    assert plan_shards(tensors, 16) == [["a"], ["big"], ["b", "c"]]


def test_frozen_weights_files_of_own():
    """Frozen weights have files of their own."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    assert plan_shards(tensors, None, {"b"}) == [["b"], ["a", "c"]]
    assert plan_shards(tensors, None, {"a", "b", "c"}) == [["a", "b", "c"]]
    assert plan_shards(tensors, None) == [["a", "b", "c"]]


def test_empty_model_file_without_tensors():
    """An empty model has one file without tensors."""
    assert plan_shards({}, 10) == [[]]
    assert shard_names("model_1", 1) == ["model_1.safetensors"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64])), max_size=12),
    st.integers(1, 100),
    st.sets(st.integers(0, 11)),
)
def test_shard_sizes(kinds, largest, frozen):
    """Every tensor is in one file and files are no larger than asked."""
    tensors = {f"t{number}": torch.zeros(count, dtype=dtype) for number, (count, dtype) in enumerate(kinds)}
    apart = {f"t{number}" for number in frozen} & tensors.keys()
    files = {}

    def add(name, encode):
        chunks, size = encode()
        files[name] = b"".join(bytes(chunk) for chunk in chunks)
        assert len(files[name]) == size

    names, index_name = write_weights(add, "model", tensors, {}, largest, apart)
    read = {name: safetensors.torch.load(files[name]) for name in names}
    found = [name for held in read.values() for name in held]
    assert sorted(found) == sorted(tensors)
    for held in read.values():
        sizes = [tensor.nbytes for tensor in held.values() if tensor.nbytes]
        assert len(sizes) <= 1 or sum(sizes) <= largest
        assert not (held.keys() & apart and held.keys() - apart)
    if index_name is not None:
        index = json.loads(files[index_name])
        assert all(name in read[file] for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert list(files)[-1] == index_name
    else:
        assert len(names) == 1


def test_file_metadata():
    """The file says that it is of torch and which weights are tied."""
    files = {}
    weights = split_state_dict(Tied().state_dict(), "the weights")
    write_weights(lambda name, encode: files.update({name: b"".join(map(bytes, encode()[0]))}), "model", weights.tensors, weights.aliases)
    data = files["model.safetensors"]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt", "head.weight": "embed.weight"}
    assert next(name for name in header if name != "__metadata__") == "norm.num_batches_tracked"  # the larger elements come first


def test_index_usual():
    """The index is the usual one."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(1)}
    index = json.loads(index_bytes({"x-00001-of-00002.safetensors": ["b"], "x-00002-of-00002.safetensors": ["a"]}, tensors))
    assert index == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "x-00002-of-00002.safetensors", "b": "x-00001-of-00002.safetensors"},
    }


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [(5, 5), ("5", 5), ("7B", 7), ("10GB", 10**10), ("200MB", 2 * 10**8), ("1.5 KiB", 1536), (" 2 TiB ", 2 * 2**40), ("0.001GB", 10**6)],
)
def test_sizes_in_words(given, bytes_):
    assert parse_size(given) == bytes_


@pytest.mark.parametrize("given", ["", "GB", "ten", "-5GB", "5XB", 0, -1, True, 1.5, None, "5gb", "0GB", "1e9", "9" * 30, "5 GB 3"])
def test_what_no_size_refused(given):
    """What is no size is refused."""
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size(given)
    with pytest.raises(ConfigError, match="size="):
        convert_file_size_to_int(given)


# -- fitting -----------------------------------------------------------------------------------------------------------


def test_all_misfits_found_first():
    """Every missing unexpected and mismatched name is found before anything changes."""
    model = Tied(tie=False)
    before = values(model)
    given = {"embed.wieght": torch.ones(5, 3), "norm.weight": torch.ones(4), "norm.bias": torch.ones(3), "head.weight": torch.ones(5, 3)}
    with pytest.raises(CheckpointError) as caught:
        load_into(model, given, {}, {}, strict=True)
    message = str(caught.value)
    assert "embed.weight (near: embed.wieght)" in message
    assert "norm.weight ([4] in the file, [3] in the model)" in message
    assert "running_mean" in message
    assert equal(values(model), before)
    with pytest.raises(CheckpointError, match="norm.weight"):
        load_into(model, given, {}, {}, strict=False)  # shapes have to fit in any case
    assert equal(values(model), before)


def test_long_list_of_names_cut():
    """A long list of names is cut."""
    report = check_fit(nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)]), {})
    with pytest.raises(CheckpointError, match="and 30 more"):
        report.demand("model.safetensors", "Sequential", strict=True)


def test_partial_load_without_strict(caplog):
    """Without strict what fits is loaded and the rest is said."""
    model = nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    report = load_into(model, {"weight": torch.ones(2, 2), "scale": torch.ones(1)}, {}, {}, strict=False)
    assert (report.missing, report.unexpected, bool(report)) == (("bias",), ("scale",), False)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(model.bias, bias)
    report.demand("model.safetensors", "Linear", strict=False)
    assert "model.safetensors fits the model Linear in part" in caplog.text
    assert "bias" in caplog.text


def test_lossy_dtypes_do_not_fit():
    """Numbers that would lose their meaning do not fit."""
    model = nn.Module()
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    model.register_buffer("real", torch.zeros(2))
    report = check_fit(model, {"count": torch.ones(2), "real": torch.ones(2, dtype=torch.complex64)})
    assert report.mismatched.keys() == {"count", "real"}
    assert check_fit(model, {"count": torch.ones(2, dtype=torch.int32), "real": torch.ones(2, dtype=torch.bfloat16)})


def test_other_precisions_converted():
    """Other precisions are converted."""
    model = nn.Linear(2, 2)
    weights = split_state_dict(copy.deepcopy(model).to(torch.bfloat16).state_dict(), "the weights")
    put(model, weights)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, weights.tensors["weight"].float())


@pytest.mark.parametrize("wrap", [lambda name: f"module.{name}", lambda name: f"_orig_mod.{name}", lambda name: f"module._orig_mod.{name}"])
def test_wrapped_names_are_renamed(wrap, caplog):
    """Names of a wrapped model are taken and it is said."""
    source, model = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    state = {wrap(name): tensor for name, tensor in source.state_dict().items()}
    report = check_fit(model, state)
    report.demand("old.bin", "Sequential", strict=True)
    assert "the prefix of a wrapper" in caplog.text
    load_into(model, state, {}, {})
    assert equal(values(model), values(source))


def test_layer_compiled_on_own_found():
    """A layer that was compiled on its own is found."""
    model = nn.Sequential(nn.Linear(2, 2))
    state = {"0._orig_mod.weight": torch.ones(2, 2), "0._orig_mod.bias": torch.ones(2)}
    load_into(model, state, {}, {})
    assert torch.equal(model[0].weight, torch.ones(2, 2))


def test_model_such_names_itself_taken_as():
    """A model that has such names itself is taken as it is."""
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    model = Holder()
    assert check_fit(model, model.state_dict()).renamed == {}
    assert check_fit(nn.ModuleDict({"weight": nn.Linear(1, 1), "module": nn.Linear(1, 1)}), {"weight.weight": (1, 1)}).renamed == {}


def test_hint_for_wrapped_file():
    """A wrapped file for another model gets the hint."""
    report = check_fit(nn.Linear(1, 1), {"module.a": (1,), "module.b": (1,)})
    with pytest.raises(CheckpointError, match="Did you save a wrapped model"):
        report.demand("x.bin", "Linear", strict=True)


# -- tied --------------------------------------------------------------------------------------------------------------


def test_tied_weights_tied_again():
    """Tied weights are tied again."""
    source = moved(Tied())
    weights = split_state_dict(source.state_dict(), "the weights")
    model = Tied()
    assert put(model, weights)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, source.embed.weight)


def test_untied_model_gets_both_values():
    """A model that is not tied any more gets the value in both places."""
    source = moved(Tied())
    model = Tied(tie=False)
    assert put(model, split_state_dict(source.state_dict(), "the weights"))
    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.head.weight, source.embed.weight)
    assert torch.equal(model.embed.weight, source.embed.weight)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_alias_without_table(kept):
    """A file that has one of the names and no table is enough."""
    source, model = moved(Tied()), Tied()
    state = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith("d.weight") or name == kept}
    assert load_into(model, state, {}, {})
    assert torch.equal(model.embed.weight, source.embed.weight)


def test_conflicting_values_for_tied_weight(caplog):
    """Two values for one weight are an error that names both."""
    weights = split_state_dict(Tied(tie=False).state_dict(), "the weights")
    model = Tied()
    before = values(model)
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight are tied"):
        put(model, weights)
    assert equal(values(model), before)
    put(model, weights, strict=False)
    assert "that of embed.weight is used" in caplog.text
    assert torch.equal(model.head.weight, weights.tensors["embed.weight"])


def test_equal_values_for_tied_weight():
    """Two equal values for one weight are no problem."""
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    state["embed.weight"][0, 0] = state["head.weight"][0, 0] = float("nan")
    assert load_into(Tied(), state, {}, {})


def test_weights_loading_replaces_tied_again():
    """Weights that loading replaces are tied again."""
    class Replacing(Tied):
        def load_state_dict(self, state_dict, strict=True, assign=False):
            return super().load_state_dict(state_dict, strict, assign=True)

    source, model = moved(Tied()), Replacing()
    assert put(model, split_state_dict(source.state_dict(), "the weights"))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, source.embed.weight)


def test_optimizer_goes_on_with_same_parameters():
    """An optimizer goes on with the same parameters."""
    model = Tied()
    parameters = [id(parameter) for parameter in model.parameters()]
    put(model, split_state_dict(moved(Tied()).state_dict(), "the weights"))
    assert [id(parameter) for parameter in model.parameters()] == parameters


# -- models that load in their own way ---------------------------------------------------------------------------------


def test_hooks_run_and_are_tried():
    """Hooks of the model run and are asked beforehand."""
    model = Renamed()
    state = {"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2)}
    assert check_fit(model, state)
    assert not torch.equal(model.new.weight, torch.ones(2, 2))
    assert load_into(model, state, {}, {})
    assert torch.equal(model.new.weight, torch.ones(2, 2))


def test_what_hook_cannot_place_found_beforehand():
    """What a hook cannot place is found beforehand."""
    model = nn.Sequential(Renamed())
    before = values(model)
    with pytest.raises(CheckpointError, match=r"0\.older\.weight"):
        load_into(model, {"0.older.weight": torch.ones(2, 2), "0.old.bias": torch.ones(2)}, {}, {})
    assert equal(values(model), before)


def test_own_load_state_dict_is_called():
    """Load state dict of the model itself is called."""
    called = []

    class Own(nn.Linear):
        def load_state_dict(self, state_dict, strict=True, assign=False):
            called.append(sorted(state_dict))
            return super().load_state_dict({name.upper().lower(): value for name, value in state_dict.items()}, strict, assign)

    model = Own(2, 2)
    load_into(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, {}, {})
    assert called == [["bias", "weight"]]
    assert torch.equal(model.bias, torch.ones(2))


def test_model_that_refuses():
    """A model that refuses for reasons of its own is reported."""
    class Refusing(Counting):
        def set_extra_state(self, state) -> None:
            raise RuntimeError("not this one")

    model = Refusing()
    with pytest.raises(CheckpointError, match="not this one"):
        put(model, split_state_dict(Counting().state_dict(), "the weights"))


def test_lazy_modules_take_shapes():
    """Lazy modules take the shapes of what they load."""
    source, model = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.LazyLinear(2))
    assert put(model, split_state_dict(source.state_dict(), "the weights"))
    assert torch.equal(model[0].weight, source[0].weight)


def test_parametrized_and_normed_modules_come_back():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)))
    other = moved(model, 0.25)
    weights = split_state_dict(other.state_dict(), "the weights")
    assert put(model, weights)
    assert equal(values(model), values(other))


def test_empty_model_loaded():
    """An empty model is loaded."""
    assert load_into(nn.Identity(), {}, {}, {})


def test_expanded_and_turned_parameters_come_back():
    model = nn.Module()
    model.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.register_buffer("wide", torch.ones(1).expand(4).clone())
    source = moved(model)
    weights = split_state_dict({"turned": source.turned, "wide": torch.full((1,), 2.0).expand(4)}, "the weights")
    assert put(model, weights)
    assert torch.equal(model.turned, source.turned)
    assert model.turned.stride() == (1, 3)
    assert model.wide.tolist() == [2, 2, 2, 2]


# -- without memory ----------------------------------------------------------------------------------------------------


def test_meta_model_allocated_and_tied():
    """A model without memory gets some and stays tied."""
    source = moved(Tied())
    with torch.device("meta"):
        model = Tied()
    assert put(model, split_state_dict(source.state_dict(), "the weights"))
    assert model.head.weight is model.embed.weight
    assert equal(values(model), values(source))
    assert model.scratch.is_meta  # nobody has its values


def test_what_not_loaded_stays_without_memory():
    """What is not loaded stays without memory."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert load_into(model, {"weight": torch.ones(2, 2)}, {}, {}, strict=False).missing == ("bias",)
    assert model.bias.is_meta
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.requires_grad


def test_parameters_change_type_in_place():
    """Parameters change their type in place."""
    model = Tied()
    weight = model.embed.weight
    cast_weights(model, {"embed.weight", "norm.weight"}, torch.bfloat16, keep=["norm"])
    assert model.head.weight is weight
    assert weight.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32
    assert model.norm.bias.dtype == torch.float32


def test_lines_come_from_logger_of_ours(caplog):
    """The lines come from a logger of ours."""
    with caplog.at_level(logging.WARNING):
        check_fit(nn.Linear(1, 1), {}).demand("x", "Linear", strict=False)
    assert caplog.records[0].name.startswith("slipstream.")
