"""Masters: the float32 copies of low parameters that an optimizer steps. The only code that swaps its parameters."""

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
    """Pairs of a low parameter and its float32 master, by identity, each once however many groups name it.

    A master takes the place of its parameter in the optimizer's groups and inherits its state. Both agree, whoever wrote
    which: the parameter is the master rounded, and either both are trainable or none is.

    ::

        publish                  after a step: the parameters from the masters
        follow_masters           before a forward pass: from masters that were written outside of a step (SAM, Lookahead)
        refresh                  before a backward pass and a step: the masters from parameters that were written (load,
                                 broadcast, clamp)
        follow_values            before a step: from parameters that were written through ``parameter.data``, which leaves
                                 no trace
        agree_on_requires_grad   before either pass

    Args:
        wanted: False never makes a master, for policies that step low parameters themselves.
        grad_buffers: where the gradients of masters lie; None for new memory in every step.

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
        self._high: list[Tensor] = []
        # Snapshots of both sides when they last agreed, and whether they were trainable.
        self._versions, self._high_versions = TensorVersions(), TensorVersions()
        self._trainable: list[bool] = []
        # By index: one pair stands for those published with it, the latest of which are ``_sampled``.
        self._samples: dict[int, Sample] = {}
        self._sampled: Sequence[int] = []
        # Low parameters in the groups that have no master yet, because they are frozen.
        self._frozen: set[int] = set()
        # The adopted optimizers: groups may have been added to them since.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Of low parameters, and of masters, by ``id``.
        self._index: dict[int, int] = {}
        self._low_of: dict[int, nn.Parameter] = {}
        # Who still has to step the gradient of a master, by ``id``; and low parameters of several optimizers.
        self._retained: dict[int, set[int]] = {}
        self._shared: set[int] = set()
        # Indices of masters that may have moved since they were last published.
        self._stepped: set[int] = set()
        self._stores: list[RemainderStore] = []

    def __len__(self) -> int:
        return len(self._low)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Pairs of (low parameter, master)."""
        return iter(zip(self._low, self._high, strict=True))

    def of(self, parameter: Tensor) -> Tensor | None:
        """What holds the unscaled gradient of a low parameter: its master, or the placeholder of a remainder; or None."""
        high, store = self._master_of(parameter), self.store_of(parameter)
        return high if store is None else store.grad_placeholder(parameter)

    def store_of(self, parameter: Tensor) -> RemainderStore | None:
        """The store of the remainder of a low parameter that has no master, or None."""
        if not self._stores or id(parameter) in self._index:
            return None
        return next((store for store in self._stores if store.has(parameter)), None)

    @property
    def accumulates_fp32(self) -> bool:
        """Whether gradients of low parameters are summed in float32: on their masters, or the placeholders of remainders."""
        return bool(self._low or self._stores)

    def _master_of(self, parameter: Tensor) -> Tensor | None:
        index = self._index.get(id(parameter))
        return None if index is None else self._high[index]

    def low_of(self, master: Tensor) -> nn.Parameter | None:
        """The low parameter that a master belongs to, or None."""
        return self._low_of.get(id(master))

    def model_param_of(self, main_param: Tensor) -> Tensor:
        """What autograd computes the gradient of: the low parameter of a master, anything else itself."""
        low = self._low_of.get(id(main_param))
        return main_param if low is None else low

    def adopt(
        self,
        optimizer: Optimizer,
        values: Mapping[int, Tensor] | None = None,
        *,
        move_grads: bool = True,
        trained: Collection[int] = (),
    ) -> None:
        """Put a master in the place of every trainable low parameter of the optimizer that has none yet.

        A frozen one gets its master when it is unfrozen, or given a value, a state or a gradient that its dtype cannot hold.

        State that the optimizer holds for the parameter moves to the master, in float32, and so does its gradient. An
        optimizer that keeps remainders of its low parameters is given the values instead.

        Args:
            optimizer: changed in place; its group dicts and lists stay the same objects.
            values: float32 values to start from, by ``id`` of the parameter. Without one, a master starts from the
                low parameter widened.
            move_grads: False leaves gradients where they are, because they are scaled.
            trained: frozen parameters, by ``id``, that get a master all the same: they have a state, or a gradient.
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
                        self._frozen.add(id(parameter))
                        continue
                    parameters[position] = master = self._master_for(parameter, values or {})
                    _move_state(optimizer, parameter, master)
                    if move_grads:
                        _move_grad(parameter, master)
                    forbid_copy(optimizer)

    def release(self, optimizer: Optimizer) -> None:
        """Undo :meth:`adopt`: put the low parameters back into the optimizer's groups, with their state."""
        self.agree_on_requires_grad()
        self.follow_masters()
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

    def retain_grads(self, who: object, masters: Iterable[Tensor]) -> None:
        """Say that ``who`` still has to step the gradients of some masters, which others may step, too."""
        for master in masters:
            if id(master) in self._low_of:
                self._retained.setdefault(id(master), set()).add(id(who))

    def release_grads(self, who: object) -> None:
        """Say that ``who`` needs no gradient any more."""
        for holders in self._retained.values():
            holders.discard(id(who))

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether several optimizers step the master of a low parameter."""
        return id(parameter) in self._shared

    def waits_for_master(self, parameter: Tensor) -> bool:
        """Whether a low parameter in the groups has no master yet: it is frozen, or has joined since the last backward pass."""
        if id(parameter) in self._index:
            return False
        if not (self._wanted and parameter.requires_grad and is_low(parameter)):
            return id(parameter) in self._frozen
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return any(parameter is member for group in groups for member in group["params"])

    def is_grad_retained(self, master: Tensor) -> bool:
        """Whether an optimizer still has to step the gradient of a master."""
        return bool(self._retained.get(id(master)))

    def indices_of(self, parameters: Iterable[Tensor]) -> list[int]:
        """The indices of the masters among some parameters; :meth:`publish` and the methods around it take them."""
        lows = (self._low_of.get(id(parameter)) for parameter in parameters)
        return [self._index[id(low)] for low in lows if low is not None]

    def mark_stepped(self, indices: Iterable[int]) -> None:
        """Say that an optimizer is about to move masters: :meth:`refresh` must not undo it."""
        self._stepped.update(indices)

    def mark_skipped(self, indices: Sequence[int]) -> None:
        """Say that an optimizer has not moved its masters after all."""
        self._stepped.difference_update(indices)
        if not self._high_versions.unchanged(self._high):
            # A fused optimizer may have moved its memory, which is not a write.
            for index in indices:
                low, high = self._low[index].detach(), self._high[index]
                if high.device == low.device and torch.equal(high.to(low.dtype), low):
                    self._record_one(index)

    def publish(self, indices: Sequence[int] | None = None, *, moved: bool = True) -> None:
        """Round the masters of one optimizer, or all of them, into their low parameters.

        The parameters of other optimizers are left unwritten: a generator's forward pass may lie before the step of the
        discriminator, and its backward pass after it.

        Args:
            indices: of these masters; None for all.
            moved: False where masters have not been given other memory since they were last published, which saves a look.
        """
        indices = list(range(len(self._low))) if indices is None else indices
        self._publish(indices, moved=moved)
        self._sample(indices)

    def record_published(self, indices: Sequence[int], *, moved: bool = True) -> None:
        """:meth:`publish`, where an optimizer has written its low parameters itself."""
        self._record(indices, low_moved=moved, high_moved=moved)
        self._sample(indices)

    def _sample(self, indices: Sequence[int]) -> None:
        """Begin to watch the largest of some pairs that were published together; :meth:`_record` takes its values anew."""
        if indices and indices is not self._sampled:
            self._sampled = indices
            index = max(indices, key=lambda index: self._high[index].numel())
            # A sample of another optimizer's parameters goes on standing for these, too.
            known = self._samples[index].indices if index in self._samples else ()
            self._samples[index] = Sample(self._low[index], self._high[index], [*indices, *known])

    def follow_masters(self) -> None:
        """Publish what optimizers have moved in a step that was not published, or outside of their steps."""
        self._publish(sorted(self._written_masters()))

    def _written_masters(self) -> set[int]:
        # A written sample stands for all pairs published with it, but for those whose parameter was written since.
        hinted = set[int]().union(*(s.indices for s in self._samples.values() if s.is_high_written()))
        written = self._stepped | {i for i in hinted if self._versions.is_unchanged(i, self._low[i])}
        if not self._high_versions.unchanged(self._high):
            written.update(
                i for i, high in enumerate(self._high) if not self._high_versions.is_unchanged(i, high)
            )
        return written

    def agree_on_requires_grad(self) -> None:
        """Whichever side was frozen or unfrozen, the other follows."""
        low, high = list(map(_TRAINABLE, self._low)), list(map(_TRAINABLE, self._high))
        if low != high:
            for index, (ours, theirs) in enumerate(zip(low, high, strict=True)):
                low[index] = theirs if ours == self._trainable[index] else ours
                self._low[index].requires_grad_(low[index])
                self._high[index].requires_grad_(low[index])
        self._trainable = low

    def _publish(self, indices: Sequence[int], *, moved: bool = True) -> None:
        if not indices:
            return
        low, high = self._low, self._high
        if len(indices) < len(low):
            low, high = [low[i] for i in indices], [high[i] for i in indices]
        with torch.no_grad():
            foreach.copy_cast_(low, high)
        self._record(indices, low_moved=False, high_moved=moved)

    def _record(self, indices: Sequence[int], *, low_moved: bool, high_moved: bool) -> None:
        if len(indices) == len(self._low):
            self._versions.record(self._low, moved=low_moved)
            self._high_versions.record(self._high, moved=high_moved)
            for sample in self._samples.values():
                sample.record()
        else:
            for index in indices:
                self._record_one(index)
        self._stepped.difference_update(indices)

    def refresh(self) -> None:
        """Follow whoever wrote to the low parameters since the last publish: load, broadcast, clamp, re-initialise.

        Element by element, a master stays where it rounds to its parameter (nobody wrote there) and takes the widened
        parameter elsewhere. Nothing waits for the device. Writes into ``parameter.data`` leave no trace, but for a new
        tensor assigned to it; :meth:`follow_values` sees them.

        Raises:
            ParameterError: a parameter changed its shape or device; prepare again after moving a model.
        """
        if self._stepped or not self._versions.unchanged(self._low):
            self.follow_masters()
            written = {i for i, low in enumerate(self._low) if not self._versions.is_unchanged(i, low)}
            # Before the write that counted a version, all parameters may have been written through .data.
            for index in written.union(*(s.indices for s in self._samples.values() if s.is_low_written())):
                self._follow(index)
        if not self._samples:
            # Before the first step, which may be skipped.
            self._sample(list(range(len(self._low))))

    def follow_values(self, indices: Sequence[int]) -> None:
        """:meth:`refresh` where values tell that somebody wrote through ``parameter.data``.

        64 values of the largest parameter are looked at: averaging, clamping and swapping weights change them, and comparing
        all weights would take half the time of a step. On an accelerator the host would wait, so there it is only warned.

        Args:
            indices: of the masters whose parameters are compared.
        """
        samples = [s for s in self._samples.values() if not s.indices.isdisjoint(indices)]
        for sample in samples:
            sample.warn_of_writes()
        written = [s.indices for s in samples if s.is_low_written()]
        if written:
            # The sample is taken anew, so what else it stands for is looked at now.
            others = set[int]().union(*written) - set(indices) - self._stepped
            indices = [
                *indices,
                *(i for i in sorted(others) if self._high_versions.is_unchanged(i, self._high[i])),
            ]
            with torch.no_grad():
                foreach.merge_([self._high[i] for i in indices], [self._low[i] for i in indices])
            for index in indices:
                self._record_one(index)

    def forget_values(self) -> None:
        """A CUDA graph has stepped: values that were taken before it are out of date."""
        for sample in self._samples.values():
            sample.forget()

    def fp32_value(self, parameter: Tensor) -> Tensor | None:
        """The float32 value of a low parameter; None if it has no master. Waits for the device.

        This is its master, except for a parameter that was written, moved or resized. Nothing is changed: weights that are
        swapped out and in again keep their float32 values.
        """
        index = self._index.get(id(parameter))
        if index is None:
            store = self.store_of(parameter)
            return None if store is None else store.fp32_value(parameter)
        low, high = self._low[index].detach(), self._high[index]
        if low.shape != high.shape:
            return low.to(high.dtype)
        if low.device != high.device:
            return reference.merged(high.detach().to(low.device), low)
        samples = [sample for sample in self._samples.values() if index in sample.indices]
        moved = index in self._stepped or not self._high_versions.is_unchanged(index, high)
        hinted = self._versions.is_unchanged(index, self._low[index]) and any(
            s.is_high_written() for s in samples
        )
        if moved or hinted:
            return high
        value = reference.merged(high.detach(), low)
        return high if bool((value == high).all()) else value

    def _record_one(self, index: int) -> None:
        self._versions.record_one(index, self._low[index])
        self._high_versions.record_one(index, self._high[index])
        if index in self._samples:
            self._samples[index].record()

    def _follow(self, index: int) -> None:
        low, high = self._low[index], self._high[index]
        if low.shape != high.shape or low.device != high.device:
            raise ParameterError(
                f"a parameter went from {tuple(high.shape)} on {high.device} to {tuple(low.shape)} on "
                f"{low.device} after its float32 master was made; move or resize the model first and prepare it afterwards"
            )
        with torch.no_grad():
            high.copy_(reference.merged(high, low))
        self._record_one(index)

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the master of a low parameter to a value that the parameter has been given, or is about to be.

        Where the parameter ends up with something else, :meth:`refresh` follows it. A parameter in an optimizer's groups that
        has no master yet, because it is frozen or was added later, gets one if its dtype cannot hold the value.
        """
        high, store = self._master_of(parameter), self.store_of(parameter)
        if high is not None and high.shape == value.shape and value.is_floating_point():
            index = self._index[id(parameter)]
            sample = self._samples.get(index)
            if sample is not None:
                # A difference from the sample means that all its pairs were moved; now this pair alone will differ.
                self.follow_masters()
            with torch.no_grad():
                high.copy_(value)
            self._high_versions.record_one(index, high)
            if sample is not None:
                sample.record_high()
        elif parameter.shape != value.shape or not value.is_floating_point():
            return
        elif store is not None:
            store.set_value(parameter, value)
        elif self.waits_for_master(parameter) and not bool((value.to(parameter.dtype) == value).all()):
            self._master_for(cast("nn.Parameter", parameter), {id(parameter): value.to(parameter.device)})

    def set_before_write(self, parameter: Tensor, value: Tensor) -> Tensor:
        """:meth:`set_value` for a caller whose next write to the parameter stores the returned tensor."""
        store = self.store_of(parameter)
        if store is not None and parameter.shape == value.shape and value.is_floating_point():
            return store.split(parameter, value)
        self.set_value(parameter, value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Masters:
        """Copies of both sides, paired as these are; an optimizer copied with the same ``memo`` steps the new masters."""
        copied = Masters(wanted=self._wanted, grad_buffers=self.grad_buffers and GradBufferPool())
        for low, high in self:
            low_copy = copy.deepcopy(low, memo)
            memo[id(high)] = high_copy = copied._master_for(low_copy, {id(low_copy): high})
            high_copy.requires_grad_(high.requires_grad)
            if self.is_shared(low):
                copied._shared.add(id(low_copy))
        copied._stepped, copied._trainable = self._written_masters(), list(self._trainable)
        return copied

    def _master_for(self, parameter: nn.Parameter, values: Mapping[int, Tensor]) -> Tensor:
        known = self._master_of(parameter)
        if known is not None:
            self._shared.add(id(parameter))
            return known
        value = values.get(id(parameter))
        high = (parameter.detach() if value is None else value.detach()).to(torch.float32, copy=True)
        high.requires_grad_(parameter.requires_grad)
        self._trainable.append(parameter.requires_grad)
        self._frozen.discard(id(parameter))
        self._index[id(parameter)] = len(self._low)
        self._low_of[id(high)] = parameter
        self._low.append(parameter)
        self._high.append(high)
        # The first refresh compares values, so that writes through .data before it are seen.
        self._versions.add(parameter)
        self._high_versions.add(high)
        self._high_versions.record_one(self._index[id(parameter)], high)
        # Until this pair is published, a write to all parameters through .data shows in any sample.
        for sample in self._samples.values():
            sample.indices |= {self._index[id(parameter)]}
        return high


def _move_grad(parameter: Tensor, master: Tensor) -> None:
    """A gradient from before the master was made goes where the optimizer will read it."""
    if parameter.grad is not None and master.grad is None:
        master.grad, parameter.grad = parameter.grad.to(master.dtype), None


def _move_state(optimizer: Optimizer, parameter: Tensor, master: Tensor) -> None:
    """Hand the optimizer's state of a parameter to its master; what was low becomes float32."""
    if parameter in optimizer.state and master not in optimizer.state:
        state = optimizer.state.pop(parameter)
        for key, value in state.items():
            if isinstance(value, Tensor) and is_low(value):
                state[key] = value.float()
        optimizer.state[master] = state


_TRAINABLE: Final = attrgetter("requires_grad")
