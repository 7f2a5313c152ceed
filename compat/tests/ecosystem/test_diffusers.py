"""diffusers on the drop-in: training scripts on one and two processes against a plain loop, and pipelines under every kind of offload.

Without an accelerator diffusers refuses `enable_model_cpu_offload()` and `enable_sequential_cpu_offload()`; with `device="cpu"` they run.
Streams of group offload, and maps over several accelerators, need hardware and are not here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload
from client_runs import PROGRAMS, REAL, Reports, approx, find_report, run_program
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.hooks import apply_group_offloading

sys.path.append(str(PROGRAMS))
import diffusion

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]
PROGRAM = "diffusers_training.py"


# -- training -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one() -> Reports:
    return run_program(PROGRAM, 1)


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program(PROGRAM, 2)


TRAINED = ("losses", "norms", "weights")


@pytest.mark.parametrize(("case", "expected"), [("text_to_image", "plain"), ("lora", "plain_lora")])
def test_trains_like_a_plain_loop(one, two, case, expected):
    """Losses, norms and weights are those of PyTorch alone: to the last digit on one process, up to rounding on two."""
    wanted = find_report(one, expected)
    names = [*TRAINED, *(["averaged"] if case == "text_to_image" else [])]
    assert {name: find_report(one, case)[name] for name in names} == {name: wanted[name] for name in names}
    for name in names:
        assert find_report(two, case)[name] == approx(wanted[name], rel=5e-6), name


@pytest.mark.parametrize("case", ["text_to_image", "lora"])
def test_resumes_exactly(one, two, case):
    """Stopped after half of the updates and gone on in a new script: the same losses, norms, weights and averages."""
    for reports in (one, two):
        found, wanted = find_report(reports, f"{case}_resumed"), find_report(reports, case)
        assert {name: found[name] for name in TRAINED} == {name: wanted[name] for name in TRAINED}
        assert found.get("averaged") == wanted.get("averaged")


def test_half_precision(one, two):
    """bf16 is close to fp32."""
    for reports in (one, two):
        assert find_report(reports, "text_to_image_bf16")["losses"] == approx(find_report(reports, "text_to_image")["losses"], rel=5e-3)


def test_checkpoints(one, two):
    """Old checkpoints go as the script says; hooks of the script decide what a model is saved as."""
    for reports in (one, two):
        assert find_report(reports, "text_to_image")["left"] == ["checkpoint-6"]
        files = find_report(reports, "lora")["files"]
        assert "pytorch_lora_weights.safetensors" in files
        assert not any(file.startswith(("model", "pytorch_model")) for file in files)


@pytest.mark.skipif(not REAL, reason="REAL_ACCELERATE does not name a folder with Accelerate")
@pytest.mark.parametrize("case", ["text_to_image", "lora", "text_to_image_bf16"])
def test_same_on_accelerate(one, case):
    """Accelerate itself computes the same, to the last digit."""
    theirs = find_report(run_program(PROGRAM, 1, "torchrun", case, real=True), case)
    assert {name: find_report(one, case)[name] for name in TRAINED} == {name: theirs[name] for name in TRAINED}


# -- pipelines ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("diffusion")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusion.save_pipeline(made)
    return made


def load(folder: Path, **options: Any) -> StableDiffusionPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline: StableDiffusionPipeline) -> torch.Tensor:
    """Return two images, with guidance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(3)
        found = pipeline(
            ["a cat", "the sea"], num_inference_steps=3, guidance_scale=5.0, generator=generator, output_type="pt", height=16, width=16
        )
    images: torch.Tensor = found.images
    return images


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """Images of the pipeline in memory."""
    return paint(load(folder))


def test_model_offload(folder, expected):
    """Each model moves to the device when it is called, and back when the next one is."""
    pipeline = load(folder)
    pipeline.enable_model_cpu_offload(device="cpu")
    assert isinstance(pipeline.unet._hf_hook, CpuOffload)
    assert torch.equal(paint(pipeline), expected)
    assert torch.equal(paint(pipeline), expected)
    pipeline.remove_all_hooks()
    assert not hasattr(pipeline.unet, "_hf_hook")
    assert torch.equal(paint(pipeline), expected)


def test_sequential_offload(folder, expected):
    """The weights of each layer are loaded when it runs. On Accelerate, the same call ends with a TypeError for the device cpu:0."""
    pipeline = load(folder)
    pipeline.enable_sequential_cpu_offload(device="cpu")
    assert all(parameter.is_meta for parameter in pipeline.unet.parameters())
    hooks = [module._hf_hook for module in pipeline.unet.modules() if hasattr(module, "_hf_hook")]
    assert all(isinstance(hook, AlignDevicesHook) for hook in hooks)
    assert torch.equal(paint(pipeline), expected)
    pipeline.remove_all_hooks()
    assert not any(parameter.is_meta for parameter in pipeline.unet.parameters())
    assert torch.equal(paint(pipeline), expected)


