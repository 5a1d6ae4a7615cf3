"""Window: everything that belongs to the gradients of an optimizer between two of its steps.

Longer than 500 lines because what is known of gradients between two steps stands here, and nowhere else.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.decide import LossFacts
from halfpeak.core.dtypes import LOW, is_low
from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.core.torch_compat import host_values, untraced
from halfpeak.ops import foreach
from halfpeak.ops.accumulate import add_unscaled
from halfpeak.ops.foreach import are_none, can_stay, is_in_bucket
from halfpeak.ops.shards import has_shards, local_of
from halfpeak.ops.unsharded import UnshardedGrads, drop_unsharded_grads
from halfpeak.parts.grad_buffers import GradBufferPool
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.pairs import Pairs


class Window:
    """The gradients of one optimizer, from its last step to its next. They are in one of two states:

    ::

        true   unscaled, float32 where the weight has a master, the same tensor on both sides; anybody may read and edit them
        held   times one recorded scale, where autograd, DDP or FSDP2 has left them; nobody reads or writes them until they
               are true: those that a fused step will read, and those of passes that the ranks have not reduced (no_sync)

    A pass goes :meth:`ready`, :meth:`enter`, backward, :meth:`end`, or :meth:`undo` if it raised. At a scale of 1 autograd adds
    to what is there, as in plain torch. At another scale what is there is set apart, and the new gradients are added to it,
    unscaled, when the pass ends. Passes under ``no_sync`` add to the scaled sum, which a later pass reduces.

    Args:
        optimizer: stored as a weak reference.
        pairs: its masters.
        models: those whose gradients FSDP2 may keep.
        memory: for the float32 gradients of masters; None allocates new memory.
        looks_at_each_pass: whether a pass sets sums apart at a scale of 1, too, and looks at its own gradients.

    Attributes:
        reference: a weak reference to the optimizer.
        mains: what the optimizer steps, in the order of its groups, each once: masters, and parameters without one.
        weights: for each of ``mains`` the tensor whose gradient autograd computes: the weight, or the parameter itself.
        dtypes: of the true gradients of ``weights``.
        low: the weights with a master.
        masters: their masters.
        indices: the places of ``low`` in :attr:`~halfpeak.parts.pairs.Pairs.weights`.
        ids: of ``weights``.
        has_shards: whether a weight is a shard (``DTensor``).
        held: None while the gradients are true.
        losses: what the passes of each loss have found.
        is_closed: whether these gradients were left by :meth:`close`, and nobody has written them since.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pairs: Pairs,
        *,
        models: Sequence[nn.Module] = (),
        memory: GradBufferPool | None = None,
        looks_at_each_pass: bool = False,
    ) -> None:
        self.reference = weakref.ref(optimizer)
        self.memory, self.looks_at_each_pass = memory, looks_at_each_pass
        self._pairs, self._models = pairs, models
        self.mains: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.has_shards = False
        self.held: Held | None = None
        self.losses: dict[LossScaler, Noted] = {}
        self.is_closed = False
        # The gradients that both sides had when the last call ended, and their versions.
        self._shared: list[Tensor | None] = []
        self._versions: list[int | None] = []
        # Whether ``losses`` tells whether these gradients are finite.
        self._is_checked = True
        self._open: _Pass | None = None
        self.read()

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

    # The parameters.

    def is_current(self) -> bool:
        """Whether the groups hold the parameters that were read."""
        optimizer = self.reference()
        return optimizer is None or are_params_of(optimizer, self._members)

    def read(self) -> None:
        """Read the groups, which hold masters already. Gradients of parameters that join are true."""
        self.agree()
        optimizer, pairs = self.optimizer, self._pairs
        before = dict(zip(map(id, self.weights), self._shared, strict=True))
        self._members = params_of(optimizer)
        self.mains = list({id(main): main for main in self._members}.values())
        self.weights = list(map(pairs.weight_of, self.mains))
        self.dtypes = [pairs.grad_dtype_of(weight) for weight in self.weights]
        both = [(w, m) for w, m in zip(self.weights, self.mains, strict=True) if w is not m]
        self.low, self.masters = [w for w, _ in both], [m for _, m in both]
        self.indices = [pairs.index_of(weight) for weight in self.low]
        self.ids = frozenset(map(id, self.weights))
        self.has_shards = has_shards(self.weights)
        joined = [w.grad for w in self.weights if id(w) not in before and w.grad is not None]
        if joined:
            self._is_checked = False
            if self.held is not None:
                with torch.no_grad():
                    foreach.scale_(joined, self.held.scale)
        self._shared = [before.get(id(weight), weight.grad) for weight in self.weights]
        self._versions = self._versions_of(self._shared)
        if self.masters or self.has_shards:
            vars(optimizer).setdefault("zero_grad", _zero_grad_of_both(self, optimizer))

    def gradients(self) -> list[Tensor]:
        """The gradients that a step would read."""
        return [grad for grad in map(_GRAD, self.weights) if grad is not None]

    def is_empty(self) -> bool:
        """Whether there are no gradients."""
        return are_none(list(map(_GRAD, self.weights)))

    # Both sides.

    def agree(self) -> None:
        """Give both sides the same gradient, and take in what user code has done to gradients. Does not wait.

        A gradient that is new on one side counts; one that is gone on one side was dropped. Zeros end the window, as None
        does: what its passes have found is forgotten.

        Raises:
            OrderError: held gradients were written. (Then, and only then, this waits for the device.)
        """
        grads = list(map(_GRAD, self.weights))
        is_same = all(map(is_, grads, self._shared))
        if self.masters and is_same:
            is_same = all(map(is_, map(_GRAD, self.mains), self._shared))
        if is_same and self._versions_of(grads) == self._versions:
            return
        self.is_closed = False
        if not is_same:
            self._join()
        self._require_unwritten()
        self._share()
        if are_none(self._shared):
            # FSDP2 may hold gradients elsewhere that it has not reduced.
            if not self.has_shards or self.held is None or self.held.reduced:
                self._end_without_step()
        elif self.held is None:
            self._is_checked = False
            self._forgive_zeros()

    def _join(self) -> None:
        """Where the sides differ, a gradient that is neither None nor the one last shared is new; else it was dropped."""
        for i, (weight, main, known) in enumerate(zip(self.weights, self.mains, self._shared, strict=True)):
            ours, theirs = weight.grad, main.grad
            if ours is known and theirs is known:
                continue
            if _is_in_new_bucket(ours, known):
                if weight is main or self.held is not None:
                    # The same values in other memory.
                    self._shared[i] = ours
                    [self._versions[i]] = self._versions_of([ours])
                    set_gradients((weight, main), repeat(ours))
                    continue
                ours = known  # DDP has rounded it; the master still has the original
            new = next((grad for grad in (ours, theirs) if grad is not None and grad is not known), None)
            if new is None and (ours is not known or theirs is not known):
                set_gradients((weight, main), repeat(None))
            elif new is None:
                set_gradients((weight, main), repeat(known))
            elif self.held is not None:
                raise OrderError(_WRITTEN)
            else:
                dtype = self.dtypes[i] if is_low(new) else new.dtype
                set_gradients((weight, main), repeat(new.to(dtype)))

    def _require_unwritten(self) -> None:
        if self.held is None:
            return
        grads, known = self.gradients(), dict(zip(map(id, self._shared), self._versions, strict=True))
        if [known.get(id(grad)) for grad in grads] == self._versions_of(grads):
            return
        if bool(foreach.global_norm(local_of(grads)) == 0):
            self.drop()
            return
        raise OrderError(_WRITTEN)

    def _forgive_zeros(self) -> None:
        """Forget what passes have found in gradients that are all zero now."""
        mine = {loss: noted for loss, noted in self.losses.items() if not noted.until_step}
        known = host_values(*(noted.found for noted in mine.values()))
        if not mine or (known is not None and not any(known)):
            return
        # Without a collective: other ranks may not have edited their shards.
        remain = foreach.global_norm(local_of(self.gradients())) != 0
        for loss, noted in mine.items():
            self.losses[loss] = noted._replace(found=noted.found * remain.to(noted.found.device))

    def _share(self) -> None:
        """Give each master the gradient of its weight, and remember what both have now."""
        grads = list(map(_GRAD, self.weights))
        if self.masters:
            try:
                set_gradients(self.mains, grads)
            except RuntimeError:
                self._pairs.refuse_moved(self.indices)
                raise
        self._shared, self._versions = grads, self._versions_of(grads)

    def _versions_of(self, grads: Iterable[Tensor | None]) -> list[int | None]:
        if self.has_shards:
            # FSDP2 and user code may write the local tensor, which does not count in the version of the DTensor.
            grads = [getattr(grad, "_local_tensor", grad) for grad in grads]
        return [None if grad is None else grad._version for grad in grads]

    # A pass.

    def ready(self, scale: Tensor, *, is_guest: bool) -> None:
        """Before a pass, after :meth:`agree`: what else may refuse it. Gradients held for a fused step become true.

        Args:
            scale: the factor of the loss.  # f32[]
            is_guest: whether the loss belongs to another engine.

        Raises:
            OrderError: FSDP2 holds gradients under another scale.
        """
        if self.held is not None and self.held.reduced:
            self.unscale()
        if self.held is not None and self.has_shards and self.held.scale is not scale and not is_guest:
            raise OrderError(
                "FSDP2 has gradients of this window under another loss scale, which no pass has reduced; use one loss_id and "
                "one scale in all backward passes of a window"
            )

    @torch.no_grad()
    def enter(
        self,
        scale: Tensor,
        known: set[int],
        *,
        is_unit: bool,
        is_local: bool,
        is_wrapped: bool,
        keeps: bool,
        is_guest: bool,
    ) -> None:
        """Begin a pass: what autograd, DDP or FSDP2 will add to is times ``scale``.

        ::

            keeps               .grad -> set apart, and put back afterwards
            true, scale 1       nothing; low gradients are set apart if DDP will write them in their dtype
            true, reducing      .grad -> set apart
            true, local         .grad *= scale, in float32
            held, local         .grad *= scale / held.scale, in float32
            held, reducing      the same, then in the dtype of the weight, which DDP reduces

        Args:
            scale: the factor of the loss.  # f32[]
            known: ids of parameters that belong to another window of this pass; those of this one are added.
            is_unit: whether the scale is always 1.
            is_local: whether the ranks do not reduce the gradients of this pass.
            is_wrapped: whether DDP or FSDP2 takes part in passes.
            keeps: the optimizer keeps the gradients it has, although the loss depends on its parameters.
            is_guest: whether the loss belongs to another engine.
        """
        chosen = range(len(self.weights))
        if not known.isdisjoint(self.ids):  # a parameter of several optimizers, or engines, is unscaled once
            chosen = [i for i in chosen if id(self.weights[i]) not in known]
        known |= self.ids
        weights = [self.weights[i] for i in chosen]
        dtypes = [self.dtypes[i] for i in chosen]
        grads = list(map(_GRAD, weights))
        earlier: list[Tensor | None] = [None] * len(weights)
        unsharded = (
            UnshardedGrads(self._models, self.ids) if self.has_shards and (keeps or is_guest) else None
        )
        is_summed = self.held is not None or is_local  # the pass adds to the scaled sum
        if are_none(grads):
            pass
        elif keeps or (unsharded is not None and self.held is not None):
            earlier = grads
        elif is_summed:
            self._rescale(weights, dtypes, scale, is_unit=is_unit, is_local=is_local)
        elif not is_unit or self.looks_at_each_pass:
            earlier = grads
        elif is_wrapped:
            earlier = [
                grad if weight.dtype in LOW else None for weight, grad in zip(weights, grads, strict=True)
            ]
        if not are_none(earlier):
            apart = [i for i, grad in enumerate(earlier) if grad is not None]
            set_gradients((weights[i] for i in apart), repeat(None))
            for i in apart:
                # DDP keeps buckets of the parameters' own dtypes, and writes them again.
                grad = earlier[i]
                if grad is not None and grad.dtype is weights[i].dtype and is_in_bucket(grad):
                    earlier[i] = grad.clone()
        begun = list(map(_GRAD, weights))
        self._open = _Pass(
            weights, [self.mains[i] for i in chosen], dtypes, scale, is_unit, keeps, earlier, begun,
            self._versions_of(begun), unsharded,
        )  # fmt: skip

    def _rescale(
        self,
        weights: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        scale: Tensor,
        *,
        is_unit: bool,
        is_local: bool,
    ) -> None:
        """Multiply the gradients to ``scale``, in the dtype in which they are added to or reduced."""
        held = self.held
        moves = not is_unit if held is None else held.scale is not scale
        for weight, dtype in zip(weights, dtypes, strict=True):
            if weight.grad is not None and (moves or is_local):
                grad = weight.grad.to(dtype)
                # The gradients in a bucket of DDP, also those of other windows, have one version.
                weight.grad = grad.clone() if is_in_bucket(grad) else grad
        if moves:
            grads = list({id(w.grad): w.grad for w in weights if w.grad is not None}.values())
            foreach.scale_(grads, scale if held is None else scale / held.scale)
        for weight in weights if not is_local else ():
            if weight.grad is not None:
                weight.grad = weight.grad.to(weight.dtype)

    @torch.no_grad()
    def end(
        self, loss: LossScaler, *, is_local: bool, holds: bool, nonfinite: Tensor | None = None
    ) -> dict[LossScaler, Tensor]:
        """End a pass: its gradients become true, or stay held.

        Args:
            loss: of the pass.
            is_local: as in :meth:`enter`.
            holds: a fused step reads the gradients where they are, if this is the only pass of the window.
            nonfinite: ``NONFINITE_LOSS`` if the loss itself is not finite, else 0; None if it is known to be.  # f32[]

        Returns:
            What was found, by loss, in the passes that have become true now.
        """
        one, self._open = self._open, None
        assert one is not None
        grads = list(map(_GRAD, one.weights))
        if one.unsharded is not None:
            is_new = one.unsharded.have_new() or (self.held is not None and not are_none(grads))
            one.unsharded.put_back()
            if is_new and not one.keeps:
                set_gradients(one.weights, one.earlier)
                raise OrderError(
                    "a backward pass whose gradients are not reduced over the ranks has reached a network of another engine; "
                    "freeze it for this loss: network.requires_grad_(False), or end its window first"
                )
        if one.keeps or (one.unsharded is not None and self.held is not None):
            set_gradients(one.weights, one.earlier)
            self._share()
            return {}
        is_elsewhere = is_local and self.has_shards and one.unsharded is None
        if all(map(is_, grads, one.begun)) and self._versions_of(grads) == one.versions and not is_elsewhere:
            self._put_back(one)  # the loss depends on other parameters
            return {}
        losses = {loss: one.scale} if self.held is None else {loss: one.scale, **self.held.losses}
        known = {} if nonfinite is None else {loss: nonfinite.to(one.scale.device)}
        if not (is_local or (holds and self._can_hold(one))):
            return self._make_true(one, losses, known)
        for each, found in known.items():
            self.note(each, found, one.scale)
        self._hold(one.scale, losses, reduced=not is_local)
        return {}

    def _can_hold(self, one: _Pass) -> bool:
        """Whether the first pass of a window has left gradients that a fused step can read, and nobody else yet."""
        if self.held is not None or not are_none([*one.earlier, *one.begun]):
            return False
        grads = list(map(_GRAD, one.weights))
        is_true = one.is_unit and all(
            grad is None or grad.dtype is dtype for grad, dtype in zip(grads, one.dtypes, strict=True)
        )
        return not is_true and can_stay([grad for grad in grads if grad is not None])

    def written(self) -> list[Tensor]:
        """The weights whose gradients the open pass has written so far."""
        one = self._open
        if one is None:
            return []
        now = self._versions_of(one.begun)
        return [
            weight
            for weight, old, version, before in zip(one.weights, one.begun, now, one.versions, strict=True)
            if weight.grad is not old or version != before
        ]

    @torch.no_grad()
    def undo(self) -> bool:
        """A pass that raised has not happened. Returns True if it has added to gradients that were there: they are lost.

        Under FSDP2 what a pass has added inside of it cannot be told from what was there.
        """
        one = self._open
        if one is None:
            return False
        grads = list(map(_GRAD, one.weights))
        if one.unsharded is not None:
            one.unsharded.put_back()
        elif self.has_shards:
            return True
        if one.unsharded is not None or one.keeps:
            self._open = None
            set_gradients(one.weights, one.earlier)
            self._share()
            return False
        for grad, old, version in zip(grads, one.begun, one.versions, strict=True):
            if old is not None and (grad is not old or old._version != version):
                return True
        self._open = None
        set_gradients(one.weights, one.begun)
        self._put_back(one)
        return False

    def _put_back(self, one: _Pass) -> None:
        """After a pass that has written nothing here."""
        for weight, old in zip(one.weights, one.earlier, strict=True):
            if old is not None:
                weight.grad = old
        if self.held is not None:
            self._hold(one.scale, self.held.losses, reduced=False)
            return
        if not one.is_unit and not are_none(one.begun):
            scaled = {id(grad): grad for grad in one.begun if grad is not None}
            foreach.scale_(list(scaled.values()), one.scale.reciprocal())
        self._share()

    def _hold(self, scale: Tensor, losses: dict[LossScaler, Tensor], *, reduced: bool) -> None:
        self._share()
        self.held = Held(scale, losses, reduced)
        self._is_checked = False

    def _make_true(
        self, one: _Pass, losses: Mapping[LossScaler, Tensor], known: Mapping[LossScaler, Tensor]
    ) -> dict[LossScaler, Tensor]:
        """Unscale the gradients, add them to the sums set apart, and note for the losses what was found.

        Args:
            one: the pass.
            losses: whose gradients become true, each with the scale of its first pass.
            known: of a loss that is itself not finite, which explains what is found: not 0.
        """
        fresh = list(map(_GRAD, one.weights))
        places: Sequence[int] = range(len(fresh))
        if one.is_unit and not self.looks_at_each_pass:
            places = [
                i
                for i, (old, grad, dtype) in enumerate(zip(one.earlier, fresh, one.dtypes, strict=True))
                if old is not None or (grad is not None and grad.dtype is not dtype)
            ]
        is_whole = len(fresh) == len(self.weights) and len(places) >= sum(grad is not None for grad in fresh)
        found = torch.zeros_like(one.scale)
        if places:
            self._add(one, fresh, places, found)
        # With earlier sums only if these were looked at, too; in low precision a sum of finite numbers may not be finite.
        adds_finite = self._is_checked and LOW.isdisjoint(one.dtypes)
        self._is_checked = is_whole and (adds_finite or are_none(one.earlier))
        # A sum that was not finite before these passes says nothing of their losses.
        for loss, noted in self.losses.items() if self.held is not None else ():
            if loss not in known:
                found = found * (noted.found == 0).to(found.device)
        self.held = None
        self._share()
        for loss, first in losses.items():
            told = known.get(loss)
            self.note(loss, found if told is None else torch.where(told != 0, told, found), first)
        return dict.fromkeys(losses, found)

    def _add(self, one: _Pass, fresh: list[Any], places: Sequence[int], found: Tensor) -> None:
        memory = self.memory
        totals = add_unscaled(
            [one.earlier[i] for i in places],
            [fresh[i] for i in places],
            [one.dtypes[i] for i in places],
            _ONE if one.is_unit else one.scale.reciprocal(),
            found,
            memory=None if memory is None else lambda some: memory.take([one.mains[places[i]] for i in some]),
        )
        set_gradients((one.weights[i] for i in places), totals)

    # Between passes and a step.

    @torch.no_grad()
    def unscale(self, advice: str = "") -> dict[LossScaler, Tensor]:
        """Make the gradients true, after :meth:`agree`. Returns what was found, by loss, in the passes that become true now.

        Args:
            advice: what else to write in the place of ``no_sync``, as the end of the message.

        Raises:
            OrderError: the ranks have not reduced them yet.
        """
        held = self.held
        if held is None:
            return {}
        self.require_reduced(advice)
        nothing: list[Any] = [None] * len(self.weights)
        one = _Pass(
            self.weights, self.mains, self.dtypes, held.scale, False, False, nothing, nothing, [], None
        )
        known = {loss: self.losses[loss].found for loss in held.losses if loss in self.losses}
        return self._make_true(one, held.losses, known)

    def require_reduced(self, advice: str = "") -> None:
        """Refuse the use of gradients that each rank has for itself.

        Raises:
            OrderError: the last backward pass did not reduce them over the ranks.
        """
        if self.held is not None and not self.held.reduced:
            raise OrderError(
                "the last backward pass of the window ran under no_sync, or with delay_unscale, so its gradients are not "
                f"reduced over the ranks; run the last pass outside of no_sync{advice}"
            )

    def hold(self, losses: dict[LossScaler, Tensor], scale: Tensor, *, reduced: bool) -> None:
        """Take gradients that are there, and not from a pass, as held ones; see :class:`Held`."""
        self.agree()
        self._hold(scale, losses, reduced=reduced)

    def found_inf(self, like: Tensor, *, trusts_versions: bool = True) -> Tensor:
        """1 if a gradient is not finite, or a pass of this window has found one. Without gradients 0. Does not wait.

        What a pass has found holds until the window ends, as in ``torch.amp``: clamping an infinite gradient does not make
        it a gradient.

        Args:
            like: a scalar on the device of the result.
            trusts_versions: False looks at gradients again that seem unwritten: collectives of c10d and writes through
                ``.data`` change no version counter.
        """  # f32[]
        found, grads = torch.zeros_like(like), self.gradients()
        if not grads:
            return found
        for noted in self.losses.values():
            known = host_values(noted.found)
            if known is None or known[0]:
                found = torch.maximum(found, (noted.found != 0).to(found))
        if not (self._is_checked and trusts_versions):
            foreach.check_(grads, found)  # with shards for all their ranks
        return found

    def note(self, loss: LossScaler, found: Tensor, first: Tensor) -> None:
        """Note what a pass has found in these gradients.

        Args:
            loss: of the pass.
            found: 0, 1 if a gradient is not finite, 0.5 if the loss itself is not.  # f32[]
            first: the factor of the loss; the first one stays.  # f32[]
        """
        self.is_closed = False
        known = self.losses.get(loss)
        if known is not None:
            found, first = torch.maximum(known.found, found.to(known.found.device)), known.first
        self.losses[loss] = Noted(found, first, until_step=known is not None and known.until_step)

    def note_until_step(self, loss: LossScaler, found: Tensor) -> None:
        """Note what an API has decided of a pass: the step skips if it has found an overflow; the loss scale has moved.

        It holds until the step, also when the gradients are zeroed, as in apex.
        """
        self.note(loss, found, found)
        noted = self.losses[loss]
        self.losses[loss] = Noted(
            noted.found, torch.full_like(noted.found, torch.inf), False, until_step=True
        )

    def uncount(self, losses: Iterable[LossScaler]) -> None:
        """A step of other windows has moved the scales of these losses: their clean passes count no second time."""
        for loss in losses:
            if loss in self.losses:
                self.losses[loss] = self.losses[loss]._replace(counts=False)

    def close(self) -> None:
        """Forget what was noted. The gradients stay, for a user who drops them: the step of apex and of plain torch."""
        self.losses, self._is_checked, self.is_closed = {}, False, True

    def drop(self) -> None:
        """No gradients, on both sides, and nothing noted of them: after a step, a skip, or an exception."""
        set_gradients(self.weights, repeat(None))
        set_gradients(self.masters, repeat(None))
        if self.has_shards and (self._open is not None or not (self.held is None or self.held.reduced)):
            for model in self._models:
                drop_unsharded_grads(model)
        self._shared, self._versions = [None] * len(self.weights), [None] * len(self.weights)
        self._open = None
        self._forget()

    def drop_held(self) -> None:
        """Drop the held gradients of this optimizer alone, which FSDP2 has because the ranks have not reduced them."""
        UnshardedGrads(self._models, self.ids)  # takes them out
        self._end_without_step()

    def _end_without_step(self) -> None:
        kept = {loss: noted for loss, noted in self.losses.items() if noted.until_step}
        self._forget()
        self.losses = kept

    def _forget(self) -> None:
        self.held, self.losses, self._is_checked, self.is_closed = None, {}, True, False

    def release(self) -> None:
        """Give the weights gradients of their own dtype, and the optimizer its own ``zero_grad``."""
        if self.held is not None:
            self.drop()
        optimizer = self.reference()
        if optimizer is not None:
            vars(optimizer).pop("zero_grad", None)
        # ``grad_dtype`` stays None, any dtype: one that is set stays, also where the model becomes float32 again.
        for weight in self.weights:
            if weight.grad is not None:
                weight.grad = weight.grad.to(weight.dtype)


