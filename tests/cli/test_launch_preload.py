"""A program that trains gets torch's compiler, which its first optimizer imports, with torch itself: once for all its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    "with an optimizer": ("from torch import optim", True),
    "without": ("import torch", False),
    "one that sets the compiler up": ("import os; os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'; from torch import optim", False),
}


@pytest.mark.launched
@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_compiler_is_imported_before_the_workers_are_forked(tmp_path: Path, text: str, expected: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import sys\nloaded = 'torch._dynamo' in sys.modules\n{text}\nprint('loaded', loaded)\n")
    command = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"loaded {expected}"] * 2
    assert done.stderr == ""
