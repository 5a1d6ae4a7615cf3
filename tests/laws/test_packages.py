"""Which packages may hold process state, print, log, use torch.distributed or triton, and write to foreign objects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pytest

from laws.source import Module, for_types_only, imports, modules, require_none

QUIET = ("core", "ops", "casting", "checkpoint", "distributed", "parts", "engine", "fused")
"""Packages that neither print nor log."""

TELLING = ("core/suitable.py", "fused/backends/inductor.py")
"""Files of these packages that log: the level chosen by ``"auto"``; that the first step waits for a compiler."""

SPEAKING = {
    "amp": "apex printed, and scripts search its lines",
}
"""Packages and files that may print, each with its reason."""

STATE = {
    "amp/session.py": "the API that it serves is a set of functions",
    "parts/pairs.py": "an average of a model finds the masters of its weights here",
    "parts/parts.py": "a loss may reach parameters of every engine of its thread, so their windows are found here",
    "parts/scaled_pass.py": "a pass that begins in another one of its thread is refused",
    "casting/registry.py": "a name replaced in a module is replaced for the process, so its users are counted there",
    "casting/rule_table.py": "a trace may hold constants only, so it names a table, and this finds the table while it lives",
    "casting/casts.py": "what os.register_at_fork was given cannot be taken back, so it is given once",
    "casting/scope.py": "torch's check of the inputs of an nn.RNN asks only a switch of the thread, so its users are counted",
    "casting/suspend.py": "torch.autocast is a switch of the thread, so who has switched it off is known by thread",
    "fused/backends/inductor.py": "compiled kernels are for every optimizer of the process",
    "migrate/names.py": "a table that is long to make and never changes",
    "optim/members.py": "configurations name what scripts have registered when they were imported",
    "runner/builder.py": "configurations name what scripts have registered when they were imported",
    "shim/mmengine.py": "mmengine's own registries are of the process, and these stand before them",
    "runner/optimizer_builder.py": "configurations name what scripts have registered when they were imported",
    "amp/multi_tensor.py": "apex has its applier as a name of the module; it is never written",
}
"""Files with state of the process, each with its reason."""

STATEFUL = {"dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
"""Calls that make an empty container to be filled later."""

HIDDEN_STATE = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local"}
"""Calls that make state, also under the name of a constant."""

VALUES = {"TypeVar", "ParamSpec", "MappingProxyType", "Path", "Struct", "Arg"}
"""Classes from elsewhere whose instances are constants."""

DISTRIBUTED = {
    "distributed/fsdp.py": "fully_shard is torch's, by level",
    "distributed/launched.py": "halfpeak train joins the processes that torchrun has started",
    "distributed/ranks.py": "check_ranks compares ranks",
    "parts/replicas.py": "all ranks get the masters of the first, as DistributedDataParallel gives them its weights",
    "ops/shards.py": "found_inf and norms over the ranks that hold parts of one tensor",
    "parts/found_inf.py": "one all-reduce of found_inf per step",
    "shim/cuda_on_cpu.py": "a script's nccl becomes gloo while the CPU plays its device",
    "shim/apex_impl/collectives.py": "apex.parallel.Reducer and flat_dist_call are collectives",
    "shim/apex_impl/ddp.py": "apex's arguments say how DistributedDataParallel reduces",
    "shim/apex_impl/syncbn.py": "SyncBatchNorm normalises by the statistics of all ranks",
    "runner/distributed.py": "init_dist, allreduce_grads and their like are helpers that scripts of mmcv call",
}
"""Files that may talk to other ranks, each with its reason."""

LONGEST = 500
"""Lines of a file that need no explanation. A longer one says why in its docstring: "Longer than 500 lines because ..."."""


def test_state_of_the_process_lives_where_it_must() -> None:
    values = value_classes(module.tree for module in modules())
    require_listed(
        {module: list(mutable_state(module.tree, values)) for module in modules()},
        "STATE",
        STATE,
        "keep it in an object with an owner, not in the module; write a constant as NAME: Final = ...; or add the file to "
        "STATE, with a reason",
    )


def require_listed(
    found: Mapping[Module, Sequence[ast.AST]], name: str, rows: Collection[str], remedy: str
) -> None:
    """Fail with every place outside of the listed files and packages, and with every row that nothing needs."""
    places = [
        f"{module.at(node)}: {ast.unparse(node)[:90]}"
        for module, nodes in found.items()
        if not {module.where, module.package} & {*rows}
        for node in nodes
    ]
    require_none(places, remedy)
    used = {key for module, nodes in found.items() if nodes for key in (module.where, module.package)}
    require_none([row for row in rows if row not in used], f"nothing needs these rows of {name}: delete them")


def value_classes(trees: Iterable[ast.Module]) -> set[str]:
    """The names of frozen dataclasses, named tuples and enumerations of the package."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
        frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        if frozen or bases & {"NamedTuple", "Enum", "IntEnum"}:
            found.add(node.name)
    return found


