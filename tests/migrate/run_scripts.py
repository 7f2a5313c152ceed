"""Runs scripts one after the other in the processes that a launcher has started, and keeps what each prints.

One start for many scripts: `torchrun run_scripts.py --fork FOLDER a.py b.py`, or `slipstream launch run_scripts.py FOLDER ...`. With
`--fork` each script has a process and a port of its own, because the store of torchrun cannot open a second default group.
"""

import contextlib
import os
import runpy
import socket
import sys
import time
from pathlib import Path

import torch.distributed  # noqa: F401  before the processes are forked

fork = "--fork" in sys.argv
folder, *scripts = [argument for argument in sys.argv[1:] if argument != "--fork"]
rank = os.environ.get("RANK", "0")
os.chdir(folder)


def agree_on_port(number: int) -> str:
    """Return a port that rank 0 finds free, and tells the others by a file."""
    told = Path(folder) / f"port.{number}"
    if rank == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (Path(folder) / "port.new").write_text(str(free.getsockname()[1]))
        (Path(folder) / "port.new").rename(told)
    while not told.exists():
        time.sleep(0.01)
    return told.read_text()


def run(script: str) -> None:
    sys.argv = [script]
    with open(Path(folder) / f"{Path(script).stem}.{rank}.txt", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")


for number, script in enumerate(scripts, 1):
    if not fork:
        run(script)
        continue
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = agree_on_port(number)
    child = os.fork()
    if not child:
        run(script)
        sys.exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{script} failed on rank {rank}")
