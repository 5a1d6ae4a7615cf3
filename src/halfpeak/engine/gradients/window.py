"""The accumulation window of one optimizer: the state of the next step's gradients as one value, and its transitions.

::

    Empty | Scaled | Unscaled -backward------------>  Unscaled  after_backward
    Empty | Scaled | Unscaled -backward, delayed--->  Scaled    after_delayed_backward
    Empty                     -backward, for fused->  Pending   after_backward_for_fused
    Empty                     -adopt_scaled_grads-->  Scaled    after_user_backward
    Pending                   -other code reads---->  Unscaled  after_backward
    any                       -step, drop---------->  Empty

A value is never edited. Any other transition raises :class:`~halfpeak.OrderError`, which names the call to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.ops.foreach import are_dense, gradients_of, is_in_bucket
from halfpeak.state.loss_scaler import LossScaler, is_unit

_VERSION: Final = attrgetter("_version")
_HAS_GRAPH: Final = attrgetter("requires_grad")


class GradSnapshot:
    """The gradients of some tensors at one moment. Detects when one is replaced, dropped or written in place."""

    __slots__ = ("_grads", "_versions", "_written", "holders")

    def __init__(self, holders: Iterable[Tensor] = (), grads: list[Tensor | None] | None = None) -> None:
        self.holders = list(holders)
        self._grads = gradients_of(self.holders) if grads is None else grads
        self._written = [grad for grad in self._grads if grad is not None]
        self._versions = list(map(_VERSION, self._written))

    @classmethod
    def of_present(cls, tensors: Sequence[Tensor]) -> GradSnapshot:
        """Take a snapshot of the tensors that have a gradient, and leave out the others."""
        grads = gradients_of(tensors)
        present = list(map(is_not, grads, repeat(None)))
        return cls(compress(tensors, present), list(compress(grads, present)))

    def unchanged(self) -> bool:
        """Whether every gradient is the same tensor as in the snapshot, without an in-place write since."""
        return self.holds(gradients_of(self.holders))

    def holds(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether ``grads`` are the snapshot's tensors, in its order, without an in-place write since."""
        return (
            len(grads) == len(self._grads)
            and all(map(is_, grads, self._grads))
            and list(map(_VERSION, self._written)) == self._versions
        )

    def has_grads_without_graph(self) -> bool:
        """Whether there are gradients, and none has a graph, as with ``create_graph=True``."""
        return bool(self._written) and not any(map(_HAS_GRAPH, self._written))

    def changed(self) -> list[Tensor]:
        """The tensors whose gradient differs from the snapshot."""
        if self.unchanged():
            return []
        versions = iter(self._versions)
        known = [(grad, None if grad is None else next(versions)) for grad in self._grads]
        return [
            holder
            for holder, (grad, version) in zip(self.holders, known, strict=True)
            if (grad is not None and grad._version != version) or not _is_same(holder.grad, grad)
        ]

    def changed_or_new(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Those of ``grads``, the gradients of ``tensors``, that differ from the snapshot or are not in it."""
        if self.holds([grad for grad in grads if grad is not None]):
            return []
        known = set(map(id, self.holders)).difference(map(id, self.changed()))
        return [g for t, g in zip(tensors, grads, strict=True) if g is not None and id(t) not in known]


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether a gradient is the same tensor or an equal one: ``DistributedDataParallel`` moves it to a bucket once."""
    if now is before or now is None or before is None or now.dtype is not before.dtype:
        return now is before
    return are_dense([now, before]) and torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)


class Sentinel(NamedTuple):
    """A gradient placed on one parameter that has none, to detect ``zero_grad()``.

    Gradients are either scaled, on low-precision parameters, or unscaled, on their masters. ``model.zero_grad()``
    reaches only low parameters, ``optimizer.zero_grad()`` only masters. Both drop the window: the other side has a
    sentinel.
    """

    holder: Tensor
    grad: Tensor
    version: int

    @classmethod
    def place(cls, holder: Tensor, value: float) -> Sentinel:
        """Give a parameter without a gradient one that is filled with ``value``."""
        grad = torch.full_like(holder, value, requires_grad=False)
        holder.grad = grad
        return cls(holder, grad, grad._version)

    def unchanged(self) -> bool:
        """Whether the sentinel is still in place, without an in-place write."""
        return self.holder.grad is self.grad and self.grad._version == self.version

    def is_zeroed(self) -> bool:
        """Whether ``zero_grad()`` was called. A backward pass or a clip changes the sentinel, too, but not to zero."""
        return not self.unchanged() and is_zero(self.holder.grad)

    def remove(self) -> None:
        """Leave the parameter without a gradient."""
        self.holder.grad = None