class Noted(NamedTuple):
    """What the passes of one loss have found in a window.

    Attributes:
        found: 0, 1 if a gradient was not finite, 0.5 if the loss itself was not.  # f32[]
        first: the scale of the first of these passes.                             # f32[]
        counts: whether a clean window counts for the loss: its scale has not moved since the passes.
        until_step: whether it holds until the step, also when the gradients are zeroed.
    """

    found: Tensor
    first: Tensor
    counts: bool = True
    until_step: bool = False


class Held(NamedTuple):
    """Gradients that are still scaled.

    Attributes:
        scale: their factor.  # f32[]
        losses: whose passes they are, each with its scale in the first; what they have found is noted when they become true.
        reduced: False if the ranks have not reduced them (``no_sync``); True if they are left for a fused step to read.
    """

    scale: Tensor
    losses: dict[LossScaler, Tensor]
    reduced: bool


class _Pass(NamedTuple):
    """An open pass. Lists are those of the weights that no other window of the pass has.

    Attributes:
        earlier: sums that are set apart.
        begun: ``.grad`` as autograd finds it.
        versions: of ``begun``.
        unsharded: what FSDP2 had, taken out of it because the pass is not theirs.
    """

    weights: list[Tensor]
    mains: list[Tensor]
    dtypes: list[torch.dtype]
    scale: Tensor
    is_unit: bool
    keeps: bool
    earlier: list[Tensor | None]
    begun: list[Tensor | None]
    versions: list[int | None]
    unsharded: UnshardedGrads | None


