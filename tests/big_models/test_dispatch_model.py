"""Dispatched models compute the same outputs, and hold in memory what they should."""

import copy
import gc
import io
import os
import resource

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from models_to_dispatch import TOKENS, Small, empty_model, meta_names, run, small
from torch import nn

from slipstream.big_models import dispatch
from slipstream.big_models.device_map.plan import infer_auto_device_map, plan_device_map
from slipstream.big_models.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.big_models.hooks.forward_hooks import ModelHook, add_hook_to_module, get_hooks, remove_hook_from_submodules
from slipstream.big_models.load import load_checkpoint_and_dispatch
from slipstream.errors import CheckpointError, ConfigError, StateError

MIXED = {"scale": "cpu", "embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "layers.2": "disk", "norm": "disk", "head": "disk"}
MODULES = ["", "embed", "layers", "layers.0", "layers.1.up", "layers.2.down", "norm", "head", "scale", "head.weight"]


def written(folder):
    return {name for name in os.listdir(folder) if name.endswith(".safetensors")}


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(MODULES[1:]), st.sampled_from(["cpu", "disk"])), st.sampled_from(["cpu", "disk"]), st.booleans())
def test_every_map_same_outputs(entries, rest, offload_buffers):
    """Every map gives the same numbers again and again."""
    model, expected = small(), run(small())
    dispatch_model(model, {"": rest, **entries}, offload_buffers=offload_buffers)
    assert torch.equal(run(model), expected)
    assert torch.equal(run(model), expected)


def test_disk_weights_offloaded_between_forwards(tmp_path):
    """Weights for the disk are offloaded between forwards and the others in memory."""
    model = dispatch_model(small(), MIXED, offload_dir=tmp_path)
    away = {f"layers.{n}.{name}.{kind}" for n in (0, 2) for name in ("up", "down") for kind in ("weight", "bias")}
    assert meta_names(model) == {*away, "norm.weight", "norm.bias"}
    assert model.hf_device_map == MIXED


def test_tied_weight_kept_in_memory():
    """A tied weight that one module keeps in memory is there for both."""
    model = dispatch_model(small(), MIXED)
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta


def test_tied_weight_written_once(tmp_path):
    """A tied weight on the disk is written once."""
    dispatch_model(small(), {"": "cpu", "embed": "disk", "head": "disk"}, offload_dir=tmp_path)
    assert sum((tmp_path / name).stat().st_size for name in written(tmp_path)) < 2 * 16 * 8 * 4


def test_small_blocks_share_file(tmp_path):
    """Small blocks share a file and an index tells a later process."""
    expected = run(small())
    dispatch_model(small(), {"": "cpu", "layers": "disk"}, offload_dir=tmp_path)
    assert len(written(tmp_path)) == 1
    later = empty_model()
    state = {name: value for name, value in small().state_dict().items() if not name.startswith("layers.")}
    later = dispatch_model(later, {"": "cpu", "layers": "disk"}, state_dict=state, offload_dir=tmp_path)
    assert torch.equal(run(later), expected)


def test_large_blocks_own_files(tmp_path, monkeypatch):
    """Large blocks have files of their own."""
    monkeypatch.setattr(dispatch, "_SMALL_FILE", 1500)
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"}, offload_dir=tmp_path)
    assert len(written(tmp_path)) == 3
    assert torch.equal(run(model), run(small()))


