"""Choose the blocks of a model that are sharded as units; pure, nothing is applied.

Parameters are gathered, used and given back block by block, so the blocks decide how much one rank holds at its peak. `plan_blocks`
returns them with the reason for the choice, innermost first; what no block holds belongs to the root. Every parameter belongs to exactly
one block, to the root, or to an ignored module; a model for which that cannot be is refused with both names of the shared parameter.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from slipstream.errors import ConfigError

__all__ = ["BlockPlan", "find_modules", "group_parameters", "plan_blocks"]

_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_OPAQUE = (nn.MultiheadAttention, ParametrizationList)
"""Modules that read the parameters of their children without calling them, so that no hook of a child would gather these."""


class _WrapOptions(Protocol):
    """What `plan_blocks` reads of the options of sharding."""

    @property
    def auto_wrap_policy(self) -> str | Callable[..., bool] | None: ...
    @property
    def transformer_cls_names_to_wrap(self) -> Sequence[str]: ...
    @property
    def min_num_params(self) -> int: ...
    @property
    def ignored_modules(self) -> Iterable[nn.Module] | str | None: ...


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of a model, the reason for them, and the modules that are not sharded."""

    blocks: tuple[tuple[str, nn.Module], ...]
    """Name and module, innermost first. The root is not among them."""
    reason: str
    ignored: tuple[tuple[str, nn.Module], ...]
    """Modules that every rank holds whole; their submodules are not listed again."""


@dataclass(frozen=True)
class _Choice:
    """What a policy answered. `blocks` may contain the root, which says that the policy matches it."""

    blocks: tuple[nn.Module, ...]
    reason: str
    asked: bool = True
    """The user named the policy: what it matches is not corrected silently."""


def plan_blocks(model: nn.Module, options: _WrapOptions) -> BlockPlan:
    """Return the blocks that a wrap policy chooses in `model`.

    Raises a ConfigError for a class that is not in the model, a policy that matches nothing, a name of ignored modules that matches
    nothing, and a parameter that is shared between two blocks.

    >>> from types import SimpleNamespace
    >>> options = SimpleNamespace(auto_wrap_policy=None, transformer_cls_names_to_wrap=(), min_num_params=1, ignored_modules=None)
    >>> plan = plan_blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False), options)
    >>> [name for name, _ in plan.blocks], plan.reason
    (['layers.0', 'layers.1'], 'TransformerEncoderLayer, which is repeated in layers')
    """
    tree = _Tree(model, options.ignored_modules)
    choice = _choose(tree, options)
    chosen = [module for module in choice.blocks if module is not model]
    chosen, left_out = _settle_sharing(tree, chosen, choice.asked)
    reason = choice.reason
    if left_out:
        names = ", ".join(tree.describe(module) for module in left_out)
        shares = "shares a parameter" if len(left_out) == 1 else "share parameters"
        reason += f"; without {names}, which {shares} with the rest of the model"
    if not chosen and not left_out and choice.blocks:
        reason += "; it matches the root alone"
    return BlockPlan(
        blocks=tuple((tree.names[module], module) for module in chosen),
        reason=reason,
        ignored=tuple((tree.names[module], module) for module in tree.ignored),
    )


def group_parameters(model: nn.Module, plan: BlockPlan) -> dict[str | None, dict[str, nn.Parameter]]:
    """Return the parameters of each block by name: "" is the root, None are the ignored modules. A tied parameter is listed once.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> groups = group_parameters(model, BlockPlan((("1", model[1]),), "by hand", ()))
    >>> {block: list(parameters) for block, parameters in groups.items()}
    {'1': ['1.weight'], '': ['0.weight'], None: []}
    """
    groups: dict[str | None, dict[str, nn.Parameter]] = {name: {} for name, _ in plan.blocks}
    groups.update({"": {}, None: {}})
    ignored = {parameter for _, module in plan.ignored for parameter in module.parameters()}
    block_names = {module: name for name, module in plan.blocks} | {model: ""}
    for parameter, places in _find_owners(model, set(block_names)).items():
        owner, name = next(iter(places.items()))
        groups[None if parameter in ignored else block_names[owner]][name] = parameter
    return groups


