"""Runs scripts one after the other in the processes that a launcher has started, and keeps what each prints.

One start for many scripts: `torchrun run_scripts.py FOLDER a.py b.py`, or `slipstream launch run_scripts.py ...`. Under torchrun each
script has a process and a port of its own, because its store cannot open a second default group.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import torch.distributed  # noqa: F401  before the processes are forked

folder, *scripts = sys.argv[1:]
rank = os.environ.get("RANK", "0")
os.chdir(folder)


def run(script: str) -> None:
    sys.argv = [script]
    with open(Path(folder) / f"{Path(script).stem}.{rank}.txt", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")


for number, script in enumerate(scripts, 1):
    if os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None) is None and "SCRIPT_PORT" not in os.environ:
        run(script)
        continue
    os.environ.setdefault("SCRIPT_PORT", os.environ["MASTER_PORT"])
    os.environ["MASTER_PORT"] = str(20000 + (int(os.environ["SCRIPT_PORT"]) * 7 + number) % 10000)
    child = os.fork()
    if not child:
        run(script)
        sys.exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{script} failed on rank {rank}")
