"""Whether another distribution named accelerate is installed beside this one; the first import says so.

The folders of the path are listed, instead of asking `importlib.metadata`, whose import alone would take longer than all of this package's.
"""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["warn_of_another_accelerate"]


def _installed(path: list[str]) -> dict[str, str]:
    """Return the versions of accelerate that are installed on a path, with their folders."""
    found: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or a folder that does not exist: both are allowed on the path
            continue
        for name in names:
            if name.startswith("accelerate-") and name.endswith(".dist-info"):
                found.setdefault(name[len("accelerate-") : -len(".dist-info")], folder)
    return found


def warn_of_another_accelerate(version: str, path: list[str] | None = None) -> None:
    """Warn if the original is installed too: which of the two is imported then depends on the order of the path."""
    for other, folder in _installed(sys.path if path is None else path).items():
        if other != version:
            warnings.warn(
                f"`import accelerate` found the drop-in of Slipstream ({version}), but accelerate {other} is installed too, in {folder}. "
                "Another order of the path imports that one. `pip uninstall accelerate` until none is left, then install the one that "
                "you want; `slipstream doctor` shows both.",
                stacklevel=3,
            )