class Empty(NamedTuple):
    """The window holds no gradients of the engine's backward passes.

    Attributes:
        found_inf: 1 if gradients that user code left were read and not finite, else 0.  # f32[]
        pairs: None, because the parameters are the ones now in the optimizer's groups.
    """

    found_inf: Tensor
    pairs: None = None


class Unscaled(NamedTuple):
    """The gradients are unscaled, on the parameters that the optimizer reads.

    Attributes:
        found_inf: 1 if a gradient of the window was not finite.  # f32[]
        pairs: the parameters at the last backward pass.
        snapshot: of the gradients, to detect ``zero_grad()`` and edits.
        sentinel: :data:`LOW_SENTINEL` on a low parameter; None if no low parameter is free for one.
        is_edited: whether ``found_inf`` describes edited gradients. The loss scale still follows the backward passes.
    """

    found_inf: Tensor
    pairs: ParamPairs
    snapshot: GradSnapshot
    sentinel: Sentinel | None = None
    is_edited: bool = False

    def with_sentinel(self, low: Tensor) -> Unscaled:
        """This window with a sentinel on the parameter ``low``, unless ``low`` has a gradient."""
        if self.sentinel is not None or low.grad is not None:
            return self
        return self._replace(sentinel=Sentinel.place(low, LOW_SENTINEL))

    def without_sentinel(self) -> Unscaled | None:
        """This window without its sentinel; None if user code called ``model.zero_grad()``, which drops the window.

        Raises:
            OrderError: user code wrote to ``.grad`` of low parameters, but the gradients are on the masters.
        """
        sentinel = self.sentinel
        if sentinel is None:
            return self
        if not sentinel.unchanged():
            grad = sentinel.holder.grad
            if grad is None or is_zero(grad):
                return None
            # DistributedDataParallel moves gradients into its buckets, with their values.
            is_moved = is_in_bucket(grad) and bool((grad == LOW_SENTINEL).all())
            if not is_moved and not self.pairs.has_low_gradient(grad):
                raise OrderError(
                    "the gradients of model.parameters() were written, but here the float32 masters have them: "
                    "clip_grad_norm_(model.parameters(), ...) clips nothing; write halfpeak.prepare(..., clip=1.0), or "
                    "clip_grad_norm_(engine.main_params(), ...), with amp clip_grad_norm_(amp.master_params(optimizer), ...)"
                )
        sentinel.remove()
        return self._replace(sentinel=None)

    def with_sentinel_of(self, before: Window) -> Unscaled:
        """This window with the sentinel of ``before`` put back, after a failed backward pass or a save."""
        sentinel = before.sentinel if isinstance(before, Unscaled) else None
        if sentinel is not None:
            sentinel.holder.grad = sentinel.grad
        return self._replace(sentinel=sentinel)