def mutable_state(tree: ast.Module, values: Collection[str] = ()) -> Iterator[ast.stmt]:
    """Mutable containers and instances in module and class bodies, ``global`` statements, and functions with a cache.

    Instances of the classes ``values`` are constants, and so are those of VALUES.
    """
    for node in ast.walk(tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Global) or any(map(caches, decorators)):
            yield node
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names == ["__all__"]:
            continue
        constant = is_final(statement) and all(name.isupper() for name in names)
        if has_instance(statement.value, values) or (is_mutable(statement.value) and not constant):
            yield statement


def caches(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).split(".")[-1] in ("cache", "lru_cache")


def has_instance(value: ast.expr, values: Collection[str]) -> bool:
    """Whether a call makes an object with state. By its name: a class begins with a capital."""
    name = called(value)
    if name in HIDDEN_STATE:
        return True
    return name.lstrip("_")[:1].isupper() and name not in {*values, *VALUES, *STATEFUL}


def is_final(statement: ast.Assign | ast.AnnAssign) -> bool:
    return isinstance(statement, ast.AnnAssign) and "Final" in ast.unparse(statement.annotation)


def is_mutable(value: ast.expr) -> bool:
    literal = isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp))
    return literal or called(value) in STATEFUL


def called(value: ast.expr) -> str:
    if not isinstance(value, ast.Call):
        return ""
    function = value.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_quiet_packages_do_not_write_on_objects_of_others() -> None:
    unknown: list[str] = []
    used: set[tuple[str, str]] = set()
    own = own_attributes(module.tree for module in modules())
    for module in modules():
        if module.package not in QUIET:
            continue
        for node, attribute in foreign_writes(module.tree, own):
            used.add((module.where, attribute))
            if (module.where, attribute) not in FOREIGN_WRITES:
                unknown.append(f"{module.at(node)}: {ast.unparse(node)[:90]}")
    require_none(unknown, "add a method to the object's own class; or a row to FOREIGN_WRITES, with a reason")
    require_none(
        map(str, FOREIGN_WRITES.keys() - used), "nothing needs these rows of FOREIGN_WRITES: delete them"
    )


_CONVERT = "converting a model in place is its job, and writing .data keeps the parameters' identity"
_WINDOW = "FSDP2 has no way to drop the gradients of a window that is not finished"
_GRAD = "gradients live on parameters: torch's optimizers read them there and nowhere else"

FOREIGN_WRITES: dict[tuple[str, str], str] = {
    ("casting/modules.py", "data"): _CONVERT,
    (
        "casting/float8.py",
        "__class__",
    ): "converting a model in place is its job; parameters, hooks and names stay",
    (
        "casting/inputs.py",
        "setattr",
    ): "notes the value that was given on the rounded copy that it has just made",
    ("casting/tree.py", "setattr"): "fills the copy of a dataclass that it has just made",
    (
        "casting/torch_functions.py",
        "__kwdefaults__",
    ): "completes the copy of a function that it has just made",
    ("casting/registry.py", "setattr"): "a function that the user registered is found by its name only",
    ("casting/rule_table.py", "_dynamo_marked_constant"): "tells torch.compile about a function of its own",
    ("core/torch_compat.py", "_torchdynamo_disable"): "tells torch.compile about functions of this package",
    ("fused/flat/layout.py", "data"): "small parameters move into flat buffers and stay the same objects",
    ("ops/unsharded.py", "_partial_reduce_output"): _WINDOW,
    ("ops/unsharded.py", "unsharded_accumulated_grad"): _WINDOW,
    ("ops/unsharded.py", "grad"): _WINDOW,
    ("distributed/optimizer_state.py", "grad"): "of a stand-in that it has just made",
    ("parts/pairs.py", "grad"): _GRAD,
    ("parts/step_hooks.py", "grad"): _GRAD,
    ("parts/pairs.py", "grad_dtype"): "low-precision weights hold float32 gradients",
    ("parts/window.py", "grad"): _GRAD,
    (
        "ops/triton/control.py",
        "tl",
    ): "triton's interpreter looks for its language among the globals of a function",
    (
        "ops/triton/decide.py",
        "tl",
    ): "triton's interpreter looks for its language among the globals of a function",
    ("parts/tracing.py", "grad"): _GRAD,
    ("engine/state_dict.py", "grad"): _GRAD,
    ("parts/state_dict_hooks.py", "_has_warned"): "an attribute of its own class",
    (
        "parts/step_hooks.py",
        "__dict__",
    ): "found_inf on the optimizer is the protocol of torch's fused optimizers",
}
"""File and attribute, with the reason why the file must write it on an object that is not its own."""

WRITERS = {"setattr", "delattr", "__setattr__", "__delattr__"}

