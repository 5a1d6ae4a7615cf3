"""One scaled backward pass: gradients are set aside, come in scaled, are unscaled in float32 and added."""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import repeat
from operator import attrgetter
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import graph_leaves, outside_inference_mode, untraced
from halfpeak.ops import foreach
from halfpeak.ops.accumulate import add_unscaled
from halfpeak.ops.foreach import are_dense, are_none, is_in_bucket
from halfpeak.state.grad_buffers import GradBufferPool
from halfpeak.state.loss_scaler import LossScaler, is_unit, nonfinite_loss, scale_loss
from halfpeak.state.pairs import Pairs, live_pairs, set_gradients
from halfpeak.state.stepped_params import CheckedGrads, LeftScaled, SteppedParams
from halfpeak.state.tracing import watch_compiler
from halfpeak.state.unsharded import UnshardedGrads, drop_unsharded_grads


class ScaledPass:
    """A context around a backward pass: the one place where gradients are scaled.

    ::

        enter   agree; .grad -> earlier. Where this pass reduces over the ranks what earlier ones did not (no_sync):
                .grad = earlier * scale in the weight's dtype, so that the sum is reduced
        body    pass.loss.backward(): autograd writes the gradients of loss * scale to .grad
        exit    .grad = earlier + .grad / scale in float32, shared by weight and master; found_inf of each optimizer
        raise   .grad = earlier: the pass has not happened. Under FSDP2, all gradients are dropped

    A loss may reach parameters of every engine of this thread (a generator's loss goes through the discriminator), and
    leaves that nobody prepared (weights of a criterion, inputs). All of them get unscaled gradients.

    Args:
        pairs: of the engine of the loss.
        loss: any shape.
        scaler: its scale multiplies the loss.
        keep: optimizers whose parameters keep the gradients they have, although the loss depends on them.
        leave: leave the gradients scaled for a fused step to read, if this is the window's first pass; see
            :class:`~halfpeak.state.pairs.LeftScaled`.
        notes_nonfinite_loss: note a loss that is itself not finite: then no lower scale helps.
        memory: for the float32 gradients of masters; None allocates new memory.

    Attributes:
        loss: in the body, the scaled loss, float32 or wider.
        found: after the pass, ``found_inf`` of the new gradients of each optimizer that got some.

    Raises:
        OrderError: another scaled pass of this thread is open; gradients were written while they were scaled; or FSDP2
            holds gradients of another scale, or of another engine.
    """

    loss: Tensor

    def __init__(
        self,
        pairs: Pairs,
        loss: Tensor,
        scaler: LossScaler,
        *,
        keep: Collection[SteppedParams] = (),
        leave: bool = False,
        notes_nonfinite_loss: bool = False,
        memory: GradBufferPool | None = None,
    ) -> None:
        self.found: dict[SteppedParams, Tensor] = {}
        self._pairs, self._given, self._scaler, self._scale = pairs, loss, scaler, scaler.state.scale
        self._keep, self._leave, self._memory = keep, leave, memory
        self._notes_nonfinite_loss, self._unit = notes_nonfinite_loss, is_unit(scaler)
        self._parts: list[_Part] = []
        self._leaves: list[Tensor] = []
        self._earlier: list[Tensor | None] = []

    @untraced
    def __enter__(self) -> Self:
        if _OPEN.is_open:
            raise OrderError(
                "a scaled backward pass began inside another one of this thread, which would unscale its gradients twice; end "
                "one engine.backward(loss), or one `with amp.scale_loss(...)` block, before the next begins"
            )
        self._pairs.thread = threading.get_ident()
        watch_compiler()
        try:
            self._set_aside()
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
        self._parts = [part for part in self._parts if part.pairs.thread == here]
        if error is None:
            try:
                self._add()
            except BaseException:
                self._undo()
                raise
        else:
            self._undo()
            if any(params.has_shards for params in self._pairs.optimizers):
                # What this pass has added inside FSDP2 cannot be told from what was there.
                self._pairs.drop_gradients()
                for model in self._pairs.reduces:
                    drop_unsharded_grads(model)

    def _set_aside(self) -> None:
        own = self._pairs
        if own.unsharded_scale is not None and own.unsharded_scale is not self._scale:
            raise OrderError(
                "FSDP2 has gradients of this window under another loss scale, which no pass has reduced; use one loss_id and "
                "one scale in all backward passes of a window"
            )
        known: set[int] = set()
        for pairs in [own, *(other for other in live_pairs() if other is not own)]:
            # Another engine's masters follow before its own passes; one whose model was moved must not end this one's.
            pairs.agree(to_weights=False, to_masters=pairs is own)
            try:
                unscale_left(pairs)
            except OrderError:
                if pairs is own:
                    raise
                continue  # the other engine's own next call says so, if anybody still trains with it
            local = pairs.local_ids()
            for params in sorted(pairs.optimizers, key=self._keep.__contains__):
                part = _Part(pairs, params, self._scale, local, known)
                if params.has_shards and (pairs is not own or params in self._keep):
                    part.unsharded = UnshardedGrads(pairs.reduces, params.ids)
                self._parts.append(part)
        # FSDP2 gathers weights for a pass: leaves, too, but their gradients are reduced into those of the shards.
        if (
            not self._unit
            and self._given.grad_fn is not None
            and not any(p.params.has_shards for p in self._parts)
        ):
            self._leaves = [leaf for leaf in graph_leaves(self._given.grad_fn) if id(leaf) not in known]
            self._earlier = _take_gradients(self._leaves)

    @torch.no_grad()
    def _add(self) -> None:
        own = self._pairs
        own.end_of_setup()
        for part in self._parts:
            part.keep_unsharded(is_own=part.pairs is own)
        nonfinite = None
        if (
            self._notes_nonfinite_loss
            and self._given.numel() == 1
            and self._scaler.config.recovery is not None
        ):
            nonfinite = nonfinite_loss(self._given)
        zero = torch.zeros_like(self._scale)
        # A number that the host knows: the products need no check of their own.
        inverse = (
            torch.ones((), dtype=torch.float32, device="cpu") if self._unit else self._scale.reciprocal()
        )
        of_loss = zero if nonfinite is None else nonfinite.to(zero.device)
        for part in self._parts:
            if part.params in self._keep:
                part.undo()
            elif self._unit and part.has_true_gradients():
                part.params.checked = None  # the step looks at them
                part.params.note(self._scaler, self._scale, zero)
            elif self._leave and part.pairs is own and part.is_first_of_window():
                own.left = LeftScaled.of(self._scaler, self._scale, list(map(_GRAD, part.weights)))
                part.params.note(self._scaler, self._scale, of_loss)
            elif (found := part.add(inverse, self._memory if part.pairs is own else None)) is not None:
                self.found[part.params] = found
                if part.is_local:
                    part.params.no_sync_losses.setdefault(self._scaler, self._scale)
                else:
                    part.params.note_reduced(found)
                    part.params.note(self._scaler, self._scale, torch.maximum(found, of_loss))
        for pairs in dict.fromkeys(part.pairs for part in self._parts):
            pairs.share()
        if any(params.has_shards for params in own.optimizers):
            own.unsharded_scale = self._scale if own.local_ids() else None
        if self._leaves:
            dtypes = [leaf.dtype for leaf in self._leaves]
            fresh = list(map(_GRAD, self._leaves))
            unused = torch.zeros_like(self._scale)
            set_gradients(self._leaves, add_unscaled(self._earlier, fresh, dtypes, inverse, unused))

    def _undo(self) -> None:
        for part in self._parts:
            part.undo()
        for pairs in dict.fromkeys(part.pairs for part in self._parts):
            pairs.share()
        set_gradients(self._leaves, self._earlier)


