"""A language of sixteen words: its tokenizer, and sentences from seeds."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["red", "green", "blue", "one", "two", "three", "four", "sun", "moon", "star", "sky", "sea", "up", "down", "left", "right"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentence(seed: int, words: int) -> str:
    """Return random words from a seed."""
    drawn = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn)
