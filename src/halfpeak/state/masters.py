"""Master weights: float32 copies of low-precision parameters, which take their place in the optimizer's groups."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ParameterError
from halfpeak.ops import foreach, reference
from halfpeak.ops.versions import TensorVersions
from halfpeak.state.grad_buffers import GradBufferPool
from halfpeak.state.no_copy import allow_copy, forbid_copy
from halfpeak.state.remainder_store import RemainderStore, remainder_store_of
from halfpeak.state.samples import Sample


class Masters:
    """Pairs of a low parameter and its float32 master. A parameter has one master, however many groups contain it.

    The master replaces the parameter in the optimizer's groups and takes over its optimizer state. Whichever of the two user
    code writes, the other follows: the parameter is the master rounded, and both have the same ``requires_grad``.

    ::

        publish                 after a step: writes the parameters from the masters
        publish_written         before a forward pass: the same for masters written outside of a step (SAM, Lookahead)
        refresh                 before a backward pass and a step: updates the masters of parameters that were written
                                (load, broadcast, clamp)
        refresh_by_value        before a step: the same for in-place writes through ``parameter.data``, which do not change
                                the version counter
        agree_on_requires_grad  before a forward and a backward pass

    Args:
        wanted: False makes no master, because the optimizer steps the low parameters themselves.
        grad_buffers: memory for the gradients of masters; None allocates new memory in every step.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2**-10)
        >>> masters = Masters()
        >>> masters.adopt(optimizer)
        >>> master = optimizer.param_groups[0]["params"][0]
        >>> master.grad = torch.ones(2)
        >>> optimizer.step(); masters.publish()
        >>> master[0].item(), weight[0].item()
        (0.9990234375, 1.0)
    """

    def __init__(self, *, wanted: bool = True, grad_buffers: GradBufferPool | None = None) -> None:
        self._wanted = wanted
        self.grad_buffers = grad_buffers
        self._low: list[nn.Parameter] = []
        self._masters: list[Tensor] = []
        # Snapshots of parameters and masters, and their ``requires_grad``, from when each pair last agreed.
        self._versions, self._master_versions = TensorVersions(), TensorVersions()
        self._trainable: list[bool] = []
        # By index: the sample of one pair stands for all pairs published with it. ``_sampled``: the latest such indices.
        self._samples: dict[int, Sample] = {}
        self._sampled: Sequence[int] = []
        # The adopted optimizers; user code may add groups to them at any time.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The index of a pair by ``id(low)``, and the low parameter by ``id(master)``.
        self._index: dict[int, int] = {}
        self._low_of: dict[int, nn.Parameter] = {}
        # By ``id(master)``: ids of the objects that still need its gradient. Low parameters of several optimizers, by ``id``.
        self._retained: dict[int, set[int]] = {}
        self._shared: set[int] = set()
        # Indices of masters that an optimizer may have written since they were last published.
        self._stepped: set[int] = set()
        self._stores: list[RemainderStore] = []

    def __len__(self) -> int:
        return len(self._low)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Pairs of (low parameter, master)."""
        return iter(zip(self._low, self._masters, strict=True))

    def of(self, parameter: Tensor) -> Tensor | None:
        """The tensor whose ``grad`` is the unscaled gradient of a low parameter: master, store's placeholder, or None."""
        master, store = self._master_of(parameter), self.store_of(parameter)
        return master if store is None else store.grad_placeholder(parameter)

    def store_of(self, parameter: Tensor) -> RemainderStore | None:
        """The store that has the remainder of a low parameter; None if it has a master, or neither."""
        if not self._stores or id(parameter) in self._index:
            return None
        return next((store for store in self._stores if store.has(parameter)), None)

    @property
    def accumulates_fp32(self) -> bool:
        """Whether gradients of low parameters are summed in float32: on their masters, or the placeholders of remainders."""
        return bool(self._low or self._stores)

    def low_of(self, master: Tensor) -> nn.Parameter | None:
        """The low parameter that a master belongs to, or None."""
        return self._low_of.get(id(master))

    def model_param_of(self, main_param: Tensor) -> Tensor:
        """The parameter whose gradient autograd computes: the low parameter of a master, any other tensor itself."""
        low = self._low_of.get(id(main_param))
        return main_param if low is None else low

    def indices_of(self, parameters: Iterable[Tensor]) -> list[int]:
        """The indices of the masters among ``parameters``, for :meth:`publish` and other methods that take ``indices``."""
        lows = (self._low_of.get(id(parameter)) for parameter in parameters)
        return [self._index[id(low)] for low in lows if low is not None]

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether several optimizers step the master of a low parameter."""
        return id(parameter) in self._shared

    def waits_for_master(self, parameter: Tensor) -> bool:
        """Whether a low parameter is in the groups without a master: it is frozen, or came after the last :meth:`adopt`."""
        if id(parameter) in self._index or not (self._wanted and is_low(parameter)):
            return False
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return any(parameter is member for group in groups for member in group["params"])

    # The optimizers' groups.

    def adopt(
        self,
        optimizer: Optimizer,
        values: Mapping[int, Tensor] | None = None,
        *,
        move_grads: bool = True,
        trained: Collection[int] = (),
    ) -> None:
        """Replace every trainable low parameter in the optimizer's groups by its master; make the masters that are missing.

        A frozen low parameter gets its master later: from the call after it is unfrozen, or from :meth:`set_value`.

        The optimizer state of the parameter moves to the master, in float32, and so does its gradient. A parameter in the
        :class:`RemainderStore` of its optimizer gets no master: the store gets its value.

        Args:
            optimizer: changed in place; its group dicts and lists stay the same objects.
            values: float32 start values, by ``id`` of the parameter. A master without one starts from the parameter upcast.
            move_grads: False leaves gradients where they are, because they are scaled.
            trained: ids of frozen parameters that get a master now, because they have optimizer state or a gradient.
        """
        self._optimizers.add(optimizer)
        store = remainder_store_of(optimizer)
        if store is not None and not any(known is store for known in self._stores):
            self._stores.append(store)
        for group in optimizer.param_groups:
            parameters = group["params"]
            for position, parameter in enumerate(parameters):
                if store is not None and store.has(parameter):
                    if id(parameter) in (values or {}):
                        store.set_value(parameter, (values or {})[id(parameter)])
                elif self._wanted and is_low(parameter):
                    known = id(parameter) in self._index or id(parameter) in trained
                    if not (parameter.requires_grad or known):
                        continue
                    parameters[position] = master = self._master_for(parameter, values or {})
                    _move_state(optimizer, parameter, master)
                    if move_grads:
                        _move_grad(parameter, master)
                    forbid_copy(optimizer)

    def release(self, optimizer: Optimizer) -> None:
        """Undo :meth:`adopt`: put the low parameters back into the optimizer's groups, with their state."""
        self.agree_on_requires_grad()
        self.publish_written()
        for group in optimizer.param_groups:
            parameters = group["params"]
            for position, master in enumerate(parameters):
                low = self.low_of(master)
                if low is not None:
                    parameters[position] = low
                    if master in optimizer.state:
                        optimizer.state[low] = optimizer.state.pop(master)
        allow_copy(optimizer)
        self._optimizers.discard(optimizer)
        store = remainder_store_of(optimizer)
        self._stores = [known for known in self._stores if known is not store]

    # The gradients of masters that several optimizers step.

    def retain_grads(self, who: object, masters: Iterable[Tensor]) -> None:
        """Record that ``who`` still needs the gradients of some masters, which other optimizers may step and drop."""
        for master in masters:
            if id(master) in self._low_of:
                self._retained.setdefault(id(master), set()).add(id(who))

    def release_grads(self, who: object) -> None:
        """Record that ``who`` needs no gradient any more."""
        for holders in self._retained.values():
            holders.discard(id(who))

    def is_grad_retained(self, master: Tensor) -> bool:
        """Whether an optimizer still needs the gradient of a master; see :meth:`retain_grads`."""
        return bool(self._retained.get(id(master)))

    # Around a step: from masters to parameters, and from parameters to masters.

    def mark_stepped(self, indices: Iterable[int]) -> None:
        """Record that an optimizer is about to write these masters, so that :meth:`refresh` does not overwrite them."""
        self._stepped.update(indices)

    def mark_skipped(self, indices: Sequence[int]) -> None:
        """Undo :meth:`mark_stepped`: the step was skipped, so the optimizer wrote none of these masters."""
        self._stepped.difference_update(indices)
        if not self._master_versions.unchanged(self._masters):
            # A fused optimizer may have moved masters into other memory, which does not change their values.
            for index in indices:
                low, master = self._low[index].detach(), self._masters[index]
                if master.device == low.device and torch.equal(master.to(low.dtype), low):
                    self._record_one(index)

    def publish(self, indices: Sequence[int] | None = None, *, moved: bool = True) -> None:
        """Round the masters of one optimizer, or all of them, into their low parameters.

        The parameters of other optimizers are not written, because autograd may have saved them: a generator's forward pass
        may come before the step of the discriminator, and its backward pass after it.

        Args:
            indices: of these masters; None for all.
            moved: False if no master has other memory than at the last publish; then their addresses are not read.
        """
        indices = list(range(len(self._low))) if indices is None else indices
        self._publish(indices, moved=moved)
        self._sample(indices)

    def record_published(self, indices: Sequence[int], *, moved: bool = True) -> None:
        """:meth:`publish` for an optimizer whose step has written the low parameters itself."""
        self._record(indices, low_moved=moved, masters_moved=moved)
        self._sample(indices)

    def publish_written(self) -> None:
        """Publish the masters that were written outside of a step, or by a step that was not published."""
        written = sorted(self._written_masters())
        self._publish(written)
        if written:
            self._sample_first()

    def refresh(self) -> None:
        """Update the masters of low parameters that were written since the last publish: load, broadcast, clamp.

        An element of a master that rounds to its parameter was not written and stays; any other becomes the parameter upcast.
        Nothing waits for the device. In-place writes through ``parameter.data`` change no version counter and are left to
        :meth:`refresh_by_value`; a new tensor assigned to ``parameter.data`` is noticed here.

        Raises:
            ParameterError: a parameter changed its shape or device; prepare again after moving a model.
        """
        if self._stepped or not self._versions.unchanged(self._low):
            self.publish_written()
            written = {i for i, low in enumerate(self._low) if not self._versions.unchanged_one(i, low)}
            # User code may have written all parameters through .data before the write that changed a version counter.
            for index in written.union(*(s.indices for s in self._samples.values() if s.is_low_written())):
                self._update_master(index)
        # The first step may be skipped and publish nothing, so the first sample is taken before it.
        self._sample_first()

    def refresh_by_value(self, indices: Sequence[int]) -> None:
        """:meth:`refresh` for in-place writes through ``parameter.data``, which show only in the values.

        About 64 values of the largest parameter of ``indices`` are compared: averaging, clamping and swapping weights change
        them, and comparing all weights would take half the time of a step. On an accelerator the host would wait for the
        values, so masters are not updated there, and a warning follows later (:class:`Sample`).
        """
        samples = [s for s in self._samples.values() if not s.indices.isdisjoint(indices)]
        for sample in samples:
            sample.warn_of_writes()
        written = [s.indices for s in samples if s.is_low_written()]
        if written:
            # The sample is recorded again below, so the other pairs that it stands for are updated now, too.
            others = set[int]().union(*written) - set(indices) - self._stepped
            indices = [
                *indices,
                *(i for i in sorted(others) if self._master_versions.unchanged_one(i, self._masters[i])),
            ]
            with torch.no_grad():
                foreach.merge_([self._masters[i] for i in indices], [self._low[i] for i in indices])
            for index in indices:
                self._record_one(index)

    def forget_values(self) -> None:
        """Discard sampled values after the replay of a CUDA graph, which has stepped the parameters."""
        for sample in self._samples.values():
            sample.forget()

    def agree_on_requires_grad(self) -> None:
        """Where user code froze or unfroze one side of a pair, do the same to the other side."""
        low, masters = list(map(_TRAINABLE, self._low)), list(map(_TRAINABLE, self._masters))
        if low != masters:
            for index, (ours, theirs) in enumerate(zip(low, masters, strict=True)):
                low[index] = theirs if ours == self._trainable[index] else ours
                self._low[index].requires_grad_(low[index])
                self._masters[index].requires_grad_(low[index])
        self._trainable = low

    # Float32 values, for state dicts and loads.

    def fp32_value(self, parameter: Tensor) -> Tensor | None:
        """The float32 value of a low parameter; None if it has neither master nor remainder. Waits for the device.

        This is the master, except where the parameter was written, moved or resized since. The master itself does not change,
        so weights that user code swaps out and in again keep their float32 values.
        """
        index = self._index.get(id(parameter))
        if index is None:
            store = self.store_of(parameter)
            return None if store is None else store.fp32_value(parameter)
        low, master = self._low[index].detach(), self._masters[index]
        if low.shape != master.shape:
            return low.to(master.dtype)
        if low.device != master.device:
            return reference.merged(master.detach().to(low.device), low)
        samples = [sample for sample in self._samples.values() if index in sample.indices]
        moved = index in self._stepped or not self._master_versions.unchanged_one(index, master)
        hinted = self._versions.unchanged_one(index, self._low[index]) and any(
            s.is_master_written() for s in samples
        )
        if moved or hinted:
            return master
        value = reference.merged(master.detach(), low)
        return master if bool((value == master).all()) else value

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the master of a low parameter to a float32 value that the caller has written to the parameter, or is about to.

        If the parameter gets another value, :meth:`refresh` updates the master. A parameter in an optimizer's groups that has
        no master yet, because it is frozen or was added later, gets one if its dtype cannot hold the value.
        """
        master, store = self._master_of(parameter), self.store_of(parameter)
        if master is not None and master.shape == value.shape and value.is_floating_point():
            index = self._index[id(parameter)]
            sample = self._samples.get(index)
            if sample is not None:
                # A sample that differs means that all its pairs were written: publish those before this pair alone differs.
                self.publish_written()
            with torch.no_grad():
                master.copy_(value)
            self._master_versions.record_one(index, master)
            if sample is not None:
                sample.record_master()
        elif parameter.shape != value.shape or not value.is_floating_point():
            return
        elif store is not None:
            store.set_value(parameter, value)
        elif self.waits_for_master(parameter) and not bool((value.to(parameter.dtype) == value).all()):
            self._master_for(cast("nn.Parameter", parameter), {id(parameter): value.to(parameter.device)})

    def set_before_write(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Like :meth:`set_value`, before a write: returns the tensor that the caller must write to the parameter next."""
        store = self.store_of(parameter)
        if store is not None and parameter.shape == value.shape and value.is_floating_point():
            return store.split(parameter, value)
        self.set_value(parameter, value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Masters:
        """Copies of both sides in the same pairs; an optimizer that is copied with the same ``memo`` steps the new masters."""
        copied = Masters(wanted=self._wanted, grad_buffers=self.grad_buffers and GradBufferPool())
        for low, master in self:
            low_copy = copy.deepcopy(low, memo)
            memo[id(master)] = master_copy = copied._master_for(low_copy, {id(low_copy): master})
            master_copy.requires_grad_(master.requires_grad)
            if self.is_shared(low):
                copied._shared.add(id(low_copy))
        copied._stepped, copied._trainable = self._written_masters(), list(self._trainable)
        return copied

    # Pairs, and the record of when they last agreed.

    def _master_of(self, parameter: Tensor) -> Tensor | None:
        index = self._index.get(id(parameter))
        return None if index is None else self._masters[index]

    def _master_for(self, parameter: nn.Parameter, values: Mapping[int, Tensor]) -> Tensor:
        known = self._master_of(parameter)
        if known is not None:
            self._shared.add(id(parameter))
            return known
        value = values.get(id(parameter))
        master = (parameter.detach() if value is None else value.detach()).to(torch.float32, copy=True)
        master.requires_grad_(parameter.requires_grad)
        self._trainable.append(parameter.requires_grad)
        self._index[id(parameter)] = len(self._low)
        self._low_of[id(master)] = parameter
        self._low.append(parameter)
        self._masters.append(master)
        # The parameter counts as written, so the first refresh compares values and sees earlier writes through .data.
        self._versions.add(parameter)
        self._master_versions.add(master)
        self._master_versions.record_one(self._index[id(parameter)], master)
        # Until this pair is published, every sample stands for it: a write through .data to all parameters changes them all.
        for sample in self._samples.values():
            sample.indices |= {self._index[id(parameter)]}
        return master

    def _update_master(self, index: int) -> None:
        low, master = self._low[index], self._masters[index]
        if low.shape != master.shape or low.device != master.device:
            raise ParameterError(
                f"a parameter went from {tuple(master.shape)} on {master.device} to {tuple(low.shape)} on "
                f"{low.device} after its float32 master was made; move or resize the model first and prepare it afterwards"
            )
        with torch.no_grad():
            master.copy_(reference.merged(master, low))
        self._record_one(index)

    def _written_masters(self) -> set[int]:
        # If a sample's master was written, so were all masters published with it, except where the parameter was written.
        hinted = set[int]().union(*(s.indices for s in self._samples.values() if s.is_master_written()))
        written = self._stepped | {i for i in hinted if self._versions.unchanged_one(i, self._low[i])}
        if not self._master_versions.unchanged(self._masters):
            written.update(
                i
                for i, master in enumerate(self._masters)
                if not self._master_versions.unchanged_one(i, master)
            )
        return written

    def _publish(self, indices: Sequence[int], *, moved: bool = True) -> None:
        if not indices:
            return
        low, masters = self._low, self._masters
        if len(indices) < len(low):
            low, masters = [low[i] for i in indices], [masters[i] for i in indices]
        with torch.no_grad():
            foreach.copy_cast_(low, masters)
        self._record(indices, low_moved=False, masters_moved=moved)

    def _record(self, indices: Sequence[int], *, low_moved: bool, masters_moved: bool) -> None:
        if len(indices) == len(self._low):
            self._versions.record(self._low, moved=low_moved)
            self._master_versions.record(self._masters, moved=masters_moved)
            for sample in self._samples.values():
                sample.record()
        else:
            for index in indices:
                self._record_one(index)
        self._stepped.difference_update(indices)

    def _record_one(self, index: int) -> None:
        self._versions.record_one(index, self._low[index])
        self._master_versions.record_one(index, self._masters[index])
        if index in self._samples:
            self._samples[index].record()

    def _sample_first(self) -> None:
        """Make a sample that stands for all pairs if there is none; without one, published values are not compared."""
        if not self._samples:
            self._sample(list(range(len(self._low))))

    def _sample(self, indices: Sequence[int]) -> None:
        """Make the largest of some pairs that were published together their sample; :meth:`_record` updates its values."""
        if indices and indices is not self._sampled:
            self._sampled = indices
            index = max(indices, key=lambda index: self._masters[index].numel())
            # The pair may already be the sample of another optimizer's parameters, and stays so.
            known = self._samples[index].indices if index in self._samples else ()
            self._samples[index] = Sample(self._low[index], self._masters[index], [*indices, *known])


def _move_grad(parameter: Tensor, master: Tensor) -> None:
    """Move the gradient of a parameter to its new master, where the optimizer reads it."""
    if parameter.grad is not None and master.grad is None:
        master.grad, parameter.grad = parameter.grad.to(master.dtype), None


def _move_state(optimizer: Optimizer, parameter: Tensor, master: Tensor) -> None:
    """Move the optimizer state of a parameter to its master, with low tensors upcast to float32."""
    if parameter in optimizer.state and master not in optimizer.state:
        state = optimizer.state.pop(parameter)
        for key, value in state.items():
            if isinstance(value, Tensor) and is_low(value):
                state[key] = value.float()
        optimizer.state[master] = state


_TRAINABLE: Final = attrgetter("requires_grad")
