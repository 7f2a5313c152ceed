"""Checkpoints loaded by a device map: on the pages of their files, in as few copies as there can be."""

import json
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from models_to_dispatch import TOKENS, Small, empty_model, meta_names, run, small
from torch import nn

from slipstream.big_models import load
from slipstream.big_models.dispatch import disk_offload, dispatch_model
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.big_models.load import load_checkpoint_and_dispatch, load_checkpoint_in_model, load_state_dict
from slipstream.checkpoint.model_io import save_model
from slipstream.errors import CheckpointError, ConfigError

DISK = {"": "cpu", "layers": "disk", "norm": "disk"}


def single(folder):
    save_model(small(), folder)
    return folder


def sharded(folder):
    save_model(small(), folder, max_shard_size=600)
    return folder


def index(folder):
    return sharded(folder) / "model.safetensors.index.json"


def one_file(folder):
    return single(folder) / "model.safetensors"


def torch_file(folder):
    save_model(small(), folder, safe_serialization=False)
    return folder


@pytest.mark.parametrize("way", [single, sharded, index, one_file, torch_file])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, DISK, "auto", "balanced", "balanced_low_0", "sequential", None])
def test_every_checkpoint_and_map(tmp_path, way, device_map):
    """Every form of checkpoint by every map."""
    model = load_checkpoint_and_dispatch(
        empty_model(), way(tmp_path / "saved"), device_map, max_memory={"cpu": 4000} if isinstance(device_map, str) else None,
        offload_folder=tmp_path / "offload" if way is torch_file else None, no_split_module_classes=["Layer"], strict=True,
    )  # fmt: skip
    assert torch.equal(run(model), run(small()))
    assert torch.equal(run(model), run(small()))
    assert bool(meta_names(model)) == (device_map is not None and device_map != {"": "cpu"})
    assert (tmp_path / "offload").exists() == (way is torch_file and bool(meta_names(model)))


def mapped_files():
    with open("/proc/self/maps") as maps:
        found = [re.match(r"([0-9a-f]+)-([0-9a-f]+) .{20,} (/.*)", line) for line in maps]
    return [(int(entry[1], 16), int(entry[2], 16), entry[3]) for entry in found if entry]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="says where memory comes from")
def test_memory_weights_are_pages(tmp_path):
    """Weights in memory are the pages of the file and changes stay in the process."""
    path = one_file(tmp_path)
    before = path.read_bytes()
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "cpu"})
    areas = [area for area in mapped_files() if area[2] == str(path)]
    assert all(any(begin <= parameter.data_ptr() < end for begin, end, _ in areas) for parameter in model.parameters())
    with torch.no_grad():
        model.embed.weight.zero_()
    assert path.read_bytes() == before


def test_nothing_read_before_use(tmp_path):
    """256 MiB of weights: what loading adds to the process is less than 5 % of that."""
    with open(tmp_path / "model.safetensors", "wb") as file:  # a file of holes
        header = {f"{n}.weight": {"dtype": "F32", "shape": [2048, 2048], "data_offsets": [n << 24, (n + 1) << 24]} for n in range(16)}
        text = json.dumps(header).encode().ljust(4096 - 8)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(4096 + (16 << 24))
    program = (
        "import sys, torch\n"
        "from slipstream import init_empty_weights, load_checkpoint_and_dispatch\n"
        "def peak():\n"
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "with init_empty_weights():\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)])\n"
        "    tiny = torch.nn.Sequential(torch.nn.Linear(2048, 2048, bias=False))\n"
        "load_checkpoint_and_dispatch(tiny, sys.argv[1], {'': 'disk'})\n"  # everything is imported
        "for place in ('cpu', 'disk'):\n"
        "    before = peak()\n"
        "    load_checkpoint_and_dispatch(model, sys.argv[1], {'': place}, strict=True)\n"
        "    print(peak() - before)\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False, device='meta') for _ in range(16)])\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment, check=True)
    assert max(map(int, done.stdout.split())) < 0.05 * 256 * 1024


def test_disk_weights_in_user_files(tmp_path):
    """Weights on the disk stay in the files of the user."""
    sharded(tmp_path)
    before = sorted(os.listdir(tmp_path))
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, DISK)
    assert sorted(os.listdir(tmp_path)) == before
    entry = model.layers[0]._hf_hook.weights_map.dataset.index["layers.0.up.weight"]
    assert os.path.dirname(entry["safetensors_file"]) == str(tmp_path)


