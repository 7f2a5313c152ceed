"""Runs scripts one after the other in the processes that a launcher has started, and keeps what each prints.

One start for many scripts: `torchrun run_scripts.py --fork FOLDER a.py b.py`, or `slipstream launch run_scripts.py FOLDER ...`. With
`--fork` each script has a process and a port of its own, because the store of torchrun cannot open a second default group.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  before the processes are forked: optimizers import it
import torch.distributed  # noqa: F401

fork = "--fork" in sys.argv
folder, *scripts = [argument for argument in sys.argv[1:] if argument != "--fork"]
port = int(os.environ.get("MASTER_PORT", "0"))
rank = os.environ.get("RANK", "0")
os.chdir(folder)


def run(script: str) -> None:
    sys.argv = [script]
    with open(Path(folder) / f"{Path(script).stem}.{rank}.txt", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")


for number, script in enumerate(scripts, 1):
    if not fork:
        run(script)
        continue
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = str(20000 + (port * 7 + number) % 10000)
    child = os.fork()
    if not child:
        run(script)
        sys.exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{script} failed on rank {rank}")
