"""The server of `slipstream watch`, over real sockets: what it shows, to whom, and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.observability.report import server as server_module, watcher
from slipstream.observability.report.server import ReportServer
from slipstream.observability.report.watcher import Listener, RunWatcher
from slipstream.observability.run_dir.folder import RunFolder

PNG = b"\x89PNG\r\n\x1a\n" + b"picture" * 1000


def log(folder: RunFolder, step: int, **values: Any) -> None:
    with open(folder.path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "time": 100.0 + step, "values": values}) + "\n")


@contextmanager
def serving(*places: Path, **options: Any) -> Iterator[ReportServer]:
    server = ReportServer(places, **{"port": 0, "interval": 0.02, **options})
    thread = threading.Thread(target=server.serve, name="server of a test")
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "first", project="spirals")
    for step in range(3000):
        log(folder, step, loss=1 / (step + 1))
    (folder.path / "media").mkdir()
    (folder.path / "media" / "a b.png").write_bytes(PNG)
    return folder


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


class Stream:
    """The events of a server as a browser gets them."""

    def __init__(self, server: ReportServer) -> None:
        self.connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        self.connection.request("GET", "/api/events")
        self.answer = self.connection.getresponse()

    def next(self, kind: str, wanted: Callable[[Any], bool] = lambda value: True) -> Any:
        """The next event of a kind that is as wanted; None when the stream has ended."""
        name = ""
        while line := self.answer.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: ") and name == kind and wanted(value := json.loads(line[6:])):
                return value
        return None

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


# -- what it shows --------------------------------------------------------------------------------------------------------


def test_served_page_and_views(run: RunFolder, tmp_path: Path) -> None:
    """Page runs and views are served."""
    with serving(tmp_path) as server:
        answer, body = ask(server, "/")
        assert answer.status == 200
        assert body.startswith(b"<!doctype html>")
        assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        runs = json.loads(ask(server, "/api/runs")[1])
        assert [(run["name"], run["project"], run["state"]) for run in runs] == [("first", "spirals", "running")]
        answer, body = ask(server, "/api/view?run=first&points=100")
        view = json.loads(body)
        assert answer.headers["Content-Type"] == "application/json"
        assert len(view["series"]["loss"]["values"]) <= 100
        assert view["series"]["loss"]["count"] == 3000
        near = json.loads(ask(server, "/api/view?run=first&low=1000&high=1010&name=loss&name=other")[1])
        assert near["series"]["loss"]["steps"] == list(range(999, 1012))
        assert json.loads(ask(server, "/api/view?run=first&name=other")[1])["series"] == {}
        part = json.loads(ask(server, "/api/view?run=first&low=1000&high=1010&only=series")[1])
        assert part == {name: near[name] for name in ("name", "at", "series")}


def test_large_answers_compressed(run: RunFolder, tmp_path: Path) -> None:
    """Large answers are compressed for who understands it."""
    with serving(tmp_path) as server:
        plain, body = ask(server, "/api/view?run=first&points=9999")
        packed, small = ask(server, "/api/view?run=first&points=9999", Accept_Encoding="gzip, br")
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(small) == body
    assert len(small) < len(body) / 2


def test_only_images_served(run: RunFolder, tmp_path: Path) -> None:
    """Pictures are served and nothing else of the folder."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run.path / "secret.png").write_bytes(b"secret")
    (run.path / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (run.path / "media" / "page.html").write_text("<script>")
    (run.path / "media" / "folder.png").mkdir()
    os.mkfifo(run.path / "media" / "pipe.png")
    ways = (
        "/media/first/a%20b.png",
        "/media?run=first&path=media/a%20b.png",
        "/media/first/link.png",
        "/media/first/../secret.png",
        "/media/first/%2e%2e/secret.png",
        "/media/first/..%2f..%2f..%2fsecret.png",
        "/media/first//etc/x.png",
        "/media/first/page.html",
        "/media/first/folder.png",
        "/media/first/pipe.png",
        "/media/first/missing.png",
        "/media/first/%00.png",
        "/media/other/a%20b.png",
        "/media/../first/a.png",
        "/media?run=first&path=secret.png",
        "/media?run=first&path=media/../secret.png",
        "/media?run=../first&path=media/a%20b.png",
        "/media",
        "/metrics.jsonl",
        "/../run.json",
    )
    with serving(tmp_path) as server:
        found = {way: ask(server, way) for way in ways}
    assert [way for way, (answer, _) in found.items() if answer.status == 200] == list(ways[:1])
    assert all(answer.status == 404 for way, (answer, _) in found.items() if way not in ways[:1])
    assert all(b"secret" not in body for _, body in found.values())
    answer, body = found[ways[0]]
    assert body == PNG
    assert (answer.headers["Content-Type"], answer.headers["X-Content-Type-Options"]) == ("image/png", "nosniff")


def test_bad_requests(run: RunFolder, tmp_path: Path) -> None:
    """What is asked wrongly is told."""
    with serving(tmp_path) as server:
        assert ask(server, "/api/view?run=other")[0].status == 404
        assert ask(server, "/api/view")[0].status == 404
        for bad in ("points=many", "only=ledger", "low=x", "high=nan", "low=inf", "&".join(["name=x"] * 3000)):
            assert ask(server, f"/api/view?run=first&{bad}")[0].status == 400
        assert ask(server, "/api/view?run=first&points=-5")[0].status == 200
        assert ask(server, "/api/nothing")[0].status == 404


# -- to whom --------------------------------------------------------------------------------------------------------------


def test_order(tmp_path: Path) -> None:
    """A list of runs begins with the newest one that is running, also where that began before others that have ended."""
    for number, (name, state) in enumerate([("old", None), ("new", None), ("done", "finished"), ("stopped", "interrupted")]):
        folder = RunFolder.create(tmp_path, name, project="spirals")
        folder.update(started=float(number))
        if state is not None:
            folder.end(state)
    gone = RunFolder.create(tmp_path, "gone", project="spirals", attempt={"pid": 2**22 + 1})
    gone.update(started=9.0)
    with serving(tmp_path) as server:
        runs = json.loads(ask(server, "/api/runs")[1])
    assert [(run["name"], run["state"]) for run in runs] == [
        ("new", "running"), ("old", "running"), ("gone", "killed"), ("stopped", "interrupted"), ("done", "finished"),
    ]  # fmt: skip


def test_host_and_origin_checked(run: RunFolder, tmp_path: Path) -> None:
    """Only the names of this machine and the own origin are answered."""
    with serving(tmp_path) as server:
        for host in ("localhost", "127.0.0.1", "localhost:9999", "[::1]:80", f"127.0.0.1:{server.server_port}", "LOCALHOST"):
            assert ask(server, "/api/runs", Host=host)[0].status == 200
        for host in (
            "evil.example",
            f"evil.example:{server.server_port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "10.0.0.1",
            "[",
        ):
            answer, body = ask(server, "/api/view?run=first", Host=host)
            assert answer.status == 403
            assert b"loss" not in body
        for site in ("cross-site", "same-site"):
            assert ask(server, "/api/runs", Sec_Fetch_Site=site, Sec_Fetch_Mode="cors")[0].status == 403
            assert ask(server, "/media/first/a%20b.png", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0].status == 403
            assert ask(server, "/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0].status == 200, "a link may lead here"
        assert ask(server, "/api/runs", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0].status == 200
        answer, _ = ask(server, "/api/runs", Origin="http://evil.example")
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["X-Frame-Options"] == "DENY"


def test_loopback_by_default(run: RunFolder, tmp_path: Path) -> None:
    """It listens on the loopback alone."""
    with serving(tmp_path) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_other_host_names(run: RunFolder, tmp_path: Path) -> None:
    """Another host is answered by its addresses and its name."""
    with serving(tmp_path, host="0.0.0.0") as server:
        assert server.url.startswith("http://127.0.0.1:")
        for host in ("10.0.0.1:80", socket.gethostname(), "localhost"):
            assert ask(server, "/api/runs", Host=host)[0].status == 200
        assert ask(server, "/api/runs", Host="evil.example")[0].status == 403


def test_only_get_and_head(run: RunFolder, tmp_path: Path) -> None:
    """Nothing but reading."""
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    with serving(tmp_path) as server:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            answer, _ = ask(server, "/api/runs", method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        for path in ("/", "/api/runs", "/api/view?run=first", "/media/first/a%20b.png", "/api/events"):
            answer, body = ask(server, path, "HEAD")
            assert (answer.status, body) == (200, b"")
        assert ask(server, "/", "BREW")[0].status == 501
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


# -- the news -------------------------------------------------------------------------------------------------------------


def test_appended_line_reaches_listeners(run: RunFolder, tmp_path: Path) -> None:
    """A line that is appended comes as an event to every listener."""
    with serving(tmp_path) as server:
        at = json.loads(ask(server, "/api/view?run=first")[1])["at"]
        streams = [Stream(server), Stream(server)]
        assert [entry["name"] for entry in streams[0].next("runs")] == ["first"]
        streams[1].next("runs")
        log(run, 3000, loss=0.25, rate="inf")
        run.event("checkpoint", "saved", step=3000)
        with open(run.path / "ledger.jsonl", "a") as file:
            file.write(json.dumps({"time": 5.0, "seconds": 1.0, "steps": 4, "phases": {"data": [0.5]}}) + "\n")
        for stream in streams:
            seen: dict[str, Any] = {"series": {}, "ledger": [], "events": []}
            while not (seen["series"] and seen["ledger"] and seen["events"]):
                news = stream.next("update")
                assert news["run"] == "first"
                assert news["at"] > at, "what a view has is not told again"
                seen["series"].update(news["series"])
                seen["ledger"] += news["ledger"]
                seen["events"] += news["events"]
            assert seen["series"]["loss"] == {"steps": [3000], "times": [3100.0], "values": [0.25], "count": 3001}
            assert seen["series"]["rate"]["values"] == [None]
            assert seen["ledger"][0]["phases"] == {"data": [0.5]}
            assert [entry["kind"] for entry in seen["events"]] == ["checkpoint"]
            stream.close()
        view = json.loads(ask(server, "/api/view?run=first")[1])
        assert view["series"]["loss"]["count"] == 3001


def test_later_run_appears(run: RunFolder, tmp_path: Path) -> None:
    """A run that begins later is shown by itself."""
    with serving(tmp_path) as server:
        stream = Stream(server)
        stream.next("runs")
        (tmp_path / "runs" / "no run").mkdir()
        second = RunFolder.create(tmp_path, "second", project="spirals")
        assert [entry["name"] for entry in stream.next("runs")] == ["second", "first"]
        log(second, 1, loss=1.0)
        assert stream.next("update", lambda news: news["run"] == "second" and news["series"])["series"]["loss"]["values"] == [1.0]
        second.end("finished")
        assert stream.next("update", lambda news: "info" in news and news["info"]["ended"])["info"]["state"] == "finished"
        stream.close()


def test_deleted_runs_forgotten(tmp_path: Path) -> None:
    """Runs that are deleted or renamed are forgotten."""
    paths = [RunFolder.create(tmp_path, name, project="spirals").path for name in ("first", "second", "third")]
    named = RunFolder.create(tmp_path / "other", "named", project="spirals").path
    watch = RunWatcher([tmp_path, named])
    watch.look()
    listener = watch.listen()
    assert listener is not None
    shutil.rmtree(paths[0])
    paths[1].rename(paths[1].with_name("renamed"))
    named.rename(tmp_path / "aside")
    watch.look()
    assert [run.key for run in watch.runs()] == ["third", "renamed"]
    data = listener.next(0)
    assert data is not None
    assert data.startswith(b"event: runs\n")
    assert [load["name"] for load in json.loads(data.split(b"data: ")[1])] == ["third", "renamed"]
    (tmp_path / "aside").rename(named)
    watch.look()
    assert [run.key for run in watch.runs()] == ["third", "renamed", "named"], "a run that was named may come back"
    watch.stop()


def test_killed_run_reported(tmp_path: Path) -> None:
    """A run that dies is told."""
    run = RunFolder.create(tmp_path, "first", project="spirals")
    (attempt,) = run.info["attempts"]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    run.update(attempts=[{**attempt, "pid": child.pid, "pid_started": None}])
    watch = RunWatcher([tmp_path])
    watch.look()
    listener = watch.listen()
    assert listener is not None
    watch.look()
    assert listener.next(0) == b"", "it lives"
    child.communicate()
    watch.look()
    data = listener.next(0)
    assert data
    info = json.loads(data.split(b"data: ")[1])["info"]
    assert info["state"] == watch.runs()[0].summary()["state"] == "killed"
    assert info["ended"] == (run.path / "run.json").stat().st_mtime_ns / 1e9
    watch.look()
    assert listener.next(0) == b"", "once"
    assert json.loads((run.path / "run.json").read_text())["state"] == "running", "nothing is written"
    watch.stop()


def test_damaged_runs_ignored(tmp_path: Path) -> None:
    """Folders that only look like runs do not stop the looking."""
    RunFolder.create(tmp_path, "first", project="spirals")
    watch = RunWatcher([tmp_path])
    for name in ("pipe", "deep", "link", "text"):
        (tmp_path / "runs" / name).mkdir()
    os.mkfifo(tmp_path / "runs" / "pipe" / "run.json")
    (tmp_path / "runs" / "deep" / "run.json").write_text("[" * 100_000)
    (tmp_path / "runs" / "link" / "run.json").symlink_to(tmp_path / "runs" / "first" / "run.json")
    (tmp_path / "runs" / "text" / "run.json").write_text("words")
    (tmp_path / "runs" / "outside").symlink_to(tmp_path)
    RunFolder.create(tmp_path, "second", project="spirals")
    watch.look()
    assert [run.key for run in watch.runs()] == ["first", "second"]


def test_watcher_error_reported_once(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error while looking is told once and looking goes on."""
    watch = RunWatcher([tmp_path], interval=0.001)
    turns = threading.Semaphore(0)

    def look() -> None:
        turns.release()
        raise RuntimeError("a disk that is strange")

    monkeypatch.setattr(watch, "look", look)
    watch.start()
    for _ in range(3):
        assert turns.acquire(timeout=60)
    watch.stop()
    assert capsys.readouterr().err.count("RuntimeError: a disk that is strange") == 1


def test_replaced_file_reloads_page(run: RunFolder, tmp_path: Path) -> None:
    """A file that is replaced asks pages to load again."""
    with serving(tmp_path) as server:
        ask(server, "/api/view?run=first")
        stream = Stream(server)
        stream.next("runs")
        (run.path / "other").write_text('{"step": 1, "time": 1.0, "values": {"loss": 7.0}}\n')
        os.replace(run.path / "other", run.path / "metrics.jsonl")
        assert stream.next("update")["reload"] is True
        stream.close()
        assert json.loads(ask(server, "/api/view?run=first")[1])["series"]["loss"]["values"] == [7.0]


def test_updates_and_views_complete(tmp_path: Path) -> None:
    """News and views together are all points once. Whatever moment a view is taken at, the messages after its number bring the rest."""
    run = RunFolder.create(tmp_path, "first", project="spirals")
    watch = RunWatcher([tmp_path])
    listener = watch.listen()
    assert listener is not None
    views = []
    for step in range(12):
        log(run, step, loss=float(step))
        if step % 4 == 0:
            views.append(json.loads(watch.runs()[0].view()))
        watch.look()
    messages = []
    while (data := listener.next(0)) not in (b"", None):
        messages.append(json.loads(data.split(b"data: ")[1]))
    for view in views:
        values = list(view["series"]["loss"]["values"])
        for news in messages:
            if news["at"] > view["at"]:
                values += news.get("series", {}).get("loss", {"values": []})["values"]
        assert values == list(range(12))
    watch.stop()


def test_many_points_thinned(tmp_path: Path) -> None:
    """Many new points at once come thinned with their spike."""
    run = RunFolder.create(tmp_path, "first", project="spirals")
    watch = RunWatcher([tmp_path])
    watch.look()
    listener = watch.listen()
    assert listener is not None
    with open(run.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "time": 1.0, "values": {"loss": float(step == 1234)}}) + "\n" for step in range(3000))
    watch.look()
    data = listener.next(0)
    assert data
    loss = json.loads(data.split(b"data: ")[1])["series"]["loss"]
    assert loss["count"] == 3000
    assert len(loss["values"]) <= watcher._MAX_NEW_POINTS
    assert loss["values"][loss["steps"].index(1234)] == 1.0
    watch.stop()


def test_long_run_shown_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first view of a long run is a part and says so, other runs do not wait for it, and in the end everything was counted once."""
    monkeypatch.setattr(watcher, "_FIRST_BLOCKS", 1)
    monkeypatch.setattr(watcher, "_CATCH_UP_INTERVAL", 0.0)
    long, short = (RunFolder.create(tmp_path, name, project="spirals") for name in ("long", "short"))
    with open(long.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "time": 1.0, "values": {"loss": float(step)}}) + "\n" for step in range(20_000))
    log(short, 1, loss=1.0)
    watch = RunWatcher([tmp_path])
    listener = watch.listen()
    assert listener is not None
    run = watch.run("long")
    assert run is not None
    first = json.loads(run.view())
    assert 0 < first["read"] < 1
    assert 0 < first["series"]["loss"]["count"] < 20_000
    watch.look()
    messages = []
    while (data := listener.next(0)) not in (b"", None):
        messages.append(json.loads(data.split(b"data: ")[1]))
    told = [message["run"] for message in messages]
    assert told.index("short") < told.index("long") + 2, "blocks are read in turns"
    ours = [message for message in messages if message["run"] == "long"]
    assert all(message["reload"] for message in ours)
    shares = [message["read"] for message in ours]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    log(long, 20_000, loss=7.0)
    watch.look()
    news = json.loads((listener.next(0) or b"").split(b"data: ")[1])
    assert news["series"]["loss"] == {"steps": [20_000], "times": news["series"]["loss"]["times"], "values": [7.0], "count": 20_001}
    assert json.loads(run.view())["read"] == 1
    watch.stop()


def test_oversized_update_reloads_page(tmp_path: Path) -> None:
    """More news than a message holds asks pages to load again."""
    run = RunFolder.create(tmp_path, "first", project="spirals")
    watch = RunWatcher([tmp_path])
    watch.look()
    listener = watch.listen()
    assert listener is not None
    with open(run.path / "ledger.jsonl", "a") as file:
        file.writelines(json.dumps({"time": float(index), "seconds": 1.0, "phases": {"data": [0.5]}}) + "\n" for index in range(500))
    watch.look()
    data = listener.next(0)
    assert data
    assert json.loads(data.split(b"data: ")[1])["reload"] is True
    assert sum(json.loads(watch.runs()[0].view())["ledger"]["seconds"]) == 500
    watch.stop()


def test_slow_listener_dropped(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that does not keep up is let go."""
    monkeypatch.setattr(watcher, "_QUEUE_LENGTH", 3)
    watch = RunWatcher([tmp_path])
    watch.look()
    slow, quick = watch.listen(), watch.listen()
    assert slow is not None
    assert quick is not None
    for step in range(5):
        log(run, 3000 + step, loss=1.0)
        watch.look()
        assert quick.next(0)
    assert watch.listeners == 1
    assert slow.next(0) is None
    watch.stop()
    assert quick.next(0) is None
    assert watch.listen() is None


def test_closed_pages_forgotten(run: RunFolder, tmp_path: Path) -> None:
    """Pages that were closed are forgotten."""
    with serving(tmp_path) as server:
        stream = Stream(server)
        stream.next("runs")
        assert server.watch.listeners == 1
        stream.close()
        step = 3000
        while server.watch.listeners:
            log(run, step, loss=1.0)
            step += 1
            threading.Event().wait(0.01)


def test_idle_stream_heartbeat(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle stream has a heartbeat."""
    monkeypatch.setattr(server_module, "_HEARTBEAT", 0.01)
    with serving(tmp_path) as server:
        stream = Stream(server)
        stream.next("runs")
        while not (line := stream.answer.readline()).startswith(b":"):
            assert line
        stream.close()


def test_full_listener_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener ends even with a full queue."""
    monkeypatch.setattr(watcher, "_QUEUE_LENGTH", 1)
    listener = Listener()
    assert listener.put(b"one")
    listener.end()
    assert listener.next(0) is None


# -- beginning and end ----------------------------------------------------------------------------------------------------


def test_close_ends_everything(run: RunFolder, tmp_path: Path) -> None:
    """Closing ends streams idle connections and threads."""
    before = set(threading.enumerate())
    with serving(tmp_path) as server:
        stream = Stream(server)
        stream.next("runs")
        idle = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        idle.request("GET", "/api/runs")
        idle.getresponse().read()
        silent = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    assert stream.next("update", lambda news: False) is None
    assert set(threading.enumerate()) == before
    for entry in (stream, idle, silent):
        entry.close()


def test_connection_limit(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more connections than there may be."""
    monkeypatch.setattr(server_module, "_MAX_CONNECTIONS", 1)
    with serving(tmp_path) as server:
        stream = Stream(server)
        stream.next("runs")
        answer, body = ask(server, "/api/runs")
        assert (answer.status, answer.headers["Connection"]) == (503, "close")
        assert b"too many connections" in body
        monkeypatch.setattr(server_module, "_MAX_REFUSED", 0)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as closed:
            assert closed.recv(10) == b""
        stream.close()


def test_port_in_use(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port in use says what to write."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} on 127.0.0.1 is in use .*\nWrite --port \d+ instead"):
            ReportServer([tmp_path], port=port)
        monkeypatch.setattr(server_module, "DEFAULT_PORT", port)
        with ReportServer([tmp_path]) as server:
            assert server.server_port not in (0, port), "the usual port is only usual"


def test_foreign_address(run: RunFolder, tmp_path: Path) -> None:
    """An address of another machine says what to write."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine .*\nLeave --host out"):
        ReportServer([tmp_path], host="192.0.2.1", port=0)


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    """A folder without runs is waited at and one that is not there is refused."""
    with serving(tmp_path) as server:
        stream = Stream(server)
        assert stream.next("runs") == []
        RunFolder.create(tmp_path, "first", project="spirals")
        assert [entry["name"] for entry in stream.next("runs")] == ["first"]
        stream.close()
    with pytest.raises(ConfigError, match="does not exist"):
        ReportServer([tmp_path / "other"], port=0)


def test_same_run_names(tmp_path: Path) -> None:
    """Runs of one name are told apart."""
    for project in ("a", "b", "x/b"):
        RunFolder.create(tmp_path / project, "first", project=project)
    watch = RunWatcher([tmp_path / "a", tmp_path / "b", tmp_path / "x" / "b", tmp_path / "a" / "runs" / "first"])
    assert [run.key for run in watch.runs()] == ["first", "first (b)", "first (b 2)"]
    assert [json.loads(run.view())["info"]["project"] for run in watch.runs()] == ["a", "b", "x/b"]


def test_newest_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with very many runs shows the newest."""
    monkeypatch.setattr(watcher, "_MAX_RUNS", 2)
    for name in "abcd":
        RunFolder.create(tmp_path, name, project="p")
    watch = RunWatcher([tmp_path, tmp_path / "runs" / "a"])
    assert [run.key for run in watch.runs()] == ["c", "d", "a"]
    assert {entry.name for entry in watch.left_out} == {"b"}
    RunFolder.create(tmp_path, "e", project="p")
    watch.look()
    assert [run.key for run in watch.runs()] == ["c", "d", "a", "e"]
