"""match_loop: matches the ``apex.amp`` training loop of a file as a whole, or refuses it with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import libcst as cst

from halfpeak.migrate.calls import named_args
from halfpeak.migrate.findings import NotSupported
from halfpeak.migrate.imports import ImportedName, LoopImports
from halfpeak.migrate.names import Replacement, look_up
from halfpeak.migrate.tree import Tree, Use, names_in, walk

Block = cst.Module | cst.IndentedBlock

PREFIXES: Final = ("apex.amp", "halfpeak.amp")
"""The modules whose loops are matched; a loop on ``halfpeak.amp`` is rewritten like one on apex."""

_KNOWN: Final = frozenset(
    {"initialize", "scale_loss", "master_params", "disable_casts", "state_dict", "load_state_dict"}
)
"""The names of amp that a matched loop may use."""

_SCALE_LOSS: Final = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
"""The arguments of ``scale_loss``."""

_KEEP_AMP: Final = "keep halfpeak.amp, or rewrite it by hand with halfpeak.prepare"


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Initialize:
    """``model, optimizer = amp.initialize(model, optimizer, opt_level=...)``.

    Attributes:
        statement: the whole line.
        keywords: the arguments after the first two.
        numbers: the number of each optimizer, by every expression for it before and after the call.
        count: the number of optimizers.
        level: the opt level if it is a literal, else None.
        result: the code of the targets that the result is unpacked into; None if it is that of the arguments.
    """

    statement: cst.SimpleStatementLine
    use: Use
    models: cst.BaseExpression
    optimizers: cst.BaseExpression
    keywords: Mapping[str, cst.Arg]
    numbers: Mapping[str, int]
    count: int
    level: str | None
    result: str | None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class BackwardPass:
    """``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``.

    Attributes:
        statement: the ``with`` statement, which is ``block.body[index]``.
        number: the number of the optimizer in :attr:`Initialize.numbers`.
        args: the arguments of ``backward``.
    """

    statement: cst.With
    block: Block
    index: int
    loss: cst.BaseExpression
    loss_id: cst.BaseExpression | None
    optimizer: cst.BaseExpression
    number: int
    args: Sequence[cst.Arg]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class OptimizerStep:
    """``optimizer.step()``, the statement ``block.body[index]``."""

    statement: cst.SimpleStatementLine
    block: Block
    index: int
    optimizer: cst.BaseExpression
    number: int


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LoopMatch:
    """One training loop, or several that share an ``initialize``.

    Attributes:
        uses: all uses of amp, by the names in amp.
    """

    initialize: Initialize
    passes: Sequence[BackwardPass]
    steps: Sequence[OptimizerStep]
    uses: Mapping[str, Sequence[Use]]

    def blocks(self) -> list[Block]:
        """The blocks of statements that contain backward passes."""
        return list({id(one.block): one.block for one in self.passes}.values())


def not_supported(use: Use, reason: str, write: str = _KEEP_AMP) -> NotSupported:
    """The exception for a use of amp whose meaning is not certain; it quotes the name of the use."""
    return NotSupported(use.node, use.name, reason, write)


def uses_of_amp(tree: Tree) -> dict[str, list[Use]]:
    """The uses of names in ``apex.amp`` or ``halfpeak.amp``, by name. A use of the module itself has the empty name."""
    found: dict[str, list[Use]] = {}
    for use in tree.uses:
        if any(use.name == prefix or use.name.startswith(f"{prefix}.") for prefix in PREFIXES):
            replacement = look_up(use.name.replace("halfpeak.amp", "apex.amp", 1), "amp")
            known = isinstance(replacement, Replacement)
            name = replacement.name if known else use.name.partition("amp")[2].lstrip(".")
            found.setdefault(name, []).append(use)
    return found


def match_loop(tree: Tree) -> LoopMatch | None:
    """The training loop of a file; None if it does not use amp.

    Raises:
        NotSupported: the file uses amp in a way that cannot be matched.
    """
    uses = uses_of_amp(tree)
    if not uses:
        return None
    for name, several in uses.items():
        for use in several:
            if use.doubt:
                raise not_supported(use, use.doubt, "import it in one place")
            if name not in _KNOWN:
                raise not_supported(use, "it is not part of a training loop that can be rewritten")
    calls = uses.get("initialize", [])
    if len(calls) != 1:
        use = calls[-1] if calls else next(iter(uses.values()))[0]
        reason = "amp is initialised more than once" if calls else "amp.initialize is called in another file"
        raise not_supported(use, reason)
    (use,) = calls
    initialize = _initialize(tree, use)
    passes = [_backward_pass(tree, one, initialize) for one in uses.get("scale_loss", ())]
    if not passes:
        raise not_supported(use, "amp.scale_loss is not called in this file")
    steps = list(_steps(tree, initialize, passes))
    match = LoopMatch(initialize=initialize, passes=passes, steps=steps, uses=uses)
    for block in match.blocks():
        _check_order(tree, match, block)
    return match


def imports_for(
    tree: Tree, match: LoopMatch, names: Sequence[ImportedName], *, kept: Collection[str]
) -> LoopImports:
    """The imports of other names in the place of amp, which stays imported if the rewritten code still uses it.

    Args:
        names: the names that the rewritten code needs.
        kept: the names of amp that the rewritten code still uses.

    Raises:
        NotSupported: amp is imported in a function, so other code that needs the new names would not see them.
    """
    gone = {use for name, uses in match.uses.items() if name not in kept for use in uses}
    where = match.initialize.use.aliases
    for alias in where if len(names) > 1 and len({use.scope for use in gone}) > 1 else ():
        if tree.function(alias.statement) is not None:
            reason = "it is imported inside a function"
            raise NotSupported(alias.statement, alias.full, reason, "import it at the top of the file")
    return LoopImports(gone, names, where)


def elements(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """The elements of a list or tuple display; for any other expression, the expression itself."""
    return [one.value for one in node.elements] if isinstance(node, cst.List | cst.Tuple) else [node]


def _initialize(tree: Tree, use: Use) -> Initialize:
    call, statement = tree.call_of(use.node), tree.line_of(use.node)
    if call is None or statement is None:
        raise not_supported(use, "it is not called in a statement of its own")
    small = statement.body[0]
    value = small.value if isinstance(small, cst.Assign | cst.Expr) else None
    unpack = "write model, optimizer = amp.initialize(...)"
    if value is not call or (isinstance(small, cst.Assign) and len(small.targets) != 1):
        raise not_supported(use, "its result is not unpacked at once", unpack)
    if any(arg.star for arg in call.args) or sum(arg.keyword is None for arg in call.args) > 2:
        reason = "its arguments are unpacked, or more than two are positional"
        raise not_supported(use, reason, "write them as keywords")
    keywords = named_args(call, ("models", "optimizers"))
    if not {"models", "optimizers"} <= keywords.keys():
        write = "keep halfpeak.amp, or cast the model yourself"
        raise not_supported(use, "it is called without an optimizer", write)
    models, optimizers = keywords.pop("models").value, keywords.pop("optimizers").value
    _check_unconditional(tree, statement, use)
    numbers, result = {tree.code(one): number for number, one in enumerate(elements(optimizers))}, None
    if isinstance(small, cst.Assign):
        target = small.targets[0].target
        parts = elements(target)
        if len(parts) != 2 or not isinstance(target, cst.Tuple | cst.List):
            raise NotSupported(small, "amp.initialize", "its result is not unpacked", unpack)
        numbers |= _names_after(tree, parts[1], len(elements(optimizers)))
        given, bound = ([_codes(tree, one) for one in pair] for pair in ((models, optimizers), parts))
        result = None if given == bound else tree.code(target)
    level = keywords["opt_level"].value if "opt_level" in keywords else cst.SimpleString('"O1"')
    literal = level.evaluated_value if isinstance(level, cst.SimpleString) else None
    return Initialize(
        statement=statement,
        use=use,
        models=models,
        optimizers=optimizers,
        keywords=keywords,
        numbers=numbers,
        count=len(elements(optimizers)),
        level=literal if isinstance(literal, str) else None,
        result=result,
    )


def _codes(tree: Tree, node: cst.BaseExpression) -> list[str]:
    return [tree.code(one) for one in elements(node)]


def _names_after(tree: Tree, target: cst.BaseExpression, count: int) -> dict[str, int]:
    """The numbers of the optimizers by the expressions for them after ``initialize``: names, or ``name[number]``."""
    names = _codes(tree, target)
    if len(names) != count:
        names = [f"{tree.code(target)}[{number}]" for number in range(count)]
    return {name: number for number, name in enumerate(names)}


def _check_unconditional(tree: Tree, statement: cst.SimpleStatementLine, use: Use) -> None:
    for above in tree.parents(statement):
        if isinstance(above, cst.FunctionDef):
            return
        if isinstance(above, cst.If | cst.For | cst.While | cst.ExceptHandler | cst.Else | cst.Finally):
            if isinstance(above, cst.If) and "__name__" in tree.code(above.test):
                continue
            raise not_supported(
                use,
                "it is called under a condition, and the engine is needed in either case",
                'keep halfpeak.amp, or write engine = halfpeak.prepare(model, optimizer, level if condition else "O0")',
            )


def _backward_pass(tree: Tree, use: Use, initialize: Initialize) -> BackwardPass:
    call = tree.call_of(use.node)
    item = tree.parent(call) if call is not None else None
    statement = tree.parent(item) if item is not None else None
    if call is None or not (
        isinstance(item, cst.WithItem) and item.asname is not None and isinstance(statement, cst.With)
    ):
        raise not_supported(use, "it is not the head of a with statement")
    scaled = tree.code(item.asname.name)
    given = {name: arg.value for name, arg in named_args(call, _SCALE_LOSS).items() if name != "model"}
    unknown = [name for name in given if name not in ("loss", "optimizers", "loss_id")]
    if unknown or any(arg.star for arg in call.args) or not {"loss", "optimizers"} <= given.keys():
        reason = "its arguments are unpacked, or have no loss or no optimizer"
        if unknown:
            reason = f"the rewritten loop has nothing for its argument {', '.join(unknown)}"
        raise not_supported(use, reason)
    args = _backward_args(statement, scaled)
    if args is None or len(statement.items) != 1:
        raise not_supported(use, f"the block does more than {scaled}.backward()")
    number = initialize.numbers.get(tree.code(given["optimizers"]))
    if number is None:
        raise not_supported(use, "its optimizer has another name than in amp.initialize")
    around = tree.function(statement) or tree.module
    mentions = sum(one.value == scaled for one in names_in(around))
    passes = sum(
        isinstance(one, cst.With) and _backward_args(one, scaled) is not None for one in walk(around)
    )
    if mentions != 2 * passes:
        raise not_supported(use, f"{scaled} is used outside the block too", "use the loss itself")
    block, index = _place(tree, statement)
    return BackwardPass(
        statement=statement,
        block=block,
        index=index,
        loss=given["loss"],
        loss_id=given.get("loss_id"),
        optimizer=given["optimizers"],
        number=number,
        args=args,
    )


def _backward_args(statement: cst.With, scaled: str) -> Sequence[cst.Arg] | None:
    """The arguments of ``scaled.backward(...)`` if this call is the whole body; else None."""
    match statement.body.body:
        case [cst.SimpleStatementLine(body=[cst.Expr(value=value)])] | [cst.Expr(value=value)]:
            call = value
        case _:
            return None
    match call:
        case cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value="backward"))):
            return call.args if name == scaled else None
        case _:
            return None


def _steps(tree: Tree, initialize: Initialize, passes: Sequence[BackwardPass]) -> Iterator[OptimizerStep]:
    for call in (node for node in walk(tree.module) if isinstance(node, cst.Call)):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "step":
            continue
        number = initialize.numbers.get(tree.code(call.func.value))
        if number is None:
            continue
        code, statement = tree.code(call), tree.line_of(call)
        if call.args:
            write = "write engine.step(closure), with engine.backward inside"
            raise NotSupported(call, code, "the step has a closure", write)
        if not isinstance(tree.parent(call), cst.Expr):
            write = "write result = engine.step() and read result.stepped()"
            raise NotSupported(call, code, "its result is used", write)
        if statement is None or not any(tree.parent(statement) is one.block for one in passes):
            raise NotSupported(
                call,
                code,
                "the step is not in the same block as the backward pass, as when gradients are accumulated",
                "keep halfpeak.amp, or write halfpeak.prepare(..., accumulate=n), engine.backward(loss) with the loss "
                "undivided, and engine.step() after each",
            )
        block, index = _place(tree, statement)
        yield OptimizerStep(
            statement=statement, block=block, index=index, optimizer=call.func.value, number=number
        )


def _place(tree: Tree, statement: cst.BaseStatement) -> tuple[Block, int]:
    """The block that contains a statement, and the statement's index in it."""
    block = tree.parent(statement)
    assert isinstance(block, Block)
    return block, next(index for index, one in enumerate(block.body) if one is statement)


