"""What a launched job prints: warnings once per machine, JSON in one piece, files of every rank, and the cause of a failure once."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import command, launch, script

pytestmark = pytest.mark.launched

LOUD = """
import logging
logger = logging.getLogger("loud")
logger.propagate = False
logger.addHandler(logging.StreamHandler())
"""
WARN = """
import logging, os, sys, time, warnings
sys.path.insert(0, os.path.join(os.environ["NOTES"], "site-packages"))
import loud
rank = os.environ["RANK"]
exec(compile("def complain(text): logger.warning(text)\\ndef fail(text): logger.error(text)", loud.__file__, "exec"), vars(loud))
warnings.warn("from all")
for _ in range(2):
    loud.complain("library of all")
loud.fail("error of all")
logging.warning("own code of all")
if rank == "1":
    warnings.warn("from one")
    loud.complain("library of one")
with warnings.catch_warnings():
    warnings.simplefilter("always")
    warnings.warn("always")
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("default")
    warnings.warn("recorded")
print("recorded", len(found))
print("out", rank)
"""
TWO = ("--cpu", "--num_processes", "2")


@pytest.fixture
def warn(script, tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "loud.py").write_text(LOUD)
    return lambda more="": script(WARN + more)


def counts(text: str, *words: str) -> dict[str, int]:
    return {word: sum(word in line for line in text.splitlines() if "warnings.warn(" not in line) for word in words}


SAID = ("from all", "library of all", "error of all", "own code of all", "from one", "library of one", "UserWarning: always")


def test_shared_warnings_shown_once(launch, warn):
    """A warning of all ranks is shown once; a warning of one rank is shown with its rank."""
    finished = launch(*TWO, warn("warnings.showwarning = lambda *_: print('mine', file=sys.stderr)\nwarnings.warn('x')"))
    assert finished.code == 0, finished
    assert list(counts(finished.err, *SAID, "mine").values()) == [1, 2, 2, 2, 1, 1, 2, 2], finished.err
    assert sorted(finished.out.splitlines()) == ["out 0", "out 1", "recorded 1", "recorded 1"]
    lines = finished.err.splitlines()
    assert "[RANK 1] library of one" in lines
    assert [line.startswith("[RANK 1] ") for line in lines if "UserWarning: from one" in line] == [True]


FAIL = """
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
logging.info("plain line\\nof two, key topsecret123")
done = os.path.join(os.environ["NOTES"], "done")
if rank == "0":
    open(done, "w").close()
while not os.path.exists(done):  # the launcher ends rank 0 soon after rank 1 has failed
    time.sleep(0.02)
if rank == "1":
    raise ValueError("the real " + "cause")
"""


def test_json_lines_whole_cause_last(launch, warn, tmp_path):
    """JSON lines stay whole and the cause comes last and once."""
    finished = launch(*TWO, "--log_format", "json", "--log_dir", "logs", warn(FAIL), MY_API_KEY="topsecret123")
    assert finished.code == 1, finished
    records = [json.loads(line) for line in finished.err.splitlines()]
    said = "\n".join(json.dumps(record) for record in records)
    assert list(counts(said, *SAID).values()) == [1, 2, 2, 2, 1, 1, 2], finished.err
    assert sorted(record["rank"] for record in records if record["message"] == "plain line\nof two, key [redacted]") == [0, 1]
    assert "the real cause" not in "".join(json.dumps(record) for record in records[:-1])
    assert "failed with exit code 1: ValueError: the real cause" in records[-1]["message"].splitlines()[0]
    assert records[-1]["exception"].splitlines()[-1] == "ValueError: the real cause"
    assert (records[-1]["rank"], records[-1]["level"]) == (1, "ERROR")
    assert "[default0]:out 0" in finished.out.splitlines()
    folder = next((tmp_path / "logs").glob("*/attempt_0"))
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    for rank in ("0", "1"):
        own = [json.loads(line) for line in (folder / rank / "stderr.log").read_text().splitlines()]
        assert sum("from all" in entry["message"] for entry in own) == 1
        assert {entry["rank"] for entry in own} == {int(rank)}
    assert own[-1]["exception"].splitlines()[-1] == "ValueError: the real cause"
    assert records[-1]["message"].endswith(f"Its output: {folder / '1' / 'stderr.log'}")


def test_hidden_rank_output_in_files(launch, warn, tmp_path):
    """A rank that the terminal does not show has its files and the launcher says so."""
    finished = launch(*TWO, "--log_dir", "logs", "--tee", "0:3", "--all_warnings", "--start_method", "spawn", warn())
    assert finished.code == 0, finished
    note, *rest = finished.err.splitlines()
    folder = next((tmp_path / "logs").iterdir())
    assert note == f"slipstream: the terminal does not show all output of local rank 1 (tee=0:3); it is in {folder}"
    assert all(line.startswith("[default0]:") for line in rest)
    assert finished.out.splitlines() == ["[default0]:recorded 1", "[default0]:out 0"]
    for rank in (0, 1):
        own = (folder / "attempt_0" / str(rank) / "stderr.log").read_text()
        assert list(counts(own, *SAID).values()) == [1, 2, 1, 1, rank, rank, 1]
        assert (folder / "attempt_0" / str(rank) / "stdout.log").read_text() == f"recorded 1\nout {rank}\n"


MISTAKEN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from slipstream import Accelerator

accelerator = Accelerator()
loaders = [accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)) for _ in range(2)]
for loader in loaders:
    for (rows,) in loader:
        pass
rows.undefined()
"""


def test_error_stands_last(launch, script):
    """Of a script with a mistake and unseeded data: one line of warning that names the loop, then the error."""
    done = launch(*TWO, script(MISTAKEN))
    lines = done.err.strip().splitlines()
    warned = [line for line in lines if "different samples" in line]
    assert len(warned) == 1
    assert warned[0].startswith("WARNING: train.py:9: processes hold different samples in TensorDataset.")
    assert lines[-1] == "AttributeError: 'Tensor' object has no attribute 'undefined'"
