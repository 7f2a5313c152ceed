"""Every call to a device namespace is recorded, and fits the signatures of every family."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from device_calls import FAMILY, TREES, DeviceCall, bind, collect, collect_tree, parse_record
from family_functions import IN_TORCH, find_function, misfits, read_record, table_rows

from slipstream.devices.packages import is_torch_version
from slipstream.devices.table import FAMILIES, Family, family_of, family_types

ROOT = Path(__file__).parents[2]
STANDIN = "standin"  # registered by tests that build it; they run it
ROWS = tuple(family for family in FAMILIES if family.type != STANDIN)
TYPES = frozenset(family.type for family in ROWS) | {"mtia"}
RECORD = read_record()
CALLS, UNCLEAR = collect_tree(TREES["device_calls.txt"], TYPES)
DROP_IN, UNCLEAR_DROP_IN = collect_tree(TREES["device_calls_drop_in.txt"], TYPES)


def test_calls_can_be_followed() -> None:
    """No function of a device is named by a computed text, and none gets arguments that cannot be counted."""
    assert UNCLEAR + UNCLEAR_DROP_IN == []


@pytest.mark.parametrize(("record", "calls"), [("device_calls.txt", CALLS), ("device_calls_drop_in.txt", DROP_IN)])
def test_calls_are_recorded(record: str, calls: list[DeviceCall]) -> None:
    """The recorded list of device calls is complete and has nothing else."""
    recorded = parse_record(Path(__file__).with_name(record).read_text())
    new, gone = set(calls) - set(recorded), set(recorded) - set(calls)
    assert not new | gone, f"run python tests/devices/device_calls.py, and read the difference: new {sorted(new)}, gone {sorted(gone)}"


@pytest.mark.parametrize("family", ROWS, ids=lambda family: family.type)
def test_calls_fit_family(family: Family) -> None:
    """Each call binds to the signature that the family has, or the record says what happens without the function."""
    assert misfits(CALLS, family, RECORD) == []


@pytest.mark.parametrize("call", sorted({call for call in CALLS + DROP_IN if call.target.startswith("torch.")}), ids=str)
def test_calls_fit_torch(call: DeviceCall) -> None:
    """Each call of a device function of torch itself binds to the installed one."""
    function = find_function(call.namespace, call.function, RECORD)
    assert function is not None, f"this torch has no {call.target}"
    if call.namespace in ("torch.Event", "torch.Stream", "torch.Tensor"):
        call = _as_function(call)
    assert bind(call, function) is None


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("call", [call for call in CALLS if call.namespace in ("torch.Event", "torch.Stream")], ids=str)
def test_stream_methods_of_families(kind: str, call: DeviceCall) -> None:
    """What is called on streams and events also fits the classes of the families that have their own."""
    own = getattr(getattr(torch, kind), call.namespace.rpartition(".")[2])
    assert bind(_as_function(call), getattr(own, call.function)) is None


def _as_function(method: DeviceCall) -> DeviceCall:
    return DeviceCall(method.file, method.target, ", ".join(["self", *filter(None, [method.arguments])]))


VENDOR_CALLS = [call for call in CALLS if call.namespace.partition(".")[0] in ("torch_xla", "habana_frameworks")]


@pytest.mark.parametrize("call", VENDOR_CALLS, ids=str)
def test_calls_fit_vendor_modules(call: DeviceCall) -> None:
    """Functions of vendors that the table calls itself are recorded and fit."""
    function = RECORD[call.namespace].functions[call.function]
    assert call.arguments == "(handed on)" or bind(call, function) is None


def test_functions_exist_somewhere() -> None:
    """No family is asked whether it has a function that no family has."""
    names = {call.function for call in CALLS if call.namespace in (FAMILY, *family_types())}
    for file in (ROOT / "src/slipstream").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_has = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "has"
            if is_has and ast.unparse(node.func.value).endswith("family"):
                assert ast.literal_eval(node.args[0]) in names, f"{file.name}: {ast.unparse(node)}"
    for name in names:
        assert any(find_function(family.type, name, RECORD) for family in ROWS), name


def test_record_has_no_unused_functions() -> None:
    """The record of a vendor lists what is called and nothing else."""
    called = {call.function for call in CALLS}
    for name, section in RECORD.items():
        assert set(section.functions) | set(section.absent) <= called, name


# --- facts that are not signatures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IN_TORCH)
def test_backend_of_torch(kind: str) -> None:
    """The backend of a family in torch is the one that torch itself chooses for it, and a name that torch knows."""
    chosen = torch.distributed.Backend.default_device_backend_map
    assert family_of(kind).backend == chosen[kind]
    pair = torch.distributed.BackendConfig(torch.distributed.Backend(f"meta:fake,{kind}:{chosen[kind]}"))
    assert pair.get_device_backend_map()[kind] == chosen[kind]


def test_names_of_statistics() -> None:
    """The counts that are read from allocator statistics are documented by torch under these names."""
    for key in ("num_alloc_retries", "num_ooms"):
        assert key in (torch.cuda.memory_stats.__doc__ or "")


def test_names_of_properties() -> None:
    """Device properties say under these names that a device takes its memory from the host."""
    from slipstream.big_models.device_map import plan

    if not is_torch_version(">=", "2.13"):
        pytest.skip("the properties of an XPU do not say it in torch 2.8")

    stubs = ast.parse(Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text())
    fields = {
        node.name: {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
        for node in stubs.body if isinstance(node, ast.ClassDef) and node.name in ("_CudaDeviceProperties", "_XpuDeviceProperties")
    }
    for names in fields.values():
        assert len(names & set(plan._INTEGRATED)) == 1
    assert len(fields) == 2


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "hpu", "xla", "mtia", "cpu"])
def test_autocast_known(kind: str) -> None:
    """Torch has an autocast for each family that is not a plugin's, with both formats."""
    assert torch.amp.is_autocast_available(kind)