class _Part:
    """The parameters of one optimizer in one pass, and the gradients they had before it."""

    def __init__(
        self, pairs: Pairs, params: SteppedParams, scale: Tensor, local: frozenset[int], known: set[int]
    ) -> None:
        self.pairs, self.params, self._scale = pairs, params, scale
        self.weights, self._mains, self._dtypes = params.weights, params.mains, params.dtypes
        # A parameter of several optimizers, or engines, is unscaled once.
        self._is_whole = known.isdisjoint(params.ids)
        if not self._is_whole:
            rest = [i for i, weight in enumerate(params.weights) if id(weight) not in known]
            self.weights = [params.weights[i] for i in rest]
            self._mains = [params.mains[i] for i in rest]
            self._dtypes = [params.dtypes[i] for i in rest]
        known |= params.ids
        params.recheck()
        self.earlier = _take_gradients(self.weights)
        self.unsharded: UnshardedGrads | None = None
        # What this pass reduces for the first time, each with the gradient that is put back for it.
        self._put_back: dict[int, tuple[Tensor, int]] = {}
        self._local = local
        self.is_local = not local.isdisjoint(params.ids)
        to_reduce = pairs.ids_to_reduce()
        for i, weight in enumerate(self.weights) if to_reduce else ():
            total = self.earlier[i]
            if total is None:
                pairs.no_sync_ids.discard(id(weight))  # user code has dropped it
            elif id(weight) in to_reduce and id(weight) not in local:
                weight.grad = (total * scale).to(weight.dtype)
                self._put_back[i] = weight.grad, weight.grad._version

    def has_true_gradients(self) -> bool:
        """Whether the gradients of a pass with a scale of 1 are what a step reads, as autograd has left them."""
        is_first = are_none(self.earlier) and not are_none(list(map(_GRAD, self.weights)))
        return is_first and not self.params.widens and not self._put_back and not self._local

    def is_first_of_window(self) -> bool:
        """Whether there are new gradients that a fused kernel can read, and no earlier ones."""
        present = [grad for grad in map(_GRAD, self.weights) if grad is not None]
        return (
            bool(present)
            and are_none(self.earlier)
            and are_dense(present)
            and not self._put_back
            and not self._local
        )

    def add(self, inverse: Tensor, memory: GradBufferPool | None) -> Tensor | None:
        """Unscale the new gradients and add them; return their ``found_inf``, or None if there are none.  # f32[]"""
        fresh = list(map(_GRAD, self.weights))
        earlier = list(self.earlier)
        for i, (grad, version) in self._put_back.items():
            if fresh[i] is grad and grad._version == version:
                fresh[i] = None  # the pass did not reach it, so it is not reduced yet
            else:
                earlier[i] = None
                self.pairs.no_sync_ids.discard(id(self.weights[i]))
        if are_none(fresh):
            set_gradients(self.weights, self.earlier)
            return None
        found = torch.zeros_like(self._scale)
        totals = add_unscaled(
            earlier,
            fresh,
            self._dtypes,
            inverse,
            found,
            memory=None if memory is None else lambda places: memory.take([self._mains[i] for i in places]),
        )
        set_gradients(self.weights, totals)
        if self._local:
            reached = (id(w) for w, g in zip(self.weights, fresh, strict=True) if g is not None)
            self.pairs.no_sync_ids.update(self._local.intersection(reached))
        checked, self.params.checked = self.params.checked, None
        if self._is_whole:
            grads = [grad for grad in totals if grad is not None]
            both = (
                found
                if checked is None
                else torch.maximum(checked.found_inf, found.to(checked.found_inf.device))
            )
            if not (are_none(earlier) or LOW.isdisjoint(self._dtypes)):
                # A sum of finite products may overflow in float16; no loss has done that alone.
                both = both.clone()
                foreach.check_(grads, both)
            self.params.checked = CheckedGrads.of(grads, both)
        return found

    def keep_unsharded(self, *, is_own: bool) -> None:
        """Put what FSDP2 had before the pass back, if the pass is not theirs.

        Raises:
            OrderError: they are of another engine, and the pass has reached them.
        """
        if self.unsharded is not None:
            if not is_own and self.unsharded.have_new():
                raise OrderError(
                    "a backward pass whose gradients are not reduced over the ranks has reached a network of another engine; "
                    "freeze it for this loss: network.requires_grad_(False), or end its window first"
                )
            self.unsharded.put_back()

    def undo(self) -> None:
        """Put the gradients from before the pass back."""
        set_gradients(self.weights, self.earlier)
        if self.unsharded is not None:
            self.unsharded.put_back()