def test_memory_before_old_index(tmp_path):
    """Values in memory go before an old index of the folder."""
    dispatch_model(small(seed=1), {"": "disk"}, offload_dir=tmp_path)
    model = dispatch_model(small(seed=0), {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(run(model), run(small(seed=0)))
    assert len(written(tmp_path)) == 1


def test_temporary_folder_removed(caplog):
    """Without a folder a temporary one goes with the model."""
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"})
    folder = caplog.text.split("written to ")[1].split(",")[0]
    assert len(written(folder)) == 1
    del model
    gc.collect()
    assert not os.path.exists(folder)


def test_offload_index_used_in_place(tmp_path):
    """An index of the caller is used in place."""
    safetensors.torch.save_file({"table": small().embed.weight.detach()}, tmp_path / "mine.safetensors")
    entry = {"safetensors_file": str(tmp_path / "mine.safetensors"), "weight_name": "table", "dtype": "float32"}
    model = small()
    nn.init.zeros_(model.embed.weight)
    dispatch_model(model, {"": "cpu", "embed": "disk", "head": "disk"}, offload_index={"embed.weight": entry})
    assert torch.equal(run(model), run(small()))


def test_offload_index_is_checked_first(tmp_path):
    """An index with a name that its file does not have is an error before the model changes."""
    model = small()
    before = dict(model.state_dict())
    safetensors.torch.save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    entry = {"safetensors_file": str(tmp_path / "model.safetensors"), "weight_name": "missing"}
    with pytest.raises(CheckpointError, match="has no tensor 'missing'"):
        dispatch_model(model, MIXED, offload_index={"norm.weight": entry}, offload_dir=tmp_path / "parked")
    assert all(value is not None and value.data_ptr() == before[name].data_ptr() for name, value in model.state_dict().items())
    assert meta_names(model) == set()


def test_state_dict_is_complete():
    """The state dict of a dispatched model is whole."""
    model = dispatch_model(small(), MIXED)
    expected = small().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_remove_hooks_restores_model():
    """Hooks that are taken off leave the plain model."""
    model = dispatch_model(small(), MIXED)
    remove_hook_from_submodules(model)
    assert meta_names(model) == set()
    assert torch.equal(run(model.to(torch.float32)), run(small()))


def test_a_copy_runs_like_the_model():
    """A copy runs like the model."""
    model = dispatch_model(small(), MIXED)
    assert torch.equal(run(copy.deepcopy(model)), run(small()))


@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.half(), lambda model: model.to(torch.float64)])
def test_moving_offloaded_model_refused(move):
    """A model with offloaded modules refuses to be moved or converted."""
    model = dispatch_model(small(), MIXED)
    with pytest.raises(StateError, match="offloaded modules"):
        move(model)
    assert torch.equal(run(model), run(small()))


def hook_counts(model):
    return [len(get_hooks(module)) for module in model.modules() if get_hooks(module)]


@pytest.mark.parametrize("again", [{"": "disk"}, {"": "cpu"}, MIXED, {"": "cpu", "layers": "disk"}])
def test_dispatch_again_replaces_hooks(again):
    """What is dispatched may be dispatched again and its hooks are replaced."""
    model = dispatch_model(dispatch_model(small(), {"": "disk"}), MIXED)  # both into temporary folders
    dispatch_model(model, again)
    gc.collect()
    assert torch.equal(run(model), run(small()))
    assert set(hook_counts(model)) <= {1}
    assert model.hf_device_map == again
    assert dispatch_model(model, {"": "cpu"}).head.weight is model.embed.weight  # tied as before


def test_redispatch_keeps_weights(tmp_path):
    """Weights of a dispatched model are those it had whatever its folder holds now."""
    model = dispatch_model(small(seed=0), {"": "disk"}, offload_dir=tmp_path)
    dispatch_model(small(seed=1), {"": "disk"}, offload_dir=tmp_path)
    dispatch_model(model, {"": "cpu", "layers": "disk"})
    assert torch.equal(run(model), run(small(seed=0)))


