"""The arguments of calls whose new function takes other arguments than the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import libcst as cst

from halfpeak.migrate.findings import Refusal
from halfpeak.migrate.names import Arguments

Changed = list[cst.Arg] | Refusal

_DDP_DROPPED: Final = frozenset(
    {
        "delay_allreduce",
        "message_size",
        "num_allreduce_streams",
        "prof",
        "retain_allreduce_buffers",
        "shared_param",
    }
)
"""Arguments of apex's DDP about when it reduces, which torch decides itself."""

_AUTOCAST: Final = ("enabled", "dtype", "cache_enabled")


def change(kind: Arguments, args: Sequence[cst.Arg], device: str) -> Changed:
    """The arguments for the new function, or why they cannot be written."""
    return _CHANGES[kind](list(args), device)


def argument(value: str, keyword: str | None = None) -> cst.Arg:
    """An argument without spaces around the equals sign."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(
        cst.parse_expression(value),
        keyword=None if keyword is None else cst.Name(keyword),
        equal=cst.MaybeSentinel.DEFAULT if keyword is None else tight,
    )


def keyword_of(arg: cst.Arg) -> str | None:
    """The keyword an argument is given by."""
    return None if arg.keyword is None else arg.keyword.value


def _device(args: list[cst.Arg], device: str) -> Changed:
    return [argument(f'"{device}"'), *args]


def _autocast(args: list[cst.Arg], device: str) -> Changed:
    if any(arg.star == "*" for arg in args):
        return Refusal("its arguments are unpacked", f'write torch.autocast("{device}", ...) with keywords')
    changed: list[cst.Arg] = []
    for position, arg in enumerate(args):
        if arg.keyword is None and not arg.star:
            keyword = argument("None", _AUTOCAST[position])
            arg = arg.with_changes(keyword=keyword.keyword, equal=keyword.equal)
        changed.append(arg)
    return _device(changed, device)


def _ddp(args: list[cst.Arg], device: str) -> Changed:
    for position, arg in enumerate(args):
        keyword = keyword_of(arg)
        if arg.star or (keyword is None and position > 0):
            return Refusal(
                "apex's arguments after the module are not torch's",
                "write torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)",
            )
        if keyword not in (None, "module") and keyword not in _DDP_DROPPED:
            return Refusal(
                f"torch's DistributedDataParallel has no {keyword}",
                "leave it out, or register a communication hook",
            )
    kept = _only([arg for arg in args if keyword_of(arg) not in _DDP_DROPPED], args)
    # apex reduced gradients only; torch would send rank 0's batch-norm statistics around in each forward pass.
    return _and(kept, "False", "broadcast_buffers")


def _without(args: list[cst.Arg], names: Sequence[str]) -> Changed:
    """Leave out arguments that are False; refuse those that may be True."""
    for arg in args:
        keyword = keyword_of(arg)
        if arg.star:
            return Refusal("its arguments are unpacked", "write them one by one")
        if keyword in names and not (isinstance(arg.value, cst.Name) and arg.value.value == "False"):
            return Refusal(
                f"torch has no {keyword}", "leave it out; it changes the speed, not what is computed"
            )
    return _only([arg for arg in args if keyword_of(arg) not in names], args)


def _layer_norm(args: list[cst.Arg], device: str) -> Changed:
    if sum(keyword_of(arg) is None for arg in args) > 3:
        return Refusal("torch's LayerNorm has other arguments after the third", "write them as keywords")
    return _only([arg for arg in args if keyword_of(arg) != "memory_efficient"], args)


def _rms_norm(args: list[cst.Arg], device: str) -> Changed:
    changed = _layer_norm(args, device)
    if isinstance(changed, Refusal):
        return changed
    if any(arg.star for arg in args):
        return Refusal("its arguments are unpacked", "write torch.nn.RMSNorm(shape, eps=1e-5)")
    given = len(changed) > 1 and keyword_of(changed[1]) is None
    if given or any(keyword_of(arg) == "eps" for arg in changed):
        return changed
    # torch's own default is the eps of the dtype.
    return _and(changed, "1e-5", "eps")


def ending_as(arg: cst.Arg, last: cst.Arg) -> cst.Arg:
    """An argument with the comma and the line break that the last one had."""
    return arg.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)


def _and(args: list[cst.Arg], value: str, keyword: str) -> list[cst.Arg]:
    """One more argument, behind the others and in front of the trailing comma and line break, if they have one."""
    more = argument(value, keyword)
    if not args:
        return [more]
    return [*args[:-1], ending_as(args[-1], more), ending_as(more, args[-1])]


def _only(kept: list[cst.Arg], args: list[cst.Arg]) -> list[cst.Arg]:
    """Some of the arguments, ending as all of them did."""
    return [*kept[:-1], ending_as(kept[-1], args[-1])] if kept else kept


_CHANGES: Final[Mapping[Arguments, Callable[[list[cst.Arg], str], Changed]]] = MappingProxyType(
    {
        "keep": lambda args, device: args,
        "device": _device,
        "autocast": _autocast,
        "custom": lambda args, device: _and(args, f'"{device}"', "device_type"),
        "ddp": _ddp,
        "syncbn": lambda args, device: _without(args, ("channel_last", "fuse_relu")),
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
    }
)
