"""The report of one or several runs, a self-contained HTML page, as a file or live from a small server.

`write(paths, output)` writes the file. Nothing here imports torch, and nothing here writes into a run directory except its `report.html`.
"""

from __future__ import annotations

from slipstream.observability.report.page import write

__all__ = ["write"]
