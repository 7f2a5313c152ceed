"""Runs of trl's trainers, one function for each, on any number of processes. Each returns what the run shows.

Start it with `python`, `torchrun` or `accelerate launch`, with CASE_FOLDER set and the names of cases as arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import trl
from datasets import Dataset
from models import arguments, run_cases, summarize
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, set_seed
from words import WORDS, make_tokenizer, sentence

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def qwen2(labels: int | None = None) -> PreTrainedModel:
    """Return a tiny Qwen2 with weights from seed 0, for text or with a head for scores."""
    set_seed(0)
    more = {} if labels is None else {"num_labels": labels}
    config = Qwen2Config(
        vocab_size=len(WORDS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, **more,
    )  # fmt: skip
    return Qwen2ForCausalLM(config) if labels is None else AutoModelForSequenceClassification.from_config(config)


def texts(rows: int = 24) -> Dataset:
    return Dataset.from_list([{"text": sentence(row, 4 + row % 5)} for row in range(rows)])


def prompts(rows: int = 24) -> Dataset:
    return Dataset.from_list([{"prompt": sentence(row, 3)} for row in range(rows)])


def preferences(rows: int = 24) -> Dataset:
    """Return prompts with an answer that is better and one that is worse."""
    return Dataset.from_list(
        [
            {"prompt": sentence(row, 3), "chosen": " " + sentence(row + 100, 3), "rejected": " " + sentence(row + 200, 4)}
            for row in range(rows)
        ]
    )


def build(folder: str, method: str, model: PreTrainedModel, data: Dataset, more: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the trainer of a method; `more` are arguments of the trainer, `options` of its config."""
    config, trainer = getattr(trl, f"{method}Config"), getattr(trl, f"{method}Trainer")
    chosen = {"max_steps": 4, "bf16": False, "gradient_checkpointing": False, **options}
    set_seed(5)
    return trainer(
        model=model, args=arguments(folder, config, **chosen), train_dataset=data, processing_class=make_tokenizer(), **(more or {})
    )


def run(trainer: Any, **options: Any) -> dict[str, Any]:
    trainer.train(**options)
    return summarize(trainer)


def sft(folder: str) -> dict[str, Any]:
    """Supervised fine-tuning, evaluated at the end."""
    trainer = build(folder, "SFT", qwen2(), texts(), {"eval_dataset": texts(7)}, max_length=16)
    trainer.train()
    return summarize(trainer, evaluated=trainer.evaluate()["eval_loss"])


def sft_packed(folder: str) -> dict[str, Any]:
    """Several texts in each sequence."""
    return run(build(folder, "SFT", qwen2(), texts(64), max_length=16, packing=True, packing_strategy="wrapped"))


def sft_lora(folder: str) -> dict[str, Any]:
    return run(build(folder, "SFT", qwen2(), texts(), {"peft_config": LORA}, max_length=16))


def sft_resumed(folder: str) -> dict[str, Any]:
    """Two of four steps, and the rest by a new trainer from the checkpoint; `whole` is the run without a stop."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_length": 16, "warmup_steps": 1}
    whole = build(folder, "SFT", qwen2(), texts(), **saving)
    whole.train()
    again = build(folder, "SFT", qwen2(), texts(), **saving)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {"whole": summarize(whole), "resumed": summarize(again)}


def dpo(folder: str) -> dict[str, Any]:
    return run(build(folder, "DPO", qwen2(), preferences(), {"ref_model": qwen2()}, max_length=16))


def dpo_lora(folder: str) -> dict[str, Any]:
    """The model without its adapters is the reference."""
    return run(build(folder, "DPO", qwen2(), preferences(), {"peft_config": LORA}, max_length=16))


def reward(folder: str) -> dict[str, Any]:
    return run(build(folder, "Reward", qwen2(labels=1), preferences(), max_length=16))


def count_red(completions: list[str], **_: Any) -> list[float]:
    """Return a reward for each completion: long ones with the word red are good."""
    return [completion.count("red") + 0.1 * len(completion.split()) for completion in completions]


def grpo(folder: str) -> dict[str, Any]:
    """Completions are drawn, so each number of processes has its own; rewards are gathered from all."""
    trainer = build(
        folder, "GRPO", qwen2(), prompts(), {"reward_funcs": count_red}, num_generations=2, max_completion_length=4, temperature=1.0
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return summarize(trainer, rewards=rewards)


def drawn_apart(folder: str) -> dict[str, Any]:
    """How many different random numbers the processes have after GRPO began: each draws its own completions."""
    trainer = build(folder, "GRPO", qwen2(), prompts(), {"reward_funcs": count_red}, num_generations=2, max_completion_length=4)
    trainer.train()
    drawn = trainer.accelerator.gather(torch.rand(1))
    return {"different": len(set(drawn.tolist())), "processes": trainer.accelerator.num_processes}


if __name__ == "__main__":
    run_cases({case.__name__: case for case in (sft, sft_packed, sft_lora, sft_resumed, dpo, dpo_lora, reward, grpo, drawn_apart)})