def loss_facts(
    windows: Iterable[Window], found_inf: Tensor, scalers: Iterable[LossScaler]
) -> dict[LossScaler, LossFacts]:
    """What the passes of some windows have found, each loss once.

    Args:
        windows: to be stepped together.
        found_inf: of their gradients, which is also what is found of gradients that are still held.  # f32[]
        scalers: the losses of whoever steps.
    """
    owned, facts = set(scalers), dict[LossScaler, LossFacts]()
    for window in windows:
        noted = dict(window.losses)
        for loss, first in () if window.held is None else window.held.losses.items():
            known = noted.get(loss)
            is_told = known is not None and (number := host_values(known.found)) is not None and not number[0]
            if known is None or is_told:
                noted[loss] = Noted(found_inf, first)
            else:
                noted[loss] = Noted(torch.where(known.found != 0, known.found, found_inf), first)
        for loss, one in noted.items():
            old = facts.get(loss)
            is_owned = loss in owned
            found, first, counts = one.found.to(found_inf.device), one.first, one.counts and is_owned
            if old is not None:
                found = torch.maximum(old.found, found)
                first = (
                    old.first
                    if old.first is one.first
                    else torch.maximum(old.first, one.first.to(old.first.device))
                )
                counts = counts or old.counts
            facts[loss] = LossFacts(loss.config, loss.state, first, found, is_owned, counts)
    return facts


