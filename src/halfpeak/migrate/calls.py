"""The arguments of calls whose new function takes other arguments than the old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import libcst as cst

from halfpeak.migrate.findings import Refusal

Changed = list[cst.Arg] | Refusal
"""The arguments for a new function, or why they cannot be written."""

Change = Callable[[list[cst.Arg], str], Changed]
"""From the arguments of the old function, and the device that it implied, to those of the new one."""

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

_SYNCBN_DROPPED: Final = ("channel_last", "fuse_relu")
_AUTOCAST: Final = ("enabled", "dtype", "cache_enabled")


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


def with_device(args: list[cst.Arg], device: str) -> Changed:
    """The device before the other arguments."""
    return [argument(f'"{device}"'), *args]


def for_autocast(args: list[cst.Arg], device: str) -> Changed:
    """The device, then keywords: ``torch.autocast`` has its arguments in another order."""
    if any(arg.star == "*" for arg in args):
        return Refusal("its arguments are unpacked", f'write torch.autocast("{device}", ...) with keywords')
    changed: list[cst.Arg] = []
    for position, arg in enumerate(args):
        if arg.keyword is None and not arg.star:
            keyword = argument("None", _AUTOCAST[position])
            arg = arg.with_changes(keyword=keyword.keyword, equal=keyword.equal)
        changed.append(arg)
    return with_device(changed, device)


def for_ddp(args: list[cst.Arg], device: str) -> Changed:
    """The arguments of ``torch.nn.parallel.DistributedDataParallel``."""
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


def for_custom(args: list[cst.Arg], device: str) -> list[cst.Arg]:
    """``device_type`` too, as ``torch.amp.custom_fwd`` and ``custom_bwd`` want it."""
    return _and(args, f'"{device}"', "device_type")


def for_syncbn(args: list[cst.Arg], device: str) -> Changed:
    """Without what torch's layer does not have: left out where it is False, refused where it may be True."""
    for arg in args:
        keyword = keyword_of(arg)
        if arg.star:
            return Refusal("its arguments are unpacked", "write them one by one")
        if keyword in _SYNCBN_DROPPED and not (
            isinstance(arg.value, cst.Name) and arg.value.value == "False"
        ):
            return Refusal(
                f"torch has no {keyword}", "leave it out; it changes the speed, not what is computed"
            )
    return _only([arg for arg in args if keyword_of(arg) not in _SYNCBN_DROPPED], args)


def for_layer_norm(args: list[cst.Arg], device: str) -> Changed:
    """The arguments of ``torch.nn.LayerNorm``."""
    if sum(keyword_of(arg) is None for arg in args) > 3:
        return Refusal("torch's LayerNorm has other arguments after the third", "write them as keywords")
    return _only([arg for arg in args if keyword_of(arg) != "memory_efficient"], args)


def for_rms_norm(args: list[cst.Arg], device: str) -> Changed:
    """The arguments of ``torch.nn.RMSNorm``, with apex's ``eps``."""
    changed = for_layer_norm(args, device)
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
