"""Checks `notebook_launcher`: the processes start, get their arguments, and fail with the error of the function."""

from __future__ import annotations

import os

from accelerate import PartialState, notebook_launcher
from accelerate.test_utils.testing import assert_exception


def _check_number(wanted: int) -> None:
    assert PartialState().num_processes == wanted


def _fail(text: str) -> None:
    raise ValueError(text)


def main() -> None:
    """Run every check, with ACCELERATE_NUM_PROCESSES processes (2)."""
    number = int(os.environ.get("ACCELERATE_NUM_PROCESSES", "2"))
    print(f"** a function in {number} processes")
    notebook_launcher(_check_number, (number,), num_processes=number)
    print("** a function that fails")
    with assert_exception(Exception, "on purpose"):
        notebook_launcher(_fail, ("on purpose",), num_processes=number)
    print("** one process: here")
    notebook_launcher(_check_number, (1,), num_processes=1)


if __name__ == "__main__":
    main()
