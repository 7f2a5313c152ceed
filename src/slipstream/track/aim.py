"""Aim: one run of the package `aim`, in the repository `.aim` of the logging folder; no service is needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import plain
from slipstream.track.values import refuse, sort_values

__all__ = ["AimTracker"]


class AimTracker(GeneralTracker):
    """A run of aim; keywords go to `aim.Run`, and `run_name` is its name and its experiment."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The run of aim."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Makes the repository where there is none, and the run."""
        repo = os.fspath(self.logging_dir) if self.logging_dir is not None else "."
        self.writer = importlib.import_module("aim").Run(**{"repo": repo, "experiment": self.run_name, **self.init_kwargs})
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as `hparams` of the run."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, texts as texts, objects of aim's own as they are; keywords go to `track`."""
        package = importlib.import_module("aim")
        found = sort_values(values)
        own = {name: one for name, one in found.others.items() if type(one).__module__.split(".")[0] == "aim"}
        texts = {name: package.Text(text) for name, text in found.texts.items()}
        for name, value in {**found.numbers, **texts, **own}.items():
            self.writer.track(value, name=name, step=step, **kwargs)
        refuse(self.name, {name: one for name, one in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Logs pictures by name; `kwargs` has keywords for `aim.Image` as "aim_image", and for `track` as "track".

        A picture may be a pair of it and its caption.
        """
        from PIL import Image

        from slipstream.track.pictures import SortedPictures

        package = importlib.import_module("aim")
        options = {"aim_image": {}, "track": {}, **(kwargs or {})}
        captions = {name: one[1] for name, one in values.items() if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], str)}
        found = SortedPictures({name: one[0] if name in captions else one for name, one in values.items()})
        for name, several in found.made.items():
            caption = captions.get(name, "")
            for number, one in enumerate(several):
                image = Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one)
                shown = package.Image(image, **{"caption": caption, **options["aim_image"]})
                self.writer.track(shown, **{"name": name, "step": step, "context": {"picture": number}, **options["track"]})
        found.refuse()

    @on_main_process
    def finish(self) -> None:
        """Closes the run."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