class Scaled(NamedTuple):
    """The gradients are scaled where autograd left them, and the next backward pass of the window adds to them.

    A window is in this state after ``delay_unscale=True``, under ``no_sync``, and between passes over float32 weights.

    Attributes:
        found_inf: of the gradients that were unscaled earlier in the same window.  # f32[]
        pairs: the parameters at the last backward pass.
        snapshot: of the gradients, scaled and unscaled.
        scaler: the owner of ``scale``.
        scale: the factor of the losses.  # f32[]
        stashed: unscaled gradients of the window, kept apart from the scaled ones, by ``id`` of the model parameter. Between
            passes they stand in ``.grad`` where nothing waits scaled, so that ``zero_grad()`` is detected there, too.
        sentinel: :data:`MASTER_SENTINEL` on a master, or None if no master is free for one.
        sums: float32 sums over several passes, by ``id`` of the low parameter, whose own gradient is the sum rounded.
        is_local: whether they wait to be reduced over the ranks.
    """

    found_inf: Tensor
    pairs: ParamPairs
    snapshot: GradSnapshot
    scaler: LossScaler
    scale: Tensor
    stashed: Mapping[int, Tensor]
    sentinel: Sentinel | None
    sums: Mapping[int, Tensor]
    is_local: bool = False

    @property
    def detects_edits(self) -> bool:
        """Whether edits are detected. False during a backward pass, because autograd itself writes the gradients."""
        return self.sentinel is not None or bool(self.snapshot.holders)

    def with_sentinel(self) -> Scaled:
        """This window with a sentinel placed, and a snapshot of the gradients as they are now."""
        for parameter in self.pairs.unmastered if self.stashed else ():
            if parameter.grad is None:
                parameter.grad = self.stashed.get(id(parameter))
        low = [parameter for parameter in self.pairs.low_params if parameter.grad is not None]
        snapshot = GradSnapshot([*self.pairs.with_gradient(), *low])
        free = [master for master in self.pairs.masters if master.grad is None]
        sentinel = Sentinel.place(min(free, key=Tensor.numel), MASTER_SENTINEL) if free else None
        return self._replace(snapshot=snapshot, sentinel=sentinel)

    def without_sentinel(self) -> Scaled | None:
        """This window without its sentinel, before gradients are added; None if ``zero_grad()`` dropped its gradients.

        If user code dropped one parameter's gradient, its stashed gradient is dropped, too. If the loss scale is always
        1, scaled and unscaled gradients are equal, so edits are allowed, but not of parameters with a stashed gradient.

        Raises:
            OrderError: user code edited gradients that wait scaled, or those of masters, which have none yet.
        """
        sentinel, changed, found_inf = self.sentinel, self.snapshot.changed(), self.found_inf
        if sentinel is not None and not sentinel.unchanged():
            refuse_edits([sentinel.holder.grad])
            return None
        gone = {id(holder) for holder in changed if is_zero(holder.grad)}
        edited = [holder for holder in changed if id(holder) not in gone]
        if any(id(holder) in self.stashed for holder in edited) or not is_unit(self.scaler):
            refuse_edits([holder.grad for holder in edited])
        # model.zero_grad() reaches low parameters, optimizer.zero_grad() masters, and both the parameters without a master.
        held = set(map(id, self.snapshot.holders))
        for side in (self.pairs.low_params, self.pairs.main_params):
            if gone and gone.issuperset(reached := held.intersection(map(id, side))) and reached:
                if self.pairs.low_params or all(holder.grad is None for holder in changed):
                    return None
                # zero_grad(set_to_none=False): the zeros stay, because optimizers step zeros by momentum and weight decay.
                found_inf = torch.zeros_like(found_inf)
        if sentinel is not None:
            sentinel.remove()
        stashed = {key: grad for key, grad in self.stashed.items() if key not in gone}
        for parameter in self.pairs.unmastered if stashed else ():
            if parameter.grad is stashed.get(id(parameter)):
                parameter.grad = None
        written = set(map(id, changed))
        sums = {key: total for key, total in self.sums.items() if key not in written}
        return self._replace(
            found_inf=found_inf, snapshot=GradSnapshot(), stashed=stashed, sentinel=None, sums=sums
        )


class Pending(NamedTuple):
    """The gradients of the window's only backward pass are scaled, left for the step of a fused optimizer to read.

    Attributes:
        found_inf: zero until the step reads the gradients, unless the loss was not finite.  # f32[]
        pairs: the parameters at the backward pass.
        snapshot: of the gradients.
        scale: the factor of the loss.  # f32[]
        pass_found_inf: of the backward pass; written when the gradients are read.  # f32[]
        sentinel: :data:`MASTER_SENTINEL` on a master, or None if there is no master.
    """

    found_inf: Tensor
    pairs: ParamPairs
    snapshot: GradSnapshot
    scale: Tensor
    pass_found_inf: Tensor
    sentinel: Sentinel | None


Window: TypeAlias = Empty | Unscaled | Scaled | Pending

MASTER_SENTINEL: Final = 2.0**-100
"""Too small to change an update, and large enough that a clip does not round it to zero: only ``zero_grad()`` does."""

