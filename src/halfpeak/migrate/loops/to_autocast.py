"""write_autocast: rewrites a matched training loop with ``torch.autocast`` and ``GradScaler``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import libcst as cst

from halfpeak.migrate.calls import keyword_of
from halfpeak.migrate.edits import Edits, in_place, same_line
from halfpeak.migrate.findings import Finding
from halfpeak.migrate.imports import ImportedName
from halfpeak.migrate.loops.forward import require_named_loss, wrap_forward
from halfpeak.migrate.loops.loop_match import (
    BackwardPass,
    Initialize,
    LoopMatch,
    OptimizerStep,
    imports_for,
    not_supported,
)
from halfpeak.migrate.loops.ref_names import RefNames
from halfpeak.migrate.rename import rename
from halfpeak.migrate.tree import Tree

_CONTEXTS: Final = {
    "O0": None,
    "O1": 'torch.autocast("cuda", dtype=torch.float16)',
    "O4": 'torch.autocast("cuda", dtype=torch.bfloat16)',
}
"""The context of each opt level that torch can express; None if the level needs no context."""

_DEFAULTS: Final = {
    "verbosity": None,
    "opt_level": None,
    "enabled": "True",
    "loss_scale": '"dynamic"',
    "num_losses": "1",
}
"""Keywords of ``initialize`` that torch can express: with any value (None), or with this value only."""


def write_autocast(tree: Tree, match: LoopMatch) -> tuple[Edits, list[Finding]]:
    """The edits that replace amp by torch's autocast and ``GradScaler``.

    Raises:
        NotSupported: torch cannot express the loop, or the meaning of some code is not certain.
    """
    initialize = match.initialize
    _check(tree, initialize)
    level = str(initialize.level)
    context, scales = _CONTEXTS[level], level == "O1"
    edits, left = rename(tree, "torch", imports_for(tree, match, [ImportedName("torch")], kept=()))
    refs = RefNames(tree, initialize, "scaler")
    made = [f'{refs.own} = torch.amp.GradScaler("cuda")'] if scales else []
    if initialize.result is not None:
        made.append(
            f"{initialize.result} = {edits.code(initialize.models)}, {edits.code(initialize.optimizers)}"
        )
    edits.statement(initialize.statement, same_line(*made))
    for one in match.passes:
        if context is not None:
            require_named_loss(one)
        scaler = refs.at(one.statement, one.optimizer) if scales else ""
        edits.statement(one.statement, in_place(*_backward(edits, match, one, scaler)))
    for step in match.steps if scales else ():
        scaler = refs.at(step.statement, step.optimizer)
        code = tree.code(step.optimizer)
        edits.statement(step.statement, same_line(f"{scaler}.step({code})", f"{scaler}.update()"))
    for block in match.blocks() if context is not None else ():
        wrap_forward(edits, match, block, str(context), required=True)
    _replace_master_params(tree, match, edits)
    for name in ("state_dict", "load_state_dict"):
        for use in match.uses.get(name, ()):
            write = (
                f"write scaler.{name} yourself; halfpeak.checkpoint.scaler_states translates states of apex"
            )
            raise not_supported(use, "checkpoints of apex have another format than GradScaler's", write)
    for use in match.uses.get("disable_casts", ()):
        write = 'write with torch.autocast("cuda", enabled=False), and cast its inputs'
        raise not_supported(use, "torch does not cast inputs back to float32 there", write)
    refs.pass_on(edits)
    return edits, left


def _check(tree: Tree, initialize: Initialize) -> None:
    use, level = initialize.use, initialize.level
    write = "write --to halfpeak, which has every level"
    if level is None:
        raise not_supported(use, "the opt level is not known before the program runs", write)
    if level not in _CONTEXTS:
        raise not_supported(
            use, f"torch.amp cannot express {level}: it never casts weights or keeps masters", write
        )
    for name, arg in initialize.keywords.items():
        value = tree.code(arg.value).replace("'", '"')
        if name not in _DEFAULTS or _DEFAULTS[name] not in (None, value):
            raise not_supported(use, f"torch.amp has no equivalent of {name}={value}", write)


def _backward(edits: Edits, match: LoopMatch, one: BackwardPass, scaler: str) -> list[str]:
    args = ", ".join(
        f"{keyword_of(arg)}={edits.code(arg.value)}" if arg.keyword else edits.code(arg.value)
        for arg in one.args
    )
    loss = edits.code(one.loss)
    if not scaler:
        simple = isinstance(one.loss, cst.Name | cst.Attribute | cst.Subscript)
        return [f"{loss if simple else f'({loss})'}.backward({args})"]
    texts = [f"{scaler}.scale({loss}).backward({args})"]
    if _reads_before_step(match, one):
        # amp unscales gradients after backward; GradScaler does so in its step unless unscale_() is called earlier.
        texts.append(f"{scaler}.unscale_({edits.code(one.optimizer)})")
    return texts


def _reads_before_step(match: LoopMatch, one: BackwardPass) -> bool:
    """Whether statements that may read gradients are between the optimizer's last backward pass and its step."""

    def later(events: Iterable[BackwardPass | OptimizerStep]) -> list[int]:
        return [
            event.index
            for event in events
            if event.block is one.block and event.number == one.number and event.index > one.index
        ]

    step = min(later(match.steps))
    return min(later(match.passes), default=step) >= step > one.index + 1


def _replace_master_params(tree: Tree, match: LoopMatch, edits: Edits) -> None:
    for use in match.uses.get("master_params", ()):
        call = tree.call_of(use.node)
        if call is None or len(call.args) != 1:
            raise not_supported(use, "it is not a plain call", "write the optimizer's parameters")
        optimizer = tree.code(call.args[0].value)
        edits.respell(call, f'[p for group in {optimizer}.param_groups for p in group["params"]]')
