"""Comparing example scripts: which lines a feature's script has that the complete script lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["clean_lines", "compare_against_test", "get_function_contents_by_name"]


def get_function_contents_by_name(lines: list[str], name: str) -> list[str]:
    """Return the lines of the function `training_function` or `main` (which ends where the file's `if __name__` begins).

    >>> get_function_contents_by_name(["def main():", "    pass", "if __name__ == '__main__':"], "main")
    ['def main():', '    pass']
    """
    if name not in ("training_function", "main"):
        raise ValueError(f"only `training_function` and `main` are compared, not {name!r}")
    body: list[str] = []
    for line in lines:
        if body and line[:1].strip() and not line.startswith((")", "#")):  # the next statement at the left margin
            break
        if body or line.startswith(f"def {name}("):
            body.append(line)
    return body


def clean_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that are neither empty nor comments."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _lines_of(path: str | Path, part: str) -> list[str]:
    return clean_lines(get_function_contents_by_name(Path(path).read_text(encoding="utf-8").splitlines(keepends=True), part))


def compare_against_test(
    base_filename: str | Path, feature_filename: str | Path, parser_only: bool, secondary_filename: str | Path | None = None
) -> list[str]:
    """Return the lines of a feature's example that the complete example should have and has not.

    What the basic example (`secondary_filename`, by default `nlp_example.py` beside the complete one) has too is not counted, nor are
    lines about trackers that the complete example writes in another way.
    """
    part = "main" if parser_only else "training_function"
    complete = _lines_of(base_filename, part)
    basic = _lines_of(secondary_filename or Path(base_filename).parent / "nlp_example.py", part)
    new_in_feature = [line for line in _lines_of(feature_filename, part) if line not in basic and "TESTING_MOCKED_DATALOADERS" not in line]
    return [line for line in new_in_feature if line not in complete]
