"""Scripts on disk: which files a path means, how they are read, and how all of them are written, or none.

A file is written beside its place, fsynced and renamed, after the old one was copied to a free name. Encoding marks, line ends and the
mode of a file stay. Nothing is written if one of the files cannot be.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from slipstream.config.files import back_up
from slipstream.errors import ConfigError

__all__ = ["ScriptFile", "decode_script", "find_scripts", "read_script", "write_scripts"]

_SUFFIXES: Final = (".py", ".ipynb")
_SKIPPED: Final = ("__pycache__", "node_modules", "site-packages", "build", "dist")
_MARK: Final = "\ufeff"


class ScriptFile(NamedTuple):
    """A script that was read."""

    path: Path
    text: str
    has_mark: bool
    """The file begins with the mark of UTF-8 (BOM), which `text` leaves out."""


def find_scripts(paths: Iterable[str]) -> list[Path]:
    """Return the scripts that files and folders mean, each once, in a stable order."""
    found: dict[str, Path] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            scripts = list(_in_folder(path))
            if not scripts:
                raise ConfigError(f"The folder {given} has no scripts: no file in it ends with .py or .ipynb.")
        elif path.exists():
            scripts = [path]
        else:
            raise ConfigError(f"There is no file {given}.\nGive the path of a script, a folder of scripts, or - for the standard input.")
        for script in scripts:
            found.setdefault(os.path.realpath(script), script)
    return list(found.values())


def _in_folder(folder: Path) -> Iterable[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not os.path.exists(f"{place}/{name}/pyvenv.cfg")
        )
        yield from (Path(place, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def read_script(path: Path) -> ScriptFile:
    """Return the text of a script, or raise what is wrong with the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from None
    return decode_script(content, path)


def decode_script(content: bytes, path: Path) -> ScriptFile:
    """Return the text in the bytes of a script; bytes that are not UTF-8 are an error with their place."""
    if b"\0" in content:
        raise ConfigError(f"{path} is a binary file, not a Python script.\nNothing was changed.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not in UTF-8: byte {content[error.start]:#04x} in line {line}.\nSave it in UTF-8 first. Nothing was changed."
        ) from None
    return ScriptFile(path, text.removeprefix(_MARK), text.startswith(_MARK))


def write_scripts(scripts: Sequence[tuple[ScriptFile, str]], tell: Callable[[str], None]) -> None:
    """Write new texts over scripts, all or none; the old files are kept beside them."""
    for script, _ in scripts:
        _check_writable(script)
    staged: list[tuple[str, str]] = []
    try:
        for script, text in scripts:
            staged.append(_stage(script, text))
        for script, _ in scripts:
            tell(f"Kept the old {script.path} as {back_up(script.path)}.")
        for temporary, target in staged:
            os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"The scripts cannot be written: {error.strerror} ({error.filename}).\nNothing was changed.") from None
    finally:
        for temporary, _ in staged:
            if os.path.exists(temporary):
                os.unlink(temporary)


def _check_writable(script: ScriptFile) -> None:
    target = os.path.realpath(script.path)
    if not os.stat(target).st_mode & 0o222 or not os.access(target, os.W_OK):
        raise ConfigError(f"The file {script.path} is read-only.\nNothing was changed. Make it writable: chmod u+w {script.path}")
    if not os.access(os.path.dirname(target), os.W_OK):
        raise ConfigError(f"The folder of {script.path} is read-only, so no new file can be put there.\nNothing was changed.")
    if read_script(script.path) != script:
        raise ConfigError(f"The file {script.path} was changed while it was read.\nNothing was changed by this command. Run it again.")


def _stage(script: ScriptFile, text: str) -> tuple[str, str]:
    """Write the new text to a temporary file beside its place; return both paths."""
    target = os.path.realpath(script.path)  # a link to the file stays a link
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".slipstream-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(((_MARK if script.has_mark else "") + text).encode())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary, target
