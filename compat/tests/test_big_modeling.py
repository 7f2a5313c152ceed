"""Big models with the names and rules of Accelerate: maps, loading, dispatch, single tensors."""

from __future__ import annotations

import json
from collections import OrderedDict

import accelerate
import pytest
import torch
from accelerate import (
    big_modeling,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    align_module_device,
    check_device_map,
    compute_module_sizes,
    dtype_byte_size,
    extract_submodules_state_dict,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    has_offloaded_params,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    retie_parameters,
    save_offload_index,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import check_device_same, clean_device_map, convert_file_size_to_int
from torch import nn

from big_models import DIVIDED, TOKENS, Language, language, offloaded, save_weights

# -- maps: as Accelerate 1.15 makes them for this model ---------------------------------------------------------------------------


def test_fills_devices_in_order():
    """Devices are filled in the order of the model, and room is kept for the largest layer."""
    found = infer_auto_device_map(language(tied=False), {0: 1000, 1: 1000, "cpu": 1000}, ["Block"])
    assert isinstance(found, OrderedDict)
    assert found == {"embed": 1, "blocks": "disk", "norm": "disk", "head": "disk"}


def test_tied_weights_stay_together():
    """The head goes where the embedding is, and counts once."""
    found = infer_auto_device_map(language(), {"cpu": 2000}, ["Block"])
    assert found["head"] == found["embed"] == "cpu"


def test_budget_of_the_disk_is_not_a_limit():
    """What is left goes to the disk, whatever its budget is."""
    assert infer_auto_device_map(language(), {"disk": 10}) == {"": "disk"}


def test_buffers_of_a_divided_module_have_a_device():
    """A map that divides a block names the buffers of the block, too, and can be used."""
    model = language()
    found = infer_auto_device_map(model, {"cpu": 2000})
    divided = {name.rpartition(".")[0] for name in found if name.endswith(".scale")}
    assert divided
    assert all(f"{name}.shift" in found for name in divided)
    check_device_map(model, found)


def test_clean_result():
    """Entries of one device are merged, unless the caller wants all."""
    assert infer_auto_device_map(language(), {"cpu": 10**6}) == {"": "cpu"}
    assert set(infer_auto_device_map(language(), {"cpu": 10**6}, clean_result=False)) == {"embed", "blocks", "norm", "head"}
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.z": 0}, "a") == {"a": 0, "b.z": 0}


def test_verbose_prints(capsys):
    """Each decision is told on request."""
    infer_auto_device_map(language(), {"cpu": 1500}, verbose=True)
    assert "embed" in capsys.readouterr().out


def test_balanced_memory():
    """Accelerators get equal shares and room beside them; `low_zero` keeps the first one free."""
    model = language(tied=False)
    total = compute_module_sizes(model)[""]
    even = get_balanced_memory(model, {0: total, 1: total})
    assert total // 2 < even[0] < total
    assert even[1] == total
    assert get_balanced_memory(model, {0: total, 1: total, 2: total}, low_zero=True)[0] == 0
    assert get_balanced_memory(model, {"cpu": 100}) == {"cpu": 100}


def test_max_layer_size():
    """The largest layer, and all of its size."""
    model = language()
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (sizes["embed"], ["embed"])
    size, names = get_max_layer_size(list(model.named_children()), sizes, ["Block"])
    assert (size, names) == (sizes["blocks.0"], ["blocks.0", "blocks.1", "blocks.2"])


def test_max_memory_in_words():
    """transformers compares the dict that it gave with the result: words in it become bytes."""
    given = {"cpu": "2KB", 0: "1MiB"}
    assert get_max_memory(given) == {0: 1 << 20, "cpu": 2000} == given


def test_check_device_map():
    """A tensor without a device is an error; a name too much is a warning."""
    model = language()
    check_device_map(model, DIVIDED)
    with pytest.raises(ValueError, match="blocks"):
        check_device_map(model, {"embed": "cpu"})
    with pytest.warns(UserWarning, match="other"):
        check_device_map(model, {"": "cpu", "other": "cpu"})


def test_sizes_in_words_and_bits():
    """Sizes as people write them."""
    assert [convert_file_size_to_int(size) for size in (5, "5GB", "5GiB", "0.5MB", "8Kb")] == [5, 5 * 10**9, 5 << 30, 500000, 1000]
    assert [dtype_byte_size(kind) for kind in (torch.bfloat16, torch.bool, "float32")] == [2, 1 / 8, 4]
    with pytest.raises(ValueError, match="5TB"):
        convert_file_size_to_int("5TB")


def test_devices_are_the_same():
    """A family without a number means its current device, also where it is not there."""
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda"))


# -- dispatch -----------------------------------------------------------------------------------------------------------------


def assert_computes(model, tied=True):
    assert torch.equal(model(TOKENS), language(tied)(TOKENS))


@pytest.mark.parametrize("tied", [True, False])
def test_dispatch(tied, tmp_path):
    """Layers on the disk are loaded for each call, all have hooks, and the map is kept."""
    model = dispatch_model(language(tied), dict(DIVIDED), offload_dir=tmp_path)
    assert_computes(model, tied)
    assert offloaded(model) == {name for name, _ in language().named_parameters() if name.startswith(("blocks.0", "blocks.2"))}
    assert model.hf_device_map == DIVIDED
    hooked = {name for name, module in model.named_modules() if isinstance(getattr(module, "_hf_hook", None), AlignDevicesHook)}
    assert hooked == {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    remove_hook_from_submodules(model)
    assert not offloaded(model)
    assert_computes(model, tied)


def test_dispatch_needs_a_folder():
    """Weights in memory cannot go to the disk without a folder, and without a source in files."""
    with pytest.raises(ValueError, match=r"blocks.0, blocks.2.*offload_dir"):
        dispatch_model(language(), dict(DIVIDED))


def test_dispatch_to_one_device():
    """One device is a move; hooks come on request."""
    assert not hasattr(dispatch_model(language(), {"": "cpu"}), "_hf_hook")
    assert hasattr(dispatch_model(language(), {"": "cpu"}, force_hooks=True), "_hf_hook")


def test_dispatched_model_does_not_move(tmp_path):
    """A model with weights on the disk cannot be moved or converted."""
    model = dispatch_model(language(), dict(DIVIDED), offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="offloaded"):
        model.to("cpu")


def test_check_device_map_is_looked_up_when_called(monkeypatch):
    """transformers replaces it for models with parameters that have no place."""
    seen = []
    monkeypatch.setattr(big_modeling, "check_device_map", lambda model, device_map: seen.append(device_map))
    dispatch_model(language(), {"": "cpu"})
    assert seen == [{"": "cpu"}]


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_cpu_offload(offload_buffers):
    """Weights stay in memory, and buffers that are saved on request."""
    model = cpu_offload(language(), execution_device=torch.device("cpu"), offload_buffers=offload_buffers)
    assert_computes(model)
    assert ("blocks.0.shift" in offloaded(model)) == offload_buffers
    assert "blocks.0.mask" not in offloaded(model)
    assert [has_offloaded_params(module) for module in (model, model.embed, model.blocks[0].up)] == [False, True, True]


def test_offload_of_whole_classes(tmp_path):
    """A class that uses the weights of its children gets one hook for all of them."""
    model = disk_offload(language(), tmp_path, preload_module_classes=["Block"])
    assert model.blocks[0]._hf_hook.place_submodules
    assert not hasattr(model.blocks[0].up, "_hf_hook")
    assert_computes(model)


def test_weights_map_as_clients_read_it(tmp_path):
    """peft and transformers go from the hook of a layer to the file of a weight."""
    model = disk_offload(language(), tmp_path)
    weights = model.blocks[1].up._hf_hook.weights_map
    assert isinstance(weights, PrefixedDataset)
    assert isinstance(weights.dataset, OffloadedWeightsLoader)
    entry = weights.dataset.index["blocks.1.up.weight"]
    assert (tmp_path / entry["safetensors_file"]).is_file()
    assert torch.equal(dict(weights.dataset)["blocks.1.up.weight"], language().blocks[1].up.weight)
    assert torch.equal(weights["weight"], language().blocks[1].up.weight)


def test_lost_weights_are_noticed(tmp_path):
    """A module on the meta device that no hook loads, such as an adapter made beside offloaded weights, is an error."""
    model = dispatch_model(language(), dict(DIVIDED), offload_dir=tmp_path)
    model.blocks[0].adapter = nn.Linear(8, 8, device="meta")
    with pytest.raises(RuntimeError, match=r"blocks.0.adapter.weight"):
        model(TOKENS)


def test_offload_with_hook():
    """Models that take turns on a device."""
    first, handle = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, other = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=handle)
    assert second(first(torch.ones(1, 2))).shape == (1, 2)
    assert second._hf_hook.prev_module_hook is handle
    handle.offload()
    other.remove()
    assert not hasattr(second, "_hf_hook")


def test_layerwise_casting():
    """Linear layers are stored in another dtype, others are not; classes and names are left out."""
    model = language(tied=False)
    big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern=("blocks.0", "head"))
    stored = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.bfloat16}
    assert stored == {f"blocks.{number}.{layer}.{key}" for number in (1, 2) for layer in ("up", "down") for key in ("weight", "bias")}
    assert model(TOKENS).dtype is torch.float32