def test_release_leaves_buffers_between(tmp_path):
    """A buffer that is in memory again, and stands between offloaded weights in the file, keeps what was written to it."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.z = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
            self.register_buffer("middle", torch.zeros(128))

        def forward(self, x):
            self.middle += 1
            return self.z(self.a(x)) + self.middle

    model = nn.Sequential(*(Mixed() for _ in range(8)))
    path, limit = tmp_path / "m.safetensors", 4 * 2 * 128 * 128 * 4  # room for four of the eight
    safetensors.torch.save_file(dict(sorted(model.state_dict().items())), path)
    load_checkpoint_and_dispatch(model, path, {"": "disk"}, offload_buffers=True, limit=limit)
    dispatch_model(model, {"": "disk"}, limit=limit)
    for _ in range(3):
        model(torch.ones(1, 128))
    assert [block.middle.tolist() for block in model] == [[3.0] * 128] * 8


def test_second_cpu_offload_keeps_hooks(tmp_path):
    """A second offload to memory and another kind of hook."""
    class Doubling(ModelHook):
        def post_forward(self, module, output):
            return output * 2

    model = add_hook_to_module(cpu_offload(small(), "cpu"), Doubling(), append=True)
    cpu_offload(model, "cpu")
    assert torch.equal(run(model), 2 * run(small()))
    disk_offload(model, tmp_path)
    assert torch.equal(run(model), 2 * run(small()))
    dispatch_model(model, {"": "cpu"})
    assert hook_counts(model) == [1]
    assert torch.equal(run(model), 2 * run(small()))


def test_failed_redispatch_changes_nothing():
    """What cannot be dispatched again stays as it was."""
    model = dispatch_model(small(), MIXED)
    with pytest.raises(ConfigError, match="limit"):
        dispatch_model(model, {"": "disk"}, limit=100)
    assert torch.equal(run(model), run(small()))


def test_pickling_refused():
    """A dispatched model is not pickled but says what to save."""
    with pytest.raises(StateError, match="save_model"):
        torch.save(dispatch_model(small(), MIXED), io.BytesIO())


def test_autocast_same_outputs():
    """Under autocast the numbers are those of the plain model."""
    model, plain = dispatch_model(small(), {"": "disk"}), small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(model), run(plain))


def test_single_device_without_hooks():
    """A single device needs no hooks unless they are forced."""
    assert not hasattr(dispatch_model(small(), {"": "cpu"}), "_hf_hook")
    model = dispatch_model(small(), {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.io_same_device
    assert torch.equal(run(model), run(small()))


def test_plan_budget_is_limit():
    """A plan with a budget limits what is in memory."""
    model = small()
    plan = infer_auto_device_map(model, {"cpu": 4000}, no_split_module_classes=["Layer"])
    dispatch_model(model, plan)
    loader = next(
        module._hf_hook.weights_map.dataset for module in model.modules() if getattr(module, "_hf_hook", None) and module._hf_hook.offload
    )
    assert loader.store.limit == plan.budget["cpu"] - plan.held["cpu"]
    assert torch.equal(run(model), run(small()))


def test_limit_divides_blocks():
    """A limit cuts blocks so that several fit."""
    model = dispatch_model(small(), {"": "disk"}, limit=4000)
    assert torch.equal(run(model), run(small()))
    sizes = [block.size for block in model._hf_hook.weights_map.dataset.store.blocks]
    assert max(sizes) <= 4000 // 3


def test_gaps_count_towards_limit(tmp_path):
    """Buffers stay in memory, but share pages with the weights around them in the file."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.z = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.register_buffer("middle", torch.ones(64))

        def forward(self, x):
            return self.z(self.a(x)) * self.middle[0]

    def built():
        return nn.Sequential(Mixed(), Mixed())

    safetensors.torch.save_file(dict(sorted(built().state_dict().items())), tmp_path / "m.safetensors")
    with init_empty_weights():
        refused, model = built(), built()
    options = {"device_map": {"": "disk"}, "no_split_module_classes": ["Mixed"]}
    with pytest.raises(ConfigError, match="0 needs 2.25 KB"):
        load_checkpoint_and_dispatch(refused, tmp_path / "m.safetensors", limit=2048, **options)
    load_checkpoint_and_dispatch(model, tmp_path / "m.safetensors", limit=2304, **options)(torch.ones(1, 16))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.attention, self.encoder = nn.MultiheadAttention(8, 2, batch_first=True), nn.TransformerEncoder(layer, 3)

    def forward(self, x):
        return self.encoder(self.attention(x, x, x)[0])


@pytest.mark.parametrize("grad", [True, False])
def test_encoder_layers_as_blocks(grad, caplog):
    """Layers of an encoder are blocks if it does not fit and what it does otherwise is reported."""
    model, inputs = Encoder().eval(), torch.randn(2, 3, 8)
    with torch.set_grad_enabled(grad):
        expected = model(inputs)
        assert torch.equal(dispatch_model(model, {"": "disk"}, limit=9000)(inputs), expected)
    assert [name for name, module in model.named_modules() if name and get_hooks(module)] == [
        "attention", *(f"encoder.layers.{number}" for number in range(3)),
    ]  # fmt: skip
    assert "padded positions" in caplog.text


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_single_tensor_entries_of_composites(every, grad):
    """Single tensors of modules that use weights of their children."""
    model, inputs = Encoder().eval(), torch.randn(2, 3, 8)
    device_map = {name: "cpu" if number % every else "disk" for number, (name, _) in enumerate(model.named_parameters())}
    with torch.set_grad_enabled(grad):
        expected = model(inputs)
        assert torch.equal(dispatch_model(model, device_map)(inputs), expected)


def test_limit_below_largest_block():
    """A limit below the largest block is refused before anything changes."""
    model = small()
    with pytest.raises(ConfigError, match="limit"):
        dispatch_model(model, {"": "disk"}, limit=100)
    assert meta_names(model) == set()


def test_unreached_parameters_stay(caplog):
    """Parameters that no module call reaches stay in memory and it is logged."""
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales, self.layer = nn.ParameterList([torch.ones(2)]), nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) * self.scales[0]

    model = Listed()
    expected = model(torch.ones(1, 2))
    dispatch_model(model, {"scales": "disk", "layer": "disk"})
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert "scales.0 stay in memory" in caplog.text


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"embed": "cpu", "layers": "disk"}, "head.weight|norm"),
        ({"": "cpu", "layer": "disk"}, "names layer, .* Did you mean"),
        ({"": "cpu", "layers.0": "gpu7"}, r"device_map\['layers.0'\] is 'gpu7', .*'cpu', 'disk'"),
        ({"": "cpu", "layers.0": 99}, r"device_map\['layers.0'\] is 99, .*'cpu', 'disk'"),
        ("auto", "infer_auto_device_map"),
    ],
)
def test_map_errors_name_module(device_map, said):
    """A map that does not fit names the module and the remedy."""
    with pytest.raises(ConfigError, match=said):
        dispatch_model(small(), device_map)


