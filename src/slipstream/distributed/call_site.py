"""Find the user's file and line that led to a call, for error messages and reports.

The call site is the innermost frame that belongs neither to this package nor to what stands between the user and it (`contextlib`,
torch's autograd and module calls, progress bars). It is taken on every collective, so it is one short loop over code objects with a
cached look-up. `filter_stack` keeps the lines of the user's program and the innermost frames of a whole stack. It imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = [
    "StackLine",
    "call_path",
    "call_site",
    "calling_code",
    "is_user_file",
    "is_package_frame",
    "filter_stack",
    "format_site",
    "user_frames",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BUNDLED_PROGRAMS = os.path.join(_PACKAGE, "testing") + os.sep
"""Programs that ship inside the package (the self check, the rank pool) count as a user's."""
_LAYER = "accelerate"
"""The import name of the drop-in. Where that is loaded, it has `__slipstream_programs__`: the name of its folder of programs."""


def _is_inside(filename: str) -> bool:
    """Whether a file is one of this package or of the drop-in on top of it, and not a bundled program."""
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_BUNDLED_PROGRAMS)
    layer = vars(sys.modules[_LAYER]) if _LAYER in sys.modules else {}
    if "__slipstream_programs__" not in layer:
        return False
    root = os.path.join(os.path.dirname(layer["__file__"]), "")
    return filename.startswith(root) and not filename.startswith(os.path.join(root, layer["__slipstream_programs__"], ""))


@lru_cache(maxsize=4096)
def is_package_frame(filename: str) -> bool:
    """Whether a file lies between the user's line and ours: in this package, or in what calls it for the user."""
    return _is_inside(filename) or filename == contextlib.__file__ or filename.startswith((*_autograd(), *_progress_bars()))


def _progress_bars() -> tuple[str, ...]:
    """Return the folders of progress bars: one that is disabled takes the batches of a loader at another line than one that is shown."""
    loaded = (sys.modules.get(name) for name in ("tqdm", "rich"))
    files = (module.__file__ for module in loaded if module is not None)
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file is not None)


def _autograd() -> tuple[str, ...]:
    """Return the files of torch that lead from `loss.backward()` or a call of a model to a collective; empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return ()
    root = os.path.dirname(torch.__file__)
    inside = (
        ("autograd", ""), ("_tensor.py",), ("nn", "parallel", ""), ("nn", "modules", ""), ("distributed", "fsdp", ""), ("_dynamo", ""),
        ("utils", "_contextlib.py"), ("utils", "checkpoint.py"),
    )
    return tuple(os.path.join(root, *parts) for parts in inside)


@lru_cache(maxsize=4096)
def format_site(filename: str, line: int, function: str) -> str:
    """Return a place in the program, as messages show it.

    >>> format_site("/home/me/train.py", 12, "main"), format_site("/home/me/train.py", 40, "<module>")
    ('train.py:12 in main', 'train.py:40')
    """
    where = f"{os.path.basename(filename)}:{line}"
    return where if function == "<module>" else f"{where} in {function}"


def call_site() -> str:
    """Return the user's `file.py:line in function` that led here.

    >>> call_site().split(":")[0] != "call_site.py"
    True
    """
    frame = _user_frame()
    if frame is None:
        return "unknown place"
    return format_site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def call_path() -> str:
    """Return all lines of the user's program that led here, outermost last; the same on processes at the same place.

    >>> call_path() == call_path()
    True
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            lines.append(format_site(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return ", ".join(lines)


def calling_code() -> CodeType | None:
    """Return the code object of the user's function that led here.

    >>> calling_code().co_name
    '<module>'
    """
    frame = _user_frame()
    return None if frame is None else frame.f_code


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_package_frame(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


class StackLine(NamedTuple):
    """One frame of a stack."""

    text: str
    filename: str
    is_script: bool = False
    """The body of the program that the user started."""


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    folders = {os.path.dirname(os.__file__), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))}
    return "<frozen ", *(os.path.join(folder, "") for folder in sorted(filter(None, folders)))


@lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether a file is of the user's program: not of the standard library, not of an installed package, not ours.

    >>> is_user_file("train.py"), is_user_file(os.__file__), is_user_file(__file__)
    (True, False, False)
    """
    if _is_inside(filename):
        return False
    if filename.startswith(_BUNDLED_PROGRAMS):
        return True
    installed = {"site-packages", "dist-packages"}.intersection(filename.split(os.sep))
    return not installed and not filename.startswith(_libraries())


def filter_stack(stack: Sequence[StackLine], limit: int = 8, innermost: int = 3) -> list[str]:
    """Return, of a stack from the script on, the last `limit` lines of the user's program and the `innermost` of any kind.

    >>> stack = [StackLine("launcher", os.__file__), StackLine("script", "train.py", is_script=True), StackLine("step", "train.py")]
    >>> filter_stack([*stack, *[StackLine(f"library {depth}", os.__file__) for depth in range(20)]])
    ['script', 'step', 'library 17', 'library 18', 'library 19']
    """
    start = next((place for place, line in enumerate(stack) if line.is_script), 0)
    inside = stack[start:]
    places = [place for place, line in enumerate(inside) if is_user_file(line.filename)][-limit:]
    if not places:  # a program that is itself an installed package
        return [line.text for line in inside[-limit:]]
    last = range(max(0, len(inside) - innermost), len(inside))
    return [inside[place].text for place in sorted({*places, *last})]


def user_frames(frame: FrameType | None, limit: int = 8) -> list[str]:
    """Return the relevant frames of the stack that ends in this frame, innermost last, one line each.

    >>> user_frames(sys._getframe())[-1].startswith("File ")
    True
    """
    lines: list[StackLine] = []
    while frame is not None:
        code = frame.f_code
        is_script = code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__" and is_user_file(code.co_filename)
        lines.append(StackLine(f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}', code.co_filename, is_script))
        frame = frame.f_back
    return filter_stack(lines[::-1], limit)
