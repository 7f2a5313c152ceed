"""What was saved, as this rank needs it: of sharded tensors the part that it holds, whichever ranks held which when it was saved.

Reads the pieces that this rank needs and verifies them. Nothing that is prepared changes, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from slipstream.checkpoint.assembling import StandIns, placed
from slipstream.checkpoint.fit import arranged
from slipstream.checkpoint.saved import Saved, SavedModel
from slipstream.checkpoint.shares import is_sharded, wanted
from slipstream.checkpoint.weights import check_fit
from slipstream.facade.parts import Parts

__all__ = ["fitted"]


def fitted(parts: Parts, objects: Sequence[Any], saved: Saved, *, strict: bool) -> Saved:
    """The same, with every tensor as its target holds it on this rank; as it is, where nothing is sharded, then or now."""
    if parts.strategy.replicated and not saved.stand_ins:
        return saved
    models, optimizers, stand_ins = parts.stepper.models, parts.registry.optimizers, saved.stand_ins
    return replace(
        saved,
        models={
            number: _model(models[number].original, one, stand_ins, strict=strict) if number < len(models) else one
            for number, one in saved.models.items()
        },
        optimizers=None
        if saved.optimizers is None
        else [
            _optimizer(one, optimizers[place].param_groups, stand_ins) if place < len(optimizers) else one
            for place, one in enumerate(saved.optimizers)
        ],
        objects={
            number: placed(one, objects[number].state_dict(), stand_ins) if number < len(objects) else one
            for number, one in saved.objects.items()
        },
    )


def _model(model: torch.nn.Module, stored: SavedModel, stand_ins: StandIns, *, strict: bool) -> SavedModel:
    targets = dict(model.state_dict())
    report = check_fit(model, stored.tensors, stored.aliases, stored.extra)
    tensors = {
        name: placed(value, targets[known], stand_ins)
        for name, value in stored.tensors.items()
        if (known := report.renamed.get(name, name)) in targets
    }
    aliases = {}
    for name, kept in stored.aliases.items():
        if kept in tensors and _alike(targets.get(name), targets[report.renamed.get(kept, kept)]):
            aliases[name] = kept
        elif name in targets:
            tensors[name] = placed(stored.tensors[kept], targets[name], stand_ins)
    arranged(model, tensors, aliases, stored.extra, report, strict=strict)  # weights that are tied here, and were not, may differ
    return replace(stored, tensors=tensors, aliases=aliases)


def _alike(one: Any, other: Any) -> bool:
    """Whether two targets hold the same part of a tensor on this rank."""
    return is_sharded(one) == is_sharded(other) and (not is_sharded(one) or wanted(one) == wanted(other))


def _optimizer(stored: Any, groups: Sequence[Mapping[str, Any]], stand_ins: StandIns) -> Any:
    """The state of an optimizer: what has the shape of a parameter is sharded as the parameter is."""
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, (parameter for group in groups for parameter in group["params"]), strict=True))
    state = {
        number: {name: placed(value, None if name == "step" else parameters.get(number), stand_ins) for name, value in entries.items()}
        if isinstance(entries, Mapping)
        else placed(entries, parameters.get(number), stand_ins)
        for number, entries in stored["state"].items()
    }
    return {**placed({name: value for name, value in stored.items() if name != "state"}, None, stand_ins), "state": state}
