"""Block: one backward pass through some lanes, as a transaction."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Final
from weakref import proxy

import torch
from torch import Tensor

from halfpeak.core.errors import OrderError
from halfpeak.core.tracing import untraced
from halfpeak.engine.intake import Intake
from halfpeak.engine.lane import Lane
from halfpeak.engine.slots import Phase, Slots
from halfpeak.engine.sums import sums_of
from halfpeak.fused.layout import gradients_of
from halfpeak.parts.loss_scaler import LossScaler


class Block:
    """Sets aside the gradients that are there before a backward pass and takes in the ones it leaves.

    ::

        open      set aside source.grad
        (backward: autograd writes source.grad, scaled)
        absorb    target.grad += source.grad / scale, in the dtype of the target, with one found_inf for all lanes
        delay     leave source.grad scaled for a later block
        put_back  source.grad as it was before open

    A parameter that several lanes share is taken in once.

    Attributes:
        slots: of all lanes, each once.
        has_begun: whether the backward pass has, and gradients that wait scaled will be written over.
        found_inf: 1 if one of the new gradients is not finite.  # f32[]
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self.slots = Slots()
        self._held: list[tuple[Tensor, Tensor | None]] = []
        self._holds = False
        self.has_begun = False
        self._has_taken = False
        self._intake: Intake | None = None
        self.found_inf = torch.zeros_like(lanes[0].found_inf)

    @untraced
    def open(self) -> None:
        """Set aside what is there, unless it lies there scaled and waiting."""
        seen: set[int] = set()
        for lane in self._lanes:
            lane.look_again()
            slots = lane.slots()
            if len(self._lanes) > 1:
                slots = Slots(slot for slot in slots if id(slot.source) not in seen)
                seen.update(id(slot.source) for slot in slots)
            self.slots = Slots([*self.slots, *slots]) if self.slots else slots
            if lane.phase is not Phase.SCALED:
                self._set_aside(slots.sources)

    def _set_aside(self, sources: list[Tensor]) -> None:
        grads = gradients_of(sources)
        if grads.count(None) == len(grads):
            self._held += zip(sources, grads, strict=True)
            return
        self._holds = True
        self._held += zip(sources, map(kept, grads), strict=True)
        for source, grad in zip(sources, grads, strict=True):
            if grad is not None:
                source.grad = None

    def begin(self) -> None:
        """The backward pass begins."""
        self.has_begun = True

    def scale_of(self, scaler: LossScaler) -> Tensor:
        """The scale of this block: the scaler's, or the one that waiting gradients were scaled by.  # f32[]

        Raises:
            OrderError: gradients wait that another loss scaler has scaled.
        """
        waiting = [lane.frozen for lane in self._lanes if lane.frozen is not None]
        for known, scale in waiting:
            if known is not scaler or scale is not waiting[0][1]:
                raise OrderError(
                    "gradients of an earlier backward pass wait scaled by another loss scale (delay_unscale=True, or "
                    "no_sync); use the same loss_id until a backward pass takes them in"
                )
        return waiting[0][1] if waiting else scaler.state.scale

    @property
    def can_be_undone(self) -> bool:
        """Whether what was there before is intact: waiting gradients not written over, new ones not taken in."""
        has_added = self._intake is not None and self._intake.has_added
        return not self._has_taken and not has_added and not (self.has_begun and self.adds_to_scaled)

    @property
    def adds_to_scaled(self) -> bool:
        """Whether autograd adds to gradients that lie there scaled."""
        return any(lane.phase is Phase.SCALED for lane in self._lanes)

    @property
    def begins_window(self) -> bool:
        """Whether there was no gradient before."""
        return all(lane.phase is Phase.CLEAN for lane in self._lanes) and not self._holds

    @property
    def is_first(self) -> bool:
        """Whether it begins a window, and leaves gradients that are nothing but numbers."""
        grads = [grad for grad in gradients_of(self.slots.sources) if grad is not None]
        return (
            bool(grads)
            and self.begins_window
            and not any(map(_HAS_GRAPH, grads))
            and not any(map(_IS_SPARSE, grads))
        )

    def hold_weakly(self) -> None:
        """Outlive the backward pass, kept by a lane, without keeping the lanes."""
        self._lanes = [proxy(lane) for lane in self._lanes]

    @untraced
    def put_back(self) -> None:
        """Undo :meth:`open`."""
        if self._intake is not None:
            self._intake.undo()
        for source, grad in self._held:
            source.grad = grad
        for lane in self._lanes:
            if lane.phase is Phase.SCALED:
                lane.keep_marker()

    @untraced
    def delay(self, scaler: LossScaler, scale: Tensor) -> None:
        """Leave the new gradients scaled. What was set aside is true-sized and parked until they are taken in."""
        self._has_taken = True
        for lane in self._lanes:
            lane.frozen = (scaler, scale)
            own = {id(slot.source) for slot in lane.slots()}
            for source, grad in self._held:
                if grad is not None and id(source) in own and lane.masters.of(source) is None:
                    lane.parked[id(source)] = grad
            lane.phase = Phase.SCALED
            lane.keep_marker()

    @untraced
    def absorb(self, scale: Tensor) -> None:
        """Take the new gradients in, true-sized."""
        self._has_taken = True
        self.intake(scale).take(self.slots)
        for low in self.slots.lows:
            low.grad = None
        for lane in self._lanes:
            # A block may name optimizers of two runs, which may live on two devices.
            lane.found_inf = torch.maximum(lane.found_inf, self.found_inf.to(lane.found_inf.device))
            lane.parked.clear()
            lane.frozen = None
            lane.phase = Phase.UNSCALED
            lane.keep_trace()

    def intake(self, scale: Tensor) -> Intake:
        """What takes the gradients of this block in.

        Args:
            scale: what they were multiplied by.  # f32[]
        """
        if self._intake is None:
            held = self._held if self._holds else ()
            parked = {id(source): grad for source, grad in held if grad is not None}
            for lane in self._lanes:
                parked.update(lane.parked)
            optimizers = [lane.optimizer for lane in self._lanes]
            sums = sums_of(optimizers, self.slots.targets)
            # One memory for all; lanes of two runs have two.
            memory = self._lanes[0].masters.memory
            shared = memory if all(lane.masters.memory is memory for lane in self._lanes) else None
            self._intake = Intake(parked, scale.reciprocal(), self.found_inf, sums, shared)
        return self._intake


@contextmanager
def spared(others: Sequence[Lane], lanes: Sequence[Lane]) -> Generator[None]:
    """Leave ``others`` the gradients they have in a backward pass that is for ``lanes``.

    A generator's loss also writes gradients into the discriminator, scaled, where they would be taken for its own.
    """
    if not others:
        yield
        return
    wanted = {id(slot.source) for lane in lanes for slot in lane.slots()}
    sources = [slot.source for lane in others for slot in lane.slots() if id(slot.source) not in wanted]
    held = [(source, kept(source.grad)) for source in sources]
    for source in sources:
        source.grad = None
    try:
        yield
    finally:
        for source, grad in held:
            source.grad = grad


_HAS_GRAPH: Final = attrgetter("requires_grad")
_IS_SPARSE: Final = attrgetter("is_sparse")


def kept(grad: Tensor | None) -> Tensor | None:
    """A gradient that the coming backward pass does not write over: one that lies in a bucket of DDP's is copied."""
    if grad is None or grad.is_sparse or grad.untyped_storage().nbytes() == grad.nbytes:
        return grad
    return grad.clone()
