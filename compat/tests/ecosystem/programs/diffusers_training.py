"""Training as the example scripts of diffusers do it, for `client_runs.run_program`: text to image with an average of the weights, and
DreamBooth with LoRA. `plain` and `plain_lora` are the same in PyTorch alone, on one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers, convert_unet_state_dict_to_peft
from diffusion import Pictures, loss_of, make_text_encoder, make_unet, make_vae, noise_schedule, weigh
from models import WORLD, run_cases
from peft import LoraConfig, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader

STEPS = 6
WINDOW = 2
BATCH = 4
"""Images for each micro-batch on all processes together."""
IMAGES = 24


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)


def adapter() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"])


class Script:
    """What both scripts share: frozen parts, one trained UNet, accumulation, clipping, checkpoints that can be resumed."""

    def __init__(self, folder: str, precision: str = "no", until: int = STEPS, resume: bool = False, limit: int | None = None) -> None:
        self.folder, self.until, self.resume, self.limit = Path(folder), until, resume, limit
        AcceleratorState._reset_state()  # another case in this process may have had another precision
        config = ProjectConfiguration(project_dir=folder, logging_dir=str(self.folder / "logs"))
        self.accelerator = Accelerator(
            gradient_accumulation_steps=WINDOW, mixed_precision=precision, project_config=config, log_with=None, cpu=True
        )
        set_seed(0)
        self.vae, self.text_encoder = make_vae().requires_grad_(False), make_text_encoder().requires_grad_(False)
        self.schedule = noise_schedule()
        self.unet = make_unet()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def parts(self) -> tuple[Any, Any, Any, Any]:
        """Return what is prepared: model, optimizer, loader and scheduler."""
        trained = [parameter for parameter in self.unet.parameters() if parameter.requires_grad]
        optimizer = optimizer_of(trained)
        loader = DataLoader(Pictures(IMAGES), batch_size=BATCH // WORLD, shuffle=False)
        processes = self.accelerator.num_processes  # a prepared scheduler steps once for each process
        scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=processes, num_training_steps=STEPS * processes)
        return self.unet, optimizer, loader, scheduler

    def after_update(self) -> None:
        """Is called after every update."""

    def train(self) -> int:
        """Run to `until` updates; save each."""
        accelerator = self.accelerator
        unet, optimizer, loader, scheduler = accelerator.prepare(*self.parts())
        self.unet = unet
        device, dtype = accelerator.device, torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        self.vae.to(device, dtype=torch.float32)
        self.text_encoder.to(device, dtype=dtype)
        done = first_epoch = 0
        if self.resume:
            newest = sorted(self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1]
            accelerator.load_state(str(newest))
            done = int(newest.name.split("-")[1])
            first_epoch = done // (len(loader) // WINDOW)
        for _ in range(first_epoch, 100):
            unet.train()
            total = 0.0
            for batch in loader:
                with accelerator.accumulate(unet):
                    loss = loss_of(unet, self.vae, self.text_encoder, self.schedule, batch)
                    total += accelerator.gather(loss.detach().repeat(BATCH // WORLD)).mean().item() / WINDOW
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_([p for p in unet.parameters() if p.requires_grad], 1.0)
                        self.norms.append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    self.after_update()
                    done += 1
                    self.losses.append(total)
                    total = 0.0
                    self.save(done)
                    if done >= self.until:
                        accelerator.wait_for_everyone()
                        return done
        return done

    def save(self, step: int) -> None:
        if step % 3 == 0 and self.accelerator.is_main_process:
            if self.limit is not None:
                kept = sorted(self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
                for old in kept[: max(0, len(kept) - self.limit + 1)]:
                    shutil.rmtree(old)
            self.accelerator.save_state(str(self.folder / f"checkpoint-{step}"))

    def report(self, **more: Any) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "weights": weigh(self.accelerator.unwrap_model(self.unet)), **more}


class TextToImage(Script):
    """All weights are trained, with an average of them; checkpoints hold models in the format of diffusers."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.average = EMAModel(make_unet().parameters(), decay=0.9, model_cls=UNet2DConditionModel, model_config=self.unet.config)
        self.accelerator.register_save_state_pre_hook(self._save_models)
        self.accelerator.register_load_state_pre_hook(self._load_models)

    def _save_models(self, models: list[Any], weights: list[Any], folder: str) -> None:
        if self.accelerator.is_main_process:
            self.average.save_pretrained(os.path.join(folder, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(folder, "unet"))
                weights.pop()  # so that it is not saved again

    def _load_models(self, models: list[Any], folder: str) -> None:
        loaded = EMAModel.from_pretrained(os.path.join(folder, "unet_ema"), UNet2DConditionModel)
        self.average.load_state_dict(loaded.state_dict())
        for _ in range(len(models)):
            model = models.pop()
            saved = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
            model.register_to_config(**saved.config)
            model.load_state_dict(saved.state_dict())

    def after_update(self) -> None:
        self.average.step(self.unet.parameters())

    def averaged(self) -> float:
        return sum(float(parameter.double().abs().sum()) for parameter in self.average.shadow_params)


class DreamBoothLora(Script):
    """Only adapters are trained; checkpoints hold LoRA weights that pipelines load."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.unet.requires_grad_(False)
        set_seed(1)
        self.unet.add_adapter(adapter())
        cast_training_params([self.unet], dtype=torch.float32)
        self.accelerator.register_save_state_pre_hook(self._save_lora)
        self.accelerator.register_load_state_pre_hook(self._load_lora)

    def _save_lora(self, models: list[Any], weights: list[Any], folder: str) -> None:
        if self.accelerator.is_main_process:
            for model in models:
                layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(self.accelerator.unwrap_model(model)))
                weights.pop()
            StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)

    def _load_lora(self, models: list[Any], folder: str) -> None:
        model = models.pop()
        state, _ = StableDiffusionPipeline.lora_state_dict(folder)
        state = {name.replace("unet.", ""): value for name, value in state.items() if name.startswith("unet.")}
        set_peft_model_state_dict(model, convert_unet_state_dict_to_peft(state), adapter_name="default")
        cast_training_params([model], dtype=torch.float32)


def plain(folder: str, lora: bool = False) -> dict[str, Any]:
    """Train in PyTorch alone."""
    set_seed(0)
    vae, text_encoder, schedule, unet = make_vae(), make_text_encoder(), noise_schedule(), make_unet()
    if lora:
        unet.requires_grad_(False)
        set_seed(1)
        unet.add_adapter(adapter())
    average = EMAModel(make_unet().parameters(), decay=0.9)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(trained)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    losses, norms, total = [], [], 0.0
    batches = [batch for _ in range(4) for batch in DataLoader(Pictures(IMAGES), batch_size=BATCH)]
    for number, batch in enumerate(batches[: STEPS * WINDOW]):
        loss = loss_of(unet, vae, text_encoder, schedule, batch) / WINDOW
        loss.backward()
        total += loss.item()
        if (number + 1) % WINDOW == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not lora:
                average.step(unet.parameters())
            losses.append(total)
            total = 0.0
    averaged = sum(float(parameter.double().abs().sum()) for parameter in average.shadow_params)
    return {"losses": losses, "norms": norms, "weights": weigh(unet), "averaged": averaged}


def text_to_image(folder: str) -> dict[str, Any]:
    script = TextToImage(folder, limit=1)
    script.train()
    return script.report(averaged=script.averaged(), left=sorted(path.name for path in Path(folder).glob("checkpoint-*")))


def text_to_image_bf16(folder: str) -> dict[str, Any]:
    script = TextToImage(folder, precision="bf16")
    script.train()
    return script.report()


def text_to_image_resumed(folder: str) -> dict[str, Any]:
    """Stop after three updates, and go on in a new script."""
    first = TextToImage(folder, until=3)
    first.train()
    first.accelerator.free_memory()
    second = TextToImage(folder, resume=True)
    second.train()
    return {**second.report(averaged=second.averaged()), "losses": first.losses + second.losses, "norms": first.norms + second.norms}


def lora(folder: str) -> dict[str, Any]:
    script = DreamBoothLora(folder)
    script.train()
    script.accelerator.wait_for_everyone()
    files = sorted(path.name for path in (Path(folder) / "checkpoint-6").iterdir())
    return script.report(files=files)


def lora_resumed(folder: str) -> dict[str, Any]:
    first = DreamBoothLora(folder, until=3)
    first.train()
    first.accelerator.free_memory()
    second = DreamBoothLora(folder, resume=True)
    second.train()
    return {**second.report(), "losses": first.losses + second.losses, "norms": first.norms + second.norms}


if __name__ == "__main__":
    cases = {
        "text_to_image": text_to_image, "text_to_image_bf16": text_to_image_bf16, "text_to_image_resumed": text_to_image_resumed,
        "lora": lora, "lora_resumed": lora_resumed,
    }  # fmt: skip
    if WORLD == 1:
        cases |= {"plain": plain, "plain_lora": lambda folder: plain(folder, lora=True)}
    run_cases(cases)
