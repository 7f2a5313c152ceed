"""`FullyShardedDataParallelPlugin`: completed from every source, version 1 translated, mistakes refused with what to write."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from slipstream import ConfigError, FullyShardedDataParallelPlugin
from slipstream.config import OPTIONS, for_worker, resolve, resolved_config
from slipstream.config.files import write_file
from slipstream.config.option import option_text
from slipstream.config.schema import Sharding
from slipstream.parallel.wrap_policy import plan_blocks
from slipstream.strategies.fsdp_options import _OPTION_OF, ShardingOptions, resolve_sharding
from slipstream.utils import patch_environment


def resolved(plugin: FullyShardedDataParallelPlugin | None = None, precision: str = "no", **options: Any) -> ShardingOptions:
    found = resolve_sharding(plugin, Sharding(**{"use_fsdp": True, **options}), precision)
    assert found is not None
    return found


def test_defaults() -> None:
    """Without anything given the options are the defaults of the record, and nothing is said."""
    assert resolved(FullyShardedDataParallelPlugin()) == resolved() == ShardingOptions()


def test_not_asked_for() -> None:
    """Without a plugin and without use_fsdp there is no sharding; options that then have no effect are named."""
    assert resolve_sharding(None, Sharding(), "bf16") is None
    with pytest.warns(UserWarning, match="fsdp_offload_params, fsdp_state_dict_type without use_fsdp"):
        assert resolve_sharding(None, Sharding(fsdp_offload_params=True, fsdp_state_dict_type="FULL_STATE_DICT"), "no") is None


FIELDS: list[tuple[str, Any, str, str, Any]] = [
    ("reshard_after_forward", False, "fsdp_reshard_after_forward", "false", False),
    ("reshard_after_forward", 2, "fsdp_reshard_after_forward", "2", 2),
    ("auto_wrap_policy", "size_based_wrap", "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "size_based_wrap"),
    ("auto_wrap_policy", "NO_WRAP", "fsdp_auto_wrap_policy", "no_wrap", "no_wrap"),
    ("transformer_cls_names_to_wrap", ["A", "B"], "fsdp_transformer_layer_cls_to_wrap", "A, B", ("A", "B")),
    ("cpu_offload", True, "fsdp_offload_params", "true", True),
    ("ignored_modules", r"b\d+", "fsdp_ignored_modules", r"b\d+", r"b\d+"),
    ("state_dict_type", "FULL_STATE_DICT", "fsdp_state_dict_type", "full_state_dict", "FULL_STATE_DICT"),
    ("state_dict_type", StateDictType.FULL_STATE_DICT, "fsdp_state_dict_type", "FULL_STATE_DICT", "FULL_STATE_DICT"),
    ("activation_checkpointing", True, "fsdp_activation_checkpointing", "true", True),
    ("cpu_ram_efficient_loading", 1, "fsdp_cpu_ram_efficient_loading", "true", True),
    ("sync_module_states", False, "fsdp_sync_module_states", "false", False),
]


@pytest.mark.parametrize(("field", "argument", "option", "text", "value"), FIELDS)
def test_field_from_every_source(field: str, argument: Any, option: str, text: str, value: Any, tmp_path: Path) -> None:
    """An argument, a flag, a variable of either name and a file give the same decision."""
    assert getattr(resolved(FullyShardedDataParallelPlugin(**{field: argument})), field) == value
    old = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}.get(option, option.upper())
    path = write_file(tmp_path / "c.yaml", {option: text})
    for config in (
        resolve(flags={option: text}, environ={}),
        resolve(environ={f"SLIPSTREAM_{option.upper()}": text}),
        resolve(environ={old: text}),
        resolve(config_file=path, environ={}),
        for_worker(environ={resolved_config.VARIABLE: resolved_config.dump(resolve(flags={option: text}, environ={}))}),
    ):
        found = resolve_sharding(FullyShardedDataParallelPlugin(), config.sharding, "no")
        assert getattr(found, field) == value


KINDS = ("argument", "flag", "variable", "old variable", "file")


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.combinations(KINDS, 2)))
def test_stronger_source_wins(stronger: str, weaker: str, tmp_path: Path) -> None:
    """Argument over flag over variable over Accelerate's variable over file, for an option whose default neither is."""
    given: Mapping[str, int] = {stronger: 11, weaker: 22}
    path = write_file(tmp_path / "c.yaml", {"fsdp_min_num_params": given["file"]}) if "file" in given else None
    names = {"variable": "SLIPSTREAM_FSDP_MIN_NUM_PARAMS", "old variable": "FSDP_MIN_NUM_PARAMS"}
    config = resolve(
        flags={"fsdp_min_num_params": given["flag"]} if "flag" in given else {},
        environ={name: str(given[kind]) for kind, name in names.items() if kind in given},
        config_file=path,
    )
    plugin = FullyShardedDataParallelPlugin(min_num_params=given.get("argument"), auto_wrap_policy="size_based_wrap")
    assert resolve_sharding(plugin, config.sharding, "no").min_num_params == 11  # type: ignore[union-attr]


