"""SwanLab: one run of the package `swanlab`, made on the main process by `start` and not before.

`mode="offline"` or `"local"` among the keywords (or SWANLAB_MODE) keeps it in a folder `swanlog`.
"""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.track.base import on_main_process
from slipstream.track.plain import plain
from slipstream.track.shared import ProjectRun
from slipstream.track.values import refuse, sort_values

__all__ = ["SwanLabTracker"]


class SwanLabTracker(ProjectRun):
    """A run of swanlab; keywords go to `swanlab.init`, and `run_name` is its project."""

    name = "swanlab"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as texts, objects of swanlab's own as they are."""
        package = importlib.import_module("swanlab")
        found = sort_values(values)
        own = {name: one for name, one in found.others.items() if type(one).__module__.split(".")[0] == "swanlab"}
        texts = {name: package.Text(text) for name, text in found.texts.items()}
        if found.numbers or texts or own:
            self.run.log({**found.numbers, **texts, **own}, step=step, **kwargs)
        refuse(self.name, {name: one for name, one in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `swanlab.Image`."""
        from slipstream.track.pictures import SortedPictures, three_channels

        image = importlib.import_module("swanlab").Image
        found = SortedPictures(values)
        if shown := {name: [image(three_channels(one), **kwargs) for one in several] for name, several in found.made.items()}:
            self.run.log(shown, step=step)
        found.refuse()