def test_offload_without_accelerator_is_refused(folder):
    """What diffusers refuses on a machine without accelerators, it refuses on the drop-in."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    pipeline = load(folder)
    for enable in (pipeline.enable_model_cpu_offload, pipeline.enable_sequential_cpu_offload):
        with pytest.raises(RuntimeError, match="requires accelerator"):
            enable()


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("to_disk", [False, True])
def test_group_offload(folder, expected, kind, to_disk, tmp_path):
    """Groups of layers, in memory or in files: hooks of diffusers, beside those of accelerate."""
    pipeline = load(folder)
    groups = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    place = {"offload_to_disk_path": str(tmp_path)} if to_disk else {}
    options = {"onload_device": torch.device("cpu"), "offload_device": torch.device("cpu"), "offload_type": kind, **groups, **place}
    for model in (pipeline.unet, pipeline.vae):
        model.enable_group_offload(**options)
    apply_group_offloading(pipeline.text_encoder, **options)
    assert torch.equal(paint(pipeline), expected)


def test_group_offload_after_dispatch_is_refused(folder):
    """Both ways to offload exclude each other, and diffusers notices by the hooks."""
    pipeline = load(folder)
    pipeline.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(ValueError, match="group offloading"):
        pipeline.unet.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.parametrize("device_map", ["balanced", "cpu"])
def test_pipeline_device_map(folder, expected, device_map):
    """A map for the parts of a pipeline, and back. Without accelerators "balanced" leaves everything in memory."""
    pipeline = load(folder, device_map=device_map)
    assert (pipeline.hf_device_map is None) == (device_map == "balanced" and not torch.accelerator.is_available())
    assert torch.equal(paint(pipeline), expected)
    pipeline.reset_device_map()
    assert pipeline.hf_device_map is None
    assert torch.equal(paint(pipeline), expected)


def total_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


MAPS = {
    "auto": {"device_map": "auto"},
    "budget": {"device_map": "auto", "max_memory": {"cpu": total_bytes(diffusion.make_unet()) // 2}},
    "explicit": {
        "device_map": {
            "conv_in": "cpu", "time_proj": "cpu", "time_embedding": "cpu", "down_blocks": "disk", "mid_block": "cpu", "up_blocks": "disk",
            "conv_norm_out": "cpu", "conv_act": "cpu", "conv_out": "cpu",
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MAPS)
def test_model_device_map(folder, expected, kind, tmp_path):
    """A model with a map of its own in a pipeline; what is on the disk is loaded for each layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {**MAPS[kind], "offload_folder": str(tmp_path / "offload")}
        unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **options)
    assert any(parameter.is_meta for parameter in unet.parameters()) == (kind != "auto")
    pipeline = load(folder, unet=unet)
    assert torch.equal(paint(pipeline), expected)


def test_offloaded_model_saved(folder, tmp_path):
    """A UNet with weights on the disk is saved whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {**MAPS["explicit"], "offload_folder": str(tmp_path / "offload")}
        unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **options)
        unet.save_pretrained(tmp_path / "saved")
        again = UNet2DConditionModel.from_pretrained(tmp_path / "saved")
    for name, value in diffusion.make_unet().state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("enable", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_lora_in_an_offloaded_pipeline(folder, enable, tmp_path):
    """A pipeline with adapters is offloaded. (Once it is, diffusers offloads again for each adapter, and needs an accelerator for that.)"""
    make_lora(tmp_path)
    pipelines = [load(folder), load(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pipeline in pipelines:
            pipeline.load_lora_weights(tmp_path)
    getattr(pipelines[1], enable)(device="cpu")
    assert torch.equal(paint(pipelines[1]), paint(pipelines[0]))
    for pipeline in pipelines:
        pipeline.set_adapters(["default_0"], 0.5)
    assert torch.equal(paint(pipelines[1]), paint(pipelines[0]))
    assert not torch.allclose(paint(pipelines[0]), paint(load(folder)), atol=1e-3)


def test_fuse_lora(folder, tmp_path):
    """Adapters are fused before layers are offloaded; afterwards it is an error, where with Accelerate the fused weights are lost."""
    make_lora(tmp_path)
    fused, late = load(folder), load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pipeline in (fused, late):
            pipeline.load_lora_weights(tmp_path)
    expected = paint(fused)
    fused.fuse_lora()
    fused.enable_sequential_cpu_offload(device="cpu")
    assert torch.allclose(paint(fused), expected, atol=1e-5)
    late.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(RuntimeError, match="is offloaded, and was written to"):
        late.fuse_lora()


def make_lora(folder: Path) -> None:
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    unet = diffusion.make_unet()
    torch.manual_seed(4)
    unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=convert_state_dict_to_diffusers(get_peft_model_state_dict(unet)))
