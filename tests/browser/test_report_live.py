"""The live page in a real browser, fed by the real server: new points appear, and a lost connection is told and found again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.observability.report.server import ReportServer
from slipstream.observability.run_dir.folder import RunFolder


def point(step: int, **values: float) -> dict[str, object]:
    return {"step": step, "time": 1000.0 + step, "values": values}


def somewhere(place: Path) -> ReportServer:
    """A server on a port that the system gives to nobody by itself, so that it is still free when a test comes back to it."""
    first = 20_000 + os.getpid() % 5_000
    for port in range(first, first + 200):
        try:
            return ReportServer([place], port=port, interval=0.05)
        except ConfigError:
            continue
    raise AssertionError("no port is free")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "first", project="spirals")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ReportServer]]:
    running: list[tuple[ReportServer, threading.Thread]] = []

    def start(port: int | None = None) -> ReportServer:
        server = ReportServer([tmp_path], port=port, interval=0.05) if port else somewhere(tmp_path)
        thread = threading.Thread(target=server.serve, name="server")
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        if thread.is_alive():
            server.close()
            thread.join()


def test_live_updates(look, run, serve, tmp_path):
    """Points names and runs appear by themselves."""
    journal = run.journal("metrics.jsonl")
    for step in range(10):
        journal.append(point(step, loss=1 / (step + 1)))
    page = look(serve().url)
    page.until("document.getElementById('status').textContent === 'Live'")
    page.until("slipstream.model('loss')?.lines?.[0]?.points === 10")
    journal.append(point(10, loss=0.5))
    page.until("slipstream.model('loss').lines[0].points === 11")
    journal.append(point(11, loss=0.25, accuracy=0.75))
    page.until("slipstream.model('accuracy')?.lines[0].last === 0.75")
    page.until("slipstream.model('loss').lines[0].points === 12")
    run.event("checkpoint", "checkpoint_0", step=5)
    page.until("slipstream.page.runs[0].events.some((one) => one.kind === 'checkpoint')")
    journal.close()
    second = RunFolder.create(tmp_path, "second", project="spirals")
    with_points = second.journal("metrics.jsonl")
    with_points.append(point(3, loss=2.0))
    with_points.close()
    page.until("slipstream.page.runs.length === 2 && slipstream.model('loss').lines.length === 2")
    assert page.ask("slipstream.page.runs.map((one) => `${one.name} ${one.color}`)") == ["second 1", "first 0"], "colours stay"


def test_first_and_deleted_runs(look, serve, tmp_path):
    """A page waits for the first run and drops one that is gone."""
    page = look(serve().url)
    page.may_complain = True  # about a run that went while it was asked for
    page.until("document.getElementById('status').textContent === 'Waiting for the first run'")
    first = RunFolder.create(tmp_path, "first", project="spirals", attempt={"pid_started": 1})
    page.until("document.getElementById('status').textContent === 'Live'")
    page.until("document.querySelector('.run .state').textContent === 'killed'")
    first.path.rename(first.path.with_name("renamed"))
    page.until("slipstream.page.runs.map((one) => one.name).join() === 'renamed'")


def test_zoom_loads_points(look, run, serve):
    """Zooming in brings the points that were thinned away."""
    journal = run.journal("metrics.jsonl")
    for step in range(6_000):
        journal.append(point(step, loss=step % 7))
    journal.close()
    page = look(serve().url)
    page.until("slipstream.model('loss')?.lines?.[0]?.points > 0")
    assert page.model("loss")["lines"][0]["points"] <= 2000
    page.driver.execute_script("slipstream.page.state.set({range: [4000, 4500]})")
    page.until("slipstream.page.plots[0].lines()[0].x.filter((one) => one >= 4000 && one <= 4500).length === 501")
    assert page.ask("slipstream.page.plots[0].extent('step')") == [0, 5_999]
    page.driver.execute_script("slipstream.page.state.set({range: null})")
    page.until("slipstream.page.runs[0].detail === null")


def test_lost_connection(look, run, serve):
    """A lost connection is told and found again."""
    journal = run.journal("metrics.jsonl")
    journal.append(point(0, loss=1.0))
    server = serve()
    page = look(server.url)
    page.may_complain = True  # about the server that is not there
    page.until("slipstream.model('loss')?.lines?.[0]?.points === 1")
    server.close()
    page.until("document.getElementById('status').textContent.startsWith('Connection lost')")
    journal.append(point(1, loss=0.5))
    journal.close()
    again = serve(server.server_port)
    assert again.url == server.url
    page.until("document.getElementById('status').textContent === 'Live'")
    page.until("slipstream.model('loss')?.lines?.[0]?.points === 2")