# --- the checks notice ---------------------------------------------------------------------------------------------------------

_HEAD = "from slipstream.devices.table import family_of\nimport torch\nfamily = family_of('cpu')\n"

UNCLEAR_SOURCES = {
    "family.ask(name)": "computed name",
    "family.ask('memory_' + kind)": "computed name",
    "family.ask('memory_stats', *arguments)": r"\*arguments",
    "family.ask('memory_stats', index=0)": "unknown keyword index",
    "family.module().memory_stats()": "out of the table",
    "namespace = family.module()": "out of the table",
    "torch.accelerator.synchronize(*devices)": r"\*arguments",
}


@pytest.mark.parametrize("line", UNCLEAR_SOURCES)
def test_unclear_source_noticed(line: str) -> None:
    """A call that cannot be followed is a complaint with its place."""
    _, unclear = collect("data/new.py", _HEAD + line, TYPES)
    assert len(unclear) == 1
    assert unclear[0].startswith("data/new.py:4: ")
    assert re.search(UNCLEAR_SOURCES[line], unclear[0])


WRONG_SOURCES = {
    "family.ask('memory_alocated', device=0)": ("cuda", "has no memory_alocated"),
    "family.ask('empty_cache', 0)": ("cuda", "too many positional arguments"),
    "family.ask('set_rng_state', device=0)": ("mps", "missing a required argument"),
    "family.ask('set_rng_state', state, 0, 1)": ("npu", "too many positional arguments"),
    "family.ask('recommended_max_memory', device=0)": ("cuda", None),
    "family.ask('driver_allocated_memory', 0)": ("mps", "too many positional arguments"),
    "family.ask('get_device_properties')": ("mlu", "missing a required argument"),
    "family.ask('synchronize', 0)": ("mps", "too many positional arguments"),
    "family.ask('mem_get_info', 0)": ("xla", None),
    "family.ask('get_rng_state', 0)": ("xla", "too many positional arguments"),
    "family_of('xla').ask('hardware', 1)": ("xla", "too many positional arguments"),
}


@pytest.mark.parametrize("line", WRONG_SOURCES)
def test_wrong_call_noticed(line: str) -> None:
    """A wrong name or number of arguments does not fit the family; what fits, or is a recorded absence, is let through."""
    kind, expected = WRONG_SOURCES[line]
    calls, unclear = collect("data/new.py", _HEAD + line, TYPES)
    assert unclear == []
    found = misfits(calls, family_of(kind), RECORD)
    assert found == [] if expected is None else len(found) == 1 and expected in found[0]


WRONG_TORCH = {
    "torch.Event(device=d, enable_timings=True)": "unexpected keyword",
    "torch.Event(d, 1, 2)": "too many positional",
    "torch.accelerator.is_available(0)": "too many positional",
    "torch.amp.GradScaler('cpu', scale=2.0)": "unexpected keyword",
    "torch.autograd.graph.save_on_cpu(pinned=True)": "unexpected keyword",
    "torch.cuda.set_device()": "missing a required argument",
    "torch.mps.synchronize(0)": "too many positional",
    "torch.get_autocast_dtype()": "missing a required argument",
}


@pytest.mark.parametrize("line", WRONG_TORCH)
def test_wrong_torch_call_noticed(line: str) -> None:
    """The same for functions of torch."""
    (call,), _ = collect("data/new.py", _HEAD + line, TYPES)
    function = find_function(call.namespace, call.function, RECORD)
    assert function is not None
    assert WRONG_TORCH[line] in (bind(call, function) or "")


@pytest.mark.parametrize("line", [
    "family.ask('synchronize')",
    "torch.cuda.synchronize()",
    "run(torch.xpu.synchronize)",
    "from torch import cuda\ncuda.synchronize()",
    "from torch.cuda import synchronize\nsynchronize()",
    "import torch.mps as metal\nmetal.synchronize()",
    "from torch.amp import GradScaler\nGradScaler('cpu')",
    "torch.Stream(device)",
    "class Own(torch.Event): ...\nOwn(device)",
    "event.wait_stream(stream)",
])
def test_new_call_noticed(line: str) -> None:
    """A call that is not in the record is found, however torch is imported."""
    calls, _ = collect("data/new.py", _HEAD + line, TYPES)
    assert len(calls) == 1
    assert calls[0] not in CALLS


def test_no_such_function_of_torch() -> None:
    """A function that torch does not have is not found in it."""
    (call,), _ = collect("data/new.py", _HEAD + "torch.accelerator.memory_left()", TYPES)
    assert find_function(call.namespace, call.function, RECORD) is None


# --- the documentation ---------------------------------------------------------------------------------------------------------


def test_documented_table() -> None:
    """docs/devices.md shows which families are checked by signature, against what, and with which torch."""
    page = (ROOT / "docs/devices.md").read_text()
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"checked by signature against torch {pinned}" in page
    if torch.__version__.partition("+")[0] != pinned:
        pytest.skip(f"the table describes torch {pinned}, and {torch.__version__} is installed")
    assert "\n".join(table_rows(CALLS, ROWS, RECORD)) in page
