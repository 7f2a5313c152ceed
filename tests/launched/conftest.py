"""Real launches through the command line, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Finished, Running

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.launched)


UP = """
import os
def up():
    note = f"{os.environ['NOTES']}/up-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    with open(note + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(note + ".part", note)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `slipstream launch ...` in a folder of its own; whatever is left of it is ended after the test."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "telling.py").write_text(UP)
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    environment.update(OMP_NUM_THREADS="1", NOTES=str(tmp_path), SLIPSTREAM_HOME=str(tmp_path / "home"))

    def start(*words: str, prefix: tuple[str, ...] = (), **variables: str) -> Running:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "slipstream", "launch", *words],
            cwd=tmp_path,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
        )
        started.append(process)
        return Running(process, tmp_path)

    try:
        yield start
    finally:
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@pytest.fixture
def launch(command: Callable[..., Running]) -> Callable[..., Finished]:
    """Runs `slipstream launch ...` to its end."""
    return lambda *words, **variables: command(*words, **variables).finish()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script and returns its path."""

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
