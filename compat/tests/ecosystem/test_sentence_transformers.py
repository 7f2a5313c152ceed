"""sentence-transformers: its models run on the drop-in; its trainer asks who published the package, and refuses.

The trainer wants the home page of the distribution `accelerate` to be one of Hugging Face. Ours is not, and does not say that it is.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "sun": 2, "moon": 3, "sea": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16
    )
    BertModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def make_encoder(folder: Path, **options: object) -> SentenceTransformer:
    transformer = Transformer(str(folder), **options)
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")


def test_encodes(folder):
    encoder = make_encoder(folder)
    assert encoder.encode(["sun moon", "sea"]).shape == (2, 16)


def test_the_trainer_refuses(folder):
    """What `docs/transformers.md` says about it stays true."""
    assert "huggingface" not in (metadata.metadata("accelerate")["Home-page"] or "")
    with pytest.raises(RuntimeError, match="accelerate"):
        SentenceTransformerTrainer(model=make_encoder(folder))
