"""A line to fit, and loaders over the few sentence pairs that lie beside a project's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelerate._forwarding import forward_names

__all__ = ["RegressionDataset", "RegressionModel", "mocked_dataloaders", "mocked_dataloaders_for_autoregressive_models"]

_forwarded, __getattr__, __dir__ = forward_names(__name__, {"accelerate.utils.dataclasses": "DistributedType"})

_SAMPLES = Path("tests/test_samples/MRPC")


class RegressionDataset:
    """Points near the line `y = a * x + b`, as dictionaries with `x` and `y`.

    >>> RegressionDataset(length=3, seed=1)[0]["x"].dtype
    dtype('float32')
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        self.y = (a * self.x + b + generator.normal(scale=0.1, size=(length,))).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(torch.nn.Module):
    """The line `a * x + b` with two parameters. It prints its dtypes at the first batch; `double_output` returns the result twice."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> Any:
        assert x is not None
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        y = x * self.a + self.b
        return (y, y) if self.double_output else y


def _sentence_pairs() -> Any:
    """Return the rows of tests/test_samples/MRPC, for examples that are tested without a download."""
    from datasets import load_dataset

    files = {"train": str(_SAMPLES / "train.csv"), "validation": str(_SAMPLES / "dev.csv")}
    return load_dataset("csv", data_files=files)


def _padding(accelerator: Any) -> dict[str, Any]:
    from accelerate.utils.dataclasses import DistributedType

    if accelerator.distributed_type == DistributedType.XLA:  # one shape for all batches: a new shape is a new compilation
        return {"padding": "max_length", "max_length": 128}
    return {"padding": "longest"}


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader, DataLoader]:
    """Return loaders for training and evaluation over a few MRPC pairs, tokenized for bert-base-cased."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    rows = _sentence_pairs()
    label_ids = {label: index for index, label in enumerate(rows["train"].unique("label"))}

    def tokenize(examples: dict[str, Any]) -> Any:
        encoded = tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None, padding="max_length")
        encoded["labels"] = [label_ids[label] for label in examples["label"]]
        return encoded

    tokenized = rows.map(tokenize, batched=True, remove_columns=["sentence1", "sentence2", "label"])

    def collate(examples: list[dict[str, Any]]) -> Any:
        return tokenizer.pad(examples, return_tensors="pt", **_padding(accelerator))

    train = DataLoader(tokenized["train"], shuffle=True, collate_fn=collate, batch_size=batch_size)
    return train, DataLoader(tokenized["validation"], shuffle=False, collate_fn=collate, batch_size=1)


def mocked_dataloaders_for_autoregressive_models(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader, DataLoader]:
    """Return loaders for training and evaluation of a language model over a few MRPC sentences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM-360M")
    tokenizer.pad_token = tokenizer.eos_token
    rows = _sentence_pairs()

    def tokenize(examples: dict[str, Any]) -> Any:
        return tokenizer(examples["sentence1"], truncation=True, max_length=None)

    tokenized = rows.filter(lambda row: row["sentence1"]).map(tokenize, batched=True, remove_columns=rows["train"].column_names)

    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = tokenizer.pad(examples, return_tensors="pt", **_padding(accelerator))
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    train = DataLoader(tokenized["train"], shuffle=False, collate_fn=collate, batch_size=batch_size)
    return train, DataLoader(tokenized["validation"], shuffle=False, collate_fn=collate, batch_size=1)
