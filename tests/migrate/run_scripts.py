"""Runs scripts one after the other in the processes that a launcher has started, and keeps what each prints.

One start for many scripts: `torchrun run_scripts.py FOLDER a.py b.py`, or `slipstream launch run_scripts.py ...`.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

folder, *scripts = sys.argv[1:]
rank = os.environ.get("RANK", "0")
os.chdir(folder)
for script in scripts:
    sys.argv = [script]
    with open(Path(folder) / f"{Path(script).stem}.{rank}.txt", "w") as file, contextlib.redirect_stdout(file):
        names = runpy.run_path(script, run_name="__main__")
