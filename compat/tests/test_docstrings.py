"""The examples in the docstrings of the drop-in run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
WITH_EXAMPLES = sorted(
    ".".join(file.relative_to(SOURCES).with_suffix("").parts)
    for file in SOURCES.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_examples_in_docstrings(path: str) -> None:
    import torch

    module = importlib.import_module(path.removesuffix(".__init__"))
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 10
