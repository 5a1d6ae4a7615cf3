"""What a room may do: hold state, speak, reach for other libraries, write on objects that are not its own."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

import pytest

from laws.source import Module, for_types_only, imports, modules

QUIET = ("core", "ops", "parts", "casting", "checkpoint", "engine", "fused")
"""Rooms that return results and never report them."""

SPEAKING = ("amp", "cli", "insight")
"""Rooms that may print."""

STATE = {
    "amp/session.py": "the API that it serves is a set of functions",
    "casting/registry.py": "a name replaced in a module is replaced for the process, so its users are counted there",
    "casting/tables.py": "a trace may hold constants only, so it names a table, and this finds the table while it lives",
    "engine/operators.py": "an operator takes tensors and numbers, so a number names an engine and finds it while it lives",
    "casting/opcasts.py": "what os.register_at_fork was given cannot be taken back, so it is given once",
}
"""Files with state of the process, each with its reason."""

STATEFUL = {"dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
"""Calls that make an empty container to be filled later."""

HIDDEN_STATE = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local"}
"""Calls that make state, whatever the name says."""

DISTRIBUTED = {
    "parts/verdict.py": "one verdict per step",
    "shim/device.py": "a script's nccl becomes gloo while the CPU plays its device",
    "shim/emulated/collectives.py": "apex.parallel.Reducer and flat_dist_call are collectives",
    "shim/emulated/ddp.py": "apex's arguments say how DistributedDataParallel reduces",
    "shim/emulated/syncbn.py": "SyncBatchNorm normalises by the statistics of all ranks",
    "shim/apex/parallel/distributed.py": "re-exports ReduceOp",
    "runner/dist.py": "init_dist and get_dist_info are the helpers that scripts of mmcv call",
    "runner/allreduce.py": "allreduce_grads and allreduce_params average over the ranks",
    "runner/ddp.py": "a runner steps a model through DistributedDataParallel",
    "runner/gather.py": "one checkpoint file holds the random generators of all ranks",
    "cli/ranks.py": "the processes that torchrun started for a run become one group, and end",
}
"""Files that may talk to other ranks, each with its reason."""

LONGEST = 330


def test_state_of_the_process_lives_where_it_must() -> None:
    found = [
        f"{module.at(node)}: {ast.unparse(node)[:90]}"
        for module in modules()
        if module.where not in STATE
        for node in mutable_state(module.tree)
    ]
    assert not found, "\n".join(found)


def mutable_state(tree: ast.Module) -> Iterator[ast.stmt]:
    """Names of a module or class body that hold something to fill later, and functions that rebind them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
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
        if called(statement.value) in HIDDEN_STATE or (is_mutable(statement.value) and not constant):
            yield statement


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


def test_quiet_rooms_do_not_write_on_objects_of_others() -> None:
    unknown: list[str] = []
    used: set[tuple[str, str]] = set()
    own = own_attributes(module.tree for module in modules())
    for module in modules():
        if module.room not in QUIET:
            continue
        for node, attribute in foreign_writes(module.tree, own):
            used.add((module.where, attribute))
            if (module.where, attribute) not in FOREIGN_WRITES:
                unknown.append(f"{module.at(node)}: {ast.unparse(node)[:90]}")
    assert not unknown, "\n".join(unknown)
    assert FOREIGN_WRITES.keys() <= used, f"no longer needed: {FOREIGN_WRITES.keys() - used}"


_CONVERT = "converting a model in place is its job, and writing .data keeps the parameters' identity"
_GRAD = "gradients live on parameters: torch's optimizers read them there and nowhere else"