DECISIONS: dict[str, tuple[str, list[Any]]] = {
    "reshard_after_forward": ("fsdp_reshard_after_forward", [True, False, 2]),
    "cpu_offload": ("fsdp_offload_params", [True, False]),
    "state_dict_type": ("fsdp_state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]),
    "activation_checkpointing": ("fsdp_activation_checkpointing", [True, False]),
    "sync_module_states": ("fsdp_sync_module_states", [True, False]),
    "ignored_modules": ("fsdp_ignored_modules", ["a", "b"]),
    "auto_wrap_policy": ("fsdp_auto_wrap_policy", ["no_wrap", "size_based_wrap"]),
}
ONE = st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, (_, values) in DECISIONS.items()})


@given(st.fixed_dictionaries({kind: ONE for kind in KINDS}))
def test_strongest_of_all_sources(given_in: dict[str, dict[str, Any]]) -> None:
    """Whatever the sources give together, every field is what the strongest of them says, else the default."""
    texts = {kind: {DECISIONS[field][0]: option_text(value) for field, value in fields.items()} for kind, fields in given_in.items()}
    environ = {name.upper(): text for name, text in texts["old variable"].items()}
    environ |= {f"SLIPSTREAM_{name.upper()}": text for name, text in texts["variable"].items()}
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder) / "c.yaml", texts["file"])
        config = resolve(flags=texts["flag"], environ=environ, config_file=path)
    found = resolve_sharding(FullyShardedDataParallelPlugin(**given_in["argument"]), config.sharding, "no")
    usual = ShardingOptions()
    for field in DECISIONS:
        strongest = next((given_in[kind][field] for kind in KINDS if field in given_in[kind]), getattr(usual, field))
        assert getattr(found, field) == strongest


def test_completed_at_once() -> None:
    """A plugin shows what counts as soon as it is made; what a script changes afterwards counts."""
    with patch_environment(fsdp_state_dict_type="FULL_STATE_DICT", slipstream_fsdp_offload_params="true"):
        plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.cpu_offload, plugin.reshard_after_forward) == (2, True, True)
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    plugin.activation_checkpointing = True
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    found = resolved(plugin, fsdp_state_dict_type="FULL_STATE_DICT")
    assert (found.activation_checkpointing, found.state_dict_type) == (True, "SHARDED_STATE_DICT")


