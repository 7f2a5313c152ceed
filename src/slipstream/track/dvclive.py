"""DVCLive: files of metrics, parameters and plots in a folder `dvclive`, written by the package of that name."""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.errors import ConfigError
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import plain
from slipstream.track.values import refuse, sort_values

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(GeneralTracker):
    """A `Live` of the user's, or one that is made with the keywords; `run_name` is the message of its experiment."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        if live is not None and kwargs:
            raise ConfigError(f"dvclive has an object live and {', '.join(kwargs)}: make the Live with them, or give the keywords alone")
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.live = live

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Makes the `Live` where none was given."""
        if self.live is None:
            message = {} if self.run_name is None else {"exp_message": self.run_name}
            self.live = importlib.import_module("dvclive").Live(**{**message, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as parameters."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts as metrics of a step, which is ended by it; keywords go to `log_metric`."""
        found = sort_values(values)
        if step is not None:
            self.live.step = step
        for name, value in {**found.numbers, **found.texts}.items():
            self.live.log_metric(name, value, **kwargs)
        if found.numbers or found.texts:
            self.live.next_step()
        refuse(self.name, found.others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        """Writes pictures as `plots/images/<name>/<step>.png`, which is how DVC shows them with a slider."""
        from slipstream.track.pictures import SortedPictures

        found = SortedPictures(values)
        for name, several in found.made.items():
            for number, one in enumerate(several):
                file = f"{self.live.step if step is None else step}{'' if len(several) == 1 else f'-{number}'}.png"
                self.live.log_image(f"{name}/{file}", one[:, :, 0] if one.shape[2] == 1 else one)
        found.refuse()

    @on_main_process
    def finish(self) -> None:
        """Ends the `Live`: its last files, and, in a repository of DVC, the experiment."""
        if self.live is not None:
            self.live.end()
            self.live = None
