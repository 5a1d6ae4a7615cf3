"""Recognise: a training loop written for ``apex.amp``, as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import libcst as cst

from halfpeak.migrate.calls import keyword_of
from halfpeak.migrate.names import Rule, answer
from halfpeak.migrate.training import Backward, Block, Initialize, Step, Training, Unsure
from halfpeak.migrate.tree import Tree, Use, names_in, walk

PREFIXES: Final = ("apex.amp", "halfpeak.amp")

KNOWN: Final = ("initialize", "scale_loss", "master_params", "disable_casts", "state_dict", "load_state_dict")


_LEAVES: Final = (cst.Break, cst.Continue, cst.Return)


def uses_of_amp(tree: Tree) -> dict[str, list[Use]]:
    """The uses of amp's names, whether it is apex's or ours. The module itself goes by the empty name."""
    found: dict[str, list[Use]] = {}
    for use in tree.uses:
        if any(use.name == prefix or use.name.startswith(f"{prefix}.") for prefix in PREFIXES):
            rule = answer(use.name.replace("halfpeak.amp", "apex.amp", 1), "amp")
            name = rule.name if isinstance(rule, Rule) else use.name.partition("amp")[2].lstrip(".")
            found.setdefault(name, []).append(use)
    return found


def recognise(tree: Tree) -> Training | None:
    """The training loop of a file; None if it does not use amp.

    Raises:
        Unsure: it uses amp in a way that is not understood in full.
    """
    uses = uses_of_amp(tree)
    if not uses:
        return None
    for name, several in uses.items():
        for use in several:
            if use.doubt:
                raise Unsure(use.node, use.name, use.doubt, "import it in one place")
            if name not in KNOWN:
                raise Unsure(use.node, use.name, "the code does more with amp than train", _STAY)
    if len(uses.get("initialize", ())) != 1:
        some = next(iter(uses.values()))[0]
        where = uses.get("initialize", [some])[-1]
        count = len(uses.get("initialize", ()))
        reason = "amp is initialised more than once" if count else "amp.initialize is called in another file"
        raise Unsure(where.node, where.name, reason, _STAY)
    training = Training(initialize=_initialize(tree, uses["initialize"][0]), uses=uses)
    training.passes = [_backward(tree, use, training.initialize) for use in uses.get("scale_loss", ())]
    if not training.passes:
        use = uses["initialize"][0]
        raise Unsure(use.node, use.name, "amp.scale_loss is not called in this file", _STAY)
    training.steps = list(_steps(tree, training))
    for block in training.blocks():
        _check_order(tree, training, block)
    return training


_STAY: Final = "keep halfpeak.amp, or rewrite it by hand with halfpeak.prepare"


def _initialize(tree: Tree, use: Use) -> Initialize:
    call, line = tree.call_of(use.node), tree.line_of(use.node)
    if call is None or line is None:
        raise Unsure(use.node, use.name, "it is not called in a statement of its own", _STAY)
    small = line.body[0]
    value = small.value if isinstance(small, cst.Assign | cst.Expr) else None
    if value is not call or (isinstance(small, cst.Assign) and len(small.targets) != 1):
        raise Unsure(
            call,
            use.name,
            "its result is not unpacked at once",
            "write model, optimizer = amp.initialize(...)",
        )
    positional = [arg.value for arg in call.args if arg.keyword is None]
    keywords = {name: arg for arg in call.args if (name := keyword_of(arg)) is not None}
    if any(arg.star for arg in call.args) or len(positional) > 2:
        raise Unsure(call, use.name, "its arguments cannot be told apart", "write them as keywords")
    first = positional[0] if positional else _taken(keywords, "models")
    second = positional[1] if len(positional) > 1 else _taken(keywords, "optimizers")
    if first is None or second is None:
        raise Unsure(call, use.name, "there is no optimizer", "keep halfpeak.amp, or cast the model yourself")
    _check_unconditional(tree, line, use)
    names, count, result = _targets(tree, small, first, second)
    level = keywords["opt_level"].value if "opt_level" in keywords else cst.SimpleString('"O1"')
    known = level.evaluated_value if isinstance(level, cst.SimpleString) else None
    return Initialize(
        line=line,
        use=use,
        models=first,
        optimizers=second,
        keywords=keywords,
        names=names,
        count=count,
        level=known if isinstance(known, str) else None,
        result=result,
    )


def _taken(keywords: dict[str, cst.Arg], name: str) -> cst.BaseExpression | None:
    arg = keywords.pop(name, None)
    return None if arg is None else arg.value


def _check_unconditional(tree: Tree, line: cst.SimpleStatementLine, use: Use) -> None:
    for above in tree.parents(line):
        if isinstance(above, cst.FunctionDef):
            return
        if isinstance(above, cst.If | cst.For | cst.While | cst.ExceptHandler | cst.Else | cst.Finally):
            if isinstance(above, cst.If) and "__name__" in tree.code(above.test):
                continue
            raise Unsure(
                use.node,
                use.name,
                "it is called under a condition, and the engine is needed in either case",
                'keep halfpeak.amp, or write engine = halfpeak.prepare(model, optimizer, level if condition else "O0")',
            )


def _targets(
    tree: Tree, small: cst.BaseSmallStatement, first: cst.BaseExpression, second: cst.BaseExpression
) -> tuple[dict[str, int], int, str | None]:
    """How optimizers are called, how many there are, and what the result is called if not as the arguments."""
    optimizers = elements(second)
    names = {tree.code(one): number for number, one in enumerate(optimizers)}
    if not isinstance(small, cst.Assign):
        return names, len(optimizers), None
    target = small.targets[0].target
    parts = elements(target)
    if len(parts) != 2 or not isinstance(target, cst.Tuple | cst.List):
        raise Unsure(
            small,
            "amp.initialize",
            "its result is not unpacked",
            "write model, optimizer = amp.initialize(...)",
        )
    bound = elements(parts[1])
    if len(bound) == len(optimizers):
        names |= {tree.code(one): number for number, one in enumerate(bound)}
    else:
        names |= {f"{tree.code(parts[1])}[{number}]": number for number in range(len(optimizers))}
    same = [[tree.code(one) for one in elements(part)] for part in parts]
    if same == [[tree.code(one) for one in elements(part)] for part in (first, second)]:
        return names, len(optimizers), None
    return names, len(optimizers), tree.code(target)


def elements(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """The elements of a list or tuple that is written out; of anything else, itself."""
    return [one.value for one in node.elements] if isinstance(node, cst.List | cst.Tuple) else [node]


def _backward(tree: Tree, use: Use, initialize: Initialize) -> Backward:
    call = tree.call_of(use.node)
    item = tree.parent(call) if call is not None else None
    statement = tree.parent(item) if item is not None else None
    if (
        call is None
        or not isinstance(item, cst.WithItem)
        or not isinstance(statement, cst.With)
        or item.asname is None
    ):
        raise Unsure(use.node, use.name, "it is not the head of a with statement", _STAY)
    given = dict(
        zip(
            ("loss", "optimizers", "loss_id", "model"),
            (a.value for a in call.args if not a.keyword),
            strict=False,
        )
    )
    given |= {name: arg.value for arg in call.args if (name := keyword_of(arg)) is not None}
    given.pop("model", None)
    unknown = [name for name in given if name not in ("loss", "optimizers", "loss_id")]
    if unknown or any(arg.star for arg in call.args) or not {"loss", "optimizers"} <= given.keys():
        raise Unsure(call, use.name, f"it is called with {', '.join(unknown) or 'other arguments'}", _STAY)
    scaled = tree.code(item.asname.name)
    args = _backward_args(statement, scaled)
    if args is None or len(statement.items) != 1:
        raise Unsure(use.node, use.name, f"the block does more than {scaled}.backward()", _STAY)
    number = initialize.names.get(tree.code(given["optimizers"]))
    if number is None:
        raise Unsure(call, use.name, "its optimizer is not one of amp.initialize's by name", _STAY)
    around = tree.function(statement)
    mentions = sum(one.value == scaled for one in names_in(around or tree.module))
    withs = sum(
        isinstance(one, cst.With) and _backward_args(one, scaled) is not None for one in tree.within(around)
    )
    if mentions != 2 * withs:
        raise Unsure(use.node, use.name, f"{scaled} is used outside the block too", "use the loss itself")
    block = tree.parent(statement)
    assert isinstance(block, Block)
    return Backward(
        statement=statement,
        block=block,
        index=_place(block, statement),
        loss=given["loss"],
        loss_id=given.get("loss_id"),
        optimizer=given["optimizers"],
        number=number,
        args=args,
    )


def _backward_args(statement: cst.With, scaled: str) -> Sequence[cst.Arg] | None:
    """The arguments of ``scaled.backward(...)``, if the body is that and nothing else."""
    body = statement.body.body
    line = body[0] if len(body) == 1 else None
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else line
    call = small.value if isinstance(small, cst.Expr) else None
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        return None
    is_it = isinstance(call.func.value, cst.Name) and call.func.value.value == scaled
    return call.args if is_it and call.func.attr.value == "backward" else None


def _steps(tree: Tree, training: Training) -> Iterator[Step]:
    blocks = list(training.blocks())
    for call in (node for node in walk(tree.module) if isinstance(node, cst.Call)):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "step":
            continue
        number = training.initialize.names.get(tree.code(call.func.value))
        if number is None:
            continue
        code, line = tree.code(call), tree.line_of(call)
        block = tree.parent(line) if line is not None else None
        if call.args:
            raise Unsure(
                call,
                code,
                "the step has a closure",
                "write engine.step(closure), with engine.backward inside",
            )
        if not isinstance(tree.parent(call), cst.Expr):
            raise Unsure(
                call, code, "its result is used", "write result = engine.step() and ask result.stepped()"
            )
        if line is None or not any(block is one for one in blocks):
            raise Unsure(
                call,
                code,
                "the step is not taken beside the backward pass, as when gradients are accumulated",
                "keep halfpeak.amp, or write halfpeak.prepare(..., accumulate=n), engine.backward(loss) with the loss "
                "undivided, and engine.step() after each",
            )
        assert isinstance(block, Block)
        yield Step(
            line=line, block=block, index=_place(block, line), optimizer=call.func.value, number=number
        )


def _place(block: Block, statement: cst.CSTNode) -> int:
    return next(index for index, one in enumerate(block.body) if one is statement)


def _check_order(tree: Tree, training: Training, block: Block) -> None:
    """Each backward pass has a step after it, with no second one of its optimizer and loss in between."""
    events = [one for one in (*training.passes, *training.steps) if one.block is block]
    waiting: dict[int, list[str]] = {}
    for event in sorted(events, key=lambda one: one.index):
        node = event.statement if isinstance(event, Backward) else event.line
        if isinstance(event, Backward):
            loss_id = "0" if event.loss_id is None else tree.code(event.loss_id)
            if loss_id in waiting.setdefault(event.number, []):
                reason = f"the loss scale of loss_id={loss_id} moves twice for one step"
                raise Unsure(node, "amp.scale_loss", reason, "keep halfpeak.amp, or add the losses up")
            waiting[event.number].append(loss_id)
        elif not waiting.pop(event.number, []):
            raise Unsure(node, tree.code(event.line.body[0]), "no backward pass comes before it", _STAY)
    between = block.body[min(one.index for one in events) : max(one.index for one in events)]
    for leave in (one for statement in between for one in walk(statement) if isinstance(one, _LEAVES)):
        raise Unsure(leave, tree.code(leave), "the step may be left out after a backward pass", _STAY)
    if waiting:
        raise Unsure(block.body[-1], "amp.scale_loss", "no step follows in the same block", _STAY)
    inside = tree.within(tree.function(block))
    if not any(isinstance(one, cst.Attribute) and one.attr.value == "zero_grad" for one in inside):
        raise Unsure(block.body[0], "zero_grad", "it is not called here, so gradients add up", _STAY)
