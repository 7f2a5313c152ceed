"""The document: self-contained, safe whatever the data say, and written where one expects it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.observability.report import write
from slipstream.observability.report.page import content_security_policy, render_page
from slipstream.observability.run_dir.folder import RunFolder

ROOT = Path(__file__).parents[2]


def data_of(document: str) -> Any:
    """What the script of a page reads."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def numbers(packed: str) -> list[float]:
    kind = {"f8:": "d", "f4:": "f", "i4:": "i"}[packed[:3]]
    return [entry for (entry,) in struct.iter_unpack(f"<{kind}", base64.b64decode(packed[3:]))]


def view(name: str = "first", **series: list[float | None]) -> dict[str, Any]:
    made = {
        key: {"steps": list(range(len(curve))), "times": [100.5 + at for at in range(len(curve))], "values": curve}
        for key, curve in series.items()
    }
    return {"name": name, "series": made}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "first", project="spirals")
    journal = folder.journal("metrics.jsonl")
    for step in range(100):
        journal.append({"step": step, "time": 100.0 + step, "values": {"loss": 1.0 / (step + 1)}})
    journal.close()
    return folder


@settings(max_examples=60)
@given(st.text(max_size=30) | st.sampled_from(["</script>", "<!--", "<script>", "]]>", "\u2028", "&lt;", "\ud800"]))
def test_data_block_escaping(text):
    """No text ends the block of data."""
    document = render_page([{"name": text, "config": {"settings": {text: text}}, "series": {}}], title=text or None)
    assert document.count("<script") == document.count("</script>") == 2
    assert "<!--" not in document
    found = data_of(document)["views"][0]
    assert found["name"] == text.encode("utf-8", "replace").decode()


def test_content_security_policy():
    """The policy names the style and the script of the page and nothing else."""
    document = render_page([])
    told = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', document)[0])
    assert told == content_security_policy()
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        body = re.findall(f"<{tag}>(.*?)</{tag}>", document, re.DOTALL)[-1]
        assert f"{rule} 'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" in told
    assert "unsafe" not in told
    assert re.findall(r"(?:src|href)=[\"'](?!data:|#)", document) == []


@settings(max_examples=40)
@given(st.lists(st.none() | st.floats(-1e308, 1e308) | st.floats(-(2.0**100), 2.0**100, width=32), max_size=20))
def test_numbers_exact(values):
    """Numbers arrive as they were."""
    found = data_of(render_page([view(loss=values)]))["views"][0]["series"]["loss"]
    assert numbers(found["steps"]) == list(range(len(values)))
    assert numbers(found["times"]) == [100.5 + at for at in range(len(values))]
    for value, other in zip(values, numbers(found["values"]), strict=True):
        assert math.isnan(other) if value is None else other == value


def test_fractional_steps():
    """Steps that are no whole numbers stay what they are."""
    series = {"steps": [0.5, 2**40], "times": [1.0, 2.0], "values": [1.0, 2.0]}
    found = data_of(render_page([{"name": "first", "series": {"loss": series}}]))["views"][0]["series"]["loss"]
    assert numbers(found["steps"]) == [0.5, 2.0**40]


def test_equal_names_labelled():
    """Runs of one name are told apart."""
    same = [{"name": "first", "path": f"projects/{project}/runs/first"} for project in ("cats", "dogs", "dogs")]
    assert [entry["label"] for entry in data_of(render_page(same))["views"]] == ["cats/first", "dogs/first", "dogs/first (2)"]