NEVER_OWN = {"forward", "step", "zero_grad", "state_dict", "load_state_dict", "grad", "data", "__class__"}
"""Attributes of user models, optimizers and tensors, although classes of halfpeak have them, too."""


def own_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """The attributes that classes of the package declare or set on ``self``."""
    own: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own.update(
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
                )
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                own.add(node.attr)
    return own - NEVER_OWN


def foreign_writes(tree: ast.Module, own: Collection[str] = ()) -> Iterator[tuple[ast.AST, str]]:
    """Every attribute set or deleted on anything but ``self``, unless it is one that only our own objects have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            if node.attr == "__dict__" or (not isinstance(node.ctx, ast.Load) and node.attr not in own):
                yield node, node.attr
        elif isinstance(node, ast.Call) and called(node) in WRITERS:
            name = node.args[1] if len(node.args) > 1 else None
            if not (node.args and is_self(node.args[0])):
                yield node, str(name.value) if isinstance(name, ast.Constant) else "setattr"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_only_listed_files_talk_to_other_ranks() -> None:
    require_listed(
        {module: list(talks(module)) for module in modules()},
        "DISTRIBUTED",
        DISTRIBUTED,
        "call one of the files in DISTRIBUTED, or add this one to it, with a reason",
    )


def talks(module: Module) -> Iterator[ast.AST]:
    """The places where a module uses torch.distributed, except for types only."""
    idle = for_types_only(module)
    for node, name in imports(module):
        if name.startswith("torch.distributed") and node not in idle:
            yield node
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" and node not in idle:
            yield node


def test_triton_is_imported_only_in_ops_triton() -> None:
    outside = [
        module.at(node)
        for module in modules()
        if not module.where.startswith("ops/triton/")
        for node, name in imports(module)
        if name.split(".")[0] == "triton"
    ]
    require_none(outside, "put the kernel into ops/triton and call it through halfpeak.ops.triton.kernels()")


def test_only_listed_packages_print() -> None:
    require_listed(
        {module: [node for node in ast.walk(module.tree) if prints(node)] for module in modules()},
        "SPEAKING",
        SPEAKING,
        "return it, or raise an error or a warning; front ends may say it",
    )


def prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def test_quiet_packages_do_not_log() -> None:
    require_listed(
        {
            module: [node for node in ast.walk(module.tree) if imports_logging(node)]
            for module in modules()
            if module.package in QUIET
        },
        "TELLING",
        TELLING,
        "return it, or raise an error or a warning; front ends may say it",
    )


def imports_logging(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
    return any(name.split(".")[0] == "logging" for name in names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cache = {}", 1),
        ("cache: dict[int, int] = dict()", 1),
        ("_cache: Final[dict[int, int]] = {}", 1),
        ("class Registry:\n    known = []", 1),
        ("here: Final = ContextVar('here')", 1),
        ("def move():\n    global here", 1),
        ("_state = Session()", 1),
        ("STATE: Final = Session()", 1),
        ("@functools.cache\ndef kernels(): ...", 1),
        ("@lru_cache(maxsize=8)\ndef kernels(): ...", 1),
        ("class Kernels:\n    @cached_property\n    def first(self): ...", 0),
        ("START: Final = Start()\n@dataclass(frozen=True)\nclass Start: ...", 0),
        ("NAMES: Final = {'half': 16}\n__all__ = ['NAMES']\npair = (1, 2)", 0),
    ],
)
def test_the_law_on_state_sees(text: str, found: int) -> None:
    tree = ast.parse(text)
    assert len(list(mutable_state(tree, value_classes([tree])))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("optimizer.step = skip", 1),
        ("setattr(model, name, skip)", 1),
        ("del model.forward", 1),
        ("group.params += [p]", 1),
        ("optimizer.__dict__['step'] = skip", 1),
        ("window.scale = 1\nclass Window:\n    scale: int", 0),
        ("model.forward = 1\nclass Ours:\n    forward: int", 1),
        ("self.scale = 1.0\ncls.known = ()\nobject.__setattr__(self, 'scale', 1.0)", 0),
    ],
)
def test_the_law_on_foreign_writes_sees(text: str, found: int) -> None:
    tree = ast.parse(text)
    assert len(list(foreign_writes(tree, own_attributes([tree])))) == found


def test_a_long_file_says_why() -> None:
    long = {
        module.where: lines
        for module in modules()
        if (lines := module.text.count("\n")) > LONGEST
        and f"Longer than {LONGEST} lines because" not in (ast.get_docstring(module.tree) or "")
    }
    require_none(
        [f"{where}: {lines} lines" for where, lines in long.items()],
        f'split it, or say in its docstring "Longer than {LONGEST} lines because ..."',
    )


def test_every_file_says_what_it_owns() -> None:
    silent = [module.where for module in modules() if not ast.get_docstring(module.tree)]
    require_none(silent, "begin the file with a docstring: one sentence on what it owns")
