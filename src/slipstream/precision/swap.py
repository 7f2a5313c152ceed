"""One module takes the place of another: what users registered on the old one goes with it."""

from __future__ import annotations

import torch

from slipstream.errors import ConfigError

__all__ = ["hand_over_hooks"]


def hand_over_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Hooks of the old module become the new one's, in the same dictionaries, so that their handles still remove them.

    >>> old, new = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> handle = old.register_forward_hook(lambda module, inputs, output: print("called"))
    >>> hand_over_hooks(old, new)
    >>> _ = new(torch.ones(1))
    called
    >>> handle.remove()
    >>> _ = new(torch.ones(1))
    """
    for name, hooks in list(vars(old).items()):
        if "_hooks" not in name or not isinstance(hooks, dict) or not hooks:
            continue
        if vars(new).get(name):
            raise ConfigError(
                f"hooks ({name.strip('_')}) were registered both on {type(new).__name__} and on the {type(old).__name__} around it: "
                "register them on the module itself, before torch.compile"
            )
        setattr(new, name, hooks)