def test_default_output(run, tmp_path, monkeypatch):
    """The page of one run lies in its folder and that of several here."""
    monkeypatch.chdir(tmp_path)
    assert write(run.path) == run.path / "report.html"
    RunFolder.create(tmp_path, "second", project="spirals")
    assert write(tmp_path) == Path("report.html")
    assert len(data_of(Path("report.html").read_text())["views"]) == 2
    assert write([run.path, tmp_path], tmp_path / "other.html") == tmp_path / "other.html"
    assert len(data_of((tmp_path / "other.html").read_text())["views"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.html", "report.html", "runs"]


def test_only_reports_replaced(run, tmp_path):
    """Only a report is ever replaced."""
    other = tmp_path / "notes.html"
    other.write_text("<!doctype html> notes of mine")
    with pytest.raises(ConfigError, match="not a report of slipstream"):
        write(run.path, other)
    assert other.read_text() == "<!doctype html> notes of mine"
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    for name in ("metrics.jsonl", "new.html", "deep/new.html"):
        with pytest.raises(ConfigError, match="the folder of a run"):
            write(run.path, run.path / name)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    assert write(run.path) == write(run.path)


def test_damaged_runs_reported(run, tmp_path, capsys):
    """Damaged runs are left out and told."""
    RunFolder.create(tmp_path, "broken", project="spirals")
    (tmp_path / "runs" / "broken" / "run.json").write_text("{nope")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err.startswith(f"Left out: {tmp_path / 'runs' / 'broken'}")
    found = data_of((tmp_path / "page.html").read_text())
    assert [entry["name"] for entry in found["views"]] == ["first"]
    assert [Path(path).name for path, _ in found["left_out"]] == ["broken"]


def test_standard_output(run, capsys, monkeypatch, tmp_path):
    """The page goes to the standard output."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run.path), "-o", "-"]) == 0
    assert data_of(capsys.readouterr().out)["views"][0]["name"] == "first"
    assert main(["report", str(run.path), "-o", "-", "--open"]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_points_option(run):
    """A curve keeps as many points as one says."""
    found = data_of(write(run.path, points=60).read_text())["views"][0]["series"]["loss"]
    assert len(numbers(found["values"])) <= 60
    assert found["count"] == 100
    assert (numbers(found["values"])[0], numbers(found["steps"])[-1]) == (1.0, 99)


def test_embedded_images(run, tmp_path):
    """Pictures are in the page and those that lead elsewhere are not."""
    media = run.path / "media"
    media.mkdir()
    (media / "good.png").write_bytes(b"a picture")
    (tmp_path / "secret.png").write_bytes(b"a secret")
    (media / "link.png").symlink_to(tmp_path / "secret.png")
    journal = run.journal("metrics.jsonl")
    journal.append({"step": 1, "time": 1.0, "images": {"shots": ["media/good.png", "media/link.png", "media/gone.png"]}})
    journal.close()
    (shot,) = data_of(write(run.path).read_text())["views"][0]["images"]["shots"]
    assert shot["sources"] == [f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"]
    assert shot["left_out"] is True


def test_unreportable_paths(run, tmp_path):
    """What cannot be reported is said."""
    with pytest.raises(ConfigError, match=r"is a folder: give the name of a file, such as .*report\.html"):
        write(run.path, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write(run.path, tmp_path / "missing" / "page.html")
    with pytest.raises(ConfigError, match="No run was given"):
        write([])


def test_report_command(run, tmp_path, capsys):
    """The command prints where the page is and refuses what is no run."""
    assert main(["report", str(run.path), "--title", "A & B"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == run.path / "report.html"
    assert "<title>A &amp; B</title>" in path.read_text()
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "has no run in it" in capsys.readouterr().err


def test_page_of_new_run(tmp_path):
    """A run that has only begun has a page."""
    folder = RunFolder.create(tmp_path, "first", project="spirals")
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "val')
    assert data_of(write(folder.path).read_text())["views"][0]["series"] == {}


def test_no_torch_and_all_assets():
    """The command does without torch and every asset is packed."""
    code = "import sys, slipstream.cli.report; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert '"observability/report/assets/*"' in (ROOT / "pyproject.toml").read_text()
    script = re.findall(r"<script>(.*?)</script>", render_page([]), re.DOTALL)[0]
    for asset in (ROOT / "src" / "slipstream" / "observability" / "report" / "assets").glob("*.js"):
        assert asset.read_text() in script


RATES = """
const rows = [
  { first: 0, last: 9, steps: 10, seconds: 2, samples: 640, time: 2 },
  { first: 10, last: 9, steps: 0, seconds: 1, samples: null, time: 3 },
];
const line = rateLine({ ledger: rows, version: 1, started: 0 }, "step", "samples");
console.log(JSON.stringify([...line.y].map((value) => (Number.isFinite(value) ? value : null))));
"""


def test_rate_of_the_end() -> None:
    """What came after the last step, such as a last checkpoint, has no rate: the curve does not end with 0 samples per second."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    assets = ROOT / "src" / "slipstream" / "observability" / "report" / "assets"
    script = "".join((assets / f"{name}.js").read_text() for name in ("math", "data", "ledger")) + RATES
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert json.loads(done.stdout)[:1] == [320]
    assert [value for value in json.loads(done.stdout) if value is not None] == [320]
