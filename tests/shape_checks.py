"""The checks of `test_shape.py`: each takes a file's path (below `src/slipstream`, with slashes) and its text, and gives back complaints.

They read the syntax tree and import nothing, so they see every branch. What they know of this project is data at the top.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

Check = Callable[[str, str], Iterable[str]]

PACKAGE = "slipstream"
FILE_LINES = 700
FUNCTION_LINES = 60

ROOMS: Mapping[str, tuple[int, str]] = {
    "errors.py": (0, "the exception tree"),
    "public_names.py": (0, "names imported on first use; the module paths and names of Accelerate"),
    "config/": (1, "options, their sources and precedence; the only reader of environment variables"),
    "devices/": (2, "the table of device families, memory, random states, installed packages"),
    "launch/": (2, "from a launch plan to running workers, and the report of how they failed"),
    "files/": (2, "atomic files, checksums, the safetensors layout, object stores"),
    "migrate/": (3, "scripts of Accelerate, DDP and DeepSpeed, rewritten: source, edits, rules, diff"),
    "distributed/": (3, "process group, state, transport, guard, heartbeat, wait monitor, collectives, work queue"),
    "logging.py": (4, "`get_logger`"),
    "precision/": (5, "precision policy, autocast, loss scale, float8"),
    "observability/": (5, "step timing, guards, profiler, memory, trackers, run directory, report"),
    "data/": (6, "the order of samples, batches for each rank, loaders, resume position, metrics"),
    "training/": (6, "gradient accumulation, backward, clipping, optimizers and schedulers"),
    "parallel/": (6, "device mesh, blocks and bytes of sharded models, compilation, unwrapping, local SGD"),
    "strategies/": (7, "who runs the step: one process, DDP, FSDP"),
    "checkpoint/": (7, "capture, commit, locate, restore; sharded saves; import of Accelerate's checkpoints"),
    "big_models/": (8, "device maps, weight store, forward hooks, dispatch, quantization, estimates"),
    "inference/": (9, "pipeline inference"),
    "accelerator/": (10, "the `Accelerator` class by subject; `components.py` assembles its parts"),
    "notebook.py": (11, "`notebook_launcher`, `debug_launcher`"),
    "integrations/": (11, "other frameworks"),
    "hooks.py": (11, "public import path of the forward hooks"),
    "tracking.py": (11, "public import path of the trackers"),
    "__init__.py": (11, "the public names"),
    "utils.py": (11, "the public helpers"),
    "cli/": (12, "the commands"),
    "testing/": (12, "rank pool, faults, leak checks"),
    "__main__.py": (13, "`python -m slipstream`"),
}
"""Each room with its layer. A file imports from lower layers and from its own room alone."""

LAYERS = {name.removesuffix("/").removesuffix(".py"): layer for name, (layer, _) in ROOMS.items()}

TORCH_FREE = ("config", "launch", "cli", "files", "migrate", "observability/run_dir", "observability/report")

MAY_TOUCH_VARIABLES = {
    "config/sources.py": "the one reader: everybody else is handed a mapping",
    "launch/worker_main.py": "the first lines of a forked worker: it takes on the variables that the plan composed for it",
    "launch/store.py": "the C library reads the options of its resolver from a variable",
    "distributed/current.py": "marks the rank as taken, for the children of this process, which inherit the variables",
    "testing/environment.py": "a rank of the test pool takes on its variables, and puts them back",
}

DEVICE_FAMILIES = frozenset({"cuda", "mps", "xpu", "npu", "mlu", "hpu", "musa", "sdaa", "neuron", "xla", "standin"})
MAY_NAME_DEVICES = {
    "devices/table.py": "the table itself",
    "testing/plugin.py": "the fixture for tests that need the stand-in accelerator",
    "config/names.py": "the variables of the stand-in accelerator, which are no options",
    "public_names.py": "public names that scripts import, such as is_npu_available",
    "migrate/process_rules.py": "calls that it looks for in scripts, such as torch.cuda.set_device",
    "migrate/training_rules.py": "calls that it looks for in scripts, such as torch.cuda.amp.autocast",
    "parallel/compile.py": "names of compilers, such as HPU_BACKEND and NEURON: what torch.compile takes, whatever the device",
    "testing/worker.py": "resets what tests have set on the stand-in",
    "utils.py": "public names that scripts import, such as is_npu_available; what they mean is defined by the table",
}
GO_THROUGH_A_SHELL = {
    "system": "os.system",
    "popen": "os.popen",
    "getoutput": "subprocess.getoutput",
    "getstatusoutput": "subprocess.getstatusoutput",
}
MAY_HOLD_STATE = {"distributed/current.py": "the one place where the runtime of this process is kept"}


COMMUNICATES = (
    "distributed", "observability", "data", "training", "parallel", "precision", "strategies", "checkpoint", "inference", "accelerator",
)
"""Rooms in which a collective may follow from what is done."""

ORDER_FREE = ("sorted", "any", "all", "sum", "len", "min", "max", "set", "frozenset")

def file_length(path: str, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{lines} lines, more than {FILE_LINES}: split it by what changes together"


def function_length(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES}"


def layers(path: str, text: str) -> Iterator[str]:
    here = room(path)
    if here not in LAYERS:
        yield f"the room {here} has no layer: add it to LAYERS"
        return
    for line, target in imports(path, text):
        there = target.split(".")[0] if target else "__init__"
        if there == here:
            continue
        if there not in LAYERS:
            yield f"line {line}: imports {target}, whose room has no layer"
        elif LAYERS[there] >= LAYERS[here]:
            yield f"line {line}: {here} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})"


def variables(path: str, text: str) -> Iterator[str]:
    if path in MAY_TOUCH_VARIABLES:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in nodes_of(text):
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield f"line {node.lineno}: os.{node.attr}; take a mapping as an argument (config/sources.py reads it)"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in names:
                    yield f"line {node.lineno}: from os import {alias.name}; take a mapping as an argument"


def torch_at_import(path: str, text: str) -> Iterator[str]:
    if not path.startswith(tuple(f"{folder}/" for folder in TORCH_FREE)):
        return
    for node in at_import(tree_of(text)):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "torch" for name in found):
            yield f"line {node.lineno}: imports torch at import time; do it inside the function that needs it"


def exports(path: str, text: str) -> Iterator[str]:
    """`__all__` names what a reader would take for public: no more, no less."""
    tree = tree_of(text)
    defined, imported, declared, lazy = _bindings(tree)
    if lazy:  # `__all__` is made from a table of names; a stub shows it to type checkers, and test_shape compares the two
        return
    if declared is None:
        if defined:
            yield f"has no __all__, but defines {', '.join(sorted(defined))}"
        return
    if len(declared) != len(set(declared)):
        yield f"__all__ repeats {', '.join(sorted({name for name in declared if declared.count(name) > 1}))}"
    visible = defined | imported if path.endswith("__init__.py") else defined
    if missing := visible - set(declared):
        yield f"visible but not in __all__: {', '.join(sorted(missing))} (export it, or begin its name with _)"
    if extra := set(declared) - defined - imported:
        yield f"in __all__ but neither defined nor imported here: {', '.join(sorted(extra))}"


def device_names(path: str, text: str) -> Iterator[str]:
    if path in MAY_NAME_DEVICES or path.startswith("testing/standin/"):  # the stand-in accelerator itself
        return
    prose = {id(node.value) for node in nodes_of(text) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in nodes_of(text):
        if id(node) in prose:
            continue
        for word in _words(node):
            if word in DEVICE_FAMILIES:
                yield f"line {getattr(node, 'lineno', '?')}: names the device family {word}; ask the table of devices"


def mutable_state(path: str, text: str) -> Iterator[str]:
    """Module or class level containers that code could change, and `global`."""
    if path in MAY_HOLD_STATE:
        return
    tree = tree_of(text)
    for scope in [tree, *(node for node in nodes_of(text) if isinstance(node, ast.ClassDef))]:
        for statement in scope.body:
            for name, value in _assignments(statement):
                if _is_mutable(value) and not name.isupper() and not name.lstrip("_").isupper() and not name.startswith("__"):
                    yield f"line {statement.lineno}: {name} is state that outlives a call; pass it in, or keep it in distributed/current.py"
    for node in nodes_of(text):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


def silent_except(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and all(_does_nothing(entry) for entry in node.body):
            yield f"line {node.lineno}: a broad except that hides the error"
        elif isinstance(node, ast.Call) and _last_name(node.func).endswith("suppress") and any(map(_is_broad, node.args)):
            yield f"line {node.lineno}: suppresses every exception"


def documented(path: str, text: str) -> Iterator[str]:
    tree = tree_of(text)
    _, _, declared, _ = _bindings(tree)
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module says nothing about itself: what it is, what it promises, what it never does"
    for node in tree.body:
        definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in (declared or ())
        if definition and ast.get_docstring(node) is None:
            yield f"line {node.lineno}: {node.name} is public and has no docstring"


def no_shell(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        if isinstance(node, ast.Call):
            if _last_name(node.func) in GO_THROUGH_A_SHELL and ast.unparse(node.func) in GO_THROUGH_A_SHELL.values():
                yield f"line {node.lineno}: {ast.unparse(node.func)} goes through a shell; use subprocess with a list"
            if any(
                keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                for keyword in node.keywords
            ):
                yield f"line {node.lineno}: shell=...; use a list of arguments"


def set_order(path: str, text: str) -> Iterator[str]:
    """Ranks do not share the order of a set: where a collective may follow, nothing is done for each member of one in turn."""
    if room(path) not in COMMUNICATES:
        return
    attributes = {name for name in _names_of_sets(nodes_of(text)) if name.startswith("self.")}
    functions = [node for node in nodes_of(text) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    told = set()
    for scope in (*functions, tree_of(text)):
        nodes = tuple(ast.walk(scope))
        sets = attributes | (_names_of_sets(nodes if scope in functions else scope.body))
        calls = [node for node in nodes if isinstance(node, ast.Call) and _last_name(node.func) in ORDER_FREE]
        free = {id(argument) for call in calls for argument in call.args}
        for node in nodes:
            if isinstance(node, ast.For):
                walked = [node.iter]
            elif isinstance(node, (ast.ListComp, ast.DictComp, ast.GeneratorExp)) and id(node) not in free:
                walked = [part.iter for part in node.generators]
            else:
                continue
            for iterated in walked:
                if _is_set(iterated, sets) and iterated not in told:
                    told.add(iterated)
                    spelled = ast.unparse(iterated)
                    yield f"line {iterated.lineno}: walks the set {spelled}, whose order ranks do not share; use a list or sorted()"


MAY_BE_A_GERUND = {
    "logging.py": "the module path that scripts import",
    "tracking.py": "the module path that scripts import",
    "testing/__init__.py": "the package that test suites import",
    "training/__init__.py": "the noun of the field",
    "observability/timing/__init__.py": "the noun of the field",
    "integrations/lightning/__init__.py": "the name of the framework",
}
"""Modules are nouns: what ends in -ing needs a reason."""

MAY_BE_UNUSED = {
    "__main__.py": "python -m slipstream",
    "hooks.py": "a module path that scripts import",
    "tracking.py": "a module path that scripts import",
    "notebook.py": "public functions",
    "testing/faults.py": "for the test suites of users",
    "testing/plugin.py": "pytest loads it by name",
    "testing/server.py": "the process that forks the ranks of a pool runs it",
    "testing/hosts.py": "for tests of several machines, and the soak; users import it",
}
"""Modules that no other module imports, with the reason."""


def gerunds(path: str, text: str) -> Iterator[str]:
    name = path.removesuffix("/__init__.py").removesuffix(".py").split("/")[-1]
    if name.endswith("ing") and path not in MAY_BE_A_GERUND:
        yield f"the module is named {name}: modules are nouns (STYLE: capture, restore, commit, heartbeat)"


INTERNALS_NOTE = "# torch internals:"
STABLE_PRIVATE_NAMES = ("torch._foreach_", "torch.ops.aten.")
"""Names with an underscore that PyTorch's own documentation or optimizers rely on."""