@pytest.mark.parametrize("argument", ["sharding_strategy", "reshard_after_forward"])
@pytest.mark.parametrize(
    ("strategy", "reshard", "hybrid"),
    [
        ("FULL_SHARD", True, False),
        ("shard_grad_op", False, False),
        (ShardingStrategy.FULL_SHARD, True, False),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, False, True),
        ("HYBRID_SHARD", True, True),
    ],
)
def test_strategies_translated(argument: str, strategy: Any, reshard: bool, hybrid: bool) -> None:
    """A strategy of version 1 becomes reshard_after_forward and a mesh, in either argument, with one message."""
    with pytest.warns(UserWarning, match=f"fsdp_version=1 became 2.*became reshard_after_forward={reshard}") as told:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **{argument: strategy})
    found = resolved(plugin)  # warns no more: warnings are errors here
    assert len(told) == 1
    assert ("ParallelismConfig(dp_replicate_size=" in str(told[0].message)) == hybrid
    assert (plugin.fsdp_version, found.reshard_after_forward, found.hybrid) == (2, reshard, hybrid)


@pytest.mark.parametrize(("number", "reshard"), [("1", True), ("2", False), ("4", True), ("5", False)])
def test_strategy_numbers(number: str, reshard: bool) -> None:
    """The launcher takes the numbers that torch gives the strategies."""
    config = resolve(flags={"use_fsdp": True, "fsdp_sharding_strategy": number}, environ={})
    with pytest.warns(UserWarning, match="became reshard_after_forward"):
        assert resolve_sharding(None, config.sharding, "no").reshard_after_forward is reshard  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backward_prefetch", "BACKWARD_PRE"),
        ("forward_prefetch", True),
        ("use_orig_params", False),
        ("limit_all_gathers", False),
        ("state_dict_config", object()),
        ("optim_state_dict_config", object()),
    ],
)
def test_no_effect_said_once(field: str, value: Any) -> None:
    """An option of version 1 without a meaning in version 2 is named once."""
    with pytest.warns(UserWarning, match=f"{field} has no effect: ") as told:
        plugin = FullyShardedDataParallelPlugin(**{field: value})
    resolved(plugin)
    resolved(plugin)
    assert len(told) == 1


@pytest.mark.parametrize(("field", "value"), [("forward_prefetch", False), ("use_orig_params", True), ("limit_all_gathers", True)])
def test_what_version_2_does_anyway_needs_no_word(field: str, value: Any) -> None:
    resolved(FullyShardedDataParallelPlugin(**{field: value}))  # warnings are errors here


