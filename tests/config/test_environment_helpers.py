"""The helpers by which scripts read and set variables, and the entry point of processes that they start themselves."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  # what torch.multiprocessing does
import subprocess
import sys
from typing import Any

import pytest

import slipstream
from slipstream import PrepareForLaunch, clear_environment, get_int_from_env, parse_flag_from_env, patch_environment, str_to_bool
from slipstream.errors import ConfigError
from slipstream.utils import DistributedType, get_free_port, parse_choice_from_env


def test_words() -> None:
    """Words for yes and no in any case become numbers or booleans; others are an error that lists them."""
    assert [str_to_bool(word) for word in ("y", "YES", "t", "True", "on", "1")] == [1] * 6
    assert [str_to_bool(word) for word in ("n", "NO", "f", "False", "off", "0")] == [0] * 6
    assert (str_to_bool("true", to_bool=True), str_to_bool("no", to_bool=True)) == (True, False)
    with pytest.raises(ValueError, match="'maybe' means neither yes nor no: write one of y, yes"):
        str_to_bool("maybe")


def test_reading(monkeypatch: Any) -> None:
    """Flags, choices and numbers are read from variables, with defaults; what cannot be read names the variable."""
    monkeypatch.setenv("A_FLAG", "Yes")
    monkeypatch.setenv("A_NUMBER", "7")
    monkeypatch.setenv("A_NEGATIVE", "-1")
    monkeypatch.delenv("A_GAP", raising=False)
    assert (parse_flag_from_env("A_FLAG"), parse_flag_from_env("A_GAP"), parse_flag_from_env("A_GAP", True)) == (True, False, True)
    assert (parse_choice_from_env("A_NUMBER"), parse_choice_from_env("A_GAP"), parse_choice_from_env("A_GAP", "x")) == ("7", "no", "x")
    assert get_int_from_env(["A_GAP", "A_NEGATIVE", "A_NUMBER"], 1) == 7
    assert get_int_from_env(["A_GAP"], 5) == 5
    with pytest.raises(ConfigError, match="the variable A_NUMBER: '7' means neither"):
        parse_flag_from_env("A_NUMBER")
    with pytest.raises(ConfigError, match="the variable A_FLAG='Yes' is not a whole number"):
        get_int_from_env(["A_FLAG"], 0)


def test_patching(monkeypatch: Any) -> None:
    """Variables are set or taken away for a block, also one that fails, and are as before afterwards."""
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    whole = dict(os.environ)

    def check() -> None:
        with patch_environment(kept="inside", new=3):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("inside", "3")
            del os.environ["KEPT"]
            with clear_environment():
                assert dict(os.environ) == {}
                os.environ["LEFT"] = "behind"
            assert os.environ["NEW"] == "3"
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        check()
    assert dict(os.environ) == whole


def seen(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_entry_point() -> None:
    """The entry point gives the function its rank, counted over machines, and can be pickled."""
    found: list[Any] = []
    names = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")

    def run() -> None:
        found.append(seen(*names))

    before = seen(*names)
    PrepareForLaunch(run)(1)
    PrepareForLaunch(run, DistributedType.MULTI_CPU)(1)
    with patch_environment(nproc=4, node_rank=2):
        PrepareForLaunch(run, debug=True)(1)
    assert found == [[before[0], before[1], "1"], ["1", "1", "1"], ["9", "1", "1"]]
    assert seen(*names) == before
    assert pickle.loads(pickle.dumps(PrepareForLaunch(seen, "MULTI_CPU"))).launcher is seen


SCRIPT = """
import torch
from slipstream import PartialState, PrepareForLaunch, patch_environment

def work(text):
    state = PartialState(cpu=True)
    print(state.gather([f"{text} {state.process_index}"]), state.fork_launched, flush=True)

with patch_environment(world_size=2, nproc=2, master_addr="127.0.0.1", master_port=%d):
    torch.multiprocessing.start_processes(PrepareForLaunch(work, "MULTI_CPU"), args=("rank",), nprocs=2, start_method="fork")
"""


@pytest.mark.launched
def test_started_by_torch() -> None:
    """Processes that torch.multiprocessing starts through it find each other."""
    run = subprocess.run([sys.executable, "-c", SCRIPT % get_free_port()], capture_output=True, text=True, timeout=100)
    assert [run.stdout.count(part) for part in ("['rank 0', 'rank 1']", "True", "False")] == [2, 2, 0], run.stderr


def test_two_places() -> None:
    """The helpers are in `slipstream` and in `slipstream.utils`, as the same objects."""
    for name in ("PrepareForLaunch", "DDPCommunicationHookType", "patch_environment", "clear_environment", "str_to_bool"):
        assert getattr(slipstream, name) is getattr(slipstream.utils, name)
