"""A tiny Stable Diffusion, made from configs: its parts, data for training, and a pipeline in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch.utils.data import Dataset
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 16
SIDE = 16
"""Pixels of an image."""


def make_unet(seed: int = 0) -> UNet2DConditionModel:
    """Return a tiny UNet."""
    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=SIDE // 2, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH, attention_head_dim=4,
    )  # fmt: skip


def make_vae(seed: int = 1) -> AutoencoderKL:
    """Return a tiny autoencoder."""
    torch.manual_seed(seed)
    return AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"), up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        sample_size=SIDE,
    )  # fmt: skip


def make_text_encoder(seed: int = 2) -> CLIPTextModel:
    """Return a tiny text encoder."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config)


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return a tokenizer of letters."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [f"{letter}{end}" for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = ["<|startoftext|>", "<|endoftext|>", *letters]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def noise_schedule() -> DDPMScheduler:
    """Return the noise of training."""
    return DDPMScheduler(num_train_timesteps=50)


def save_pipeline(folder: Path) -> None:
    """Write a whole pipeline."""
    pipeline = StableDiffusionPipeline(
        vae=make_vae(), text_encoder=make_text_encoder(), tokenizer=make_tokenizer(folder / "letters"), unet=make_unet(),
        scheduler=DDIMScheduler(num_train_timesteps=50), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder)


class Pictures(Dataset[dict[str, torch.Tensor]]):
    """Images with a text, and the noise and time step for each, so that runs on several processes see the same."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._rows = [
            {
                "pixel_values": torch.rand(3, SIDE, SIDE, generator=generator) * 2 - 1,
                "input_ids": torch.randint(2, 54, (16,), generator=generator),
                "noise": torch.randn(4, SIDE // 2, SIDE // 2, generator=generator),
                "timesteps": torch.randint(0, 50, (), generator=generator),
            }
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


def loss_of(unet: Any, vae: Any, text_encoder: Any, schedule: DDPMScheduler, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch, as scripts of diffusers compute it."""
    with torch.no_grad():
        latents = vae.encode(batch["pixel_values"]).latent_dist.mode() * 0.18215
        states = text_encoder(batch["input_ids"], return_dict=False)[0]
    noisy = schedule.add_noise(latents, batch["noise"], batch["timesteps"])
    predicted = unet(noisy, batch["timesteps"], states, return_dict=False)[0]
    return torch.nn.functional.mse_loss(predicted.float(), batch["noise"].float(), reduction="mean")


def weigh(module: torch.nn.Module) -> float:
    """Return a number for all weights."""
    return sum(float(parameter.detach().double().abs().sum()) for parameter in module.parameters())