def _check_order(tree: Tree, match: LoopMatch, block: Block) -> None:
    """Check that a step follows each backward pass, with no second pass of the same optimizer and loss in between."""
    events = [one for one in (*match.passes, *match.steps) if one.block is block]
    waiting: dict[int, list[str]] = {}
    for event in sorted(events, key=lambda one: one.index):
        if isinstance(event, BackwardPass):
            loss_id = "0" if event.loss_id is None else tree.code(event.loss_id)
            if loss_id in waiting.setdefault(event.number, []):
                reason = f"two backward passes with loss_id={loss_id} come before one step"
                write = "keep halfpeak.amp, or add the losses and call backward once"
                raise NotSupported(event.statement, "amp.scale_loss", reason, write)
            waiting[event.number].append(loss_id)
        elif not waiting.pop(event.number, []):
            code = tree.code(event.statement.body[0])
            raise NotSupported(event.statement, code, "no backward pass comes before it", _KEEP_AMP)
    first, last = (choose(one.index for one in events) for choose in (min, max))
    for node in (one for statement in block.body[first:last] for one in walk(statement)):
        if isinstance(node, cst.Break | cst.Continue | cst.Return):
            reason = "it may skip the step after a backward pass"
            raise NotSupported(node, tree.code(node), reason, _KEEP_AMP)
    if waiting:
        raise NotSupported(block.body[-1], "amp.scale_loss", "no step follows in the same block", _KEEP_AMP)
    around = tree.function(block) or tree.module
    if not any(isinstance(one, cst.Attribute) and one.attr.value == "zero_grad" for one in walk(around)):
        reason = "it is not called here, so gradients add up"
        raise NotSupported(block.body[0], "zero_grad", reason, _KEEP_AMP)
