"""Changes of the arguments of calls whose new function takes other arguments than the old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import libcst as cst

from halfpeak.migrate.findings import Refusal

Changed = list[cst.Arg] | Refusal
"""The arguments for the new function, or the reason why there are none."""

Change = Callable[[list[cst.Arg], str], Changed]
"""A function from the old function's arguments and the device that it implied to the new function's arguments."""

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
"""Arguments of apex's DDP that control when it reduces gradients. torch's DDP decides this itself."""

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
    """The keyword of an argument; None if it is positional."""
    return None if arg.keyword is None else arg.keyword.value


def named_args(call: cst.Call, names: Sequence[str]) -> dict[str, cst.Arg]:
    """The arguments of a call by name; ``names`` are those of the positional ones, in order."""
    positional = (arg for arg in call.args if arg.keyword is None)
    keywords = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
    return dict(zip(names, positional, strict=False)) | keywords


def with_device(args: list[cst.Arg], device: str) -> Changed:
    """The arguments with the device in front."""
    return [argument(f'"{device}"'), *args]


def for_autocast(args: list[cst.Arg], device: str) -> Changed:
    """The device, then all arguments as keywords, because ``torch.autocast`` takes them in another order."""
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
    # apex reduced gradients only; torch would broadcast rank 0's batch-norm statistics in each forward pass.
    return _and(kept, "False", "broadcast_buffers")


def for_custom(args: list[cst.Arg], device: str) -> list[cst.Arg]:
    """The arguments and ``device_type``, which ``torch.amp.custom_fwd`` and ``custom_bwd`` require."""
    return _and(args, f'"{device}"', "device_type")


def for_syncbn(args: list[cst.Arg], device: str) -> Changed:
    """The arguments of torch's ``SyncBatchNorm``; ``channel_last`` and ``fuse_relu`` are dropped only if False."""
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
    # torch's own default would be the machine epsilon of the dtype.
    return _and(changed, "1e-5", "eps")


def ending_as(arg: cst.Arg, last: cst.Arg) -> cst.Arg:
    """An argument with the comma and the line break that follow ``last``."""
    return arg.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)


def _and(args: list[cst.Arg], value: str, keyword: str) -> list[cst.Arg]:
    """The arguments and one more, which takes over the trailing comma and line break."""
    more = argument(value, keyword)
    if not args:
        return [more]
    return [*args[:-1], ending_as(args[-1], more), ending_as(more, args[-1])]


def _only(kept: list[cst.Arg], args: list[cst.Arg]) -> list[cst.Arg]:
    """The kept arguments; the last takes over the trailing comma and line break of ``args``."""
    return [*kept[:-1], ending_as(kept[-1], args[-1])] if kept else kept