def test_accelerate_version_1_file() -> None:
    """All keys that `accelerate config` writes for version 1 together give one message and the options of version 2."""
    options: dict[str, Any] = {
        "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True, "fsdp_forward_prefetch": False, "fsdp_sync_module_states": True,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="backward_prefetch has no effect") as told:
        found = resolved(**options)
    assert len(told) == 1
    assert found == ShardingOptions(reshard_after_forward=False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_version": 3}, "fsdp_version=3 .*FullyShardedDataParallelPlugin.fsdp_version=.* is more than 2"),
    ({"sharding_strategy": "NO_SHARD"}, "shards nothing: without use_fsdp every process keeps a whole model"),
    ({"reshard_after_forward": "NO_SHARD"}, "shards nothing"),
    ({"reshard_after_forward": "sometimes"}, "neither true nor false, nor a number of processes"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "FULL_SHARD means reshard_after_forward=True"),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, "needs the flat parameters of FSDP version 1"),
    ({"state_dict_type": StateDictType.LOCAL_STATE_DICT}, "needs the flat parameters of FSDP version 1"),
    ({"state_dict_type": "WHOLE"}, "One of|one of SHARDED_STATE_DICT, FULL_STATE_DICT"),
    ({"auto_wrap_policy": "by_class"}, "one of TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
    ({"auto_wrap_policy": 7}, "neither a word nor a function"),
    ({"transformer_cls_names_to_wrap": [7]}, "is not a list of names of classes"),
    ({"transformer_cls_names_to_wrap": 7}, "is not a list of names of classes"),
    ({"min_num_params": 0}, "min_num_params=0 .* is less than 1"),
    ({"cpu_offload": "perhaps"}, "cpu_offload=perhaps .* is neither yes nor no"),
    ({"cpu_offload": 3.5}, "neither yes nor no"),
    ({"ignored_modules": "("}, "is not a regular expression"),
    ({"ignored_modules": [3]}, "neither a list of modules nor a regular expression"),
    ({"ignored_modules": 3}, "neither a list of modules nor a regular expression"),
    ({"mixed_precision_policy": {"dtype": "bf16"}}, "Its keys are param_dtype"),
    ({"mixed_precision_policy": {"param_dtype": "bf17"}}, "param_dtype='bf17'.* is no dtype"),
    ({"mixed_precision_policy": 16}, "is no policy"),
    ({"param_init_fn": "zeros"}, "is not a function of a module"),
    ({"activation_checkpointing_offload": True}, "activation_checkpointing is off"),
    ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "have to be sent"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_refused(arguments: dict[str, Any], why: str) -> None:
    """A value that cannot be used is refused where it is written, with what was given and what to write."""
    with pytest.raises(ConfigError, match=why) as caught:
        FullyShardedDataParallelPlugin(**arguments)
    first, second = str(caught.value).splitlines()
    assert "FullyShardedDataParallelPlugin(" in first
    assert next(iter(arguments)) in first
    assert second


def test_no_plugin() -> None:
    """Something else in the place of a plugin is refused."""
    with pytest.raises(ConfigError, match="is not a plugin"):
        resolve_sharding(object(), Sharding(), "no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "precision", "param", "reduce", "output"),
    [
        (None, "no", None, None, None),
        (None, "bf16", torch.bfloat16, torch.float32, None),
        (None, "fp16", torch.float16, torch.float32, None),
        ("fp16", "bf16", torch.float16, torch.float32, None),
        (torch.bfloat16, "no", torch.bfloat16, torch.float32, None),
        ({"param_dtype": "bf16", "output_dtype": torch.float32}, "no", torch.bfloat16, None, torch.float32),
        ({"param_dtype": "torch.bfloat16", "reduce_dtype": "float32", "buffer_dtype": None}, "no", torch.bfloat16, torch.float32, None),
        (MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16), "bf16", torch.float16, torch.float16, None),
        (MixedPrecisionPolicy(reduce_dtype=torch.float64), "bf16", None, torch.float64, None),
    ],
)
def test_precision(policy: Any, precision: str, param: Any, reduce: Any, output: Any) -> None:
    """A policy in any form decides; without one, mixed_precision does."""
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    assert plugin.mixed_precision_policy is None or isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy)
    found = resolved(plugin, precision)
    assert (found.param_dtype, found.reduce_dtype, found.output_dtype, found.cast_forward_inputs) == (param, reduce, output, True)


def test_set_mixed_precision() -> None:
    """`set_mixed_precision` makes a policy, and replaces one only when told to."""
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    assert resolved(plugin).param_dtype is torch.bfloat16
    plugin.set_mixed_precision(torch.float16, override=True)
    assert resolved(plugin).param_dtype is torch.float16
    plugin.set_mixed_precision("no", override=True)
    assert resolved(plugin).param_dtype is None


@pytest.mark.parametrize(
    ("given", "offloads"),
    [(True, True), (False, False), (1, True), ("true", True), (CPUOffload(offload_params=True), True), (CPUOffload(), False),
     (CPUOffloadPolicy(pin_memory=False), True), (OffloadPolicy(), False)],
)  # fmt: skip
def test_cpu_offload(given: Any, offloads: bool) -> None:
    """Offload is a word, a flag or a policy of torch; `set_cpu_offload` makes the policy that works on this machine."""
    plugin = FullyShardedDataParallelPlugin(cpu_offload=given)
    assert resolved(plugin).cpu_offload is offloads
    plugin.set_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == offloads
    assert not offloads or plugin.cpu_offload.pin_memory is torch.accelerator.is_available()
    assert resolved(plugin).cpu_offload is offloads