FOREIGN_WRITES: dict[tuple[str, str], str] = {
    ("casting/modules.py", "data"): _CONVERT,
    ("casting/containers.py", "setattr"): "fills the copy of a dataclass that it has just made",
    ("casting/composites.py", "__kwdefaults__"): "completes the copy of a function that it has just made",
    ("casting/registry.py", "setattr"): "a function that the user registered is found by its name only",
    ("casting/tables.py", "_dynamo_marked_constant"): "tells torch.compile about a function of its own",
    ("core/tracing.py", "_torchdynamo_disable"): "tells torch.compile about functions of this package",
    ("fused/layout.py", "data"): "small parameters move into arenas and stay the same objects",
    ("fused/forms/remainders.py", "grad"): "zero_grad() reaches what stands in for masters",
    ("engine/block.py", "grad"): _GRAD,
    ("engine/deferred.py", "grad"): _GRAD,
    ("engine/intake.py", "grad"): _GRAD,
    ("engine/lane.py", "grad"): _GRAD,
    ("engine/state.py", "grad"): _GRAD,
    ("engine/strays.py", "grad"): _GRAD,
    ("engine/trace.py", "grad"): _GRAD,
    ("engine/whole.py", "grad"): _GRAD,
    ("engine/fused.py", "__dict__"): "found_inf on the optimizer is the protocol of torch's fused optimizers",
}
"""File and attribute, with the reason why this room must write it on an object that it does not own."""

WRITERS = {"setattr", "delattr", "__setattr__", "__delattr__"}

NEVER_OWN = {"forward", "step", "zero_grad", "state_dict", "load_state_dict", "grad", "data", "__class__"}
"""Names that user models, optimizers and tensors have, whatever classes of ours have them too."""


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


def test_only_the_verdict_talks_to_other_ranks() -> None:
    others = [
        module.at(node) for module in modules() if module.where not in DISTRIBUTED for node in talks(module)
    ]
    assert not others


def talks(module: Module) -> Iterator[ast.AST]:
    """Where a module reaches torch.distributed, but for naming its types."""
    idle = for_types_only(module)
    for node, name in imports(module):
        if name.startswith("torch.distributed") and node not in idle:
            yield node
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" and node not in idle:
            yield node


def test_triton_stays_behind_its_door() -> None:
    outside = [
        module.at(node)
        for module in modules()
        if not module.where.startswith("ops/triton/")
        for node, name in imports(module)
        if name.split(".")[0] == "triton"
    ]
    assert not outside


def test_quiet_rooms_neither_print_nor_log() -> None:
    loud = [
        f"{module.at(node)}: {ast.unparse(node)[:90]}"
        for module in modules()
        for node in ast.walk(module.tree)
        if speaks(module, node)
    ]
    assert not loud, "\n".join(loud)


def speaks(module: Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        return module.room not in SPEAKING
    if isinstance(node, (ast.Import, ast.ImportFrom)) and module.room in QUIET:
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return any(name.split(".")[0] == "logging" for name in names)
    return False


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cache = {}", 1),
        ("cache: dict[int, int] = dict()", 1),
        ("_cache: Final[dict[int, int]] = {}", 1),
        ("class Registry:\n    known = []", 1),
        ("here: Final = ContextVar('here')", 1),
        ("def move():\n    global here", 1),
        ("NAMES: Final = {'half': 16}\n__all__ = ['NAMES']\npair = (1, 2)", 0),
    ],
)
def test_the_law_on_state_sees(text: str, found: int) -> None:
    assert len(list(mutable_state(ast.parse(text)))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("optimizer.step = skip", 1),
        ("setattr(model, name, skip)", 1),
        ("del model.forward", 1),
        ("group.params += [p]", 1),
        ("optimizer.__dict__['step'] = skip", 1),
        ("lane.phase = 1\nclass Lane:\n    phase: int", 0),
        ("model.forward = 1\nclass Ours:\n    forward: int", 1),
        ("self.scale = 1.0\ncls.known = ()\nobject.__setattr__(self, 'scale', 1.0)", 0),
    ],
)
def test_the_law_on_foreign_writes_sees(text: str, found: int) -> None:
    tree = ast.parse(text)
    assert len(list(foreign_writes(tree, own_attributes([tree])))) == found


def test_a_room_holds_one_idea() -> None:
    long = {module.where: lines for module in modules() if (lines := module.text.count("\n")) > LONGEST}
    assert not long


def test_every_file_says_what_it_owns() -> None:
    assert not [module.where for module in modules() if not ast.get_docstring(module.tree)]
