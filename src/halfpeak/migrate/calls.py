"""Changes of the arguments of calls whose new function takes other arguments than the old one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import libcst as cst

from halfpeak.migrate.edits import Edit
from halfpeak.migrate.findings import Refusal
from halfpeak.migrate.tree import Tree

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
_UNPACKED: Final = "its arguments are unpacked"


@dataclass(frozen=True, slots=True)
class OldCall:
    """A call of an old name.

    Attributes:
        device: the device that the old name implied.
    """

    tree: Tree
    node: cst.Call
    device: str

    @property
    def keywords(self) -> list[str | None]:
        """The keyword of each argument; None if it is positional."""
        return [keyword_of(arg) for arg in self.node.args]

    @property
    def is_unpacked(self) -> bool:
        """Whether an argument is ``*args`` or ``**kwargs``."""
        return any(arg.star for arg in self.node.args)

    def changed(self, *, first: str = "", dropped: Collection[str] = (), last: str = "") -> list[Edit]:
        """The edits that write an argument before all others, drop keywords, and write an argument after all others."""
        spans = [self.tree.span(arg) for arg in self.node.args]
        close = self.tree.span(self.node)[1] - 1
        gone = [number for number, keyword in enumerate(self.keywords) if keyword in dropped]
        last_kept = max(set(range(len(spans))).difference(gone), default=-1)
        edits: list[Edit] = []
        if first:
            edits.append(Edit(spans[0][0], spans[0][0], f"{first}, ") if spans else Edit(close, close, first))
        if last:
            end = spans[last_kept][1] if last_kept >= 0 else close
            edits.append(Edit(end, end, f", {last}" if last_kept >= 0 else last))
        for number in gone:
            if number < last_kept:
                edits.append(Edit(spans[number][0], spans[number + 1][0], ""))
            elif last_kept >= 0:  # nothing is kept after it, so the comma before it goes
                edits.append(Edit(spans[number - 1][1], spans[number][1], ""))
            else:
                edits.append(Edit(spans[number][0], close, ""))
        return edits


Change = Callable[[OldCall], list[Edit] | Refusal]
"""A function from a call to the edits of its arguments, or to the reason why there are none."""


def keyword_of(arg: cst.Arg) -> str | None:
    """The keyword of an argument; None if it is positional."""
    return None if arg.keyword is None else arg.keyword.value


def with_device(call: OldCall) -> list[Edit]:
    """The device before all arguments."""
    return call.changed(first=f'"{call.device}"')


def for_autocast(call: OldCall) -> list[Edit] | Refusal:
    """The device, then all arguments as keywords, because ``torch.autocast`` takes them in another order."""
    if any(arg.star == "*" for arg in call.node.args):
        return Refusal(_UNPACKED, f'write torch.autocast("{call.device}", ...) with keywords')
    edits = with_device(call)
    for name, arg in zip(_AUTOCAST, call.node.args, strict=False):
        if arg.keyword is None and not arg.star:
            start, _ = call.tree.span(arg)
            edits.append(Edit(start, start, f"{name}="))
    return edits


def for_ddp(call: OldCall) -> list[Edit] | Refusal:
    """The arguments of ``torch.nn.parallel.DistributedDataParallel``."""
    if call.is_unpacked or None in call.keywords[1:]:
        return Refusal(
            "apex's arguments after the module are not torch's",
            "write torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)",
        )
    unknown = set(call.keywords) - _DDP_DROPPED - {None, "module"}
    if unknown:
        return Refusal(
            f"torch's DistributedDataParallel has no {', '.join(sorted(map(str, unknown)))}",
            "leave it out, or register a communication hook",
        )
    # apex reduced gradients only; torch would broadcast rank 0's batch-norm statistics in each forward pass.
    return call.changed(dropped=_DDP_DROPPED, last="broadcast_buffers=False")


def for_custom(call: OldCall) -> list[Edit]:
    """The arguments and ``device_type``, which ``torch.amp.custom_fwd`` and ``custom_bwd`` require."""
    return call.changed(last=f'device_type="{call.device}"')


def for_syncbn(call: OldCall) -> list[Edit] | Refusal:
    """The arguments of torch's ``SyncBatchNorm``; ``channel_last`` and ``fuse_relu`` are dropped only if False."""
    if call.is_unpacked:
        return Refusal(_UNPACKED, "write them one by one")
    for keyword, arg in zip(call.keywords, call.node.args, strict=True):
        if keyword in _SYNCBN_DROPPED and call.tree.text(arg.value) != "False":
            return Refusal(
                f"torch has no {keyword}", "leave it out; it changes the speed, not what is computed"
            )
    return call.changed(dropped=_SYNCBN_DROPPED)


def for_layer_norm(call: OldCall, eps: str = "") -> list[Edit] | Refusal:
    """The arguments of ``torch.nn.LayerNorm``, and ``eps``."""
    if call.keywords.count(None) > 3:
        return Refusal("torch's norms have other arguments after the third", "write them as keywords")
    return call.changed(dropped=("memory_efficient",), last=eps)


def for_rms_norm(call: OldCall) -> list[Edit] | Refusal:
    """The arguments of ``torch.nn.RMSNorm``, with apex's ``eps``."""
    if call.is_unpacked:
        return Refusal(_UNPACKED, "write torch.nn.RMSNorm(shape, eps=1e-5)")
    is_given = "eps" in call.keywords or None in call.keywords[1:]
    # torch's own default would be the machine epsilon of the dtype.
    return for_layer_norm(call, "" if is_given else "eps=1e-5")
