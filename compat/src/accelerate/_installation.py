"""What stands beside the drop-in: the original package, and clients newer than those it was tested with. Both are warned of, once.

Nothing is imported for it. The original is found by the names of folders on the path: two installations of `accelerate` overwrite or hide
each other, and which one answers depends on the order of the path. A client is asked for its version only where it is in use already.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TESTED", "find_originals", "warn_of_newer_clients", "warn_of_original"]

TESTED = {"transformers": "5.22.2", "peft": "0.21.2", "trl": "1.16.0", "diffusers": "0.42.1"}
"""The newest release of each client that the tests of the drop-in run (`constraints.txt`)."""
_METADATA = re.compile(r"accelerate-(?P<version>[^-]+)(-[^-]*)?\.(dist-info|egg-info)", re.IGNORECASE)
_ONLY_IN_ORIGINAL = (os.path.join("commands", "menu", "selection_menu.py"), os.path.join("commands", "menu", "keymap.py"))
"""Files of the original that the drop-in does not have: left behind, or written over it, they are in its folder."""
_said: set[str] = set()


def find_originals(path: Iterable[str] | None = None, package: Path | None = None) -> list[str]:
    """Return where the original package, or a part of it, is installed besides the drop-in.

    >>> find_originals([], Path("no such folder"))
    []
    """
    found = []
    for entry in dict.fromkeys(sys.path if path is None else path):
        try:
            names = os.listdir(entry or os.curdir)
        except OSError:  # not a folder: an archive, or an entry that is not there
            continue
        for name in names:
            match = _METADATA.fullmatch(name) if name[:10].lower() == "accelerate" else None
            if match is not None and "slipstream" not in match["version"]:
                found.append(f"accelerate {match['version']} is installed too, in {entry or os.getcwd()}")
    folder = Path(__file__).parent if package is None else package
    found += [f"a file of the original is in its folder: {folder / file}" for file in _ONLY_IN_ORIGINAL if os.path.exists(folder / file)]
    return found


def warn_of_original(path: Iterable[str] | None = None, package: Path | None = None) -> None:
    """Warn if Hugging Face Accelerate is installed too; called where `accelerate` is imported."""
    found = find_originals(path, package)
    if found:
        warnings.warn(
            f"`import accelerate` found the drop-in of Slipstream, in {Path(__file__).parent}, but {'; '.join(found)}. With another order "
            "of the path, or after another installation, that one answers. Run `pip uninstall accelerate` until none is left, then install "
            "the one that you want; `slipstream doctor` shows both.",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return a release as numbers that can be compared.

    >>> _numbers("5.22.2"), _numbers("5.23.0.dev0")
    ((5, 22, 2), (5, 23, 0))
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def warn_of_newer_clients() -> None:
    """Warn, once for each, about clients in use that are newer than those that were tested; called where an Accelerator is made."""
    for name, newest in TESTED.items():
        version = getattr(sys.modules.get(name), "__version__", None)
        if name in _said or not isinstance(version, str) or _numbers(version) <= _numbers(newest):
            continue
        _said.add(name)
        warnings.warn(
            f"{name} {version} is newer than what Slipstream's drop-in for accelerate was tested with (up to {newest}). If something "
            f"fails that works with Accelerate, install {name}=={newest}, and report it.",
            stacklevel=3,
        )
