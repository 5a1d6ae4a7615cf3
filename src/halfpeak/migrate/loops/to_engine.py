"""write_engine: rewrites a matched training loop with ``halfpeak.prepare`` and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import libcst as cst
from libcst.helpers import get_full_name_for_node

from halfpeak.core.levels import LEVELS, PER_OP
from halfpeak.migrate.calls import argument, ending_as, keyword_of
from halfpeak.migrate.edits import Edits, in_place, in_place_of_line, parse_line, same_line
from halfpeak.migrate.findings import Finding, NotSupported
from halfpeak.migrate.imports import ImportedName
from halfpeak.migrate.loops.forward import require_named_loss, wrap_forward
from halfpeak.migrate.loops.loop_match import (
    BackwardPass,
    Block,
    LoopMatch,
    elements,
    imports_for,
    not_supported,
)
from halfpeak.migrate.loops.ref_names import RefNames
from halfpeak.migrate.rename import rename
from halfpeak.migrate.tree import Tree, walk

_KEPT: Final = frozenset(
    {
        *("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"),
        *("loss_scale", "cast_model_outputs", "num_losses", "norms"),
    }
)
"""Keywords of ``initialize`` that ``prepare`` takes, too."""

_GONE: Final = frozenset({"verbosity", "opt_level", "min_loss_scale", "max_loss_scale"})
_SHARED: Final = frozenset({"master_params", "disable_casts"})
"""Names of ``halfpeak.amp`` that also work with an engine, so the rewritten code keeps them."""

_CHECKPOINTS: Final = frozenset({"state_dict", "load_state_dict"})
"""Names of amp that are replaced by code that reads or writes loss-scaler states in apex's format."""

_NO_OP_CASTS: Final = LEVELS.keys() - PER_OP
"""Levels that cast no operations: ``engine.forward()`` need not contain exactly the statements of the forward pass."""

