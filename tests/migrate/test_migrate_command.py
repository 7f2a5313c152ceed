"""`slipstream migrate`: what is printed, what is written, exit codes, and files that cannot be read or written."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.migrate.migration import migrate_text

OLD = "# a script\nfrom accelerate import Accelerator\n\naccelerator = Accelerator()  # all of it\n"
NEW = OLD.replace("from accelerate", "from slipstream")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    return path


def test_diff(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options the diff is printed, with the reason in the heading of the hunk, and nothing is written."""
    assert main(["migrate", str(script)]) == 0
    out, err = capsys.readouterr()
    assert "@@ -1,3 +1,3 @@ the names of Accelerate are in slipstream\n" in out
    assert "-from accelerate import Accelerator\n+from slipstream import Accelerator\n" in out
    assert "--write" in err
    assert script.read_text() == OLD


def test_diff_is_a_patch(script: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git apply` takes the diff."""
    monkeypatch.chdir(tmp_path)
    main(["migrate", "train.py"])
    (tmp_path / "change.patch").write_text(capsys.readouterr().out)
    subprocess.run(["git", "apply", "change.patch"], check=True)
    assert script.read_text() == NEW


def test_write(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--write` replaces the file, keeps its mode, and keeps the old one; a second time there is nothing to do."""
    script.chmod(0o750)
    assert main(["migrate", "--write", str(script)]) == 0
    assert f"Kept the old {script} as {script}.bak." in capsys.readouterr().err
    assert script.read_text() == NEW
    assert Path(f"{script}.bak").read_text() == OLD
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert main(["migrate", "--write", str(script)]) == 0
    assert "nothing to change" in capsys.readouterr().err
    assert sorted(path.name for path in script.parent.iterdir()) == ["train.py", "train.py.bak"]


def test_check(script: Path) -> None:
    """`--check` exits with 1 as long as there is something to change."""
    assert main(["migrate", "--check", str(script)]) == 1
    assert script.read_text() == OLD
    assert main(["migrate", "--write", str(script)]) == 0
    assert main(["migrate", "--check", str(script)]) == 0


def test_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that uses none of them is left alone, and that is said."""
    path = tmp_path / "plain.py"
    path.write_text("import torch\n\nloss = torch.ones(1, requires_grad=True)\nloss.backward()\n")
    assert main(["migrate", str(path)]) == 0
    assert "nothing to change; it has no use of Accelerate, DDP or DeepSpeed" in capsys.readouterr().err


def test_origin(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from` restricts the rules."""
    assert main(["migrate", "--check", "--from", "ddp", str(script)]) == 0
    assert main(["migrate", "--check", "--from", "accelerate", str(script)]) == 1


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`-` reads the standard input; with `--write` the new script is printed."""
    for arguments, expected in ((["-"], "+from slipstream"), (["--write", "-"], NEW)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OLD.encode())))
        assert main(["migrate", *arguments]) == 0
        assert expected in capsys.readouterr().out


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder means its scripts, without hidden folders and environments; all are written or none."""
    for name in ("a.py", "sub/b.py", ".hidden/c.py", "env/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert main(["migrate", "--write", str(tmp_path)]) == 2
    assert "broken.py" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == OLD
    (tmp_path / "broken.py").unlink()
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    changed = [name for name in ("a.py", "sub/b.py", ".hidden/c.py", "env/d.py") if (tmp_path / name).read_text() == NEW]
    assert changed == ["a.py", "sub/b.py"]


BAD = {
    "missing": (None, "There is no file"),
    "syntax": (b"import os\nif True\n    pass\n", "line 2, column 8"),
    "binary": (b"\x7fELF\0\0\1", "is a binary file"),
    "latin": ("x = 1\ny = 'é'\n".encode("latin-1"), "not in UTF-8: byte 0xe9 in line 2"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not a script is an error that says where, with exit code 2."""
    content, expected = BAD[kind]
    path = tmp_path / f"{kind}.py"
    if content is not None:
        path.write_bytes(content)
    assert main(["migrate", "--write", str(path)]) == 2
    assert expected in capsys.readouterr().err


def test_other_bad_input(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing given, contradicting options, a read-only file, a configuration, an empty folder."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    script.chmod(0o444)
    for arguments, expected in (
        ([], "nothing to migrate"),
        (["--write", "--check", str(script)], "Give one of them"),
        (["--write", str(script)], "read-only"),
        ([str(tmp_path / "config.json")], "is not a Python script"),
        ([str(tmp_path / "empty")], "has no scripts"),
        (["-", str(script)], "Give it alone"),
        (["--from", "horovod", str(script)], "horovod"),
    ):
        assert main(["migrate", *arguments]) == 2
        assert expected in capsys.readouterr().err
    assert script.read_text() == OLD
    assert not os.path.exists(f"{script}.bak")


def test_line_ends_and_marks(tmp_path: Path) -> None:
    """Line ends and the mark of UTF-8 stay; so do characters outside of ASCII before a change on the same line."""
    path = tmp_path / "dos.py"
    old = '\ufeff# größe\r\nname = "größe"; from accelerate import Accelerator\r\n'
    path.write_bytes(old.encode())
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_bytes().decode() == old.replace("accelerate", "slipstream")


def test_link(script: Path, tmp_path: Path) -> None:
    """A link stays a link, and the file that it leads to is changed."""
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert main(["migrate", "--write", str(link)]) == 0
    assert link.is_symlink()
    assert script.read_text() == NEW


def test_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code cells of a notebook are changed; magics, outputs and other cells stay."""
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["from accelerate import Accelerator\n"]},
        {"cell_type": "code", "outputs": [{"text": "x"}], "source": ["%matplotlib inline\n", "from accelerate import notebook_launcher"]},
        {"cell_type": "code", "outputs": [], "source": "!pip install torch\nnotebook_launcher(print, ())\nnotebook_launcher?"},
        {"cell_type": "code", "outputs": [], "source": ["%%bash\n", "accelerate launch x.py"]},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "metadata": {"a": "é"}}, indent=1, ensure_ascii=False) + "\n")
    old = path.read_text()
    assert main(["migrate", "--write", str(path)]) == 0
    assert "code cell 2, line 2: notebook_launcher needs num_processes" in capsys.readouterr().err
    assert path.read_text() == old.replace("from accelerate import notebook_launcher", "from slipstream import notebook_launcher")
    path.write_text("{}")
    assert main(["migrate", str(path)]) == 2


def test_help_and_no_torch(script: Path) -> None:
    """The command imports no torch, and its help names the exit codes."""
    program = "import sys; from slipstream.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for arguments in (["migrate", "--help"], ["migrate", str(script)]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert arguments[1] != "--help" or "Exit codes" in done.stdout


def test_page() -> None:
    """The example of the page is what the command prints."""
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
    before = page.partition("```python before\n")[2].partition("```")[0]
    assert migrate_text(before, "train.py").diff() == page.partition("```diff\n")[2].partition("```")[0]


def test_reasons_of_hunks() -> None:
    """Every hunk has a reason."""
    for path in sorted((Path(__file__).parent / "scripts").glob("*.py")):
        headings = [line for line in migrate_text(path.read_text(), str(path)).diff().splitlines() if line.startswith("@@")]
        assert headings
        assert [line for line in headings if line.rstrip().endswith("@@")] == []
