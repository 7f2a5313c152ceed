"""Checkpoints of transformers' Trainer under FSDP: what is in a folder, and a run that resumes from it. Two processes or more."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import WORLD, Tokens, arguments, gpt2, run_cases, summarize, weigh
from transformers import GPT2LMHeadModel, Trainer


def make(folder: str, config: dict[str, Any], model: Any = None, count: int = 36, **options: Any) -> Trainer:
    """Return a Trainer that shards and saves after three of six updates."""
    chosen = {"transformer_layer_cls_to_wrap": ["GPT2Block"], **config}
    args = arguments(folder, fsdp="full_shard auto_wrap", fsdp_config=chosen, save_strategy="steps", save_steps=3, **options)
    return Trainer(model=model or gpt2(dropout=0.1), args=args, train_dataset=Tokens(count), eval_dataset=Tokens(13, seed=1))


def listing(folder: str) -> list[str]:
    """Return the files of a checkpoint."""
    return sorted(
        os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/") for root, _, names in os.walk(folder) for name in names
    )


def saved_and_resumed(folder: str, config: dict[str, Any], model: Callable[[], Any] = lambda: gpt2(dropout=0.1)) -> dict[str, Any]:
    """Train, then resume in the middle with other weights and another seed, which must not matter."""
    trainer = make(folder, config, model())
    trainer.train()
    report = summarize(trainer, files=listing(f"{folder}/checkpoint-3"), version=trainer.accelerator.state.fsdp_plugin.fsdp_version)
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    again = make(folder, config, other)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    report["resumed"] = summarize(again)
    return report


def full(folder: str) -> dict[str, Any]:
    """Whole state dicts, and weights that `from_pretrained` reads."""
    report = saved_and_resumed(folder, {"state_dict_type": "FULL_STATE_DICT"})
    loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-6")
    return {**report, "loaded": weigh(loaded)}


def sharded(folder: str) -> dict[str, Any]:
    """Sharded state dicts."""
    return saved_and_resumed(folder, {"state_dict_type": "SHARDED_STATE_DICT"})


def sharded_for_accelerate(folder: str) -> dict[str, Any]:
    """Sharded state dicts in folders of torch.distributed.checkpoint."""
    os.environ["ACCELERATE_CHECKPOINT_FORMAT"] = "accelerate"
    try:
        return saved_and_resumed(folder, {"state_dict_type": "SHARDED_STATE_DICT"})
    finally:
        del os.environ["ACCELERATE_CHECKPOINT_FORMAT"]


def version_1(folder: str) -> dict[str, Any]:
    """What was written for FSDP1: the model is prepared first, and the optimizer is made from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return saved_and_resumed(folder, {"version": 1, "state_dict_type": "FULL_STATE_DICT"})


def version_1_sharded(folder: str) -> dict[str, Any]:
    """The same with sharded state dicts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return saved_and_resumed(folder, {"version": 1, "state_dict_type": "SHARDED_STATE_DICT"})


def best(folder: str) -> dict[str, Any]:
    """`load_best_model_at_end`, where the highest loss counts as the best, so that it is an earlier checkpoint."""
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_total_limit": 2, "greater_is_better": True}
    trainer = make(folder, {"state_dict_type": "FULL_STATE_DICT"}, **options)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return summarize(trainer, best=trainer.state.best_metric, loss=loss, checkpoint=trainer.state.best_model_checkpoint[-1])


def adapter(folder: str, **config: Any) -> dict[str, Any]:
    """LoRA: sharded, and only the adapter is saved."""
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open

    def make_model() -> Any:
        model = gpt2()
        torch.manual_seed(11)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))

    report = saved_and_resumed(folder, {"state_dict_type": "SHARDED_STATE_DICT", **config}, make_model)
    names: set[str] = set()
    for name in report["files"]:
        if name.startswith("pytorch_model_fsdp_0/"):
            with safe_open(f"{folder}/checkpoint-3/{name}", "pt") as opened:
                names |= set(opened.keys())
    return {**report, "names": sorted(names)}


def adapter_version_1(folder: str) -> dict[str, Any]:
    """The same as it was written for FSDP1: Trainer changes the policy of the plugin after the Accelerator was made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adapter(folder, version=1)


def other_kind(folder: str) -> dict[str, Any]:
    """A run with whole state dicts resumes from shards."""
    trainer = make(folder, {"state_dict_type": "SHARDED_STATE_DICT"})
    trainer.train()
    report = summarize(trainer)
    again = make(folder, {"state_dict_type": "FULL_STATE_DICT"})
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {**report, "resumed": summarize(again)}


def whole(folder: str) -> dict[str, Any]:
    """Without FSDP, on any number of processes; without dropout."""
    trainer = Trainer(model=gpt2(), args=arguments(folder), train_dataset=Tokens(40))
    trainer.train()
    return summarize(trainer)


def plain_sharded(folder: str) -> dict[str, Any]:
    """With FSDP, without dropout."""
    trainer = make(folder, {}, gpt2(), count=40)
    trainer.train()
    return summarize(trainer)


CASES = {
    case.__name__: case
    for case in (
        full, sharded, sharded_for_accelerate, version_1, version_1_sharded, best, adapter, adapter_version_1, other_kind, whole,
        plain_sharded,
    )
}  # fmt: skip

if __name__ == "__main__":
    run_cases(CASES if WORLD > 1 else {"whole": whole})
