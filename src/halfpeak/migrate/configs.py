"""Rewriting of OpenMMLab's configuration files (Python files): the entries that enable mixed precision."""

from __future__ import annotations

from typing import Final

import libcst as cst

from halfpeak.migrate.calls import keyword_of
from halfpeak.migrate.edits import Edit
from halfpeak.migrate.findings import Finding, Target
from halfpeak.migrate.tree import Tree, walk

_OTHER_ENTRIES: Final = frozenset(
    {"optimizer", "optimizer_config", "lr_config", "runner", "_base_", "checkpoint_config"}
)
"""A file that assigns ``fp16`` and one of these names is a configuration file."""

_KEYS: Final = frozenset(
    {"loss_scale", "coalesce", "bucket_size_mb", "distributed", "grad_clip", "mode", "dtype"}
)


def rewrite_config(tree: Tree, to: Target) -> tuple[list[Edit], list[Finding]]:
    """Merge ``fp16 = dict(loss_scale=...)`` into ``optimizer_config`` if both are in the file.

    mmcv's training tools made a ``Fp16OptimizerHook`` of the two entries. ``halfpeak.runner``, like mmcv, also takes a
    hook by its name in ``optimizer_config``. A file that reads ``fp16`` makes the hook itself, and keeps both entries.
    mmengine's wrappers keep their names; an ``ApexOptimWrapper`` is reported.
    """
    entries = _entries(tree.module)
    wrapper = next((node for node in walk(tree.module) if _is_apex_wrapper(node)), None)
    findings: list[Finding] = []
    if wrapper is not None:
        write = "keep the config, and before the Runner is made, write import halfpeak.shim; halfpeak.shim.install('mmengine')"
        findings.append(
            Finding(tree.line(wrapper), "ApexOptimWrapper", "mmengine's own wrapper needs apex.amp", write)
        )
    if _is_none(entries.get("fp16")) or not _OTHER_ENTRIES & entries.keys() or _reads_fp16(tree.module):
        return [], findings
    fp16, hook = _dict_of(entries["fp16"]), _dict_of(entries.get("optimizer_config"))
    reason = None
    if to == "torch":
        reason = "torch has no optimizer hooks"
    elif fp16 is None or not {keyword_of(arg) for arg in fp16.args} <= _KEYS:
        reason = "it is not a plain dict(loss_scale=...)"
    elif hook is None:
        reason = "optimizer_config is in another file, or not a dict(...)"
    elif any(keyword_of(arg) in ("type", None) for arg in hook.args):
        reason = "optimizer_config names a hook already"
    if reason is not None or fp16 is None or hook is None:
        write = "write optimizer_config = dict(type='Fp16OptimizerHook', loss_scale=..., grad_clip=...) for halfpeak.runner"
        return [], [*findings, Finding(tree.line(entries["fp16"]), "fp16", reason or "", write)]
    return [_merged(tree, fp16, hook), tree.without_line(entries["fp16"])], findings


def _merged(tree: Tree, fp16: cst.Call, hook: cst.Call) -> Edit:
    """The edit that writes the type of the hook, and what ``fp16`` has and ``hook`` has not, before all arguments."""
    given = {keyword_of(arg) for arg in hook.args}
    more = [tree.text(arg) for arg in fp16.args if keyword_of(arg) not in given]
    new = ", ".join(("type='Fp16OptimizerHook'", *more))
    start = tree.span(hook.args[0])[0] if hook.args else tree.span(hook)[1] - 1
    return Edit(start, start, f"{new}, " if hook.args else new)


def _entries(module: cst.Module) -> dict[str, cst.SimpleStatementLine]:
    """The lines at the top level of a file that assign one name, by this name."""
    found: dict[str, cst.SimpleStatementLine] = {}
    for line in module.body:
        match line:
            case cst.SimpleStatementLine(
                body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]
            ):
                found[name] = line
            case _:
                pass
    return found


def _reads_fp16(module: cst.Module) -> bool:
    """Whether the file reads ``fp16``: the name occurs other than as an assignment's target or a keyword."""
    nodes = list(walk(module))
    written = {id(node.target) for node in nodes if isinstance(node, cst.AssignTarget)}
    keywords = {id(node.keyword) for node in nodes if isinstance(node, cst.Arg)}
    return any(
        isinstance(node, cst.Name) and node.value == "fp16" and id(node) not in written | keywords
        for node in nodes
    )


def _dict_of(line: cst.SimpleStatementLine | None) -> cst.Call | None:
    """The value of an entry if it is ``dict(...)`` with keywords only, else None."""
    match line:
        case cst.SimpleStatementLine(body=[cst.Assign(value=cst.Call(func=cst.Name(value="dict")) as call)]):
            return call if all(keyword_of(arg) is not None for arg in call.args) else None
        case _:
            return None


def _is_none(line: cst.SimpleStatementLine | None) -> bool:
    """Whether an entry is missing, or None, which in mmcv's configurations means the same."""
    match line:
        case None | cst.SimpleStatementLine(body=[cst.Assign(value=cst.Name(value="None"))]):
            return True
        case _:
            return False


def _is_apex_wrapper(node: cst.CSTNode) -> bool:
    """Whether a node is ``type='ApexOptimWrapper'``, as a keyword argument or as an entry of a dict."""
    match node:
        case (
            cst.Arg(keyword=cst.Name(value="type"), value=cst.SimpleString(evaluated_value=name))
            | cst.DictElement(
                key=cst.SimpleString(evaluated_value="type"), value=cst.SimpleString(evaluated_value=name)
            )
        ):
            return name == "ApexOptimWrapper"
        case _:
            return False
