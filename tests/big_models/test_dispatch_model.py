"""Models that are spread over memory and disk give the same numbers, and hold what they should."""

import copy
import gc
import io
import os
import resource

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from spread_models import TOKENS, Small, meta_names, run, skeleton, small
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
def test_every_map_gives_the_same_numbers_again_and_again(entries, rest, offload_buffers):
    model, expected = small(), run(small())
    dispatch_model(model, {"": rest, **entries}, offload_buffers=offload_buffers)
    assert torch.equal(run(model), expected)
    assert torch.equal(run(model), expected)


def test_weights_for_the_disk_are_away_between_forwards_and_the_others_in_memory(tmp_path):
    model = dispatch_model(small(), MIXED, offload_dir=tmp_path)
    away = {f"layers.{n}.{name}.{kind}" for n in (0, 2) for name in ("up", "down") for kind in ("weight", "bias")}
    assert meta_names(model) == {*away, "norm.weight", "norm.bias"}
    assert model.hf_device_map == MIXED


def test_a_tied_weight_that_one_module_keeps_in_memory_is_there_for_both():
    model = dispatch_model(small(), MIXED)
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta


def test_a_tied_weight_on_the_disk_is_written_once(tmp_path):
    dispatch_model(small(), {"": "cpu", "embed": "disk", "head": "disk"}, offload_dir=tmp_path)
    assert sum((tmp_path / name).stat().st_size for name in written(tmp_path)) < 2 * 16 * 8 * 4


def test_small_blocks_share_a_file_and_an_index_tells_a_later_process(tmp_path):
    expected = run(small())
    dispatch_model(small(), {"": "cpu", "layers": "disk"}, offload_dir=tmp_path)
    assert len(written(tmp_path)) == 1
    later = skeleton()
    state = {name: value for name, value in small().state_dict().items() if not name.startswith("layers.")}
    later = dispatch_model(later, {"": "cpu", "layers": "disk"}, state_dict=state, offload_dir=tmp_path)
    assert torch.equal(run(later), expected)


def test_large_blocks_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "_SMALL_FILE", 1500)
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"}, offload_dir=tmp_path)
    assert len(written(tmp_path)) == 3
    assert torch.equal(run(model), run(small()))


def test_values_in_memory_go_before_an_old_index_of_the_folder(tmp_path):
    dispatch_model(small(seed=1), {"": "disk"}, offload_dir=tmp_path)
    model = dispatch_model(small(seed=0), {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(run(model), run(small(seed=0)))
    assert len(written(tmp_path)) == 1


def test_without_a_folder_a_temporary_one_goes_with_the_model(caplog):
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"})
    folder = caplog.text.split("written to ")[1].split(",")[0]
    assert len(written(folder)) == 1
    del model
    gc.collect()
    assert not os.path.exists(folder)


def test_an_index_of_the_caller_is_used_in_place(tmp_path):
    safetensors.torch.save_file({"table": small().embed.weight.detach()}, tmp_path / "mine.safetensors")
    entry = {"safetensors_file": str(tmp_path / "mine.safetensors"), "weight_name": "table", "dtype": "float32"}
    model = small()
    nn.init.zeros_(model.embed.weight)
    dispatch_model(model, {"": "cpu", "embed": "disk", "head": "disk"}, offload_index={"embed.weight": entry})
    assert torch.equal(run(model), run(small()))


def test_the_state_dict_of_a_spread_model_is_whole():
    model = dispatch_model(small(), MIXED)
    expected = small().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_hooks_that_are_taken_off_leave_the_plain_model():
    model = dispatch_model(small(), MIXED)
    remove_hook_from_submodules(model)
    assert meta_names(model) == set()
    assert torch.equal(run(model.to(torch.float32)), run(small()))


def test_a_copy_runs_like_the_model():
    model = dispatch_model(small(), MIXED)
    assert torch.equal(run(copy.deepcopy(model)), run(small()))


@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.half(), lambda model: model.to(torch.float64)])
def test_a_model_with_offloaded_modules_refuses_to_be_moved_or_converted(move):
    model = dispatch_model(small(), MIXED)
    with pytest.raises(StateError, match="offloaded modules"):
        move(model)
    assert torch.equal(run(model), run(small()))


