"""Build the C++ extension of the stand-in device, once, into a cache folder.

The folder is named after the sources, torch, Python and the compiler, so whatever changes leads to a new build and nothing is rebuilt
otherwise. Processes that need it at the same time wait for the one that builds. It imports torch only to build.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.config.sources import environment
from slipstream.devices.packages import require_torch, version_of
from slipstream.errors import SlipstreamError

__all__ = ["StandinUnavailable", "cache_folder", "extension_file"]

_SOURCES = Path(__file__).with_name("csrc")
_NAME = "slipstream_standin"
_FLAGS = ("-O1", "-g0", "-std=c++20", "-fvisibility=hidden")


class StandinUnavailable(SlipstreamError):
    """The stand-in device cannot be built or loaded here; the message says why and what to do."""


def cache_folder() -> Path:
    """Return the folder of all builds: SLIPSTREAM_STANDIN_CACHE, or one below the user's cache folder."""
    variables = environment()
    if given := variables.get("SLIPSTREAM_STANDIN_CACHE"):
        return Path(given)
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream" / "standin"


def extension_file() -> Path:
    """Return the extension, built if need be.

    Raises `StandinUnavailable` if torch is too old, there is no compiler, the cache folder cannot be written, or the build fails.
    """
    require_torch("The stand-in device", StandinUnavailable)
    compiler = _compiler()
    folder = cache_folder() / _key(compiler)
    file = folder / f"{_NAME}.so"
    if file.exists():
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise StandinUnavailable(
            f"the stand-in device cannot be built: {folder} cannot be written ({error.strerror}); "
            "set SLIPSTREAM_STANDIN_CACHE to a folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _build(folder, file)
    return file


def _compiler() -> str:
    name = environment().get("CXX") or "c++"
    found = shutil.which(name) or (shutil.which("g++") if name == "c++" else None)
    if found is None:
        raise StandinUnavailable(
            f"the stand-in device is built from C++ on its first use, and there is no compiler {name!r} here; "
            "install g++ (Debian: apt-get install g++), or name one in CXX"
        )
    return found


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()
    parts = (*_FLAGS, compiler, version, sys.version)
    digest.update("\0".join(parts).encode())
    return f"torch-{version_of('torch')}-{digest.hexdigest()[:16]}"


def _build(folder: Path, file: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as place, _progress(Path(place), len(sources)):
        built = _compile(sources, Path(place))
        os.replace(built, file)


def _compile(sources: list[Path], place: Path) -> Path:
    """Run the compiler in an interpreter of its own: building imports setuptools, which changes the process."""
    program = (
        "import sys; from torch.utils import cpp_extension as extension; "
        f"extension.load({_NAME!r}, {[str(source) for source in sources]!r}, build_directory={str(place)!r}, "
        f"extra_cflags={list(_FLAGS)!r}, is_python_module=False)"
    )
    variables = dict(environment())
    path = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), variables.get("PATH"))))  # ninja may be installed beside Python
    done = subprocess.run([sys.executable, "-c", program], env={**variables, "PATH": path}, capture_output=True, text=True, check=False)
    built = place / f"{_NAME}.so"
    if done.returncode == 0 and built.exists():
        return built
    text = (done.stdout + done.stderr).strip()
    raise StandinUnavailable(f"the stand-in device could not be built with torch {version_of('torch')}: {_reason(text)}")


def _reason(text: str) -> str:
    """Return the lines of a compiler's output that say what is wrong.

    >>> _reason("x.cpp:1:2: error: no such thing")
    'x.cpp:1:2: error: no such thing'
    """
    lines = text.splitlines()
    if any("ninja" in line.lower() and "required" in line.lower() for line in lines):
        return "torch builds extensions with ninja, which is not installed; pip install ninja"
    errors = [line for line in lines if " error: " in line] or [line for line in lines if "Error: " in line]
    return "\n".join((errors or lines)[:8]) or "the compiler said nothing"


@contextlib.contextmanager
def _progress(place: Path, total: int) -> Iterator[None]:
    """Show how many files are compiled, on a terminal as a bar that moves, elsewhere as one line at the start and one at the end."""
    stream, begun, done = sys.stderr, time.monotonic(), threading.Event()
    moving = stream.isatty()

    def draw() -> None:
        while not done.wait(0.2):
            ready = len(list(place.glob("*.o")))
            bar = "#" * ready + "." * (total - ready)
            stream.write(f"\rbuilding the stand-in device [{bar}] {ready} of {total} files, {time.monotonic() - begun:.0f} s ")
            stream.flush()

    if not moving:
        stream.write(f"building the stand-in device ({total} files, about a minute, once)\n")
    painter = threading.Thread(target=draw, daemon=True)
    if moving:
        painter.start()
    try:
        yield
    finally:
        done.set()
        if moving:
            painter.join()
        stream.write(f"{chr(13) if moving else ''}the stand-in device: {time.monotonic() - begun:.0f} s to build\n")
        stream.flush()
