"""Lane: one optimizer's way through a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.engine.bypass import refuse_half_way
from halfpeak.engine.closures import Guard, take_closure
from halfpeak.engine.fused import hand_over, take_back
from halfpeak.engine.movement import Movement
from halfpeak.engine.roster import Roster
from halfpeak.engine.served import Served
from halfpeak.engine.slots import Owner, Phase, Slots
from halfpeak.engine.trace import Trace
from halfpeak.fused.books import Account, Books
from halfpeak.ops import foreach
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.masters import Masters


class Lane:
    """One optimizer: its masters, where its gradients stand, and the hooks by which its ``step`` is watched.

    Nothing is replaced on the optimizer. A pre-hook withholds the gradients of a step that must be skipped (torch's
    optimizers move only what has one, so moments and counts stay and schedulers see a step), or hands ``found_inf`` to
    an optimizer that takes it; a post-hook publishes the masters.

    Args:
        optimizer: held weakly; its hooks hold the lane, so there is no cycle.
        masters: shared between the lanes of an engine, so that a parameter of two optimizers has one master.
        owner: asked when the optimizer is stepped; it must not hold the lane.
        device: where ``found_inf`` lives.

    Attributes:
        count: how many lanes the engine has.
        found_inf: 1 if a gradient of this window was not finite.  # f32[]
        phase: where the gradients of this window stand.
        parked: true-sized gradients set aside while others wait scaled, by ``id`` of the parameter.
        frozen: the loss scaler, and its scale then, of gradients that wait scaled.
        trace: of the gradients written, to notice when somebody zeroes or replaces them.
        verdict: what the step now running must do: skip, or a ``found_inf`` for the optimizer's own kernel.
        is_stepping: whether a step has begun and not come to its end.
        has_stepped: whether the last step came to its end.
    """

    def __init__(
        self, optimizer: Optimizer, masters: Masters, owner: Owner, device: torch.device, *, count: int = 1
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owner = owner
        self.masters = masters
        self.count = count
        self.found_inf = self._nothing = torch.zeros((), device=device)
        self.phase = Phase.CLEAN
        self.parked: dict[int, Tensor] = {}
        self.frozen: tuple[LossScaler, Tensor] | None = None
        self.verdict: Tensor | bool | None = None
        self.is_stepping = False
        self.has_stepped = False
        # The engine drops gradients when the last of its optimizers has stepped: two may share a master.
        self._is_driven = False
        self._keeps = False
        self._is_swept = False
        self._movement: Movement | None = None
        self._slots: Slots | None = None
        self.trace = Trace()
        self._roster: Roster | None = None
        self._deferred: Served | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            OrderError: it does not exist any more.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise OrderError("the optimizer of this engine does not exist any more; keep a reference to it")
        return optimizer

    @staticmethod
    def parameters_of(lanes: Sequence[Lane]) -> Iterator[Tensor] | None:
        """What a step of ``lanes`` is of; None if these are all lanes of their engine."""
        if len(lanes) == lanes[0].count:
            return None
        return (slot.source for lane in lanes for slot in lane.slots())

    def slots(self) -> Slots:
        """The trainable parameters: inside a window as they were at its last backward pass, else as they are now."""
        return self.roster().slots if self._slots is None else self._slots

    def roster(self) -> Roster:
        """The parameters of the groups as they are now."""
        roster = self._roster
        if roster is None or not roster.is_current(self.optimizer):
            roster = self._roster = Roster(self.optimizer, self.masters)
        return roster

    def include(self, slots: Slots) -> None:
        """Take gradients that lie at ``slots`` for those of the open window, also where nothing is trainable now."""
        self._slots = self.roster().slots_of(slots)

    def look_again(self) -> None:
        """Before a backward pass: follow what happened to groups, parameters and gradients since the last one."""
        self.recover()
        if self._roster is None or not self._roster.is_current(self.optimizer):
            self.masters.adopt(self.optimizer)
            self._roster = Roster(self.optimizer, self.masters)
        self.masters.refresh()
        self.take_in()
        self._slots = self._roster.slots_of(self._slots)
        if self.phase is Phase.UNSCALED and not self.trace.is_untouched():
            self._forget_if_zeroed()
        elif self.phase is Phase.SCALED and not self.trace.lift():
            self.drop()

    def keep_trace(self) -> None:
        """Remember the gradients just written."""
        self.trace.keep(self.slots().with_gradient())
        if self.count > 1:
            self.masters.claim(self, self.trace.claimed())

    def keep_marker(self) -> None:
        """While low gradients wait scaled, notice when ``zero_grad()`` is called on the optimizer of their masters."""
        free = [high for high in self.slots().highs if high.grad is None]
        self.trace.lay(min(free, key=Tensor.numel, default=None))
        self.keep_trace()

    def defer(self, deferred: Served) -> None:
        """Leave the gradients of a backward pass to the optimizer's step."""
        self._deferred = deferred
        self.phase = Phase.DEFERRED

    def take_in(self) -> None:
        """Make gradients that were left to the step true-sized now, because somebody is to read them, or add to them."""
        deferred = self._undisturbed()
        if deferred is not None:
            self._deferred = None
            deferred.take_in()

    def measure(self, books: Books | None = None) -> Tensor | Account | None:
        """What :meth:`Served.measure` says of gradients that are left to the step; None if they are not."""
        deferred = self._undisturbed()
        return None if deferred is None else deferred.measure(books)

    def serve(self, coefficient: Tensor | None) -> None:
        """Let the coming step read the gradients left to it, times a number.  # f32[]"""
        if self._deferred is not None:
            self._deferred.serve(coefficient)

    def has_gradients(self) -> bool:
        """Whether the optimizer has something to step on."""
        return self._deferred is not None or bool(self.targets())

    def targets(self) -> list[Tensor]:
        """The gradients that the optimizer will read, true-sized."""
        self.take_in()
        return self.slots().gradients()

    def end(self, *, keep: bool) -> None:
        """After a step: drop what is left of the window, or with ``keep`` only what ``zero_grad()`` does not reach."""
        if keep:
            self.drop_masters()
        elif not self._is_swept:
            self.drop()

    def drop(self) -> None:
        """Drop the window: no gradient is left anywhere and no verdict is pending."""
        roster = self.roster()
        for end in (*roster.sources, *roster.targets, *roster.ends_beyond(self._slots)):
            end.grad = None
        self.masters.unclaim(self)
        self.close()

    def drop_masters(self) -> None:
        """Drop the gradients of masters, which ``zero_grad()`` of a model does not reach.

        One that another optimizer still has to step stays for it.
        """
        self.masters.unclaim(self)
        for high in self.slots().highs:
            if not self.masters.is_claimed(high):
                high.grad = None

    def close(self) -> None:
        """Begin a new window."""
        if self._deferred is not None:
            self._deferred.release()
            self._deferred = None
        self.found_inf = self._nothing
        self.parked.clear()
        self.frozen = None
        self.trace.clear()
        self._slots = None
        self.phase = Phase.CLEAN

    def step(
        self, verdict: Tensor | bool, closure: Callable[[], Any] | None = None, *, keep: bool = False
    ) -> Any:
        """Call ``optimizer.step`` under a verdict that the owner has reached.

        Args:
            verdict: skip, or a ``found_inf`` that decides on the device.  # bool or f32[]
            closure: passed to the optimizer.
            keep: whether gradients without a master stay.
        """
        self.verdict = verdict
        self._keeps = keep
        self._is_swept = False
        self.has_stepped = False
        self._is_driven = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self.recover()
            self._is_driven = False

    def recover(self) -> None:
        """Put right what a step that raised has left: bring it to its end if the optimizer had moved, else undo it."""
        self.catch_up()
        self._clear_step()

    def catch_up(self) -> None:
        """:meth:`recover` as far as a forward pass needs it, which may also come from a step hook of somebody's."""
        if self.is_stepping and (self.has_stepped or self._has_moved()):
            self._finish()
        self.masters.publish_late()

    def detach(self) -> None:
        """Take the hooks off and put the low parameters back into the groups."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            if self.phase in (Phase.SCALED, Phase.DEFERRED):
                self.drop()  # nobody would divide them any more
            self.masters.release(optimizer)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        verdict = self.verdict
        self._movement = None
        self.has_stepped = False
        self.is_stepping = True
        closure, rebuild = take_closure(args, kwargs)
        if verdict is None:
            refuse_half_way(self.phase, is_own=self._owner.steps_itself)
            verdict = not self._owner.steps_itself and self._owner.decide(
                self, has_closure=closure is not None
            )
        self.verdict = verdict
        if closure is not None:
            self.masters.mark_stepped(optimizer)
            return rebuild(Guard(closure, self, self._owner))
        if isinstance(verdict, Tensor) or self._deferred is not None:
            hand_over(optimizer, verdict)
        elif verdict is True:
            for target in self.roster().targets:
                target.grad = None
        is_fed = self._deferred is not None
        moving = [] if is_fed else self.slots().with_gradient()
        self._movement = Movement(optimizer, moving, is_fed=is_fed)
        self.masters.mark_stepped(optimizer)
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.has_stepped = True
        self._finish()

    def _finish(self) -> None:
        """The optimizer has moved, or has been kept from it. Doing this twice does no harm."""
        self.has_stepped = True
        verdict = False if self.verdict is None else self.verdict
        if self._deferred is not None and self._has_moved():
            self.masters.note_published(self.optimizer)
        else:
            self.masters.publish(self.optimizer)
        if self._deferred is not None:
            self._is_swept = self._deferred.withdraw(keep=self._keeps)
        if not self._is_driven:
            self.drop_masters()
        self.close()
        self._clear_step()
        self._owner.finished(self, verdict)

    def _has_moved(self) -> bool:
        """Whether the running step got through the optimizer's own code."""
        return self._movement is not None and self._movement.has_happened(self.optimizer)

    def _clear_step(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            take_back(optimizer)
        self.verdict = None
        self.is_stepping = False
        self._movement = None

    def _undisturbed(self) -> Served | None:
        """The gradients that are left to the step, unless somebody has zeroed them."""
        if self._deferred is not None and not self._deferred.are_there():
            self.drop()
        return self._deferred

    def _forget_if_zeroed(self) -> None:
        """Somebody zeroed or changed the gradients: the verdict holds only if they still are not finite."""
        grads = self.targets()
        if not grads:
            self.close()
            return
        still = torch.zeros_like(self.found_inf)
        foreach.check_(grads, still)
        self.found_inf = torch.minimum(self.found_inf, still)
