"""States of optimizers that go by names of parameters, as torch's distributed checkpoints have them.

An optimizer numbers its parameters in the order in which it was given them; a sharded one is saved under the names that its model has for
them. `number_parameters` turns such a state into one that the optimizer of this run loads: by name, never by position.
`name_parameters` is the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.parallel.unwrap import plain_name

__all__ = ["goes_by_names", "name_parameters", "number_parameters", "parameter_names"]


def parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, list[str]]:
    """Return the plain names of every parameter, by its id; a tied one has several."""
    names: dict[int, list[str]] = {}
    for model in models:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(plain_name(name))
    return names


def goes_by_names(state: Any) -> bool:
    """Whether the state of an optimizer names its parameters.

    >>> goes_by_names({"param_groups": [{"params": ["weight"]}]}), goes_by_names({"param_groups": [{"params": [0]}]})
    (True, False)
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return isinstance(groups, list) and any(type(key) is str for group in groups for key in group["params"])


def number_parameters(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, Sequence[str]], where: str
) -> dict[str, Any]:
    """Return a state that goes by names with the numbers that these groups of parameters have; `where` begins the messages."""
    homes = {name: group for group in state["param_groups"] for name in group["params"]}
    made: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    used: set[str] = set()
    number = 0
    for group in groups:
        settings: Any = None
        numbers = []
        for parameter in group["params"]:
            known = [name for name in names.get(id(parameter), ()) if name in homes]
            if not known:
                called = next(iter(names.get(id(parameter), ())), f"of shape {list(parameter.shape)}")
                raise CheckpointError(
                    f"{where} has no state of the parameter {called}; it has {_some(list(homes))}. Make it of the same parameters."
                )
            home = homes[known[0]]
            if settings is not None and home is not settings:
                before = _some(settings["params"])
                raise CheckpointError(f"{where}: {known[0]!r} was in another group than {before}. Group them as they were.")
            settings = home
            if known[0] in state["state"]:
                states[number] = state["state"][known[0]]
            used.update(known)
            numbers.append(number)
            number += 1
        made.append({**(settings or _settings_without_parameters(state, len(made), group)), "params": numbers})
    if left := [name for name in homes if name not in used]:
        raise CheckpointError(f"{where} has states of {_some(left)}, which this optimizer does not have. Make it of the same parameters.")
    return {**state, "state": states, "param_groups": made}


def _settings_without_parameters(state: Mapping[str, Any], place: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a group that no parameter leads to: those stored at its place if that group was empty too, else its own."""
    stored = state["param_groups"][place] if place < len(state["param_groups"]) else None
    return stored if stored is not None and not stored["params"] else group


def name_parameters(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a state that goes by numbers with names; `names` has that of each parameter, in their order.

    >>> name_parameters({"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}, ["weight"])
    {'state': {'weight': {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': ['weight']}]}
    """
    order = {number: name for number, name in zip((key for group in state["param_groups"] for key in group["params"]), names, strict=True)}
    return {
        **state,
        "state": {order[number]: entries for number, entries in state["state"].items()},
        "param_groups": [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]],
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
