"""Lane: one optimizer's way through a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.engine.closures import Guard, take_closure
from halfpeak.engine.fused import hand_over, take_back
from halfpeak.engine.slots import Owner, Phase, Slot
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
        count: how many lanes the engine has.

    Attributes:
        count: how many lanes the engine has.
        found_inf: 1 if a gradient of this window was not finite.  # f32[]
        phase: where the gradients of this window stand.
        parked: true-sized gradients set aside while others wait scaled, by ``id`` of the parameter.
        frozen: the loss scaler, and its scale then, of gradients that wait scaled.
        marker: the master whose gradient is a zero laid there by :meth:`keep_marker`, if there is one.
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
        self.found_inf = torch.zeros((), device=device)
        self.phase = Phase.CLEAN
        self.parked: dict[int, Tensor] = {}
        self.frozen: tuple[LossScaler, Tensor] | None = None
        self.verdict: Tensor | bool | None = None
        self.is_stepping = False
        self.has_stepped = False
        # The engine drops gradients when the last of its optimizers has stepped: two may share a master.
        self._is_driven = False
        self._moving: list[tuple[Tensor, _Mark]] | None = None
        self._trace: list[tuple[Tensor, Tensor, int]] = []
        self._slots: list[Slot] | None = None
        self.marker: Tensor | None = None
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

    def slots(self) -> list[Slot]:
        """The trainable parameters: inside a window as they were at its last backward pass, else as they are now."""
        return list(self._scan()) if self._slots is None else self._slots

    def _scan(self) -> Iterator[Slot]:
        """The trainable parameters of the groups as they are now, each once."""
        seen: set[int] = set()
        for slot in self._everything():
            if slot.source.requires_grad and id(slot.source) not in seen:
                seen.add(id(slot.source))
                yield slot

    def _everything(self) -> Iterator[Slot]:
        """Whatever stands in the groups."""
        for group in self.optimizer.param_groups:
            for target in group["params"]:
                source = self.masters.low_of(target)
                yield Slot(target if source is None else source, target)

    def _rescan(self) -> list[Slot]:
        """The trainable parameters now, and those frozen inside the window whose gradients belong to it."""
        now = list(self._scan())
        known = {id(slot.source) for slot in now}
        earlier = self._slots or []
        return now + [s for s in earlier if id(s.source) not in known and s.has_gradient()]

    def look_again(self) -> None:
        """Before a backward pass: follow what happened to groups, parameters and gradients since the last one."""
        self.recover()
        self.masters.adopt(self.optimizer)
        self.masters.refresh()
        self._slots = self._rescan()
        if self.phase is Phase.UNSCALED and not self._is_untouched():
            self._forget_if_zeroed()
        elif self.phase is Phase.SCALED:
            self._take_marker()

    def keep_trace(self) -> None:
        """Remember the gradients just written, to notice when somebody zeroes or replaces them."""
        self._trace = [
            (slot.target, slot.target.grad, slot.target.grad._version)
            for slot in self.slots()
            if slot.target.grad is not None
        ]
        if self.count > 1:
            self.masters.claim(self, [target for target, _, _ in self._trace])

    def keep_marker(self) -> None:
        """While low gradients wait scaled, let a zero lie as the gradient of one master.

        ``optimizer.zero_grad()`` reaches masters only; that it took or wrote this zero is how it is noticed.
        """
        free = [s.target for s in self.slots() if s.source is not s.target and s.target.grad is None]
        if free:
            self.marker = min(free, key=Tensor.numel)
            self.marker.grad = torch.zeros_like(self.marker)
        self.keep_trace()

    def targets(self) -> list[Tensor]:
        """The gradients that the optimizer will read."""
        return [slot.target.grad for slot in self.slots() if slot.target.grad is not None]

    def drop(self) -> None:
        """Drop the window: no gradient is left anywhere and no verdict is pending."""
        for slot in (*(self._slots or ()), *self._everything()):
            slot.source.grad = None
            slot.target.grad = None
        self.masters.unclaim(self)
        self.close()

    def drop_masters(self) -> None:
        """Drop the gradients of masters, which ``zero_grad()`` of a model does not reach.

        One that another optimizer still has to step stays for it.
        """
        self.masters.unclaim(self)
        for slot in self.slots():
            if slot.target is not slot.source and not self.masters.is_claimed(slot.target):
                slot.target.grad = None

    def close(self) -> None:
        """Begin a new window."""
        self.found_inf = torch.zeros_like(self.found_inf)
        self.parked.clear()
        self.frozen = None
        self.marker = None
        self._trace.clear()
        self._slots = None
        self.phase = Phase.CLEAN

    def step(self, verdict: Tensor | bool, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``optimizer.step`` under a verdict that the owner has reached."""
        self.verdict = verdict
        self.has_stepped = False
        self._is_driven = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self.recover()
            self._is_driven = False

    def recover(self) -> None:
        """Put right what a step that raised has left: bring it to its end if the optimizer had moved, else undo it."""
        if self.is_stepping and self._has_moved():
            self._finish()
        self.masters.publish_late()
        self._clear_step()

    def catch_up(self) -> None:
        """:meth:`recover` as far as a forward pass needs it, which may also come from a step hook of somebody's."""
        if self.is_stepping and self._has_moved():
            self._finish()
        self.masters.publish_late()

    def detach(self) -> None:
        """Take the hooks off and put the low parameters back into the groups."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            self.masters.release(optimizer)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        verdict = self.verdict
        self._moving = None
        self.has_stepped = False
        self.is_stepping = True
        closure, rebuild = take_closure(args, kwargs)
        if verdict is None:
            verdict = self._verdict_of_caller(has_closure=closure is not None)
        self.verdict = verdict
        if closure is not None:
            self.masters.mark_stepped(optimizer)
            return rebuild(Guard(closure, self, self._owner))
        if verdict is True:
            for slot in self._everything():
                slot.target.grad = None
        elif isinstance(verdict, Tensor):
            hand_over(optimizer, verdict)
        targets = [slot.target for slot in self.slots() if slot.target.grad is not None]
        self._moving = [(target, _mark(optimizer, target)) for target in targets]
        self.masters.mark_stepped(optimizer)
        return None

    def _verdict_of_caller(self, *, has_closure: bool) -> Tensor | bool:
        if self.phase is Phase.SCALED:
            raise OrderError(
                "optimizer.step() was called on gradients that are still scaled: the last backward pass was delayed "
                "(delay_unscale=True, or no_sync); end the window with one that is not"
            )
        if not self._owner.steps_itself:
            return self._owner.decide(self, has_closure=has_closure)
        if self.phase is Phase.UNSCALED:
            raise OrderError("optimizer.step() was called inside an engine's window; write engine.step()")
        return False

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.has_stepped = True
        self._finish()

    def _finish(self) -> None:
        """The optimizer has moved, or has been kept from it. Doing this twice does no harm."""
        self.has_stepped = True
        verdict = False if self.verdict is None else self.verdict
        self.masters.publish(self.optimizer)
        if not self._is_driven:
            self.drop_masters()
        self.close()
        self._clear_step()
        self._owner.finished(self, verdict)

    def _has_moved(self) -> bool:
        """Whether the step that is running got as far as the optimizer's own code and through it."""
        moving = self._moving
        if moving is None or self.has_stepped:
            return self.has_stepped
        optimizer = self.optimizer
        return not moving or any(_mark(optimizer, target) != mark for target, mark in moving)

    def _clear_step(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            take_back(optimizer)
        self.verdict = None
        self.is_stepping = False

    def _is_untouched(self) -> bool:
        return all(target.grad is grad and grad._version == version for target, grad, version in self._trace)

    def _take_marker(self) -> None:
        if not self._is_untouched():
            self.drop()
        elif self.marker is not None:
            self.marker.grad = None
            self.marker = None

    def _forget_if_zeroed(self) -> None:
        """Somebody zeroed or changed the gradients: the verdict holds only if they still are not finite."""
        grads = self.targets()
        if not grads:
            self.close()
            return
        still = torch.zeros_like(self.found_inf)
        foreach.check_(grads, still)
        self.found_inf = torch.minimum(self.found_inf, still)


_Mark = tuple[int, int | None]


def _mark(optimizer: Optimizer, target: Tensor) -> _Mark:
    """What changes when an optimizer moves a parameter: its version, or with torch's fused kernels that of its step."""
    step = optimizer.state.get(target, {}).get("step")
    return target._version, step._version if isinstance(step, Tensor) else step