# -- loading ------------------------------------------------------------------------------------------------------------------


def empty(tied=True):
    with init_empty_weights():
        return Language(tied)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, DIVIDED, {"": "disk"}, "auto", "sequential"], ids=str)
def test_load_and_dispatch(kind, device_map, tmp_path):
    """Every kind of file by every kind of map."""
    folder = save_weights(language().state_dict(), tmp_path / "saved", kind)
    options = {"max_memory": {"cpu": 2000}, "no_split_module_classes": ["Block"]} if isinstance(device_map, str) else {}
    model = load_checkpoint_and_dispatch(empty(), folder, device_map=device_map, offload_folder=tmp_path / "offload", **options)
    assert_computes(model)


def test_load_of_another_dtype(tmp_path):
    """In half precision, except for some modules."""
    folder = save_weights(language().state_dict(), tmp_path / "saved")
    model = empty()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"])
    assert (model.norm.weight.dtype, model.embed.weight.dtype) == (torch.float32, torch.float16)


def test_missing_weights_stay_empty(tmp_path, caplog):
    """Weights that the file does not have can be set afterwards."""
    state = language(tied=False).state_dict()
    del state["head.weight"]
    for device_map in (None, {"": "cpu"}):
        model = empty(tied=False)
        load_checkpoint_in_model(model, save_weights(state, tmp_path / "saved"), device_map)
        assert offloaded(model) == {"head.weight"}
        model.head.weight = model.embed.weight
        assert_computes(model)
    assert "head.weight" in caplog.text


