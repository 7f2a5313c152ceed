"""Rules for what a hand-written script does about processes: groups, ranks, devices, collectives, and how they are started.

Every question about ranks goes to the Accelerator, or to `PartialState()` where there is none, so the script also runs alone, without a
launcher and its variables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from slipstream.migrate.edits import Deferred, Part, Rewriter
from slipstream.migrate.placement import AcceleratorPlacement
from slipstream.migrate.source import Key, Script, key_of

__all__ = ["GROUP_MODULES", "ProcessRules"]

GROUP_MODULES: Final = ("torch.distributed", "torch.distributed.distributed_c10d", "deepspeed.comm")

_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "RANK": "process_index",
        "LOCAL_RANK": "local_process_index",
        "WORLD_SIZE": "num_processes",
        "SLURM_PROCID": "process_index",
        "SLURM_LOCALID": "local_process_index",
        "SLURM_NTASKS": "num_processes",
        "OMPI_COMM_WORLD_RANK": "process_index",
        "OMPI_COMM_WORLD_LOCAL_RANK": "local_process_index",
        "OMPI_COMM_WORLD_SIZE": "num_processes",
    }
)
_RENDEZVOUS: Final = ("MASTER_ADDR", "MASTER_PORT", *_VARIABLES)
_RANK_NAME: Final = re.compile(r"(^|\.|_)(local_?rank|gpu(_?id)?|rank|device_?id)$")
_OPERATIONS: Final = MappingProxyType({"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"})

_ENGINES: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".fsdp": "stays as it is: prepare the model itself, and shard it by FullyShardedDataParallelPlugin (docs/sharded.md)",
        ".optim": "stays as it is, and works on several processes only: use one of torch.optim, with FSDP to shard its state",
        ".checkpoint": "stays as it is: accelerator.save_state and load_state save and load everything",
        "apex.": "stays as it is: accelerator.prepare and Accelerator(mixed_precision=...) do the same",
    }
)

_RANKS: Final = "ranks are known under any launcher, and without one"
_DEVICE: Final = "the device of this process"
_START: Final = "slipstream launch starts the processes"
_COLLECTIVE: Final = "collectives are checked, and work on one process"


class ProcessRules:
    """Changes ranks, devices and collectives of one script."""

    def __init__(self, rewriter: Rewriter, placement: AcceleratorPlacement) -> None:
        self.rewriter: Final = rewriter
        self.placement: Final = placement
        self.script: Final[Script] = rewriter.script
        self.rank_keys: Final[set[Key]] = set()
        self.has_local_rank_option: Final = any(self._local_rank_options())

    def apply(self) -> None:
        """Add the changes."""
        self._delete_local_rank_option()
        self._spawn()
        for node in self.script.nodes:
            if isinstance(node, ast.Compare):
                self._comparison(node)
            elif isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Subscript):
                self._variable(node)
            elif isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Dict)):
                self._device_text(node)
            elif isinstance(node, ast.Attribute):
                self._local_rank(node)
            elif isinstance(node, ast.Assign):
                self._assignment(node)

    def ask(self, node: ast.AST, question: str) -> tuple[Part, ...]:
        """Return the text of a property of the processes at a node."""
        return self.placement.need(node, state=True), f".{question}"

    # ranks

    def _comparison(self, node: ast.Compare) -> None:
        """Change comparisons of a rank with 0 and with -1, and `"RANK" in os.environ`."""
        if len(node.ops) != 1 or self.rewriter.is_deleted(node):
            return
        left, operation, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(operation, (ast.In, ast.NotIn)) and self._is_environ(right) and _text_of(left) in _VARIABLES:
            self._replace_comparison(node, "num_processes > 1" if isinstance(operation, ast.In) else "num_processes == 1")
        elif isinstance(operation, (ast.Is, ast.IsNot)) and self._variable_name(left) and _is_constant(right, None):
            self._replace_comparison(node, "num_processes > 1" if isinstance(operation, ast.IsNot) else "num_processes == 1")
        elif (question := self._rank_question(left)) is not None:
            self._compare_rank(node, question, operation, right)

    def _compare_rank(self, node: ast.Compare, question: str, operation: ast.cmpop, right: ast.expr) -> None:
        value = ast.unparse(right)
        main = "is_main_process" if question == "process_index" else "is_local_main_process"
        if question == "num_processes":
            return
        if value == "-1" and isinstance(operation, (ast.NotEq, ast.Gt)):
            self._replace_comparison(node, "num_processes > 1")
        elif value == "-1" and isinstance(operation, ast.Eq):
            self._replace_comparison(node, "num_processes == 1")
        elif isinstance(operation, ast.In) and value in ("[-1, 0]", "(-1, 0)", "{-1, 0}", "[0, -1]", "(0, -1)"):
            self._replace_comparison(node, main)
        elif isinstance(operation, ast.NotIn) and value in ("[-1, 0]", "(-1, 0)", "{-1, 0}", "[0, -1]", "(0, -1)"):
            self.rewriter.replace(node, "not ", *self.ask(node, main), reason=_RANKS)
        elif value == "0" and isinstance(operation, (ast.Eq, ast.LtE)):
            self._replace_comparison(node, main)
        elif value == "0" and isinstance(operation, (ast.NotEq, ast.Gt)):
            parent = self.script.parents[node]
            text = ("not ", *self.ask(node, main))
            self.rewriter.replace(node, *(("(", *text, ")") if isinstance(parent, ast.UnaryOp) else text), reason=_RANKS)

    def _replace_comparison(self, node: ast.Compare, text: str) -> None:
        self.rewriter.replace(node, *self.ask(node, text), reason=_RANKS)

    def _rank_question(self, node: ast.AST) -> str | None:
        """Return which property of the processes an expression asks for."""
        if isinstance(node, ast.Call) and self.script.qualified(node.func) is None and key_of(node.func) == "int" and node.args:
            node = node.args[0]
        name = self._variable_name(node)
        if name is not None:
            return _VARIABLES.get(name)
        if self._is_group_call(node, "get_rank"):
            return "process_index"
        if self.has_local_rank_option and self._is_local_rank(node):
            return "local_process_index"
        return None

    def _variable_name(self, node: ast.AST) -> str | None:
        """Return the name of an environment variable about ranks that an expression reads."""
        name: str | None = None
        if isinstance(node, ast.Subscript) and self._is_environ(node.value):
            name = _text_of(node.slice)
        elif self.script.is_call(node, "os.environ.get", "os.getenv", "environ.get") and isinstance(node, ast.Call) and node.args:
            name = _text_of(node.args[0])
        return name if name in _VARIABLES else None

    def _is_environ(self, node: ast.AST) -> bool:
        return self.script.qualified(node) == "os.environ"

    def _variable(self, node: ast.Subscript | ast.Call) -> None:
        """Change `int(os.environ["RANK"])` and its like."""
        name = self._variable_name(node)
        if name is None or isinstance(getattr(node, "ctx", None), ast.Store):
            return
        parent = self.script.parents[node]
        if isinstance(parent, ast.Call) and key_of(parent.func) == "int":
            self.rewriter.replace(parent, *self.ask(parent, _VARIABLES[name]), reason=_RANKS)
        else:
            self.rewriter.replace(node, "str(", *self.ask(node, _VARIABLES[name]), ")", reason=_RANKS)

    def _assignment(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Subscript) and self._is_environ(target.value) and _text_of(target.slice) in _RENDEZVOUS:
            self.rewriter.delete(node, "the launcher chooses the address")

    # the option --local_rank

    def _local_rank_options(self) -> list[ast.Call]:
        calls = self.script.calls(".add_argument")
        return [call for call in calls if any(_text_of(given) in ("--local_rank", "--local-rank") for given in call.args)]

    def _delete_local_rank_option(self) -> None:
        for call in self._local_rank_options():
            statement = self.script.statement(call)
            if isinstance(statement, ast.Expr):
                reason = "slipstream launch gives no --local_rank"
                self.rewriter.delete(statement, reason)
            else:
                self.rewriter.note(call, "remove the option --local_rank by hand: slipstream launch does not give it.")

    def _is_local_rank(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr != "local_rank":
            return False
        return isinstance(node.value, ast.Name) and node.value.id != "self"

    def _local_rank(self, node: ast.Attribute) -> None:
        if not self.has_local_rank_option or not self._is_local_rank(node):
            return
        statement = self.script.statement(node)
        if isinstance(node.ctx, ast.Store):
            if isinstance(statement, ast.Assign) and statement.targets == [node]:
                self.rewriter.delete(statement, "slipstream launch gives no --local_rank")
            else:
                self.rewriter.note(node, f"{key_of(node)} is set here; nothing reads it any more.")
        else:
            self.rewriter.replace(node, *self.ask(node, "local_process_index"), reason=_RANKS)

    # calls

    def _is_group_call(self, node: ast.AST, name: str) -> bool:
        return self.script.is_call(node, *(f"{module}.{name}" for module in GROUP_MODULES))

    def _call(self, node: ast.Call) -> None:
        if self.rewriter.is_deleted(node):
            return
        name = self.script.qualified(node.func) or ""
        module, _, function = name.rpartition(".")
        if module in GROUP_MODULES:
            self._group_call(node, function)
        elif name in ("os.environ.get", "os.getenv"):
            self._variable(node)
        elif name == "os.environ.setdefault" and _text_of(node.args[0]) in _RENDEZVOUS and self._is_statement(node):
            self.rewriter.delete(self.script.statement(node), "the launcher chooses the address")
        elif name in ("torch.cuda.set_device", "torch.cuda.device.set") and self._is_statement(node):
            self.rewriter.delete(self.script.statement(node), "the Accelerator sets the device")
        elif name == "torch.device":
            self._device(node)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "to") and not name.startswith("torch."):
            self._move(node, node.func)
        elif module.startswith("torch.distributed.") or name.startswith("apex."):
            self._note_engine(node, name)
        if not self.rewriter.is_replaced(node):
            self._device_arguments(node)

    def _note_engine(self, node: ast.Call, name: str) -> None:
        """Tell of other parts of torch.distributed, and of apex, that a prepared model replaces."""
        told = "stays as it is; Slipstream does not know of it"
        for part, instead in _ENGINES.items():
            if part in name:
                told = instead
        self.rewriter.note(node, f"{name.rpartition('.')[2]} {told}.")

    def _is_statement(self, node: ast.AST) -> bool:
        return isinstance(self.script.parents[node], ast.Expr)

    def _group_call(self, node: ast.Call, function: str) -> None:
        questions: Mapping[str, str] = {"get_rank": "process_index", "get_world_size": "num_processes"}
        if function in questions:
            if node.args or node.keywords:
                self.rewriter.note(node, f"{function} of a group of its own: Slipstream has one group; make it by hand from the ranks.")
            else:
                self.rewriter.replace(node, *self.ask(node, questions[function]), reason=_RANKS)
        elif function == "is_initialized":
            text = "num_processes > 1"
            parent = self.script.parents[node]
            binds = isinstance(parent, (ast.UnaryOp, ast.Compare, ast.BinOp, ast.Attribute))
            parts = ("(", *self.ask(node, text), ")") if binds else self.ask(node, text)
            self.rewriter.replace(node, *parts, reason="a group exists if there are several processes")
        elif function in ("is_available", "is_nccl_available", "is_gloo_available"):
            return
        elif not self._is_statement(node):
            self._note_call(node, function)
        elif function in ("init_process_group", "init_distributed"):
            self._init(node)
        elif function == "barrier" or function == "monitored_barrier":
            self.rewriter.replace(node, *self.ask(node, "wait_for_everyone()"), reason="waits, and names who does not come")
        elif function == "destroy_process_group":
            self._destroy(node)
        else:
            self._collective(node, function)

    def _note_call(self, node: ast.Call, function: str) -> None:
        self.rewriter.note(
            node,
            f"torch.distributed.{function} stays as it is, and works on several processes only. "
            "gather, reduce and broadcast of the Accelerator work on one, too.",
        )

    def _init(self, node: ast.Call) -> None:
        """Record the call whose place the Accelerator takes, and keep variables that held rank and world size right."""
        statement = self.script.statement(node)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        lines: list[list[Part]] = []
        for name, question in (("rank", "process_index"), ("world_size", "num_processes")):
            key = key_of(given.get(name))
            if key is not None and key not in self.rank_keys and not self._is_rank_variable(key) and self._is_read_after(key, node):
                lines.append([f"{key} = ", *self.ask(statement, question)])
        if lines:
            self.rewriter.insert_lines(statement, lines, _RANKS)
        if "timeout" in given:
            self.placement.add_handler_option("InitProcessGroupKwargs", "timeout", given["timeout"])
        self.placement.replaced.append(statement)

    def _is_read_after(self, key: Key, node: ast.Call) -> bool:
        """Whether somebody reads the variable later: anybody for an attribute, the same function for a name."""
        unit, last = self.script.unit(node), node.end_lineno or node.lineno
        reads = [found for found in self.script.nodes if key_of(found) == key and isinstance(getattr(found, "ctx", None), ast.Load)]
        return "." in key or any(self.script.unit(found) is unit and self.script.line_of(found) > last for found in reads)

    def _is_rank_variable(self, key: Key) -> bool:
        """Whether a variable gets its value from a question that is changed."""
        return any(found == key and self._rank_question(value) is not None for found, value, _ in self.script.assignments())

    def _destroy(self, node: ast.Call) -> None:
        base = self.placement.need(node, state=True)

        def text() -> str:
            found = base()
            return f"{found}.destroy_process_group()" if found == "PartialState()" else f"{found}.end_training()"

        self.rewriter.replace(node, text, reason="closes trackers and the group")

    def _collective(self, node: ast.Call, function: str) -> None:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if given.keys() & {"group", "async_op"}:
            self._note_call(node, function)
            return
        rules: Mapping[str, Callable[[ast.Call, Mapping[str | None, ast.expr]], bool]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "all_gather_object": self._all_gather_object,
            "broadcast": self._broadcast,
            "broadcast_object_list": self._broadcast,
        }
        if function not in rules or not rules[function](node, given):
            self._note_call(node, function)

    def _all_reduce(self, node: ast.Call, given: Mapping[str | None, ast.expr]) -> bool:
        """`dist.all_reduce(x)` changes x in place: so does the new line, by a new value of a variable or by `copy_`."""
        tensor = node.args[0] if node.args else given.get("tensor")
        is_all = isinstance(node.func, ast.Attribute) and node.func.attr == "all_reduce" or key_of(node.func) == "all_reduce"
        place = 1 if is_all else 2
        operation = given.get("op") or (node.args[place] if len(node.args) > place else None)
        name = "SUM" if operation is None else (key_of(operation) or "").rpartition(".")[2]
        if tensor is None or name not in _OPERATIONS:
            return False
        base = self.placement.need(node, state=True)
        call: tuple[Part, ...] = (base, ".reduce(", tensor, f', "{_OPERATIONS[name]}")')
        if isinstance(tensor, ast.Name) and not self._is_parameter(tensor):
            self.rewriter.replace(node, f"{tensor.id} = ", *call, reason=_COLLECTIVE)
        else:
            self.rewriter.replace(node, tensor, ".copy_(", *call, ")", reason=_COLLECTIVE)
        return True

    def _is_parameter(self, name: ast.Name) -> bool:
        """Whether a variable is a parameter or comes from outside, so that a new value would not reach its owner."""
        for parent in self.script.ancestors(name):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = (*parent.args.args, *parent.args.kwonlyargs, *parent.args.posonlyargs)
                stored = any(
                    isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Store) for node in ast.walk(parent)
                )
                return any(argument.arg == name.id for argument in arguments) or not stored
            if isinstance(parent, (ast.For, ast.comprehension)) and name.id in ast.unparse(parent.target).replace(",", " ").split():
                return True
        return False

    def _all_gather(self, node: ast.Call, given: Mapping[str | None, ast.expr]) -> bool:
        if len(node.args) != 2:
            return False
        base = self.placement.need(node, state=True)
        parts: tuple[Part, ...] = (node.args[0], "[:] = ", base, ".gather(", node.args[1], ".unsqueeze(0)).unbind()")
        self.rewriter.replace(node, *parts, reason=_COLLECTIVE)
        return True

    def _all_gather_object(self, node: ast.Call, given: Mapping[str | None, ast.expr]) -> bool:
        if len(node.args) != 2:
            return False
        self.placement.imports.add(("slipstream.utils", "gather_object"))
        self.rewriter.replace(node, node.args[0], "[:] = gather_object([", node.args[1], "])", reason=_COLLECTIVE)
        return True

    def _broadcast(self, node: ast.Call, given: Mapping[str | None, ast.expr]) -> bool:
        if not node.args:
            return False
        source = given.get("src") or (node.args[1] if len(node.args) > 1 else None)
        name = (key_of(node.func) or "").rpartition(".")[2]
        if name in {key for key, _, _ in self.script.assignments()}:
            return False
        self.placement.imports.add(("slipstream.utils", name))
        call: tuple[Part, ...] = (f"{name}(", node.args[0], ", from_process=", source if source is not None else "0", ")")
        parts: tuple[Part, ...] = (node.args[0], ".copy_(", *call, ")") if name == "broadcast" else call
        self.rewriter.replace(node, *parts, reason=_COLLECTIVE)
        return True

    # devices

    def _is_rank(self, node: ast.AST | None) -> bool:
        key = key_of(node)
        if key is not None:
            return key in self.rank_keys or _RANK_NAME.search(key) is not None
        return node is not None and self._rank_question(node) is not None

    def _is_rank_device(self, node: ast.AST | None) -> bool:
        """Whether an expression is a text such as `f"cuda:{rank}"`."""
        if isinstance(node, ast.IfExp):
            return self._is_rank_device(node.body)
        if isinstance(node, ast.JoinedStr):
            return (_text_of(node.values[0]) or "").startswith("cuda:") and len(node.values) > 1
        if isinstance(node, ast.BinOp):
            return (_text_of(node.left) or "").startswith("cuda:")
        return self.script.is_call(node, ".format") and ast.unparse(node).startswith("'cuda:") if node is not None else False

    def _device(self, node: ast.Call) -> None:
        """Change `torch.device(...)` that depends on the rank, or on what is available."""
        text = ast.unparse(node)
        first = node.args[0] if node.args else None
        depends = len(node.args) == 2 and not isinstance(node.args[1], ast.Constant)
        depends = depends or self._is_rank_device(first) or isinstance(first, ast.IfExp) or self._is_rank(first)
        if depends and ("cuda" in text or self._is_rank(first)):
            parent = self.script.parents[node]
            whole = parent if isinstance(parent, ast.IfExp) and parent.body is node and "cpu" in ast.unparse(parent.orelse) else node
            self.rewriter.replace(whole, *self.ask(node, "device"), reason=_DEVICE)

    def _device_text(self, node: ast.JoinedStr | ast.BinOp | ast.Dict) -> None:
        outer: ast.AST = node
        parent = self.script.parents[node]
        if isinstance(node, ast.Dict):
            if not any(self._is_rank_device(value) for value in node.values) or "cuda" not in ast.unparse(node.keys[0] or node):
                return
        elif not self._is_rank_device(node) or isinstance(parent, ast.Dict):
            return
        if isinstance(parent, ast.IfExp) and parent.body is node:
            outer, parent = parent, self.script.parents[parent]
        wants_text = isinstance(node, (ast.JoinedStr, ast.BinOp)) and not isinstance(parent, (ast.Call, ast.keyword))
        base: Deferred = self.placement.need(node, state=True)
        parts: tuple[Part, ...] = ("str(", base, ".device)") if wants_text else (base, ".device")
        if not (isinstance(parent, ast.Call) and self.script.is_call(parent, "torch.device")):
            self.rewriter.replace(outer, *parts, reason=_DEVICE)

    def _move(self, node: ast.Call, function: ast.Attribute) -> None:
        """Change `.cuda(...)`, and `.to(rank)`."""
        if function.attr == "to":
            if node.args and self._is_rank(node.args[0]):
                self.rewriter.replace(node.args[0], *self.ask(node, "device"), reason=_DEVICE)
            return
        rest: list[Part] = []
        for keyword in node.keywords:
            if keyword.arg == "non_blocking":
                rest += [", non_blocking=", keyword.value]
        self.rewriter.replace(node, function.value, ".to(", *self.ask(node, "device"), *rest, ")", reason=_DEVICE)

    def _device_arguments(self, node: ast.Call) -> None:
        """Change `device=rank` and `map_location=rank`."""
        for keyword in node.keywords:
            value = keyword.value
            moves = keyword.arg == "map_location" and isinstance(value, ast.Lambda) and ".cuda(" in ast.unparse(value)
            named = keyword.arg in ("device", "map_location") and self._is_rank(value) and not self._is_init(node)
            if moves or named:
                self.rewriter.replace(value, *self.ask(node, "device"), reason=_DEVICE)

    def _is_init(self, node: ast.Call) -> bool:
        return self._is_group_call(node, "init_process_group")

    # starting processes

    def _spawn(self) -> None:
        for call in self.script.calls("torch.multiprocessing.spawn"):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            function = call.args[0] if call.args else given.get("fn")
            if not self._is_statement(call) or not isinstance(function, ast.Name):
                told = "call the function of torch.multiprocessing.spawn directly: slipstream launch starts the processes."
                self.rewriter.note(call, told)
                continue
            arguments = given.get("args") or (call.args[1] if len(call.args) > 1 else None)
            count = given.get("nprocs") or (call.args[2] if len(call.args) > 2 else None)
            self._count(count)
            parts: list[Part] = [function, "(", *self.ask(call, "local_process_index")]
            for argument in arguments.elts if isinstance(arguments, (ast.Tuple, ast.List)) else []:
                parts += [", ", argument]
            if arguments is not None and not isinstance(arguments, (ast.Tuple, ast.List)):
                parts += [", *", arguments]
            self.rewriter.replace(call, *parts, ")", reason=_START)
            self.placement.invoked[function] = call
            for node in self.script.tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == function.id and node.args.args:
                    self.rank_keys.add(node.args.args[0].arg)
        for call in self.script.calls("torch.multiprocessing.Process", "multiprocessing.Process"):
            self.rewriter.note(call, "if these processes train together, call their function directly: slipstream launch starts them.")

    def _count(self, count: ast.expr | None) -> None:
        """The number that was given to `spawn` becomes the number of processes that there are."""
        key = key_of(count)
        found = False
        for name, value, statement in self.script.assignments():
            if key is not None and name == key and self._rank_question(value) is None:
                self.rewriter.replace(value, *self.ask(statement, "num_processes"), reason=_START)
                found = True
        if not found and count is not None:
            text = ast.unparse(count)
            spawned = [self.script.parents[count], *self.script.ancestors(count)]
            spawned += [found for call in spawned if isinstance(call, ast.Call) for found in call.keywords]
            for node in self.script.nodes:
                parent = self.script.parents.get(node)
                is_item = isinstance(node, ast.expr) and isinstance(parent, ast.Tuple) and self.script.parents[parent] in spawned
                if is_item and ast.unparse(node) == text:
                    self.rewriter.replace(node, *self.ask(node, "num_processes"), reason=_START)


def _text_of(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
