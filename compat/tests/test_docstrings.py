"""Every example in a docstring of the drop-in is right."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import accelerate
import pytest

NAMES = sorted(
    found.name
    for found in pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda name: None)
    if ".scripts" not in found.name and found.name not in ("accelerate.memory_utils", "accelerate.utils.rich")
)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    """The examples of one module."""
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