_BEFORE_ANOTHER: Final = cst.Arg(cst.Name("_"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
"""An argument followed by a comma and a space."""


def write_engine(tree: Tree, match: LoopMatch) -> tuple[Edits, list[Finding]]:
    """The edits that replace amp by an engine.

    Raises:
        NotSupported: some code has no certain equivalent.
    """
    more = [ImportedName("halfpeak.checkpoint", "scaler_states")] if _CHECKPOINTS & match.uses.keys() else []
    imports = imports_for(tree, match, [ImportedName("halfpeak"), *more], kept=_SHARED)
    edits, notes = rename(tree, "halfpeak", imports)
    initialize = match.initialize
    per_op = initialize.level not in _NO_OP_CASTS
    refs = RefNames(tree, initialize, "engine")
    edits.statement(initialize.statement, _prepare(match, refs, edits))
    for one in match.passes:
        if per_op:
            require_named_loss(one)
        text = _backward(edits, match, one, refs.at(one.statement, one.optimizer))
        edits.statement(one.statement, in_place(text))
    for step in match.steps:
        engine = refs.at(step.statement, step.optimizer)
        given = [f"optimizers={tree.code(step.optimizer)}"] if initialize.count > 1 else []
        given += ["keep_gradients=True"] if _reads_gradients_later(tree, match) else []
        edits.statement(step.statement, same_line(f"{engine}.step({', '.join(given)})"))
    for block in match.blocks():
        first = next(one for one in match.passes if one.block is block)
        engine = refs.at(first.statement, first.optimizer)
        notes += _clip_main_params(tree, match, block, engine, edits)
        wrap_forward(edits, match, block, f"{engine}.forward()", required=per_op)
    _save_and_load(tree, match, refs, edits)
    refs.pass_on(edits)
    if per_op:
        reason = f"rewritten; but casts of {initialize.level or 'O1 and O4'} are now on inside engine.forward() only"
        write = "put evaluation into it too if it is to be cast as before"
        notes.append(Finding(tree.line(initialize.statement), "amp.initialize", reason, write))
    return edits, notes


def _clip_main_params(tree: Tree, match: LoopMatch, block: Block, engine: str, edits: Edits) -> list[Finding]:
    """Clip ``engine.main_params()``, not ``model.parameters()``, before a step; with several optimizers, report it."""
    first = min(one.index for one in match.passes if one.block is block)
    last = max((step.index for step in match.steps if step.block is block), default=first)
    notes = list[Finding]()
    for node in (node for statement in block.body[first:last] for node in walk(statement)):
        match node:
            case cst.Call(func=clip, args=[cst.Arg(value=cst.Call() as given), *_]):
                name = get_full_name_for_node(clip) or ""
            case _:
                continue
        is_clip = name.rpartition(".")[2] in ("clip_grad_norm_", "clip_grad_value_")
        is_of_parameters = tree.code(given).endswith(".parameters()")
        if not (is_clip and is_of_parameters) or tree.line_of(node) not in block.body:
            continue
        if match.initialize.count == 1:
            edits.respell(given, f"{engine}.main_params()")
        else:
            todo = f"clip [p for group in optimizer.param_groups for p in group['params']] instead of {tree.code(given)}"
            notes.append(Finding(tree.line(node), name, "masters have the gradients at O2 and O5", todo))
    return notes


def _reads_gradients_later(tree: Tree, match: LoopMatch) -> bool:
    """Whether the loop reads gradients outside of backward pass to step, where the engine has released them."""
    reading = [
        node
        for node in walk(tree.module)
        if isinstance(node, cst.Attribute) and node.attr.value == "grad" and tree.call_of(node) is None
    ]
    readers = {around.name.value for node in reading if (around := tree.function(node)) is not None}
    calls = [
        node
        for node in walk(tree.module)
        if isinstance(node, cst.Call)
        and (get_full_name_for_node(node.func) or "").rpartition(".")[2] in readers
    ]
    loops = {tree.function(block) for block in match.blocks()}
    windows = [
        (tree.line(one.statement), tree.line(step.statement))
        for one in match.passes
        for step in match.steps
        if step.block is one.block
    ]
    return any(
        tree.function(node) in loops and not any(first <= tree.line(node) <= last for first, last in windows)
        for node in (*reading, *calls)
    )


def _prepare(match: LoopMatch, refs: RefNames, edits: Edits):
    initialize = match.initialize
    unknown = initialize.keywords.keys() - _KEPT - _GONE
    if unknown:
        reason = f"halfpeak.prepare has no argument {', '.join(sorted(unknown))}"
        raise not_supported(initialize.use, reason, "keep halfpeak.amp")

    def change(updated: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
        call = updated.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(call, cst.Call)
        first = elements(cst.parse_expression(initialize.result)) if initialize.result is not None else ()
        args = _arguments(call.args, dict(zip(("models", "optimizers"), first, strict=False)))
        made = call.with_changes(func=cst.parse_expression("halfpeak.prepare"), args=args)
        target = cst.AssignTarget(cst.parse_expression(refs.own))  # pyright: ignore[reportArgumentType]
        lines = [updated.with_changes(body=[cst.Assign([target], made)])]
        if initialize.result is not None:
            # A line before prepare(), whose arguments are then these names, so that each argument is evaluated once.
            given = f"{edits.code(initialize.models)}, {edits.code(initialize.optimizers)}"
            lines.insert(0, parse_line(f"{initialize.result} = {given}"))
        return in_place_of_line(updated, lines)

    return change


def _arguments(args: object, first: Mapping[str, cst.BaseExpression]) -> list[cst.Arg]:
    """The arguments of ``prepare``, with the expressions in ``first`` for models and optimizers."""
    given: list[cst.Arg] = [
        arg.with_changes(value=first.get(keyword_of(arg) or ("models", "optimizers")[place], arg.value))
        for place, arg in enumerate(args)  # pyright: ignore
    ]
    bounds = {keyword_of(arg): cst.Module([]).code_for_node(arg.value) for arg in given}
    kept: list[cst.Arg] = []
    for arg in given:
        if keyword_of(arg) == "opt_level":
            is_third = len(kept) == 2 and all(one.keyword is None for one in kept)
            level = arg.with_changes(keyword=cst.Name("level"))
            plain = arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
            kept.append(plain if is_third else level)
        elif keyword_of(arg) not in _GONE:
            kept.append(arg)
    if "opt_level" not in bounds:
        is_plain = all(one.keyword is None for one in kept[:2])
        kept.insert(2, argument('"O1"', None if is_plain else "level"))
    if "min_loss_scale" in bounds or "max_loss_scale" in bounds:
        low, high = bounds.get("min_loss_scale", "None"), bounds.get("max_loss_scale", "2.0**24")
        kept.append(argument(f"halfpeak.ScaleConfig.bounded({low}, {high})", "scale"))
    middle = [
        one if isinstance(one.comma, cst.Comma) else ending_as(one, _BEFORE_ANOTHER) for one in kept[:-1]
    ]
    return [*middle, ending_as(kept[-1], given[-1])]


def _backward(edits: Edits, match: LoopMatch, one: BackwardPass, engine: str) -> str:
    parts = [edits.code(one.loss)]
    if one.loss_id is not None:
        parts.append(f"loss_id={edits.code(one.loss_id)}")
    if match.initialize.count > 1:
        parts.append(f"optimizers={edits.code(one.optimizer)}")
    for arg in one.args:
        if keyword_of(arg) not in ("retain_graph", "create_graph"):
            reason = "it has other arguments than retain_graph and create_graph"
            raise NotSupported(one.statement, "backward", reason, "keep halfpeak.amp")
        parts.append(f"{keyword_of(arg)}={edits.code(arg.value)}")
    return f"{engine}.backward({', '.join(parts)})"


def _save_and_load(tree: Tree, match: LoopMatch, refs: RefNames, edits: Edits) -> None:
    """Save and load amp's part of a checkpoint in apex's format, so that old checkpoints still load."""
    for use in match.uses.get("state_dict", ()):
        call = tree.call_of(use.node)
        if call is None or call.args:
            raise not_supported(use, "it is not a plain call", "keep halfpeak.amp")
        edits.respell(
            call, f"scaler_states.to_apex([scaler.state_dict() for scaler in {refs.at(call)}.scalers])"
        )
    for use in match.uses.get("load_state_dict", ()):
        call, where = tree.call_of(use.node), tree.line_of(use.node)
        if call is None or len(call.args) != 1 or where is None or tree.parent(call) is not where.body[0]:
            raise not_supported(use, "it is not a statement of its own", "keep halfpeak.amp")
        state, engine = edits.code(call.args[0].value), refs.at(call)
        head = f"for scaler, state in zip({engine}.scalers, scaler_states.from_apex({state})):"
        edits.statement(where, in_place(f"{head}\n    scaler.load_state_dict(state)"))