def hook_counts(model):
    return [len(get_hooks(module)) for module in model.modules() if get_hooks(module)]


@pytest.mark.parametrize("again", [{"": "disk"}, {"": "cpu"}, MIXED, {"": "cpu", "layers": "disk"}])
def test_what_is_spread_may_be_spread_again_and_its_hooks_are_replaced(again):
    model = dispatch_model(dispatch_model(small(), {"": "disk"}), MIXED)  # both into temporary folders
    dispatch_model(model, again)
    gc.collect()
    assert torch.equal(run(model), run(small()))
    assert set(hook_counts(model)) <= {1}
    assert model.hf_device_map == again
    assert dispatch_model(model, {"": "cpu"}).head.weight is model.embed.weight  # tied as before


def test_weights_of_a_spread_model_are_those_it_had_whatever_its_folder_holds_now(tmp_path):
    model = dispatch_model(small(seed=0), {"": "disk"}, offload_dir=tmp_path)
    dispatch_model(small(seed=1), {"": "disk"}, offload_dir=tmp_path)
    dispatch_model(model, {"": "cpu", "layers": "disk"})
    assert torch.equal(run(model), run(small(seed=0)))


def test_a_second_offload_to_memory_and_another_kind_of_hook(tmp_path):
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


def test_what_cannot_be_spread_again_stays_as_it_was():
    model = dispatch_model(small(), MIXED)
    with pytest.raises(ConfigError, match="limit"):
        dispatch_model(model, {"": "disk"}, limit=100)
    assert torch.equal(run(model), run(small()))


def test_a_spread_model_is_not_pickled_but_says_what_to_save():
    with pytest.raises(StateError, match="save_model"):
        torch.save(dispatch_model(small(), MIXED), io.BytesIO())


def test_under_autocast_the_numbers_are_those_of_the_plain_model():
    model, plain = dispatch_model(small(), {"": "disk"}), small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(model), run(plain))