def test_ties_kept(tmp_path):
    """What was tied is tied in memory and on the disk."""
    single(tmp_path)
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "cpu", "layers": "disk"})
    assert model.head.weight is model.embed.weight
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "cpu", "head": "disk"})
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "cpu", "head": "disk", "embed": "disk"})
    assert model.head.weight.is_meta
    assert torch.equal(run(model), run(small()))


def test_file_ties_do_not_share(tmp_path):
    """What is tied in the file alone does not share memory."""
    shared = torch.ones(2, 2)
    save_model({"0.weight": shared, "1.weight": shared}, tmp_path)
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta"), nn.Linear(2, 2, bias=False, device="meta"))
    load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, strict=True)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, shared)


def test_in_memory_parameters_kept(tmp_path):
    """A model in memory keeps its parameters."""
    single(tmp_path)
    model = small(seed=1)
    before = dict(model.named_parameters())
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert torch.equal(run(model), run(small()))


def test_unsaved_buffers_keep_values(tmp_path):
    """Buffers of a model without weights that no file has keep their values."""
    single(tmp_path)
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "disk"})
    assert torch.equal(model.shift, small().shift)
    assert torch.equal(model.norm.running_mean, small().norm.running_mean)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offload_buffers(tmp_path, offload_buffers):
    """Buffers are offloaded if that is wanted."""
    single(tmp_path)
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "disk"}, offload_buffers=offload_buffers)
    assert model.norm.running_mean.is_meta is offload_buffers
    assert torch.equal(run(model), run(small()))


def test_load_then_dispatch(tmp_path):
    """What is loaded first is dispatched later."""
    single(tmp_path / "saved")
    model = empty_model()
    load_checkpoint_in_model(model, tmp_path / "saved", device_map=DISK, offload_folder=tmp_path / "offload")
    assert torch.equal(run(dispatch_model(model, DISK)), run(small()))


# --- other types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, DISK])
def test_weights_become_another_type(tmp_path, dtype, device_map):
    """Weights become another type."""
    single(tmp_path / "saved")
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path / "saved", device_map, dtype=dtype, offload_folder=tmp_path / "offload")
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.float16
    plain = small().to(wanted)
    plain.shift = small().shift  # it is in no file
    assert all(parameter.dtype is wanted for parameter in model.parameters())
    assert torch.equal(model.state_dict()["layers.1.up.weight"], plain.layers[1].up.weight)
    assert model.state_dict()["norm.num_batches_tracked"].dtype is torch.int64
    model.shift = plain.shift = small().shift.to(wanted)
    assert torch.equal(run(model), run(plain))


def test_some_modules_stay_float32(tmp_path):
    """Some modules stay float32."""
    single(tmp_path / "saved")
    model = empty_model()
    load_checkpoint_in_model(
        model, tmp_path / "saved", DISK, tmp_path / "offload", dtype="float16", keep_in_fp32_modules=["norm", "layers.1"]
    )
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.float32}
    assert kept == {"norm.weight", "norm.bias", *(f"layers.1.{name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias"))}


def test_no_dtype_keeps_models(tmp_path, caplog):
    """Without a type the model keeps its own and it is logged."""
    save_model(small().to(torch.bfloat16), tmp_path)
    model = load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "cpu"})
    assert model.embed.weight.dtype is torch.float32
    assert "dtype='bfloat16'" in caplog.text


@pytest.mark.parametrize(("way", "options", "said"), [(single, {"dtype": "float16"}, "dtype='float32'"), (torch_file, {}, "safetensors")])
def test_conversion_needs_folder(tmp_path, way, options, said):
    """What has to be written needs a folder."""
    model = empty_model()
    with pytest.raises(ConfigError, match=f"device_map puts layers.0.up.weight .*{said}") as caught:
        load_checkpoint_and_dispatch(model, way(tmp_path), DISK, **options)
    assert "offload_folder" in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_offload_folder_reused(tmp_path):
    """A folder of written weights is read by a later process."""
    load_checkpoint_in_model(empty_model(), torch_file(tmp_path / "saved"), {"": "disk"}, tmp_path / "offload", offload_buffers=True)
    assert torch.equal(run(disk_offload(empty_model(), tmp_path / "offload", offload_buffers=True)), run(small()))