LOW_SENTINEL: Final = 2.0**-14
"""The smallest normal number of float16, which a clip does not round to zero: only ``zero_grad()`` does."""

NOTHING_STASHED: Final[Mapping[int, Tensor]] = MappingProxyType({})


def scale_for_backward(windows: Sequence[Window], scaler: LossScaler) -> Tensor:
    """The scale of the next backward pass: the scale of the gradients that wait, else the scaler's.  # f32[]

    Args:
        windows: of all optimizers whose parameters the pass reaches.

    Raises:
        OrderError: gradients wait under another loss scaler or another scale.
    """
    waiting = [window for window in windows if isinstance(window, Scaled)]
    if any(window.scaler is not scaler or window.scale is not waiting[0].scale for window in waiting):
        raise OrderError(
            "gradients of an earlier backward pass wait scaled by another loss scale (delay_unscale=True, or no_sync); use "
            "the same loss_id until a backward pass has unscaled them"
        )
    return waiting[0].scale if waiting else scaler.state.scale


def after_backward(window: Window, pairs: ParamPairs, found_inf: Tensor) -> Unscaled:
    """The window after gradients of a backward pass, or pending gradients, were unscaled and accumulated.

    Args:
        window: before.
        pairs: the parameters at the pass.
        found_inf: of the pass.  # f32[]
    """
    # The optimizers of one backward pass may belong to two engines, on two devices.
    found_inf = torch.maximum(window.found_inf, found_inf.to(window.found_inf.device))
    is_edited = isinstance(window, Unscaled) and window.is_edited
    return Unscaled(found_inf, pairs, GradSnapshot.of_present(pairs.main_params), is_edited=is_edited)


def after_delayed_backward(
    window: Window,
    pairs: ParamPairs,
    scaler: LossScaler,
    scale: Tensor,
    stashed: Mapping[int, Tensor],
    sums: Mapping[int, Tensor],
    *,
    is_local: bool,
) -> Scaled:
    """The window after a backward pass whose gradients stay scaled. For the other arguments, see :class:`Scaled`.

    Args:
        window: before.
        stashed: unscaled gradients that were set aside before the pass, by ``id`` of the parameter.
        is_local: whether the gradients of this pass were not reduced over the ranks.
    """
    if isinstance(window, Scaled):
        stashed, is_local = {**window.stashed, **stashed}, is_local or window.is_local
    return Scaled(window.found_inf, pairs, GradSnapshot(), scaler, scale, stashed, None, sums, is_local)


def after_backward_for_fused(
    window: Empty,
    pairs: ParamPairs,
    snapshot: GradSnapshot,
    scale: Tensor,
    pass_found_inf: Tensor,
    *,
    unit: bool,
) -> Pending:
    """The window whose only backward pass leaves its gradients for the step of a fused optimizer.

    For the other arguments, see :class:`Pending`.

    Args:
        window: before.
        unit: whether the scale is always 1. Gradients of parameters without a master may then be edited.
    """
    snapshot = GradSnapshot(pairs.low_params) if unit else snapshot
    smallest = pairs.smallest
    sentinel = None if smallest is None else Sentinel.place(smallest.main, MASTER_SENTINEL)
    return Pending(window.found_inf, pairs, snapshot, scale, pass_found_inf, sentinel)


def after_user_backward(window: Empty, pairs: ParamPairs, scaler: LossScaler) -> Scaled:
    """The window after user code called ``backward()`` itself, on the loss times the scale of ``scaler``."""
    scale, none = scaler.state.scale, NOTHING_STASHED
    return Scaled(window.found_inf, pairs, GradSnapshot(), scaler, scale, none, None, none)


def refuse_scaled_beside_unscaled(window: Unscaled) -> None:
    """Refuse a backward pass that user code ran itself in a window whose earlier gradients are unscaled already.

    Raises:
        OrderError: it has left gradients, which autograd has added to the unscaled ones where there is no master.
    """
    unmastered, sentinel = window.pairs.unmastered, window.sentinel
    added = window.snapshot.changed_or_new(unmastered, gradients_of(unmastered))
    if added or window.pairs.has_low_gradient(None if sentinel is None else sentinel.grad):
        raise OrderError(
            "a backward pass of your own has added scaled gradients to a window whose gradients are unscaled already; call "
            "engine.adopt_scaled_grads() once, after the last pass of the window, or write engine.backward(loss)"
        )