def test_a_single_device_needs_no_hooks_unless_they_are_forced():
    assert not hasattr(dispatch_model(small(), {"": "cpu"}), "_hf_hook")
    model = dispatch_model(small(), {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.io_same_device
    assert torch.equal(run(model), run(small()))


def test_a_plan_with_a_budget_limits_what_is_in_memory():
    model = small()
    plan = infer_auto_device_map(model, {"cpu": 4000}, no_split_module_classes=["Layer"])
    dispatch_model(model, plan)
    loader = next(
        module._hf_hook.weights_map.dataset for module in model.modules() if getattr(module, "_hf_hook", None) and module._hf_hook.offload
    )
    assert loader.store.limit == plan.budget["cpu"] - plan.held["cpu"]
    assert torch.equal(run(model), run(small()))


def test_a_limit_cuts_blocks_so_that_several_fit():
    model = dispatch_model(small(), {"": "disk"}, limit=4000)
    assert torch.equal(run(model), run(small()))
    sizes = [block.size for block in model._hf_hook.weights_map.dataset.store.blocks]
    assert max(sizes) <= 4000 // 3


def test_what_lies_between_the_tensors_of_a_block_counts_towards_the_limit_before_anything_runs(tmp_path):
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
def test_layers_of_an_encoder_are_blocks_if_it_does_not_fit_and_what_it_does_otherwise_is_told(grad, caplog):
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
def test_single_tensors_of_modules_that_use_weights_of_their_children(every, grad):
    model, inputs = Encoder().eval(), torch.randn(2, 3, 8)
    device_map = {name: "cpu" if number % every else "disk" for number, (name, _) in enumerate(model.named_parameters())}
    with torch.set_grad_enabled(grad):
        expected = model(inputs)
        assert torch.equal(dispatch_model(model, device_map)(inputs), expected)


def test_a_limit_below_the_largest_block_is_refused_before_anything_changes():
    model = small()
    with pytest.raises(ConfigError, match="limit"):
        dispatch_model(model, {"": "disk"}, limit=100)
    assert meta_names(model) == set()


def test_parameters_that_no_module_call_reaches_stay_in_memory_and_it_is_said(caplog):
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
def test_a_map_that_does_not_fit_names_the_module_and_the_remedy(device_map, said):
    with pytest.raises(ConfigError, match=said):
        dispatch_model(small(), device_map)


def test_a_model_without_values_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"scale, .*without values.*load_checkpoint_and_dispatch"):
        dispatch_model(skeleton(), {"": "cpu", "layers": "disk"})
    with pytest.raises(ConfigError, match="without values"):
        dispatch_model(skeleton(), {"": "cpu"})


def test_names_of_classes_and_tensors_that_the_model_has_not_are_told_with_those_that_are_near(caplog):
    infer_auto_device_map(small(), {"cpu": "1MB"}, ["Layr"], special_dtypes={"hed.weight": torch.float16})
    assert "no_split_module_classes names the class Layr (did you mean Layer?)" in caplog.text
    assert "special_dtypes names the tensor hed.weight (did you mean head.weight?)" in caplog.text
    caplog.clear()
    dispatch_model(small(), {"": "disk"}, preload_module_classes=["Layer", "Modul"])
    assert "preload_module_classes names the class Modul (did you mean Module?)" in caplog.text
    with pytest.raises(ConfigError, match="one text"):
        cpu_offload(small(), preload_module_classes="Layer")


def test_classes_that_a_model_itself_names_need_not_be_there(caplog):
    model = small()
    model._no_split_modules = ["Layer", "Other"]
    plan_device_map(model, "auto", {"cpu": "1MB"})
    dispatch_model(model, infer_auto_device_map(model, {"cpu": "1MB"}))
    assert "Other" not in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_changes(tmp_path):
    (tmp_path / "file").write_text("")
    model = small()
    with pytest.raises(CheckpointError, match="offload_dir cannot take .* Something on the way is a file .* choose another folder"):
        dispatch_model(model, MIXED, offload_dir=tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="file"):
        disk_offload(model, tmp_path / "file" / "below")
    assert meta_names(model) == set()
    assert torch.equal(run(model), run(small()))


def test_a_full_disk_leaves_the_model_as_it_was(tmp_path):
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


def test_disk_offload_writes_once_and_a_skeleton_takes_it_from_there(tmp_path):
    expected = run(small())
    model = disk_offload(small(), tmp_path)
    assert meta_names(model) == {name for name, _ in small().named_parameters(remove_duplicate=False)}
    assert torch.equal(run(model), expected)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in written(tmp_path)}
    assert torch.equal(run(disk_offload(skeleton(), tmp_path)), expected)  # its buffers are there too
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in written(tmp_path)}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_cpu_offload_runs_on_the_processor_too(offload_buffers):
    model = cpu_offload(small(), "cpu", offload_buffers=offload_buffers)
    assert meta_names(model) == {name for name, _ in small().named_parameters(remove_duplicate=False)}
    assert model.norm.running_mean.is_meta is offload_buffers
    assert torch.equal(run(model), run(small()))


def test_cpu_offload_takes_weights_from_a_state_dict():
    assert torch.equal(run(cpu_offload(skeleton(), "cpu", state_dict=small().state_dict())), run(small()))


def test_a_whole_model_on_demand():
    model, handle = cpu_offload_with_hook(small(), execution_device="cpu")
    assert torch.equal(run(model), run(small()))
    handle.remove()
    assert not hasattr(model, "_hf_hook")


def test_the_check_of_maps_is_looked_up_when_it_is_called(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "check_device_map", lambda model, device_map: asked.append(device_map))
    dispatch_model(small(), {"": "cpu"})
    assert asked == [{"": "cpu"}]


def test_layers_that_are_trained_in_memory_get_gradients_through_offloaded_ones():
    plain, model = Small(), Small()
    model.load_state_dict(plain.state_dict())
    for entry in (plain, model):
        entry.eval().requires_grad_(False)
        entry.layers[0].requires_grad_(True)
    dispatch_model(model, {"": "cpu", "layers.1": "disk", "layers.2": "disk"})
    for entry in (plain, model):
        entry(TOKENS).square().sum().backward()
    assert torch.equal(plain.layers[0].up.weight.grad, model.layers[0].up.weight.grad)