def find_modules(model: nn.Module, wanted: Iterable[nn.Module] | str | None, argument: str = "ignored_modules") -> tuple[nn.Module, ...]:
    """Return the modules of a model that are given, or whose whole names a regular expression matches, without what is inside of them.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> find_modules(model, "0|1") == (model[0], model[1])
    True
    """
    if wanted is None:
        return ()
    names = {module: name for name, module in model.named_modules()}
    if isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise ConfigError(f"{argument}={wanted!r} is not a regular expression: {error}.") from None
        found = [module for module, name in names.items() if name and pattern.fullmatch(name)]
        if not found:
            examples = ", ".join([name for name in names.values() if name][:8])
            raise ConfigError(
                f"{argument}={wanted!r} matches no module: the regular expression has to match a whole name. "
                f"Modules of {type(model).__name__} are {examples}, ..."
            )
    else:
        found = list(wanted)
        for module in found:
            if module not in names:
                raise ConfigError(
                    f"{argument} has a {type(module).__name__} that is not a module of {type(model).__name__}. "
                    "Pass modules of the model that is prepared, or a regular expression over their names."
                )
    inner = {below for module in found for below in module.modules() if below is not module}
    return tuple(dict.fromkeys(module for module in found if module not in inner))


class _Tree:
    """The modules of a model, which of them may be blocks, and which are ignored."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Module] | str | None) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.ignored = find_modules(model, ignored)
        self._left_whole = {inner for module in self.ignored for inner in module.modules()}
        self.ignored_parameters = {parameter for module in self.ignored for parameter in module.parameters()}
        hidden = {inner for module in self.names if isinstance(module, _OPAQUE) for inner in module.modules()}
        self._hidden = hidden - {module for module in self.names if isinstance(module, nn.MultiheadAttention)}
        if not self.parameters(model):
            raise ConfigError(
                f"{type(model).__name__} has no parameters that could be sharded"
                + (": ignored_modules covers all of them." if self.ignored else ".")
            )

    def describe(self, module: nn.Module) -> str:
        """Return "name (Class)" of a module."""
        return f"{self.names[module]} ({type(module).__name__})" if module is not self.model else "the root"

    def is_ignored(self, module: nn.Module) -> bool:
        return module in self._left_whole

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters below a module that can be sharded. A parameter without dimensions cannot."""
        return [parameter for parameter in module.parameters() if parameter.ndim and parameter not in self.ignored_parameters]

    def can_be_block(self, module: nn.Module) -> bool:
        """Return whether a module is called by `forward`, so that its parameters are gathered in time, and has any."""
        if self.is_ignored(module) or module in self._hidden or not self.parameters(module):
            return False
        return getattr(module.forward, "__func__", None) is not nn.Module.forward

    def classes(self) -> str:
        """Return the classes of modules that could be blocks, those with children first."""
        candidates = [module for module in self.names if module is not self.model and self.can_be_block(module)]
        candidates.sort(key=lambda module: not any(True for _ in module.children()))
        return ", ".join(dict.fromkeys(type(module).__name__ for module in candidates)) or "none"

    def outermost(self, wanted: Callable[[nn.Module], bool]) -> tuple[nn.Module, ...]:
        """Return the modules for which `wanted` holds and that are in no other one; the root is not asked."""
        found: dict[nn.Module, None] = {}
        seen: set[nn.Module] = set()

        def visit(module: nn.Module) -> None:
            for child in module.children():
                if child in seen:
                    continue
                seen.add(child)
                if self.can_be_block(child) and wanted(child):
                    found[child] = None
                else:
                    visit(child)

        visit(self.model)
        inner = {below for module in found for below in module.modules() if below is not module}
        return tuple(module for module in found if module not in inner)


