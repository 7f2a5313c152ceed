"""The report of one or several runs: one HTML page that opens without a network, as a file or live from a small server.

`write(paths, output)` makes the file; `page.render(views)` makes the document from views of runs (`runs.reading.Run.view`). Nothing
here imports torch, and nothing here writes into a run but its `report.html`.
"""

from __future__ import annotations

from slipstream.report.writing import write

__all__ = ["write"]
