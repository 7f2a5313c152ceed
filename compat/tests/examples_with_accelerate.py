"""The examples of this repository with `accelerate` in place of `slipstream` in their imports, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIFFERENT = {
    "effective_batch": "batches are shared out by Accelerate's rule, which repeats samples to fill the last one",
    "larger_than_memory": "a device map is a plain dictionary, as in Accelerate, and has no table",
    "resume": "as in Accelerate, a script that resumes within an epoch skips the batches itself (skip_first_batches)",
    "uneven_data": "with even_batches=False processes get different numbers of batches, as in Accelerate",
}
"""Examples of what Slipstream does and Accelerate does otherwise: there the drop-in keeps Accelerate's way."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in DIFFERENT)


def write_example(name: str, folder: Path) -> Path:
    """Write an example with its imports changed, and return its path."""
    text = (EXAMPLES / f"{name}.py").read_text()
    text, changed = re.subn(r"^(\s*)(from|import) slipstream\b", r"\1\2 accelerate", text, flags=re.MULTILINE)
    assert changed
    target = folder / f"{name}.py"
    target.write_text(text)
    return target
