"""The drop-in is a distribution of its own: its metadata, its commands, and that Slipstream does not need it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path


def test_metadata_names_slipstream():
    """The version says whose it is, and the author is not the original's."""
    found = metadata.metadata("accelerate")
    assert found["Version"] == "1.15.0+slipstream"
    assert "Slipstream" in (found["Author"] or found["Author-email"] or "")


def test_command_is_installed(accelerate_command):
    """The console command answers."""
    shown = subprocess.run([accelerate_command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "to-fsdp2" in shown


def test_launched_script_imports_the_drop_in(launch):
    """A script that `accelerate launch` starts on two processes uses this package."""
    shown = launch(
        """
        import accelerate
        state = accelerate.PartialState()
        print("rank", state.process_index, "of", state.num_processes, accelerate.__version__)
        """,
        2,
    )
    assert "rank 0 of 2 1.15.0+slipstream" in shown
    assert "rank 1 of 2 1.15.0+slipstream" in shown


def test_slipstream_does_not_import_it():
    """Importing Slipstream and making an Accelerator leaves the drop-in alone."""
    code = "import sys, slipstream; slipstream.Accelerator(cpu=True); sys.exit('accelerate' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    import slipstream

    sources = Path(slipstream.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "\nimport accelerate" in path.read_text() or "\nfrom accelerate" in path.read_text()]
