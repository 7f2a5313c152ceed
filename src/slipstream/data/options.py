"""`DataLoaderConfiguration`: how loaders are prepared. Values are checked when it is made and when a loader is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError

__all__ = ["DataLoaderConfiguration"]

_SWITCHES = ("split_batches", "even_batches", "non_blocking", "use_stateful_dataloader")
_OPEN_SWITCHES = ("dispatch_batches", "use_seedable_sampler")
"""These may be None as well."""


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """How the loaders given to `prepare` are shared between processes; read each time that one is prepared.

    >>> DataLoaderConfiguration(even_batches=False).to_kwargs()
    {'even_batches': False}
    """

    split_batches: bool = False
    """Whether the script's batch size is that of all processes together, rather than that of each."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads for everyone; None means no."""
    even_batches: bool = True
    """Whether a short last batch is completed with samples from the start, rather than shared out as it is (gradients stay exact)."""
    use_seedable_sampler: bool | None = None
    """The order is always a function of seed and epoch; False has no effect and is warned about."""
    data_seed: int | None = None
    """The seed of the order; None takes the one that the script set (`set_seed`, or that of the loader's own generator)."""
    non_blocking: bool = False
    """Whether copies to a device may overlap with what follows."""
    use_stateful_dataloader: bool = False
    """Whether a loaded checkpoint lets the next iteration go on where the saved one stood; else `skip_first_batches` does."""
    resume: str | None = None
    """"auto" is the same by its short name: after a checkpoint was loaded, the next `for` over a loader goes on by itself."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuses values that cannot be meant: fields can be set after the object was made."""
        for name in (*_SWITCHES, *_OPEN_SWITCHES):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPEN_SWITCHES):
                choices = "True, False or None" if name in _OPEN_SWITCHES else "True or False"
                raise ConfigError(f"DataLoaderConfiguration({name}={value!r}): a {type(value).__name__} is no switch; write {choices}")
        if self.resume not in (None, "auto"):
            raise ConfigError(
                f"DataLoaderConfiguration(resume={self.resume!r}): write resume='auto' to let the next loop over a loader go on where the "
                "checkpoint stood, or leave it out and call skip_first_batches"
            )
        seed = self.data_seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ConfigError(f"DataLoaderConfiguration(data_seed={seed!r}): a seed is a whole number from 0; write e.g. 42")

    @property
    def resumes(self) -> bool:
        """Whether a loop goes on by itself after a position was loaded."""
        return self.use_stateful_dataloader or self.resume == "auto"