def set_gradients(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set ``.grad`` of each parameter. The loop runs in C."""
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)


def _is_in_new_bucket(grad: Tensor | None, known: Tensor | None) -> bool:
    """Whether DDP has made new buckets, once in a run, and copied a gradient to them. Waits for the device."""
    if grad is None or known is None or grad is known or not grad._is_view() or grad.shape != known.shape:
        return False
    rounded = known.to(grad.dtype)
    return bool((grad.eq(rounded) | (grad.isnan() & rounded.isnan())).all())


def _zero_grad_of_both(window: Window, optimizer: Optimizer) -> Callable[..., None]:
    """``optimizer.zero_grad`` for masters and their weights, and for shards.

    A backward pass that is no scaled one, such as one for the gradient of an input, leaves gradients on the weights alone,
    and the optimizer's own method would leave them there for the next step; as it leaves those that FSDP2 has not reduced.
    """
    # Weak references: the optimizer holds the result.
    to_window, to_optimizer, plain = weakref.ref(window), weakref.ref(optimizer), type(optimizer).zero_grad

    @untraced
    @wraps(plain)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        window, optimizer = to_window(), to_optimizer()
        if window is None or optimizer is None:
            return
        if window.held is None:
            window.agree()
        elif window.has_shards and not window.held.reduced:
            window.drop_held()
        else:  # also what another backward pass has added to them
            set_gradients(window.weights, repeat(None))
        plain(optimizer, *args, **kwargs)
        window.agree()

    return zero_grad


_WRITTEN: Final = (
    "gradients were changed while they were still scaled: an optimizer of halfpeak.fused reads them where autograd has left "
    "them, and passes under no_sync leave them for a later pass to reduce; write engine.unscale() before you read or change "
    "gradients, or let the step clip: halfpeak.prepare(..., clip=1.0). To drop them, write zero_grad() or engine.abort()"
)
_ONE: Final = torch.ones((), dtype=torch.float32, device="cpu")
_GRAD: Final = attrgetter("grad")
