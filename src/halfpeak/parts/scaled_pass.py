"""One scaled backward pass, over the windows of every engine that its loss may reach."""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import repeat
from operator import attrgetter
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import graph_leaves, untraced
from halfpeak.ops.accumulate import add_unscaled
from halfpeak.parts.found_inf import is_multi_rank
from halfpeak.parts.loss_scaler import LossScaler, is_unit, nonfinite_loss, scale_loss
from halfpeak.parts.parts import Parts, live_parts
from halfpeak.parts.tracing import watch_compiler
from halfpeak.parts.window import Window, set_gradients


class ScaledPass:
    """A context around a backward pass: the one place where gradients are scaled.

    ::

        enter   for all windows: ready (every refusal is here, before any change), then enter
        body    pass.loss.backward(): autograd writes the gradients of loss * scale to .grad
        exit    for all windows: end. What they have found is noted for the loss
        raise   for all windows: undo. Where gradients were added in place, all of them are dropped

    A loss may reach parameters of every engine of this thread (a generator's loss goes through the discriminator), and
    leaves that nobody prepared (weights of a criterion, inputs). All of them get unscaled gradients.

    Args:
        parts: of the engine of the loss.
        loss: any shape.
        scaler: its scale multiplies the loss.
        keep: windows whose parameters keep the gradients they have, although the loss depends on them.
        holds: hold the gradients, scaled, for a fused step to read, if this is the window's first pass.
        by_hand: windows whose gradients the script itself will reduce over the ranks, in a later pass.
        notes_nonfinite_loss: note a loss that is itself not finite: then no lower scale helps. Only with
            ``ScaleConfig.recovers``; on several ranks only where ``found_inf`` reaches all of them.

    Attributes:
        loss: in the body, the scaled loss, float32 or wider.
        learned: after the pass, by window what was found of each loss whose gradients have become true.

    Raises:
        OrderError: another scaled pass of this thread is open; gradients were written while they were scaled; or FSDP2
            holds gradients of another scale, or of another engine.
    """

    loss: Tensor

    def __init__(
        self,
        parts: Parts,
        loss: Tensor,
        scaler: LossScaler,
        *,
        keep: Collection[Window] = (),
        holds: bool = False,
        by_hand: Collection[Window] = (),
        notes_nonfinite_loss: bool = False,
    ) -> None:
        self.learned: dict[Window, dict[LossScaler, Tensor]] = {}
        self._own, self._given, self._scaler, self._scale = parts, loss, scaler, scaler.state.scale
        self._keep, self._holds, self._by_hand = keep, holds, by_hand
        self._notes_nonfinite_loss, self._is_unit = notes_nonfinite_loss, is_unit(scaler)
        self._reached: list[_Reached] = []
        self._leaves: list[Tensor] = []
        self._earlier: list[Tensor | None] = []

    @untraced
    def __enter__(self) -> Self:
        if _OPEN.is_open:
            raise OrderError(
                "a scaled backward pass began inside another one of this thread, which would unscale its gradients twice; end "
                "one engine.backward(loss), or one `with amp.scale_loss(...)` block, before the next begins"
            )
        self._own.thread = threading.get_ident()
        watch_compiler()
        self._ready()
        try:
            self._enter()
        except BaseException:
            self._undo()
            raise
        _OPEN.is_open = True
        self.loss = scale_loss(self._given, self._scale)
        return self

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OPEN.is_open = False
        # An engine may have gone over to another thread meanwhile, whose passes are its own.
        here = threading.get_ident()
        self._reached = [each for each in self._reached if each.parts.thread == here]
        if error is None:
            try:
                self._end()
            except BaseException as raised:
                self._undo(raised)
                raise
        else:
            self._undo(error)

    def _ready(self) -> None:
        """Everything that may refuse the pass."""
        own = self._own
        own.comparison.require_same()
        for parts in [own, *(other for other in live_parts() if other is not own)]:
            is_guest = parts is not own
            try:
                # Another engine's masters follow before its own passes; one whose model was moved must not end this one's.
                parts.agree(to_weights=False, to_masters=not is_guest)
                for window in parts.windows:
                    window.ready(self._scale, is_guest=is_guest)
            except OrderError:
                if not is_guest:
                    raise
                continue  # the other engine's own next call says so, if anybody still trains with it
            local = parts.local_ids()
            self._reached += [
                _Reached(parts, window, window in self._by_hand or not local.isdisjoint(window.ids))
                for window in sorted(parts.windows, key=self._keep.__contains__)
            ]

    def _enter(self) -> None:
        known: set[int] = set()
        for parts, window, is_local in self._reached:
            window.enter(
                self._scale,
                known,
                is_unit=self._is_unit,
                is_local=is_local,
                is_wrapped=bool(parts.reduces),
                keeps=window in self._keep,
                is_guest=parts is not self._own,
            )
        # FSDP2 gathers weights for a pass: leaves, too, but their gradients are reduced into those of the shards.
        if (
            not self._is_unit
            and self._given.grad_fn is not None
            and not any(each.window.has_shards for each in self._reached)
        ):
            self._leaves = [leaf for leaf in graph_leaves(self._given.grad_fn) if id(leaf) not in known]
            self._earlier = list(map(_GRAD, self._leaves))
            set_gradients(self._leaves, repeat(None))

    @torch.no_grad()
    def _end(self) -> None:
        own, nonfinite = self._own, None
        own.pairs.end_of_setup()
        if len(own.scalers) > 1 and not self._is_unit and is_multi_rank():
            self._compare_losses()
        if (
            self._notes_nonfinite_loss
            and self._given.numel() == 1
            and self._scaler.config.recovery is not None
        ):
            nonfinite = nonfinite_loss(self._given)
        for parts, window, is_local in self._reached:
            self.learned[window] = window.end(
                self._scaler,
                is_local=is_local,
                holds=self._holds and parts is own,
                nonfinite=nonfinite if parts is own else None,
            )
        if self._leaves:
            dtypes = [leaf.dtype for leaf in self._leaves]
            fresh, found = list(map(_GRAD, self._leaves)), torch.zeros_like(self._scale)
            totals = add_unscaled(self._earlier, fresh, dtypes, self._scale.reciprocal(), found)
            set_gradients(self._leaves, totals)

    def _compare_losses(self) -> None:
        """Refuse ranks that have used different losses where their gradients were reduced together.

        Raises:
            RankMismatchError: they have. An accelerator tells it later; until then the step is skipped on all ranks.
        """
        own, reduced = self._own, [each for each in self._reached if not each.is_local]
        written = {each.window: weights for each in reduced if (weights := each.window.written())}
        numbers = {scaler: number for number, scaler in enumerate(own.scalers)}
        held = [window.held for window in written if window.held is not None]
        before = {numbers[loss] for one in held for loss in one.losses if loss in numbers}
        differs = own.comparison.compare(
            (numbers[self._scaler], sorted(before)),
            [weight for weights in written.values() for weight in weights],
            [wrapper for each in reduced for wrapper in each.parts.wrappers],
            self._scale,
        )
        if differs is not None:
            for window in written:
                window.note(self._scaler, differs, self._scale)

    def _undo(self, error: BaseException | None = None) -> None:
        # A window that has ended already has added what the pass gave it.
        lost = {
            each.parts: None for each in self._reached if each.window.undo() or each.window in self.learned
        }
        set_gradients(self._leaves, self._earlier)
        for parts in lost:
            parts.abort()
        if lost and error is not None:
            error.add_note(
                "halfpeak: this backward pass had added to gradients of earlier passes, so the window begins again"
            )


class _Reached(NamedTuple):
    """A window that the pass may reach.

    Attributes:
        parts: of its engine.
        window: of one optimizer.
        is_local: whether the ranks do not reduce the gradients of this pass.
    """

    parts: Parts
    window: Window
    is_local: bool


def refuse_in_pass(call: str) -> None:
    """Refuse a call between the beginning and the end of a scaled pass.

    Raises:
        OrderError: a scaled pass of this thread is open, so gradients are scaled and incomplete.
    """
    if _OPEN.is_open:
        raise OrderError(
            f"{call} was called during a backward pass, while gradients are multiplied by the loss scale; call it after "
            "engine.backward(loss), with amp after the `with amp.scale_loss` block, and not in a hook of a parameter"
        )


class _Open(threading.local):
    """Whether a scaled pass of this thread is open."""

    is_open = False


_OPEN: Final = _Open()
_GRAD: Final = attrgetter("grad")