def test_unwritable_folder_keeps_model(tmp_path):
    """An offload folder that cannot be written leaves the model as it was."""
    (tmp_path / "file").write_text("")
    model = empty_model()
    with pytest.raises(CheckpointError, match="A part of the path is a file"):
        load_checkpoint_and_dispatch(model, single(tmp_path / "saved"), DISK, dtype="float16", offload_folder=tmp_path / "file" / "x")
    assert all(parameter.is_meta and parameter.dtype is torch.float32 for parameter in model.parameters())


def test_progress_bar_counts_copies(tmp_path, monkeypatch):
    """A bar counts the bytes that are copied and no others."""
    bars = []

    class Bar:
        def __init__(self, total, *_):
            self.total, self.count = total, 0
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, count):
            self.count += count

    monkeypatch.setattr(load, "bar", Bar)
    single(tmp_path / "saved")
    load_checkpoint_and_dispatch(empty_model(), tmp_path / "saved", DISK)
    load_checkpoint_and_dispatch(empty_model(), tmp_path / "saved", DISK, dtype="float16", offload_folder=tmp_path / "offload")
    assert [bar.count for bar in bars] == [bar.total for bar in bars]
    assert bars[0].total == 0 < bars[1].total


# --- models that load in their own way ----------------------------------------------------------------------------------------


