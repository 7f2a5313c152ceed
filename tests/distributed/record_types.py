"""Classes of records that every process can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class Answer:
    """A record of a class."""

    prompt: str
    embedding: torch.Tensor


class Pair(NamedTuple):
    """A record with names."""

    prompt: str
    embedding: torch.Tensor