def _choose(tree: _Tree, options: _WrapOptions) -> _Choice:
    policy = options.auto_wrap_policy
    if policy is None:
        return _choose_automatically(tree)
    if callable(policy):
        return _choose_by_function(tree, policy)
    name = policy.lower() if isinstance(policy, str) else policy
    if name == "transformer_based_wrap":
        return _choose_by_class(tree, tuple(options.transformer_cls_names_to_wrap or ()))
    if name == "size_based_wrap":
        return _choose_by_size(tree, options.min_num_params)
    if name == "no_wrap":
        return _Choice((), "no_wrap: the root alone is sharded")
    if hasattr(policy, "_run_policy"):
        raise ConfigError(f"auto_wrap_policy is a {type(policy).__name__}, which only FSDP1 can run. Pass the function inside of it.")
    raise ConfigError(
        f"auto_wrap_policy={policy!r} is no wrap policy. Write one of {', '.join(map(repr, _POLICIES))}, or pass a function "
        "(module) -> bool; None takes the blocks that the model names, or repeated ones."
    )


# Classes


def _class_names(module: nn.Module) -> set[str]:
    """Return the names of the class of a module and of its bases, without that of `nn.Module`."""
    return {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module}


def _modules_of_classes(tree: _Tree, names: Iterable[str]) -> tuple[nn.Module, ...]:
    wanted = set(names)
    return _walk(tree, lambda module, _: True, lambda module, *_: bool(wanted & _class_names(module)))


def _choose_by_class(tree: _Tree, names: tuple[str, ...]) -> _Choice:
    source = "from transformer_cls_names_to_wrap"
    if not names:
        names, source = _names_of_model(tree.model), "from the model's _no_split_modules"
        if not names:
            raise ConfigError(
                f"transformer_based_wrap needs the classes of the blocks, and {type(tree.model).__name__} names none in "
                f"_no_split_modules. Give transformer_cls_names_to_wrap one or more of: {tree.classes()}."
            )
        names = tuple(name for name in names if any(name in _class_names(module) for module in tree.names)) or names
    present = {name for module in tree.names for name in _class_names(module)}
    for name in names:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            raise ConfigError(
                f"There is no module of the class {name!r} ({source}) in {type(tree.model).__name__}"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" Its modules are of the classes: {tree.classes()}."
            )
    chosen = _modules_of_classes(tree, names)
    if not chosen:
        raise ConfigError(
            f"No module of the classes {', '.join(names)} ({source}) can be a block: they are containers without a forward, or have no "
            f"parameters to shard. Name one or more of: {tree.classes()}."
        )
    return _Choice(chosen, f"{', '.join(names)}, {source}", asked=source.endswith("to_wrap"))


def _names_of_model(model: nn.Module) -> tuple[str, ...]:
    """Return the classes that a model asks not to split: its own list, or those of the models inside of it."""
    for modules in ([model], model.modules()):
        names: dict[str, None] = {}
        for module in modules:
            names.update(dict.fromkeys(getattr(module, "_no_split_modules", None) or ()))
        if names:
            return tuple(names)
    return ()


# Without a policy