class Renaming(nn.Module):
    """Reads a file of an older version, whose names and shapes were others."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.query(x) + self.key(x)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        both = state_dict.pop(f"{prefix}both", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if both is not None:
            state_dict[f"{prefix}query.weight"], state_dict[f"{prefix}key.weight"] = both.chunk(2)


def test_own_load_state_dict(tmp_path):
    """A model that translates old files is asked."""
    both = torch.randn(8, 4)
    safetensors.torch.save_file({"0.both": both, "1.weight": torch.ones(4, 4), "1.bias": torch.ones(4)}, tmp_path / "old.safetensors")

    def make():
        return nn.Sequential(Renaming(), nn.Linear(4, 4))

    plain = make()
    plain.load_state_dict({"0.both": both, "1.weight": torch.ones(4, 4), "1.bias": torch.ones(4)}, strict=False)
    with torch.device("meta"):
        empty_model = make()
    for device_map in ({"": "cpu"}, {"0": "disk", "1": "disk"}):
        with torch.device("meta"):
            empty_model = make()
        model = load_checkpoint_and_dispatch(empty_model, tmp_path / "old.safetensors", device_map, offload_folder=tmp_path / "offload")
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def test_old_norm_counts_from_zero(tmp_path):
    """A norm of an old file counts from zero."""
    state = {name: value for name, value in nn.BatchNorm1d(4).state_dict().items() if name != "num_batches_tracked"}
    safetensors.torch.save_file(state, tmp_path / "old.safetensors")
    model = nn.BatchNorm1d(4, device="meta")
    load_checkpoint_and_dispatch(model, tmp_path / "old.safetensors", {"": "cpu"})
    assert model.num_batches_tracked.item() == 0


# --- what does not fit --------------------------------------------------------------------------------------------------------


def broken(folder, change):
    state = dict(small().state_dict())
    del state["head.weight"]
    change(state)
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_missing_left_on_meta(tmp_path, device_map):
    """With allow_meta, weights that the file does not have stay without values, and the others are loaded."""
    weights = {name: value for name, value in small().state_dict().items() if name != "layers.1.up.weight"}
    safetensors.torch.save_file({name: value.clone() for name, value in weights.items()}, tmp_path / "model.safetensors")
    model = empty_model()
    with pytest.raises(CheckpointError, match="layers.1.up.weight"):
        load_checkpoint_in_model(model, tmp_path, device_map)
    assert load_checkpoint_in_model(model, tmp_path, device_map, allow_meta=True).missing == ("layers.1.up.weight",)
    assert meta_names(model) == {"layers.1.up.weight"}


def test_missing_extra_misshaped(tmp_path):
    """Missing extra and misshaped tensors are named and change nothing."""
    def missing(state):
        del state["layers.1.up.weight"]

    def extra(state):
        state["layers.9.weight"] = torch.ones(1)

    def misshaped(state):
        state["scale"] = torch.ones(3)

    for change, name, strict in ((missing, "layers.1.up.weight", True), (extra, "layers.9.weight", True), (misshaped, "scale", False)):
        model = empty_model()
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint_and_dispatch(model, broken(tmp_path, change), DISK, strict=strict)
        assert all(parameter.is_meta for parameter in model.parameters())
    for device_map in (DISK, None):
        with pytest.raises(CheckpointError, match=r"without values.*\n.*layers.1.up.weight\n.*Load a checkpoint that has them"):
            load_checkpoint_and_dispatch(empty_model(), broken(tmp_path, missing), device_map)
    assert load_checkpoint_in_model(empty_model(), broken(tmp_path, extra), {"": "cpu"}).unexpected == ("layers.9.weight",)


@pytest.mark.parametrize("device_map", [{"": "disk"}, None])
def test_renamed_keys_message(tmp_path, device_map):
    """Names that another library changes are reported as such and not as those of a wrapper."""
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.ModuleDict({"experts": nn.Linear(2, 2)})

    save_model({"model.moe.weight": torch.ones(2, 2), "model.moe.bias": torch.ones(2)}, tmp_path)
    with init_empty_weights():
        model = Renamed()
    with pytest.raises(CheckpointError, match="renames weights while loading: .* save_model") as caught:
        load_checkpoint_and_dispatch(model, tmp_path, device_map)
    assert {"model.experts.weight", "model.moe.weight"} <= {*re.split("[ ,\n]+", str(caught.value))}
    assert "wrapped" not in str(caught.value)


@pytest.mark.parametrize("device_map", [DISK, {"": "cpu"}, None])
def test_inference_mode_weights_trainable(tmp_path, device_map):
    """Weights loaded in inference mode are trained later."""
    model = empty_model()
    with torch.inference_mode():
        load_checkpoint_and_dispatch(model, single(tmp_path), device_map)
    model(TOKENS).sum().backward()
    assert model.scale.grad is not None


def test_index_outside_folder_refused(tmp_path):
    """An index that points outside its folder is refused."""
    single(tmp_path / "secret")
    (tmp_path / "given").mkdir()
    where = {name: "../secret/model.safetensors" for name in small().state_dict()}
    (tmp_path / "given" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"\.\./secret"):
        load_checkpoint_and_dispatch(empty_model(), tmp_path / "given", {"": "cpu"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": {"embed": "cpu"}}, "has no device for"),
        ({"device_map": {"": "cpu", "layres": "disk"}}, "layres"),
        ({"device_map": {"": "cpu", "layers.1": "gpu7"}}, r"device_map\['layers.1'\] is 'gpu7', .*'cpu', 'disk'"),
        ({"device_map": {"": 99}}, r"device_map\[''\] is 99, .*'cpu', 'disk'"),
        ({"device_map": "by magic"}, "'balanced'"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "much"),
        ({"device_map": {"": "cpu"}, "full_state_dict": False}, "full_state_dict"),
        ({"device_map": {"": "cpu"}, "broadcast_from_rank0": True}, "broadcast_from_rank0"),
        ({"device_map": {"": "cpu"}, "dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_wrong_arguments(tmp_path, options, said):
    """Wrong arguments say what to write."""
    with pytest.raises(ConfigError, match=said):
        load_checkpoint_and_dispatch(empty_model(), single(tmp_path), **options)


def test_unwritable_folder_named(tmp_path):
    """An offload folder that cannot be written is named as such."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="offload_folder cannot be written"):
        load_checkpoint_and_dispatch(empty_model(), torch_file(tmp_path / "saved"), DISK, offload_folder=tmp_path / "file" / "below")