def test_loading_errors(tmp_path):
    """What cannot be loaded is a ValueError, as in Accelerate."""
    with pytest.raises(ValueError, match="nothing at"):
        load_checkpoint_in_model(language(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no weights"):
        load_checkpoint_in_model(language(), tmp_path)
    folder = save_weights({**language().state_dict(), "other": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(ValueError, match="other"):
        load_checkpoint_in_model(language(), folder, {"": "cpu"}, strict=True)
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_in_model(empty(), folder, dict(DIVIDED))
    with pytest.raises(ValueError, match="device_map='best'"):
        load_checkpoint_and_dispatch(language(), folder, device_map="best")


def test_empty_weights():
    """Parameters without memory, buffers on request; afterwards everything is as before."""
    with init_empty_weights(include_buffers=True):
        assert torch.ones(1).is_meta
        assert offloaded(nn.BatchNorm1d(2)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    with init_empty_weights():
        assert offloaded(nn.BatchNorm1d(2)) == {"weight", "bias"}
    with init_on_device(torch.device("meta")):
        assert offloaded(nn.Linear(1, 1, bias=False)) == {"weight"}
    assert not offloaded(nn.Linear(1, 1))


# -- single tensors -------------------------------------------------------------------------------------------------------------


def test_set_module_tensor():
    """Values, dtypes and devices of one tensor; what cannot be is a ValueError."""
    model = language(tied=False)
    set_module_tensor_to_device(model, "embed.weight", "meta")
    with pytest.raises(ValueError, match=r"embed.weight.*value"):
        set_module_tensor_to_device(model, "embed.weight", "cpu")
    set_module_tensor_to_device(model, "embed.weight", "cpu", value=torch.ones(16, 8), dtype=torch.float16)
    assert model.embed.weight.dtype is torch.float16
    with pytest.raises(ValueError, match="shape"):
        set_module_tensor_to_device(model, "head.weight", "cpu", value=torch.ones(2, 2))
    with pytest.raises(ValueError, match="other"):
        set_module_tensor_to_device(model, "head.other", "cpu")


def test_tied_parameters():
    """Groups of names, and tied again."""
    model = language()
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    set_module_tensor_to_device(model, "head.weight", "cpu", value=torch.zeros(16, 8))
    retie_parameters(model, [["embed.weight", "head.weight"]])
    assert model.head.weight is model.embed.weight


def test_align_module_device():
    """Weights of an offloaded layer, for a while."""
    model = cpu_offload(language(tied=False))
    with align_module_device(model.head):
        assert torch.equal(model.head.weight, language(tied=False).head.weight)
    assert model.head.weight.is_meta


# -- folders of weights -----------------------------------------------------------------------------------------------------------


WEIGHTS = {"matrix": torch.eye(2, 3), "scalar": torch.tensor(3.0), "half": torch.ones(2, dtype=torch.bfloat16), "whole": torch.arange(3)}


@pytest.mark.parametrize("value", WEIGHTS.values(), ids=WEIGHTS)
def test_one_weight_in_a_file(value, tmp_path):
    """As Accelerate writes it, and read again."""
    index = offload_weight(value, "weight", tmp_path, index={})
    assert torch.equal(load_offloaded_weight(tmp_path / "weight.dat", index["weight"]), value)
    save_offload_index(index, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == index


def test_a_folder_of_weights(tmp_path):
    """A mapping over a folder and memory, parts of it, and back into a model."""
    state = language(tied=False).state_dict()
    offload_state_dict(tmp_path, state)
    loader = OffloadedWeightsLoader(state_dict={"more": torch.ones(1)}, save_folder=tmp_path)
    assert set(loader) == {*state, "more"}
    assert len(loader) == len(state) + 1
    assert all(torch.equal(loader[name], value) for name, value in state.items())
    assert set(extract_submodules_state_dict(state, ["norm", "blocks.1"])) == {
        name for name in state if name.startswith(("norm.", "blocks.1."))
    }
    assert torch.equal(PrefixedDataset(loader, "norm.")["weight"], state["norm.weight"])
    model = language(tied=False)
    load_offloaded_weights(model, offload_weight(torch.zeros(16, 8), "embed.weight", tmp_path, {}), tmp_path)
    assert not model.embed.weight.any()
    load_offloaded_weights(model, None, None)


def test_names_at_the_top():
    """What programs import from the package itself."""
    for name in ("cpu_offload", "disk_offload", "dispatch_model", "infer_auto_device_map", "load_checkpoint_in_model"):
        assert callable(getattr(accelerate, name))