def test_meta_model_refused():
    """A model without values is refused with what to do."""
    with pytest.raises(ConfigError, match=r"scale, .*without values.*load_checkpoint_and_dispatch"):
        dispatch_model(empty_model(), {"": "cpu", "layers": "disk"})
    with pytest.raises(ConfigError, match="without values"):
        dispatch_model(empty_model(), {"": "cpu"})


def test_unknown_names_warned(caplog):
    """Names of classes and tensors that the model has not are reported with those that are near."""
    infer_auto_device_map(small(), {"cpu": "1MB"}, ["Layr"], special_dtypes={"hed.weight": torch.float16})
    assert "no_split_module_classes names the class Layr (did you mean Layer?)" in caplog.text
    assert "special_dtypes names the tensor hed.weight (did you mean head.weight?)" in caplog.text
    caplog.clear()
    dispatch_model(small(), {"": "disk"}, preload_module_classes=["Layer", "Modul"])
    assert "preload_module_classes names the class Modul (did you mean Module?)" in caplog.text
    with pytest.raises(ConfigError, match="one text"):
        cpu_offload(small(), preload_module_classes="Layer")


def test_own_class_names_not_warned(caplog):
    """Classes that a model itself names need not be there."""
    model = small()
    model._no_split_modules = ["Layer", "Other"]
    plan_device_map(model, "auto", {"cpu": "1MB"})
    dispatch_model(model, infer_auto_device_map(model, {"cpu": "1MB"}))
    assert "Other" not in caplog.text


def test_unwritable_folder_changes_nothing(tmp_path):
    """A folder that cannot be written is an error before anything changes."""
    (tmp_path / "file").write_text("")
    model = small()
    with pytest.raises(CheckpointError, match="offload_dir cannot be written.* A part of the path is a file .* choose another folder"):
        dispatch_model(model, MIXED, offload_dir=tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="file"):
        disk_offload(model, tmp_path / "file" / "below")
    assert meta_names(model) == set()
    assert torch.equal(run(model), run(small()))


def test_full_disk_changes_nothing(tmp_path):
    """A full disk leaves the model as it was."""
    model = small()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []
    assert torch.equal(run(model), run(small()))


def test_disk_offload_written_once(tmp_path):
    """Disk offload writes once and a model without weights takes it from there."""
    expected = run(small())
    model = disk_offload(small(), tmp_path)
    assert meta_names(model) == {name for name, _ in small().named_parameters(remove_duplicate=False)}
    assert torch.equal(run(model), expected)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in written(tmp_path)}
    assert torch.equal(run(disk_offload(empty_model(), tmp_path)), expected)  # its buffers are there too
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in written(tmp_path)}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_cpu_offload_on_cpu(offload_buffers):
    """Cpu offload runs on the CPU too."""
    model = cpu_offload(small(), "cpu", offload_buffers=offload_buffers)
    assert meta_names(model) == {name for name, _ in small().named_parameters(remove_duplicate=False)}
    assert model.norm.running_mean.is_meta is offload_buffers
    assert torch.equal(run(model), run(small()))


def test_cpu_offload_from_state_dict():
    """Cpu offload takes weights from a state dict."""
    assert torch.equal(run(cpu_offload(empty_model(), "cpu", state_dict=small().state_dict())), run(small()))


def test_a_whole_model_on_demand():
    """A whole model on demand."""
    model, handle = cpu_offload_with_hook(small(), execution_device="cpu")
    assert torch.equal(run(model), run(small()))
    handle.remove()
    assert not hasattr(model, "_hf_hook")


def test_check_device_map_late_binding(monkeypatch):
    """The check of maps is looked up when it is called."""
    asked = []
    monkeypatch.setattr(dispatch, "check_device_map", lambda model, device_map: asked.append(device_map))
    dispatch_model(small(), {"": "cpu"})
    assert asked == [{"": "cpu"}]


def test_gradients_through_offloaded_layers():
    """Layers that are trained in memory get gradients through offloaded ones."""
    plain, model = Small(), Small()
    model.load_state_dict(plain.state_dict())
    for entry in (plain, model):
        entry.eval().requires_grad_(False)
        entry.layers[0].requires_grad_(True)
    dispatch_model(model, {"": "cpu", "layers.1": "disk", "layers.2": "disk"})
    for entry in (plain, model):
        entry(TOKENS).square().sum().backward()
    assert torch.equal(plain.layers[0].up.weight.grad, model.layers[0].up.weight.grad)