def refuse_scaled(window: Window) -> None:
    """Refuse to step gradients that are still scaled.

    Raises:
        OrderError: the last backward pass was delayed, or not synchronised over ranks.
    """
    if isinstance(window, Scaled):
        raise OrderError(
            "the last backward pass of the window was delayed or ran under no_sync, so its gradients are still scaled; run "
            "the last pass outside of no_sync, or let the engine enter no_sync where it is due: engine.forward(wrapped)"
        )


def refuse_user_step(window: Window, *, allowed: bool, has_closure: bool) -> None:
    """Refuse an ``optimizer.step()`` that user code calls inside a window, or with a closure that would open one.

    Args:
        allowed: whether user code may step in place of the engine.

    Raises:
        OrderError: gradients are still scaled, or the engine is to step them.
    """
    if isinstance(window, Scaled):
        raise OrderError(
            "optimizer.step() was called on gradients that are still scaled: the last backward pass was delayed "
            "(delay_unscale=True, or no_sync); end the window with one that is not"
        )
    if not allowed and not isinstance(window, Empty):
        raise OrderError(
            "optimizer.step() was called inside an engine's window; write engine.step(), or for an optimizer that steps in "
            "two parts (SAM) engine.step(closure)"
        )
    if not allowed and has_closure:
        raise OrderError(
            "optimizer.step(closure) was called on an optimizer that an engine steps; write engine.step(closure)"
        )


def refuse_unseen_backward(window: Window, pairs: ParamPairs) -> None:
    """Refuse a step if low parameters have gradients of their own: the optimizer reads masters, so nothing would move.

    Raises:
        OrderError: user code called ``loss.backward()`` on the loss itself.
    """
    sentinel = window.sentinel if isinstance(window, Unscaled) else None
    if pairs.has_low_gradient(None if sentinel is None else sentinel.grad):
        raise OrderError(
            "the backward pass did not go through halfpeak, so its gradients never reached the float32 masters and this step "
            "would change no weight; write engine.backward(loss), wrapper.backward(loss), or with amp "
            "`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"
        )


def refuse_only_unseen_backward(window: Window, pairs: ParamPairs) -> None:
    """Refuse ``engine.step()`` if all gradients come from backward passes outside the engine: no loss was scaled.

    Raises:
        OrderError: user code called ``loss.backward()`` on the loss itself.
    """
    if isinstance(window, Empty) and pairs.with_gradient():
        raise OrderError(
            "no backward pass of this step went through halfpeak, so its loss was neither scaled nor divided for "
            "accumulation; write engine.backward(loss), with a wrapper wrapper.backward(loss) or super().backward(loss), or "
            "after a backward pass of your own, of the loss times engine.scale, engine.adopt_scaled_grads()"
        )


def is_zero(grad: Tensor | None) -> bool:
    """Whether ``grad`` is None or all zeros, as ``zero_grad()`` leaves it. Waits for the device."""
    return grad is None or not bool(grad.any())


def refuse_edits(grads: Iterable[Tensor | None]) -> None:
    """Refuse gradients that user code wrote while scaled gradients wait for a backward pass or a fused step.

    Such a value is ambiguous: it may be meant scaled or unscaled. ``zero_grad(set_to_none=False)`` writes zeros, so
    zeros are allowed, but not in low-precision gradients, where a clip by an infinite norm may have written them.

    Raises:
        OrderError: a gradient is sparse, low-precision or not zero.
    """
    present = [grad for grad in grads if grad is not None]
    if any(grad.is_sparse or is_low(grad) or bool(grad.any()) for grad in present):
        raise OrderError(
            "gradients were changed while they were still scaled, before the next backward pass or the step of a fused "
            "optimizer; write halfpeak.prepare(..., clip=1.0) to clip, or engine.unscale() before you change gradients "
            "(without an engine, or under no_sync: change them after the last backward pass before the step), and "
            "engine.backward(loss) for every loss"
        )
