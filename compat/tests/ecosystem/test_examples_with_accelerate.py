"""Every example of this repository runs with `accelerate` in its imports, started by `accelerate launch`."""

from __future__ import annotations

import pytest
from examples_with_accelerate import NAMES, write_example


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_example(launch, tmp_path, name, num_processes):
    """The example ends well; its own assertions compare results."""
    launch(write_example(name, tmp_path), num_processes, timeout=300)
