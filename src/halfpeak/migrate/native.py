"""The native API: a recognised training loop, written with ``halfpeak.prepare``."""

from __future__ import annotations

from typing import Final

import libcst as cst
from libcst.helpers import get_full_name_for_node

from halfpeak.migrate.calls import argument, ending_as, keyword_of
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.engines import Engines
from halfpeak.migrate.findings import Finding
from halfpeak.migrate.forward import computes
from halfpeak.migrate.imports import Entry
from halfpeak.migrate.loops import drop_imports, in_place_of, line, same_line, wrap_forward
from halfpeak.migrate.training import Backward, Training, Unsure
from halfpeak.migrate.tree import Tree, walk

_KEPT: Final = frozenset(
    {
        *("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"),
        *("loss_scale", "cast_model_outputs", "num_losses", "norms"),
    }
)
"""Keywords of ``initialize`` that ``prepare`` takes too."""

_GONE: Final = frozenset({"verbosity", "opt_level", "min_loss_scale", "max_loss_scale"})
_SHARED: Final = frozenset({"master_params", "disable_casts"})
"""Names of amp that do for an engine what they do for amp."""

_WHOLE_MODEL: Final = frozenset({"O0", "O2", "O3", "O5"})
"""Levels without casts per operation: it does not matter to them what stands inside ``engine.forward()``."""

_BETWEEN: Final = cst.Arg(cst.Name("_"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
"""An argument that is followed by another one."""


def write_native(tree: Tree, training: Training) -> tuple[Edits, list[Finding]]:
    """The edits that put an engine in the place of amp.

    Raises:
        Unsure: something has no certain counterpart. Nothing is to be edited then.
    """
    edits, notes = Edits(), list[Finding]()
    initialize = training.initialize
    per_op = initialize.level not in _WHOLE_MODEL
    engines = Engines(tree, initialize, "engine")
    edits.statement(initialize.line, _prepare(tree, training, engines))
    for one in training.passes:
        if per_op and computes(one.loss):
            raise Unsure(
                one.loss,
                "amp.scale_loss",
                "the loss is computed in its head",
                "give it a name in a line before",
            )
        text = _backward(tree, training, one, engines.at(one.statement, one.optimizer))
        edits.statement(one.statement, in_place_of(one.statement, text))
    for step in training.steps:
        engine = engines.at(step.line, step.optimizer)
        given = [f"optimizers={tree.code(step.optimizer)}"] if initialize.count > 1 else []
        given += ["keep_gradients=True"] if _looks_at_gradients_later(tree, training) else []
        edits.statement(step.line, same_line(f"{engine}.step({', '.join(given)})"))
    for block in training.blocks():
        first = next(one for one in training.passes if one.block is block)
        engine = engines.at(first.statement, first.optimizer)
        wrap_forward(edits, training, block, f"{engine}.forward()", required=per_op)
    more = _save_and_load(tree, training, engines, edits)
    engines.pass_on(edits)
    drop_imports(tree, training, edits, [Entry("halfpeak"), *more], kept=_SHARED)
    if per_op:
        notes.append(_note(tree, training))
    return edits, notes


def _looks_at_gradients_later(tree: Tree, training: Training) -> bool:
    """Whether gradients are read elsewhere than before a step, where the engine would have dropped them."""
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
    loops = {tree.function(block) for block in training.blocks()}
    windows = [
        (tree.line(one.statement), tree.line(step.line))
        for one in training.passes
        for step in training.steps
        if step.block is one.block
    ]
    return any(
        tree.function(node) in loops and not any(first <= tree.line(node) <= last for first, last in windows)
        for node in (*reading, *calls)
    )


def _prepare(tree: Tree, training: Training, engines: Engines):
    initialize = training.initialize
    unknown = initialize.keywords.keys() - _KEPT - _GONE
    if unknown:
        use = initialize.use
        raise Unsure(use.node, use.name, f"prepare has no {', '.join(sorted(unknown))}", "keep halfpeak.amp")

    def change(updated: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
        call = updated.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(call, cst.Call)
        made = call.with_changes(func=cst.parse_expression("halfpeak.prepare"), args=_arguments(call.args))
        target = cst.AssignTarget(cst.parse_expression(engines.home))  # pyright: ignore[reportArgumentType]
        lines = [updated.with_changes(body=[cst.Assign([target], made)])]
        if initialize.result is not None:
            lines.append(
                line(
                    f"{initialize.result} = {tree.code(initialize.models)}, {tree.code(initialize.optimizers)}"
                )
            )
        return lines

    return change


def _arguments(args: object) -> list[cst.Arg]:
    given: list[cst.Arg] = list(args)  # pyright: ignore
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
    middle = [one if isinstance(one.comma, cst.Comma) else ending_as(one, _BETWEEN) for one in kept[:-1]]
    return [*middle, ending_as(kept[-1], given[-1])]


def _backward(tree: Tree, training: Training, one: Backward, engine: str) -> str:
    parts = [tree.code(one.loss)]
    if one.loss_id is not None:
        parts.append(f"loss_id={tree.code(one.loss_id)}")
    if training.initialize.count > 1:
        parts.append(f"optimizers={tree.code(one.optimizer)}")
    for arg in one.args:
        if keyword_of(arg) not in ("retain_graph", "create_graph"):
            raise Unsure(
                one.statement, "backward", "it takes other arguments than a graph's", "keep halfpeak.amp"
            )
        parts.append(f"{keyword_of(arg)}={tree.code(arg.value)}")
    return f"{engine}.backward({', '.join(parts)})"


def _save_and_load(tree: Tree, training: Training, engines: Engines, edits: Edits) -> list[Entry]:
    """The third dict of a checkpoint keeps its form, so that those of yesterday can be loaded."""
    for use in training.uses.get("state_dict", ()):
        call = tree.call_of(use.node)
        if call is None or call.args:
            raise Unsure(use.node, use.name, "it is not a plain call", "keep halfpeak.amp")
        text = f"foreign.to_apex([scaler.state_dict() for scaler in {engines.at(call)}.scalers])"
        edits.expression(call, lambda updated, text=text: cst.parse_expression(text))
    for use in training.uses.get("load_state_dict", ()):
        call, where = tree.call_of(use.node), tree.line_of(use.node)
        if call is None or len(call.args) != 1 or where is None or tree.parent(call) is not where.body[0]:
            raise Unsure(use.node, use.name, "it is not a statement of its own", "keep halfpeak.amp")
        state, engine = tree.code(call.args[0].value), engines.at(call)
        text = f"for scaler, state in zip({engine}.scalers, foreign.from_apex({state})):\n    scaler.load_state_dict(state)"
        edits.statement(where, in_place_of(where, text))
    used = any(name in training.uses for name in ("state_dict", "load_state_dict"))
    return [Entry("halfpeak.checkpoint", "foreign", "foreign")] if used else []


def _note(tree: Tree, training: Training) -> Finding:
    level = training.initialize.level or "O1 and O4"
    return Finding(
        tree.line(training.initialize.line),
        "amp.initialize",
        f"rewritten; but casts of {level} are now on inside engine.forward() only",
        "put evaluation into it too if it is to be cast as before",
    )
