"""Train a tiny model with one of trl's trainers, and print its losses and the sum of its weights as JSON.

    python trl_methods.py sft OUTPUT_FOLDER [--peft] [--resume] [--steps 4] [--batch 4]
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

warnings.filterwarnings("ignore")
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "sun", "moon", "star", "sky", "sea", "up", "down", "left", "right"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_config(**changes: object) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(WORDS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, **changes,
    )  # fmt: skip


def sentence(seed: int, words: int) -> str:
    drawn = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn)


def make_data(method: str, rows: int = 24) -> Dataset:
    if method == "sft":
        return Dataset.from_list([{"text": sentence(row, 4 + row % 5)} for row in range(rows)])
    if method in ("grpo", "rloo"):
        return Dataset.from_list([{"prompt": sentence(row, 3)} for row in range(rows)])
    return Dataset.from_list(
        [
            {"prompt": sentence(row, 3), "chosen": " " + sentence(row + 100, 3), "rejected": " " + sentence(row + 200, 4)}
            for row in range(rows)
        ]
    )


def count_red(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("red")) + 0.1 * len(completion.split()) for completion in completions]


def make_trainer(method: str, options: argparse.Namespace):
    import trl

    set_seed(7)
    tokenizer = make_tokenizer()
    peft_config = None
    if options.peft:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    common = dict(
        output_dir=options.folder, per_device_train_batch_size=options.batch, max_steps=options.steps, logging_steps=1, report_to="none",
        use_cpu=True, learning_rate=1e-2, save_strategy="steps", save_steps=2, seed=11, bf16=False, gradient_checkpointing=False,
        gradient_accumulation_steps=options.accumulate, disable_tqdm=True,
    )  # fmt: skip
    kinds = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, {"max_length": 16}),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"max_length": 16}),
        "reward": (trl.RewardConfig, trl.RewardTrainer, {"max_length": 16}),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer, {"num_generations": 2, "max_completion_length": 4, "temperature": 1.0}),
    }
    config, trainer, more = kinds[method]
    if method == "reward":
        config_of_model = make_config(num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config_of_model)
    else:
        model = Qwen2ForCausalLM(make_config())
    ref_model = Qwen2ForCausalLM(model.config) if method == "dpo" and peft_config is None else None
    if ref_model is not None:
        ref_model.load_state_dict(model.state_dict())
    keywords = {"grpo": {"reward_funcs": count_red}, "dpo": {"ref_model": ref_model}}.get(method, {})
    return trainer(
        model=model,
        args=config(**common, **more),
        train_dataset=make_data(method),
        processing_class=tokenizer,
        peft_config=peft_config,
        **keywords,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["sft", "dpo", "reward", "grpo"])
    parser.add_argument("folder")
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    trainer = make_trainer(options.method, options)
    trainer.train(resume_from_checkpoint=options.resume or None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    total = sum(p.detach().double().abs().sum().item() for p in trainer.accelerator.unwrap_model(trainer.model).parameters())
    if trainer.accelerator.is_main_process:
        print(json.dumps({"losses": losses, "weights": total, "processes": trainer.accelerator.num_processes}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