def test_hub_name_is_no_path():
    """A name of a hub is not a path."""
    with pytest.raises(CheckpointError, match="download it first"):
        load_checkpoint_and_dispatch(empty_model(), "some-people/some-model", "auto")


def test_unused_options_named(tmp_path, caplog):
    """Options that change nothing are named."""
    load_checkpoint_and_dispatch(small(seed=1), single(tmp_path), force_hooks=True, max_memory={"cpu": 1})
    assert "max_memory, force_hooks has no effect without a device_map" in caplog.text


# --- one file, and a real model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [one_file, torch_file])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"embed": "disk"}])
def test_the_tensors_of_one_file(tmp_path, way, device_map):
    """The tensors of one file."""
    path = way(tmp_path)
    found = load_state_dict(path / "pytorch_model.bin" if path.is_dir() else path, device_map)
    expected = small().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert expected.keys() - found.keys() <= {"head.weight"}


def test_a_folder_is_no_single_file(tmp_path):
    """A folder is no single file."""
    with pytest.raises(ConfigError, match="is a folder"):
        load_state_dict(tmp_path)


def test_untied_weights_stay_apart(tmp_path):
    """One tensor of the file for two weights that are not tied: a change of the one in memory does not reach the one on the disk."""

    def pair():
        return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    tied = pair()
    tied[1].weight = tied[0].weight
    save_model(tied, tmp_path)
    with init_empty_weights():
        model = pair()
    load_checkpoint_and_dispatch(model, tmp_path, {"0": "cpu", "1": "disk"})
    x, weight = torch.ones(1, 64), tied[1].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1](x), x @ weight.t())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_generate_same(tmp_path, tied):
    """A transformers model generates the same tokens with and without offload."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "saved")

    def tokens(model):
        return model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0)

    expected = tokens(plain)
    maps = [
        {"": "disk"},
        {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"},
    ]
    for device_map in (*maps, "auto"):
        with init_empty_weights():
            empty = transformers.LlamaForCausalLM(config).eval()
        budget = {"cpu": 60_000} if device_map == "auto" else None
        model = load_checkpoint_and_dispatch(empty, tmp_path / "saved", device_map, budget, ["LlamaDecoderLayer"], strict=True)
        assert torch.equal(tokens(model), expected)
        assert any(parameter.is_meta for parameter in model.parameters())
    for device_map in maps:
        copied = transformers.LlamaForCausalLM(config).eval()
        copied.load_state_dict(plain.state_dict())
        assert torch.equal(tokens(dispatch_model(copied, device_map, offload_dir=tmp_path / "a")), expected)
    assert torch.equal(tokens(disk_offload(plain, tmp_path / "b")), expected)


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}, {"": "cpu", "layers": "disk"}])
def test_second_checkpoint_replaces_first(tmp_path, device_map):
    """A second checkpoint replaces the first in a dispatched model."""
    model = load_checkpoint_and_dispatch(empty_model(), single(tmp_path / "a"), {"": "disk"})
    save_model(small(seed=1), tmp_path / "b")
    load_checkpoint_and_dispatch(model, tmp_path / "b", device_map, strict=True)
    assert torch.equal(run(model), run(small(seed=1)))


def test_load_into_dispatched_model(tmp_path, caplog):
    """Loading alone into a dispatched model ends that and what the file has not stays."""
    model = load_checkpoint_and_dispatch(empty_model(), single(tmp_path / "a"), {"": "disk"})
    half = {name: value for name, value in small(seed=1).state_dict().items() if name.startswith("layers.")}
    save_model(half, tmp_path / "b")
    load_checkpoint_in_model(model, tmp_path / "b", {"": "cpu", "layers.1": "disk"}, tmp_path / "c")
    assert "call dispatch_model" in caplog.text
    expected = small()
    expected.load_state_dict(half, strict=False)
    assert torch.equal(run(dispatch_model(model, {"": "cpu", "layers.1": "disk"})), run(expected))


def test_wrapped_model_names(tmp_path):
    """A wrapped model is loaded by the names of the inner one."""
    model = nn.DataParallel(Small().eval())
    assert load_checkpoint_and_dispatch(model, single(tmp_path), {"": "cpu", "layers": "disk"}) is model
    assert torch.equal(run(model.module), run(small()))