class Block(nn.Linear):
    pass


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, Block),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=6),
        ModuleWrapPolicy({Block}),
    ],
)
def test_callable_policy(policy: Any) -> None:
    """A policy of either version finds the blocks."""
    plan = plan_blocks(nn.Sequential(Block(2, 2), nn.Linear(2, 1)), resolved(FullyShardedDataParallelPlugin(auto_wrap_policy=policy)))
    assert [name for name, _ in plan.blocks] == ["0"]


def test_wrap_fields_without_effect() -> None:
    """Names of classes choose the policy; beside another policy they have no effect, and that is said."""
    assert FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap="A,B").auto_wrap_policy == "transformer_based_wrap"
    assert FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=[Block]).transformer_cls_names_to_wrap == ["Block"]
    with pytest.warns(UserWarning, match="transformer_cls_names_to_wrap has no effect without auto_wrap_policy='transformer_based_wrap'"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", transformer_cls_names_to_wrap=["A"])
    with pytest.warns(UserWarning, match="min_num_params has no effect"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", min_num_params=3)


def test_set_auto_wrap_policy() -> None:
    """Class names are looked for on the model: an unknown one is an error with those that exist."""
    model = nn.Sequential(Block(2, 2), nn.ReLU())
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(ConfigError, match="no module of the class 'Blok' .from transformer_cls_names_to_wrap.*: Block"):
        plugin.set_auto_wrap_policy(model)
    model._no_split_modules = ["Block", "Elsewhere"]  # type: ignore[assignment]
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_auto_wrap_policy(model)
    assert (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap) == ("transformer_based_wrap", ["Block"])


def test_modules_kept() -> None:
    """Ignored modules and functions reach the strategy as the objects that they are."""
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    found = resolved(FullyShardedDataParallelPlugin(ignored_modules=iter(modules), param_init_fn=nn.Module.eval))
    assert found.ignored_modules is not None
    assert all(kept is given for kept, given in zip(found.ignored_modules, modules, strict=True))
    assert found.param_init_fn is nn.Module.eval


def test_plugin_copies() -> None:
    """A copy of a plugin knows what was given and what was completed."""
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True)
    again = copy.deepcopy(plugin)
    assert again == plugin
    assert resolved(again, fsdp_activation_checkpointing=True).activation_checkpointing


def test_page_complete() -> None:
    """The page of the options has a row for every field of the plugin, with its option and the variable of Accelerate."""
    page = (Path(__file__).parents[2] / "docs" / "fsdp-options.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for entry in dataclasses.fields(FullyShardedDataParallelPlugin):
        if entry.init:
            row = next(row for row in rows if f"`{entry.name}`" in row.split("|")[1])
            option = OPTIONS.get(_OPTION_OF.get(entry.name, ""))
            assert option is None or {f"`--{option.name}`", f"`{option.variable_aliases[0]}`"} <= {cell.strip() for cell in row.split("|")}
    options = [option for option in OPTIONS.values() if option.section == "sharding"]
    assert [option.name for option in options if f"`--{option.name}`" not in page] == []


def test_quiet_without_version_1() -> None:
    """The options of version 2 are taken without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], reshard_after_forward=False,
            mixed_precision_policy="bf16", cpu_offload=True, ignored_modules="x", state_dict_type="FULL_STATE_DICT",
            activation_checkpointing=True, activation_checkpointing_offload=True, cpu_ram_efficient_loading=True, sync_module_states=True,
        )  # fmt: skip


def test_options_told_once() -> None:
    """Options of version 1 that come from the launcher are named once, however many plugins are made of them."""
    with patch_environment(fsdp_version=1, fsdp_use_orig_params="false"):
        plugin = FullyShardedDataParallelPlugin()  # warns not: warnings are errors here
        with pytest.warns(UserWarning, match="fsdp_version=1 became 2.*use_orig_params has no effect"):
            resolve_sharding(plugin, for_worker().sharding, "no")
        resolve_sharding(plugin, for_worker().sharding, "no")