@outside_inference_mode
@torch.no_grad()
def unscale_left(pairs: Pairs, memory: GradBufferPool | None = None) -> None:
    """Unscale gradients that a pass has left for the step, because other code is about to read them or add to them.

    Raises:
        OrderError: they were written in between.
    """
    left = pairs.left
    if left is None:
        return
    (params,) = pairs.optimizers
    grads = list(map(_GRAD, params.weights))
    left.require_unwritten(grads)
    del grads[len(left.grads) :]
    found = torch.zeros_like(left.scale)
    totals = add_unscaled(
        [None] * len(grads),
        grads,
        params.dtypes[: len(grads)],
        left.scale.reciprocal(),
        found,
        memory=None if memory is None else lambda places: memory.take([params.mains[i] for i in places]),
    )
    set_gradients(params.weights, totals)
    pairs.left = None
    pairs.share()
    params.note(left.scaler, left.scale, found)
    params.checked = CheckedGrads.of(params.gradients(), found)


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


def _take_gradients(parameters: list[Tensor]) -> list[Tensor | None]:
    """Take the gradients from ``parameters``; one that lies in a bucket of DDP, which DDP writes again, is copied out."""
    grads = list(map(_GRAD, parameters))
    if are_none(grads):
        return grads
    set_gradients(parameters, repeat(None))
    return [
        # DistributedDataParallel keeps buckets of the parameters' own dtypes.
        grad.clone() if grad is not None and grad.dtype is one.dtype and is_in_bucket(grad) else grad
        for one, grad in zip(parameters, grads, strict=True)
    ]


class _Open(threading.local):
    """Whether a scaled pass of this thread is open."""

    is_open = False


_OPEN: Final = _Open()
_GRAD: Final = attrgetter("grad")
