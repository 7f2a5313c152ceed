"""Tiny models, data and reports for the programs of this folder. Everything is made from configs and seeds; nothing is downloaded."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
BATCH = 8
"""Samples per update on all processes together."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens that repeat a pattern, so that there is something to learn."""

    def __init__(self, count: int, length: int = 12, seed: int = 0, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(count):
            size = int(torch.randint(4, length + 1, (1,), generator=generator)) if ragged else length
            pattern = torch.randint(1, 48, (3,), generator=generator)
            self.samples.append(pattern.repeat(size)[:size].clone())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


class Classes(Dataset[dict[str, torch.Tensor]]):
    """Sequences with a label: whether the first token is small."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.tokens = torch.randint(1, 48, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": (row[0] < 24).long()}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The sequences of `Tokens`, without a length."""

    def __init__(self, count: int, **options: Any) -> None:
        self.inner = Tokens(count, **options)

    def __iter__(self) -> Any:
        return iter([self.inner[index] for index in range(len(self.inner))])


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack sequences of different lengths; padded labels are -100."""
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        missing = length - len(row["input_ids"])
        batch["input_ids"].append(torch.nn.functional.pad(row["input_ids"], (0, missing)))
        batch["labels"].append(torch.nn.functional.pad(row["labels"], (0, missing), value=-100))
        batch["attention_mask"].append((torch.arange(length) < len(row["input_ids"])).long())
    return {name: torch.stack(values) for name, values in batch.items()}


def gpt2(dropout: float = 0.0, layers: int = 2) -> GPT2LMHeadModel:
    """Return a tiny GPT-2 with weights from seed 0."""
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=48, n_positions=16, n_embd=16, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def bert() -> BertForSequenceClassification:
    """Return a tiny BERT classifier with weights from seed 0."""
    set_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    """Return a tiny T5 with weights from seed 0."""
    set_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def arguments(folder: str, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> TrainingArguments:
    """Return arguments with the same effective batch on any number of processes."""
    chosen: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": BATCH // WORLD, "per_device_eval_batch_size": 4, "max_steps": 6,
        "logging_steps": 1, "learning_rate": 0.01, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    return kind(**{**chosen, **options})


def summarize(trainer: Trainer, **more: Any) -> dict[str, Any]:
    """Return what a run shows: losses, gradient norms, learning rates, metrics, and a number for all weights."""
    history = trainer.state.log_history
    timed = ("runtime", "per_second", "total_flos")
    evaluations = [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in history
        if any(name.startswith("eval_") for name in entry)
    ]
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluations": evaluations,
        "steps": trainer.state.global_step,
        "weights": weigh(trainer.model),
        **more,
    }


def weigh(model: torch.nn.Module) -> float:
    """Return the sum of the absolute values of all parameters, whole also where they are sharded."""
    total = 0.0
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        total += float(whole.detach().double().abs().sum())
    return total


def run_cases(cases: dict[str, Callable[[str], dict[str, Any]]]) -> None:
    """Run the cases named on the command line, or all, each in its folder below CASE_FOLDER.

    Rank 0 writes a line of JSON for each, and every rank one for each error: to a file of its own in REPORT_FOLDER, else to its output.
    """
    folder = os.environ.get("REPORT_FOLDER")
    for name in sys.argv[1:] or list(cases):
        try:
            report = cases[name](os.path.join(os.environ["CASE_FOLDER"], name))
        except Exception as error:  # one case must not keep the others from running; the test shows the traceback
            report = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        if RANK == 0 or "error" in report:
            line = json.dumps({"case": name, "rank": RANK, **report})
            if folder is None:
                print(line, flush=True)
            else:
                with open(os.path.join(folder, f"rank{RANK}.jsonl"), "a") as file:
                    file.write(line + "\n")
