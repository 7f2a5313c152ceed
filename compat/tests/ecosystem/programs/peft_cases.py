"""Runs of peft's adapters with transformers' Trainer, one function for each; see `trainer_cases`."""

from __future__ import annotations

import os
from typing import Any

import torch
from models import Tokens, arguments, gpt2, run_cases, summarize, weigh
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer, set_seed


def lora(**options: Any) -> LoraConfig:
    """Return adapters of rank 4 on attention, not zero at the start, so that every weight has a gradient."""
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    return LoraConfig(task_type="CAUSAL_LM", **{**chosen, **options})


def adapted(config: Any = None, dropout: float = 0.0) -> Any:
    """Return the tiny GPT-2 with an adapter whose weights come from seed 1."""
    model = gpt2(dropout=dropout)
    set_seed(1)
    return get_peft_model(model, config or lora())


def make(folder: str, model: Any, **options: Any) -> Trainer:
    """Return a Trainer for an adapter."""
    return Trainer(model=model, args=arguments(folder, **options), train_dataset=Tokens(40), eval_dataset=Tokens(13, seed=1))


def compute_logits(model: torch.nn.Module) -> list[float]:
    """Return a few outputs."""
    rows = torch.stack([sample["input_ids"] for sample in (Tokens(3, seed=5)[index] for index in range(3))])
    with torch.no_grad():
        return model.eval()(input_ids=rows).logits[:, -1, :4].flatten().tolist()


def check_saves(folder: str, trainer: Trainer) -> dict[str, Any]:
    """Return outputs of the trained model, of its saved adapter on a new base, and of the merged model that was saved and loaded."""
    trainer.save_model(folder + "/adapter")
    trainer.accelerator.wait_for_everyone()
    files = sorted(os.listdir(folder + "/adapter"))
    merged = PeftModel.from_pretrained(gpt2(), folder + "/adapter").merge_and_unload()
    merged.save_pretrained(folder + "/merged")
    trainer.accelerator.wait_for_everyone()
    return {
        "files": [name for name in files if name.startswith("adapter")],
        "tensors": len(load_file(folder + "/adapter/adapter_model.safetensors")),
        "from adapter": compute_logits(PeftModel.from_pretrained(gpt2(), folder + "/adapter")),
        "from merged": compute_logits(GPT2LMHeadModel.from_pretrained(folder + "/merged")),
        "base": weigh(gpt2()),
    }


def train_lora(folder: str) -> dict[str, Any]:
    """LoRA, evaluated, saved merged and unmerged."""
    trainer = make(folder, adapted(), eval_strategy="steps", eval_steps=3)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    trained = compute_logits(model)
    counts = model.get_nb_trainable_parameters()
    return summarize(trainer, trained=trained, counts=list(counts), kind=type(model).__name__, **check_saves(folder, trainer))


def resume_lora(folder: str) -> dict[str, Any]:
    """LoRA with dropout, resumed in the middle of an epoch."""
    options: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    whole = make(folder, adapted(lora(lora_dropout=0.1), dropout=0.1), **options)
    whole.train()
    report = summarize(whole, files=sorted(name for name in os.listdir(folder + "/checkpoint-3") if name.startswith("adapter")))
    again = make(folder, adapted(lora(lora_dropout=0.1), dropout=0.1), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    report["from 3"] = summarize(again)
    return report


def best_lora(folder: str) -> dict[str, Any]:
    """The best adapter is loaded at the end."""
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make(folder, adapted(), load_best_model_at_end=True, metric_for_best_model="eval_loss", **steps)
    trainer.train()
    return summarize(trainer, best=os.path.basename(str(trainer.state.best_model_checkpoint)))


def variants(folder: str) -> dict[str, Any]:
    """Other adapters: weight-decomposed, several layers with a saved head, IA3, prompt tuning; checkpointed gradients and bf16."""
    configs = {
        "dora": (lora(use_dora=True), {}),
        "head": (lora(target_modules=["c_attn", "c_fc"], modules_to_save=["ln_f"]), {}),
        "ia3": (IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True), {}),
        "prompt": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), {}),
        "checkpointed": (lora(), {"gradient_checkpointing": True}),
        "half": (lora(), {"bf16": True}),
    }
    report = {}
    for name, (config, options) in configs.items():
        trainer = make(f"{folder}/{name}", adapted(config), max_steps=4, **options)
        trainer.train()
        report[name] = summarize(trainer)["losses"]
    return report


def sharded_lora(folder: str) -> dict[str, Any]:
    """LoRA on a model sharded by TrainingArguments, saved as an adapter."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "FULL_STATE_DICT"}
    trainer = make(folder, adapted(), fsdp=True, fsdp_config=config, eval_strategy="steps", eval_steps=3)
    trainer.train()
    kinds = sorted({type(parameter).__name__ for parameter in trainer.model.parameters() if parameter.requires_grad})
    return summarize(trainer, kinds=kinds, **check_saves(folder, trainer))


def resume_sharded_lora(folder: str) -> dict[str, Any]:
    """The same, resumed from a checkpoint."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "FULL_STATE_DICT"}
    options: dict[str, Any] = {"fsdp": True, "fsdp_config": config, "max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    whole = make(folder, adapted(), **options)
    whole.train()
    report = summarize(whole)
    again = make(folder, adapted(), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    report["from 3"] = summarize(again)
    return report


CASES = {case.__name__: case for case in (train_lora, resume_lora, best_lora, variants, sharded_lora, resume_sharded_lora)}

if __name__ == "__main__":
    run_cases(CASES)
