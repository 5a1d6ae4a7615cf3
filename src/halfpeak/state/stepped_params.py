"""SteppedParams: the parameters of one optimizer, and what backward passes have noted of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter, is_
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.core.torch_compat import host_values
from halfpeak.ops import foreach
from halfpeak.ops.shards import has_shards
from halfpeak.state.loss_scaler import LossScaler


class SteppedParams:
    """The parameters of one optimizer, in the order of its groups, and what passes have noted of their gradients.

    Attributes:
        reference: a weak reference to the optimizer.
        mains: what it steps: masters, and parameters without one; each once.
        weights: for each of ``mains`` the tensor whose gradient autograd computes: the weight, or the parameter itself.
        dtypes: of the unscaled gradients of ``weights``.
        low: the weights with a master.
        masters: their masters.
        indices: their places in :attr:`~halfpeak.state.pairs.Pairs.weights`.
        ids: of ``weights``.
        widens: whether a gradient is wider than its weight.
        has_shards: whether a weight is a shard (``DTensor``).
        losses: what the passes since its last step have found here, by loss scaler.
        no_sync_losses: the losses whose passes are not reduced over the ranks yet, each with the scale of its first such pass.
        checked: the gradients whose ``found_inf`` is known; None if it must be computed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.reference = weakref.ref(optimizer)
        self.mains: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.low: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.indices: list[int] = []
        self.ids: frozenset[int] = frozenset()
        self.widens = self.has_shards = False
        self.losses: dict[LossScaler, LossFound] = {}
        self.no_sync_losses: dict[LossScaler, Tensor] = {}
        self.checked: CheckedGrads | None = None
        self._members: list[Tensor] = []

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            OrderError: it does not exist any more.
        """
        optimizer = self.reference()
        if optimizer is None:
            raise OrderError("the optimizer of this engine does not exist any more; keep a reference to it")
        return optimizer

    def is_current(self) -> bool:
        """Whether the groups hold the parameters that were read."""
        optimizer = self.reference()
        return optimizer is None or are_params_of(optimizer, self._members)

    def read(
        self, weight_of: Callable[[Tensor], Tensor], index: Mapping[int, int], widened: Container[int]
    ) -> None:
        """Read the groups, which hold masters already.

        Args:
            weight_of: the weight of a master; any other tensor is its own weight.
            index: the places of weights with a master, by ``id``.
            widened: the weights with float32 gradients, by ``id``.
        """
        self._members = params_of(self.optimizer)
        self.mains = list({id(main): main for main in self._members}.values())
        self.weights = list(map(weight_of, self.mains))
        self.dtypes = [torch.float32 if id(w) in widened else w.dtype for w in self.weights]
        own = [(w, m) for w, m in zip(self.weights, self.mains, strict=True) if w is not m]
        self.low, self.masters = [w for w, _ in own], [m for _, m in own]
        self.indices = [index[id(weight)] for weight in self.low]
        self.ids = frozenset(map(id, self.weights))
        self.widens = any(id(weight) in widened for weight in self.weights)
        self.has_shards = has_shards(self.weights)

    def gradients(self) -> list[Tensor]:
        """The gradients that a step would read."""
        return [grad for grad in map(_GRAD, self.weights) if grad is not None]

    def note(self, scaler: LossScaler, scale: Tensor, found_inf: Tensor) -> None:
        """Note what a pass of a loss has found in these gradients.

        Args:
            scaler: of the loss.
            scale: the factor of the loss.  # f32[]
            found_inf: not 0 if one is not finite.  # f32[]
        """
        known = self.losses.get(scaler)
        if known is not None:
            found_inf = torch.maximum(known.found_inf, found_inf.to(known.found_inf.device))
        self.losses[scaler] = LossFound(found_inf, scale if known is None else known.scale)

    def note_reduced(self, found_inf: Tensor) -> None:
        """Note for the losses of passes under ``no_sync`` what the pass has found that reduced their gradients.

        What a rank finds in such a pass itself the other ranks do not know, and loss scales must move alike on all ranks.
        """
        for scaler, scale in self.no_sync_losses.items():
            self.note(scaler, scale, found_inf)
        self.no_sync_losses = {}

    def recheck(self) -> None:
        """Before a pass: note what user code has done to the gradients since they were checked. Does not wait.

        Without gradients the window has ended. Edited ones that are finite now take back what passes have found.
        """
        grads = self.gradients()
        if not grads:
            self.forget()
        elif self.checked is None or not self.checked.matches(grads):
            found = torch.zeros((), dtype=torch.float32, device=grads[0].device)
            foreach.check_(grads, found)
            self.checked = CheckedGrads.of(grads, found)
            for scaler, known in self.losses.items():
                found_inf = known.found_inf * found.to(known.found_inf.device)
                self.losses[scaler] = known._replace(found_inf=found_inf)

    def found_inf(self, like: Tensor) -> Tensor:
        """1 if a gradient is not finite, or was when a pass has checked it. Without gradients 0. Does not wait.

        A pass's own check holds until the window ends, as in ``torch.amp``: clamping an infinite gradient does not make it
        a gradient.

        Args:
            like: a scalar on the device of the result.
        """  # f32[]
        found, grads = torch.zeros_like(like), self.gradients()
        if not grads:
            return found
        if self.checked is not None and self.checked.matches(grads):
            found = self.checked.found_inf.to(found.device)
        else:
            foreach.check_(grads, found)
        return self.with_noted(found)

    def with_noted(self, found_inf: Tensor) -> Tensor:
        """``found_inf``, and 1 if a pass since the last step has found an overflow, or a loss that is itself not finite."""
        for noted in self.losses.values():
            known = host_values(noted.found_inf)
            if known is None or known[0]:
                found_inf = torch.maximum(found_inf, noted.found_inf.to(found_inf.device).clamp(max=1))
        return found_inf

    def forget(self) -> None:
        """Forget what passes have noted, because the gradients are gone."""
        self.losses, self.no_sync_losses, self.checked = {}, {}, None


class LossFound(NamedTuple):
    """What the passes of one loss found in the gradients of one optimizer.

    Attributes:
        found_inf: not 0 if one of them was not finite.  # f32[]
        scale: of the first of these passes.  # f32[]
    """

    found_inf: Tensor
    scale: Tensor


class CheckedGrads(NamedTuple):
    """Gradients with a known ``found_inf``: valid while they are the same tensors at the same versions.

    Attributes:
        grads: of one optimizer.
        versions: their version counters.
        found_inf: 1 if one of them is not finite.  # f32[]
    """

    grads: list[Tensor]
    versions: list[int]
    found_inf: Tensor

    @classmethod
    def of(cls, grads: list[Tensor], found_inf: Tensor) -> CheckedGrads:
        """``grads`` as they are now."""
        return cls(grads, list(map(_VERSION, grads)), found_inf)

    def matches(self, grads: Sequence[Tensor]) -> bool:
        """Whether ``grads`` are these gradients, and not written since."""
        return (
            len(grads) == len(self.grads)
            and all(map(is_, grads, self.grads))
            and list(map(_VERSION, grads)) == self.versions
        )


class LeftScaled(NamedTuple):
    """The gradients of a window's only pass, left scaled where autograd put them, for a fused step to read.

    Attributes:
        scaler: of the loss.
        scale: the factor of the loss.  # f32[]
        grads: of the weights of the engine's only optimizer, in their order.
        versions: of those that are not None.
    """

    scaler: LossScaler
    scale: Tensor
    grads: list[Tensor | None]
    versions: list[int]

    @classmethod
    def of(cls, scaler: LossScaler, scale: Tensor, grads: list[Tensor | None]) -> LeftScaled:
        """``grads`` as they are now."""
        return cls(scaler, scale, grads, [grad._version for grad in grads if grad is not None])

    def require_unwritten(self, grads: Sequence[Tensor | None]) -> None:
        """Refuse gradients that were written while they are scaled; dropped ones are none.

        Args:
            grads: of all weights. Those of a group added since the pass come last, and are unscaled.

        Raises:
            OrderError: a gradient was written or replaced since the pass.
        """
        grads = grads[: len(self.grads)]
        if all(map(is_, grads, self.grads)) and [g._version for g in grads if g is not None] == self.versions:
            return
        # DDP makes new buckets after the first pass, and copies gradients that are views of the old ones into them.
        grads = [old if _is_copy(new, old) else new for new, old in zip(grads, self.grads, strict=True)]
        versions = dict(zip((id(g) for g in self.grads if g is not None), self.versions, strict=True))
        if any(grad is not None and versions.get(id(grad)) != grad._version for grad in grads):
            raise OrderError(
                "gradients were changed while they were still scaled: an optimizer of halfpeak.fused reads them where "
                "autograd has left them; write engine.unscale() before you read or change gradients, or let the step clip: "
                "halfpeak.prepare(..., clip=1.0). To drop them, write zero_grad() or engine.abort()"
            )


def _is_copy(new: Tensor | None, old: Tensor | None) -> bool:
    """Whether ``new`` has the values of ``old``, a view of other memory. Waits for the device."""
    if new is None or old is None or not old._is_view() or new.shape != old.shape:
        return False
    return new is not old and bool((new.eq(old) | (new.isnan() & old.isnan())).all())


_GRAD: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")