def _choose_automatically(tree: _Tree) -> _Choice:
    named = _names_of_model(tree.model)
    chosen = _modules_of_classes(tree, named)
    if chosen:
        names = dict.fromkeys(name for name in named if any(name in _class_names(module) for module in chosen))
        return _Choice(chosen, f"{', '.join(names)}, from the model's _no_split_modules", asked=False)
    siblings, containers = _find_siblings(tree)
    # Only the outermost: what is repeated inside of a block (the experts of a layer) need not run on every rank, and a block has to.
    kinds = {type(module) for module in siblings if type(module) is not nn.Sequential}
    chosen = tree.outermost(lambda module: module in siblings or (type(module) in kinds and _has_children(tree, module)))
    if chosen:
        holders = [tree.names[container] or "the root" for container in containers if not set(chosen).isdisjoint(container.children())]
        return _Choice(chosen, f"{_describe_classes(chosen)} repeated in {', '.join(holders)}", asked=False)
    counts = Counter(type(module) for module in tree.names if module is not tree.model and _has_children(tree, module))
    repeated = {kind for kind, count in counts.items() if count > 1 and kind is not nn.Sequential}
    chosen = tree.outermost(lambda module: type(module) in repeated and _has_children(tree, module))
    if len(chosen) > 1:
        return _Choice(chosen, f"{_describe_classes(chosen)} found {len(chosen)} times", asked=False)
    return _Choice((), "no block class is repeated, so the root alone is sharded", asked=False)


def _has_children(tree: _Tree, module: nn.Module) -> bool:
    """Return whether a module is more than a layer: one that can be a block and has children with parameters."""
    return tree.can_be_block(module) and any(tree.parameters(child) for child in module.children())


def _find_siblings(tree: _Tree) -> tuple[set[nn.Module], list[nn.Module]]:
    """Return modules of one class that stand next to each other in a list, and the lists."""
    siblings: set[nn.Module] = set()
    containers: list[nn.Module] = []
    for container in tree.names:
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = [child for child in container.children() if _has_children(tree, child)]
            counts = Counter(type(child) for child in children)
            repeated = {child for child in children if counts[type(child)] > 1}
            if repeated:
                containers.append(container)
                siblings |= repeated
    return siblings, containers


def _describe_classes(modules: Iterable[nn.Module]) -> str:
    """Return "Block, which is", or "Block, Other, which are"."""
    names = dict.fromkeys(type(module).__name__ for module in modules)
    return f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'}"


# Sizes and functions


def _walk(
    tree: _Tree, enter: Callable[[nn.Module, int], bool], wanted: Callable[[nn.Module, int, bool], bool]
) -> tuple[nn.Module, ...]:
    """Return the modules that are wanted, children before their parents, the root last.

    Both functions get a module and the number of its parameters that no chosen module holds; `wanted` also gets what `enter`
    answered, which decides whether the children are visited.
    """
    chosen: dict[nn.Module, None] = {}
    held: set[nn.Parameter] = set()
    seen: set[nn.Module] = set()

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in tree.parameters(module) if parameter not in held)

    def visit(module: nn.Module) -> None:
        seen.add(module)
        entered = enter(module, count(module))
        if entered:
            for child in module.children():
                if child not in seen and not tree.is_ignored(child):
                    visit(child)
        if (module is tree.model or tree.can_be_block(module)) and wanted(module, count(module), entered):
            chosen[module] = None
            held.update(tree.parameters(module))

    visit(tree.model)
    return tuple(chosen)


def _choose_by_size(tree: _Tree, min_num_params: int) -> _Choice:
    if type(min_num_params) is not int or min_num_params < 1:
        raise ConfigError(f"min_num_params={min_num_params!r}: size_based_wrap needs a number of parameters from 1.")

    def shares_nothing(module: nn.Module) -> bool:
        return all(len(places) == 1 for places in _find_owners(tree.model, {module}).values() if module in places)

    chosen = _walk(
        tree,
        lambda module, count: count >= min_num_params,
        lambda module, count, _: count >= min_num_params and shares_nothing(module),
    )
    if not chosen:
        total = sum(parameter.numel() for parameter in tree.parameters(tree.model))
        raise ConfigError(
            f"size_based_wrap with min_num_params={min_num_params:,} matches nothing: {type(tree.model).__name__} has {total:,} "
            f"parameters in all. Give a smaller min_num_params, or write auto_wrap_policy='no_wrap'."
        )
    return _Choice(chosen, f"size_based_wrap: modules with {min_num_params:,} parameters or more")


