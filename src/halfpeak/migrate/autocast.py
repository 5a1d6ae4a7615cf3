"""torch.amp: a recognised training loop, written with ``torch.autocast`` and ``GradScaler``, as far as these can say it."""

from __future__ import annotations

from typing import Final

import libcst as cst

from halfpeak.migrate.calls import keyword_of
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.engines import Engines
from halfpeak.migrate.findings import Finding
from halfpeak.migrate.forward import computes
from halfpeak.migrate.imports import Entry
from halfpeak.migrate.loops import drop_imports, in_place_of, same_line, wrap_forward
from halfpeak.migrate.training import Backward, Initialize, Step, Training, Unsure
from halfpeak.migrate.tree import Tree

_CONTEXTS: Final = {
    "O0": None,
    "O1": 'torch.autocast("cuda", dtype=torch.float16)',
    "O4": 'torch.autocast("cuda", dtype=torch.bfloat16)',
}
"""What each level that torch can express computes in."""

_DEFAULTS: Final = {
    "verbosity": None,
    "opt_level": None,
    "enabled": "True",
    "loss_scale": '"dynamic"',
    "num_losses": "1",
}
"""Keywords of ``initialize`` that torch can follow: at any value, or at this one."""


def write_autocast(tree: Tree, training: Training) -> tuple[Edits, list[Finding]]:
    """The edits that put torch's autocast and ``GradScaler`` in the place of amp.

    Raises:
        Unsure: torch cannot express it, or it is not certain. Nothing is to be edited then.
    """
    initialize = training.initialize
    _check(tree, initialize)
    level = str(initialize.level)
    context, scales = _CONTEXTS[level], level == "O1"
    edits = Edits()
    engines = Engines(tree, initialize, "scaler")
    made = [f'{engines.home} = torch.amp.GradScaler("cuda")'] if scales else []
    if initialize.result is not None:
        made.append(
            f"{initialize.result} = {tree.code(initialize.models)}, {tree.code(initialize.optimizers)}"
        )
    edits.statement(initialize.line, same_line(*made))
    for one in training.passes:
        if context is not None and computes(one.loss):
            raise Unsure(
                one.loss,
                "amp.scale_loss",
                "the loss is computed in its head",
                "give it a name in a line before",
            )
        scaler = engines.at(one.statement, one.optimizer) if scales else ""
        edits.statement(one.statement, in_place_of(one.statement, *_backward(tree, training, one, scaler)))
    for step in training.steps if scales else ():
        scaler = engines.at(step.line, step.optimizer)
        code = tree.code(step.optimizer)
        edits.statement(step.line, same_line(f"{scaler}.step({code})", f"{scaler}.update()"))
    for block in training.blocks() if context is not None else ():
        wrap_forward(edits, training, block, str(context), required=True)
    _replace_master_params(tree, training, edits)
    for name in ("state_dict", "load_state_dict"):
        for use in training.uses.get(name, ()):
            write = f"write scaler.{name} yourself; halfpeak.checkpoint.foreign translates states of apex"
            raise Unsure(use.node, use.name, "checkpoints of apex have another form than GradScaler's", write)
    for use in training.uses.get("disable_casts", ()):
        write = 'write with torch.autocast("cuda", enabled=False), and cast its inputs'
        raise Unsure(use.node, use.name, "torch casts no input back inside it", write)
    engines.pass_on(edits)
    drop_imports(tree, training, edits, [Entry("torch")], kept=())
    return edits, []


def _check(tree: Tree, initialize: Initialize) -> None:
    use, level = initialize.use, initialize.level
    write = "write --to halfpeak, which has every level"
    if level is None:
        raise Unsure(use.node, use.name, "the opt level is not known before the program runs", write)
    if level not in _CONTEXTS:
        raise Unsure(
            use.node,
            use.name,
            f"torch.amp cannot express {level}: it never casts weights or keeps masters",
            write,
        )
    for name, arg in initialize.keywords.items():
        value = tree.code(arg.value).replace("'", '"')
        if name not in _DEFAULTS or _DEFAULTS[name] not in (None, value):
            raise Unsure(use.node, use.name, f"torch.amp has nothing for {name}={value}", write)


def _backward(tree: Tree, training: Training, one: Backward, scaler: str) -> list[str]:
    args = ", ".join(
        f"{keyword_of(arg)}={tree.code(arg.value)}" if arg.keyword else tree.code(arg.value)
        for arg in one.args
    )
    loss = tree.code(one.loss)
    if not scaler:
        simple = isinstance(one.loss, cst.Name | cst.Attribute | cst.Subscript)
        return [f"{loss if simple else f'({loss})'}.backward({args})"]
    texts = [f"{scaler}.scale({loss}).backward({args})"]
    if _looks_before_step(training, one):
        # amp leaves true-sized gradients behind; here they are until the step only if somebody asks.
        texts.append(f"{scaler}.unscale_({tree.code(one.optimizer)})")
    return texts


def _looks_before_step(training: Training, one: Backward) -> bool:
    """Whether anything stands between the last backward pass of an optimizer and its step."""
    after: list[Step] = [
        step
        for step in training.steps
        if step.block is one.block and step.number == one.number and step.index > one.index
    ]
    step = min(after, key=lambda step: step.index)
    between = [
        other
        for other in training.passes
        if other.block is one.block and other.number == one.number and one.index < other.index < step.index
    ]
    return not between and step.index > one.index + 1


def _replace_master_params(tree: Tree, training: Training, edits: Edits) -> None:
    for use in training.uses.get("master_params", ()):
        call = tree.call_of(use.node)
        if call is None or len(call.args) != 1:
            raise Unsure(use.node, use.name, "it is not a plain call", "write the optimizer's parameters")
        text = f'[p for group in {tree.code(call.args[0].value)}.param_groups for p in group["params"]]'
        edits.expression(call, lambda updated, text=text: cst.parse_expression(text))
