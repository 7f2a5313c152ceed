"""Importing this module prints tracebacks with rich. `import accelerate` does so where ACCELERATE_ENABLE_RICH is true and rich is there."""

from accelerate.utils.imports import is_rich_available

if not is_rich_available():
    raise ModuleNotFoundError("accelerate.utils.rich needs ACCELERATE_ENABLE_RICH=true and the package rich: pip install rich", name="rich")

from rich.traceback import install  # noqa: E402  # after the check, whose error says what to do

install(show_locals=False)
