"""`no_leaks` fails the test that leaves something behind, says what, and spares the next."""

from __future__ import annotations

import os
import sys
import threading

import psutil
import pytest
import torch

from slipstream import PartialState


@pytest.fixture
def session(pytester):
    """Runs the text of a test file in a session of its own, every test held to `no_leaks`; gives back the result."""
    pytester.makeconftest(
        """
        import pytest
        pytest_plugins = ["slipstream.testing.plugin"]

        @pytest.fixture(autouse=True)
        def clean(no_leaks): ...
        """
    )

    def run(text):
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider")

    return run


def test_clean_test_passes(session):
    """A clean test passes."""
    session(
        """
        import os, subprocess, sys, threading

        def test_clean(monkeypatch):
            monkeypatch.setenv("FOR_THIS_TEST", "1")
            thread = threading.Thread(target=lambda: None)
            thread.start()
            subprocess.run([sys.executable, "-c", ""])
        """
    ).assert_outcomes(passed=1)


def test_compiler_pool_may_stay(session):
    """The thread and the processes that torch's compiler keeps are no leak."""
    session(
        """
        import subprocess, sys, threading

        kept, over = [], threading.Event()

        def _read_thread():
            over.wait()

        _read_thread.__module__ = "torch._inductor.compile_worker.subproc_pool"

        def test_compiles():
            pool = [sys.executable, "-c", "input()", "site-packages/torch/_inductor/compile_worker/__main__.py"]
            kept.append(subprocess.Popen(pool, stdin=subprocess.PIPE))
            threading.Thread(target=_read_thread).start()

        def test_end_of_pool():
            over.set()
            kept.pop().communicate(b"over\\n")
        """
    ).assert_outcomes(passed=2)


def test_ending_thread_gets_moment(session):
    """Something about to end is given a moment."""
    session(
        """
        import threading, time

        def test_ends_soon():
            threading.Thread(target=time.sleep, args=(0.2,)).start()
        """
    ).assert_outcomes(passed=1)


def test_thread_named(session):
    """A thread is named."""
    threading.let_go = threading.Event()
    try:
        result = session(
            """
            import threading

            def test_leaks():
                threading.Thread(target=threading.let_go.wait, name="forgotten").start()
            """
        )
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["this test left behind:", "  thread 'forgotten'*"])
    finally:
        threading.let_go.set()
        del threading.let_go


@pytest.mark.parametrize(
    ("statement", "change"),
    [
        ("os.environ['LEAKED'] = 'secret'", "LEAKED (set)"),
        ("os.environ['LANG'] = 'x'", "LANG (changed)"),
        ("del os.environ['LANG']", "LANG (removed)"),
    ],
)
def test_variable_named_and_restored(session, monkeypatch, statement, change):
    """A variable is named without its value and put back."""
    monkeypatch.setenv("LANG", "C.UTF-8")
    result = session(
        f"""
        import os

        def test_leaks():
            {statement}

        def test_is_spared():
            assert os.environ["LANG"] == "C.UTF-8"
            assert "LEAKED" not in os.environ
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"  environment variable {change}"])
    assert os.environ["LANG"] == "C.UTF-8"
    assert "secret" not in "".join(line for line in result.outlines if "left behind" in line or "variable" in line)


def test_child_named_and_ended(session):
    """A child process is named and ended."""
    result = session(
        """
        import os, sys

        def test_leaks():
            print("pid", os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(300)"]))
            assert False, "so that the output is shown"
        """
    )
    result.assert_outcomes(failed=1, errors=1)
    pid = int(next(line.split()[1] for line in result.outlines if line.startswith("pid ")))
    result.stdout.fnmatch_lines([f"  child process {pid} ({sys.executable} *time.sleep(300)*"])
    assert not psutil.pid_exists(pid)


def test_group_named_and_closed(session):
    """A process group is named and closed."""
    result = session(
        """
        import torch.distributed as dist

        def test_leaks():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def test_is_spared():
            assert not dist.is_initialized()
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["  torch.distributed process group*"])


def test_session_pools_no_leak(session):
    """The pools of the session are no leak."""
    session(
        """
        def test_runs(ranks):
            assert ranks(1).run(lambda: 5) == [5]
        """
    ).assert_outcomes(passed=1)


def test_compiler_variables_no_leak(session, monkeypatch):
    """Variables that torch sets for its compiler are no leak and stay."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    session(
        """
        import os

        def test_imports_the_compiler():
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = "after"

        def test_leaks():
            os.environ["LEAKED"] = "1"

        def test_it_is_still_set():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "after"
            assert "LEAKED" not in os.environ
        """
    ).assert_outcomes(passed=3, errors=1)


def test_ddp_leaves_nothing(ranks):
    """A model in torch DDP leaves nothing behind in a rank."""
    def run():
        state = PartialState()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(state.process_index))).sum().backward()
        return model.module.weight.grad.tolist()

    assert ranks(2).run(run) == [[[0.5, 0.5]]] * 2