def _choose_by_function(tree: _Tree, policy: Callable[..., bool]) -> _Choice:
    try:
        arguments = set(inspect.signature(policy).parameters)
    except (TypeError, ValueError):  # some built-in callables have no signature
        arguments = set()
    name = getattr(policy, "__qualname__", type(policy).__name__)
    if "recurse" in arguments:  # the form of FSDP1: asked before the children with recurse=True, after them with recurse=False

        def ask(module: nn.Module, count: int, recurse: bool) -> bool:
            return bool(policy(module=module, recurse=recurse, nonwrapped_numel=count))

        chosen = _walk(
            tree,
            lambda module, count: ask(module, count, True),
            lambda module, count, entered: entered and ask(module, count, False),
        )
    else:
        chosen = _walk(tree, lambda module, _: True, lambda module, *_: bool(policy(module)))
    if not chosen:
        raise ConfigError(
            f"The wrap policy {name} matches no module that can be a block (one with a forward and parameters to shard). "
            f"The model has modules of the classes: {tree.classes()}. To shard the root alone, write auto_wrap_policy='no_wrap'."
        )
    return _Choice(chosen, f"the function {name}")


# Shared parameters


def _find_owners(model: nn.Module, blocks: set[nn.Module]) -> dict[nn.Parameter, dict[nn.Module, str]]:
    """Return the blocks that each parameter would belong to, and its first name in each. A module may be in several places."""
    found: dict[nn.Parameter, dict[nn.Module, str]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(module: nn.Module, owner: nn.Module, path: str) -> None:
        owner = module if module in blocks else owner
        if (module, owner) in seen:
            return
        seen.add((module, owner))
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(parameter, {}).setdefault(owner, path + name)
        for name, child in module.named_children():
            visit(child, owner, f"{path}{name}.")

    visit(model, model, "")
    return found


def _settle_sharing(tree: _Tree, chosen: Sequence[nn.Module], asked: bool) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the blocks among which no parameter is shared, and those that were left out for it.

    A block is left out only where the user did not choose it and another one around it has the same parameter.
    """
    kept, left_out = list(chosen), []
    while True:
        for parameter, places in _find_owners(tree.model, set(kept)).items():
            if len(places) == 1 or not parameter.ndim or parameter in tree.ignored_parameters:
                continue
            around = next((owner for owner in places if set(places) <= set(owner.modules())), None)
            if around is None or asked:
                raise ConfigError(_sharing_message(tree, places))
            left_out += [owner for owner in places if owner is not around]
            kept = [module for module in kept if module is around or module not in places]
            break
        else:
            return kept, left_out


def _sharing_message(tree: _Tree, places: dict[nn.Module, str]) -> str:
    (first, first_name), (second, second_name) = list(places.items())[:2]
    text = (
        f"{first_name} and {second_name} are one parameter, but it would belong to two blocks: {tree.describe(first)} and "
        f"{tree.describe(second)}. A block gathers and reduces its parameters by itself, so a shared one needs one owner. "
    )
    inner = [owner for owner in (first, second) if owner is not tree.model]
    classes = " and ".join(dict.fromkeys(type(owner).__name__ for owner in inner))
    common = _common_module(tree, first_name, second_name)
    if common is not tree.model and common not in (first, second):
        return text + f"Wrap {tree.describe(common)}, which contains both, instead of {classes}."
    return text + (
        f"Do not wrap {classes}, so that {tree.describe(common)} holds both; auto_wrap_policy='no_wrap' shards the root alone."
    )


def _common_module(tree: _Tree, first: str, second: str) -> nn.Module:
    """Return the innermost module around two parameters that can be a block, or the root."""
    module: nn.Module = tree.model
    found = module
    for left, right in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if left != right:
            break
        module = module._modules[left]  # type: ignore[assignment]  # the names were made from these
        if tree.can_be_block(module):
            found = module
    return found