def fenced_internals(path: str, text: str) -> Iterator[str]:
    """A private name of torch is used below a note that says why, on which versions, and which test notices; one note serves a file."""
    if INTERNALS_NOTE in text:
        return
    for node in nodes_of(text):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else node.module if isinstance(node, ast.ImportFrom) else None
        if name and re.match(r"torch\.(\w+\.)*_[a-zA-Z]", name) and not name.startswith(STABLE_PRIVATE_NAMES) and "__" not in name:
            yield f"line {getattr(node, 'lineno', '?')}: uses {name} without a note: {INTERNALS_NOTE} why, versions, test, when it can go"


def missing_files(path: str, text: str, exists: Callable[[str], bool]) -> Iterator[str]:
    """The files that prose names in backticks and that do not exist; in Python code, docstrings and comments are prose."""
    for line, found in enumerate(text.splitlines(), 1):
        for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.py)(?:[:#][^`]*)?`", found):
            if "/" in name and not exists(name):
                yield f"{path}:{line}: names {name}, which does not exist"


def shared_class_names(sources: Mapping[str, str]) -> list[str]:
    """Public class names that are defined in more than one module."""
    homes: dict[str, list[str]] = {}
    for path, text in sources.items():
        for node in nodes_of(text):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(set(paths)) > 1]


def unused_modules(sources: Mapping[str, str]) -> list[str]:
    """Modules that no other module imports, names in a string, or finds as a command."""
    known = {_dotted(path): path for path in sources}
    used = {"__init__", "utils"}
    for path, text in sources.items():
        used |= {found for _, target in imports(path, text) if (found := _module(target, known)) not in (None, _dotted(path))}
        strings = [node.value for node in nodes_of(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        used |= {name.removeprefix(f"{PACKAGE}.") for name in strings if re.fullmatch(r"[a-z_0-9.]+", name)}
    packages = {name for name in known if known[name].endswith("__init__.py")}
    commands = {name for name in known if name.startswith("cli.")}  # cli/main.py imports a command by its name
    return sorted(known[name] for name in known.keys() - used - packages - commands if known[name] not in MAY_BE_UNUSED)


def layer_table(exists: Callable[[str], bool]) -> str:
    """Return the table of rooms that CONTRIBUTING.md shows, for the rooms that exist."""
    rows = [f"| {layer} | `{name}` | {what} |" for name, (layer, what) in ROOMS.items() if exists(name)]
    return "\n".join(["| layer | room | what is in it |", "|---|---|---|", *rows])


CHECKS: tuple[Check, ...] = (
    file_length,
    function_length,
    layers,
    variables,
    torch_at_import,
    exports,
    device_names,
    mutable_state,
    silent_except,
    documented,
    no_shell,
    set_order,
    gerunds,
    fenced_internals,
)


def cycles(sources: Mapping[str, str]) -> list[str]:
    """Import cycles between modules, each as `a -> b -> a`; imports inside functions count, those for type checkers do not."""
    known = {_dotted(path): path for path in sources}
    graph = {
        name: sorted({found for _, target in imports(path, sources[path]) if (found := _module(target, known)) not in (None, name)})
        for name, path in known.items()
    }
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


@cache
def tree_of(text: str) -> ast.Module:
    """The syntax tree, of which every check reads the same."""
    return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Every node of the tree, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(text)))


def room(path: str) -> str:
    """The top-level folder or module of a path below the package."""
    return path.split("/")[0].removesuffix(".py")


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and target (dotted, below the package) of every import of our own modules, except those for type checkers."""
    folder = path.split("/")[:-1]
    unseen = {id(inner) for node in nodes_of(text) if _for_type_checkers(node) for inner in ast.walk(node)}
    for node in nodes_of(text):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[2]) for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
            elif (node.module or "").split(".")[0] == PACKAGE:
                base = (node.module or "").split(".")[1:]
            else:
                continue
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def at_import(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement that runs when the module is imported: not the bodies of functions, not what is for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _for_type_checkers(node):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from at_import(node)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _last_name(function: ast.expr) -> str:
    """`suppress` of `contextlib.suppress`; nothing where the function that is called has no name."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _module(target: str, known: Mapping[str, str]) -> str | None:
    """`comm.ops.gather` is found in `comm.ops`, and a name of the package itself in `__init__`."""
    parts = target.split(".") if target else []
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in known:
            return name
    return "__init__" if "__init__" in known else None


def _bindings(tree: ast.Module) -> tuple[set[str], set[str], list[str] | None, bool]:
    """Public names defined, names imported, `__all__`, and whether the module answers `__getattr__`."""
    defined: set[str] = set()
    imported: set[str] = set()
    declared: list[str] | None = None
    lazy = False
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            lazy |= node.name == "__getattr__"
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == PACKAGE):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            lazy |= any(isinstance(part, ast.Name) and part.id == "__getattr__" for target in node.targets for part in ast.walk(target))
        for name, value in _assignments(node):
            if name == "__all__" and isinstance(value, (ast.List, ast.Tuple)):
                declared = [str(ast.literal_eval(elt)) for elt in value.elts if not isinstance(elt, ast.Starred)]
            elif name == "__all__":
                declared = []
            if not (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("TypeVar", "ParamSpec")):
                defined.add(name)
    return {name for name in defined if not name.startswith("_")}, {name for name in imported if not name.startswith("_")}, declared, lazy


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(statement, ast.Assign):
        yield from ((target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        yield statement.target.id, statement.value


def _is_mutable(value: ast.expr | None) -> bool:
    made = {"dict", "list", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap", "local", "WeakKeyDictionary"}
    made |= {"WeakValueDictionary", "WeakSet", "Lock", "RLock", "Queue", "ContextVar"}
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in made
    return isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp))


def _names_of_sets(nodes: Iterable[ast.AST]) -> set[str]:
    """Names and attributes of `self` that hold sets, by how they are made or annotated."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.arg) and node.annotation is not None and _is_set_type(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.Assign) and _is_set(node.value, frozenset()):
            found.update(ast.unparse(target) for target in node.targets)
    return found


def _is_set_type(annotation: ast.expr) -> bool:
    whole = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return _last_name(whole) in ("set", "frozenset", "Set", "AbstractSet", "WeakSet")


def _is_set(value: ast.expr, known: Iterable[str]) -> bool:
    if isinstance(value, (ast.Set, ast.SetComp)):
        return True
    if isinstance(value, ast.Call):
        if _last_name(value.func) in ("list", "tuple", "enumerate", "reversed") and value.args:
            return _is_set(value.args[0], known)
        return _last_name(value.func) in ("set", "frozenset", "WeakSet")
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
        return _is_set(value.left, known) or _is_set(value.right, known)
    return isinstance(value, (ast.Name, ast.Attribute)) and ast.unparse(value) in known


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or ast.unparse(kind) in ("Exception", "BaseException")


def _does_nothing(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, (ast.Pass, ast.Continue, ast.Break))
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Return) and (statement.value is None or isinstance(statement.value, ast.Constant)))
    )


def _words(node: ast.AST) -> Iterator[str]:
    """The words in what a node names or says: identifiers split at underscores, text split at everything that is no letter or digit."""
    texts: list[str] = []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts = [node.value]
    elif isinstance(node, ast.Attribute):
        texts = [node.attr]
    elif isinstance(node, ast.Name):
        texts = [node.id]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        texts = [node.name]
    elif isinstance(node, (ast.arg, ast.keyword)):
        texts = [node.arg or ""]
    elif isinstance(node, ast.alias):
        texts = [node.name, node.asname or ""]
    for text in texts:
        yield from re.findall(r"[a-z0-9]+", text.lower())
