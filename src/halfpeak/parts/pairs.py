"""Pairs of a low-precision weight and its float32 master, and how each follows the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ParameterError
from halfpeak.core.torch_compat import outside_inference_mode
from halfpeak.ops import foreach, reference
from halfpeak.parts.remainder_store import RemainderStore, remainder_store_of


class Pairs:
    """A float32 master for each low-precision weight that some optimizers step. Nothing here is about gradients.

    A master takes the place of its weight in the optimizer's groups. :meth:`agree` makes both sides equal before a forward
    pass, a backward pass and a step. It compares two lists, each by itself: weights (by version counters) and
    ``requires_grad``. A step ends with :meth:`publish`, which rounds the masters into the weights.

    Both hold *the same* float32 gradient tensor outside of a backward pass (``weight.grad is master.grad``), which torch
    allows since 2.10: ``weight.grad_dtype = None``. :class:`~halfpeak.parts.window.Window` sees to that.

    Args:
        optimizers: stored as weak references; each list in their groups stays the same object.
        masters: False makes no master: the optimizers step the low-precision weights themselves (O3).
        values: float32 start values by ``id`` of the weight; other masters start from the weight upcast.

    Attributes:
        weights: the low-precision weights that have a master.
        masters: their masters, in the same order.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2**-10)
        >>> pairs = Pairs([optimizer])
        >>> pairs.masters[0].grad = torch.ones(2)
        >>> optimizer.step()
        >>> pairs.publish()
        >>> pairs.masters[0].tolist(), weight.tolist()
        ([0.9990234375, 0.9990234375], [1.0, 1.0])
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        masters: bool = True,
        values: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._optimizers = list(map(weakref.ref, optimizers))
        self._wants_masters = masters
        # The place of a weight in the lists, and the weight of a master, by id.
        self._index: dict[int, int] = {}
        self._weight_of: dict[int, Tensor] = {}
        # The weights with float32 gradients, by id: those with masters, and those with remainders.
        self._widened: dict[int, Tensor] = {}
        self._stores: list[RemainderStore] = []
        # New masters. Their weights may be written through ``.data``, too, until the first backward pass or step.
        self._new: set[int] = set()
        self._weight_versions: list[int] = []
        self._master_versions: list[int] = []
        self._trainable: list[bool] = []
        self.adopt(values)
        LIVE.add(self)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, master) of each pair."""
        return iter(zip(self.weights, self.masters, strict=True))

    def __len__(self) -> int:
        return len(self.weights)

    def main_of(self, weight: Tensor) -> Tensor:
        """The tensor that an optimizer steps for a weight: its master, or the weight itself."""
        index = self._index.get(id(weight))
        return weight if index is None else self.masters[index]

    def weight_of(self, main: Tensor) -> Tensor:
        """The weight of a master; any other tensor is its own weight."""
        return self._weight_of.get(id(main), main)

    def index_of(self, weight: Tensor) -> int:
        """The place of a weight with a master."""
        return self._index[id(weight)]

    def grad_dtype_of(self, weight: Tensor) -> torch.dtype:
        """The dtype of the gradient of a weight outside of a backward pass."""
        return torch.float32 if id(weight) in self._widened else weight.dtype

    def widened(self) -> Iterable[Tensor]:
        """The low-precision weights with float32 gradients."""
        return self._widened.values()

    # Both sides agree.

    @outside_inference_mode
    @torch.no_grad()
    def agree(self, *, to_weights: bool = True, to_masters: bool = True) -> None:
        """Make weights and ``requires_grad`` the same on both sides.

        Args:
            to_weights: round masters that were written into their weights. Not before a backward pass, which reads the
                weights that its forward pass has read.
            to_masters: let masters follow weights that were written. Not before a forward pass: an evaluation may run with
                averaged weights, and when the old ones are put back, their masters have every digit.

        Raises:
            ParameterError: a weight was moved or resized after its master was made.
        """
        if not self.weights:
            return
        if to_masters and (self._new or list(map(_VERSION, self.weights)) != self._weight_versions):
            self._follow_written_weights()
        if to_weights and list(map(_VERSION, self.masters)) != self._master_versions:
            self._publish_written_masters()
        if not list(map(_TRAINABLE, self.weights)) == list(map(_TRAINABLE, self.masters)) == self._trainable:
            for weight, master, before in zip(self.weights, self.masters, self._trainable, strict=True):
                now = weight.requires_grad if weight.requires_grad != before else master.requires_grad
                weight.requires_grad_(now)
                master.requires_grad_(now)
            self._trainable = list(map(_TRAINABLE, self.weights))

    def _follow_written_weights(self) -> None:
        written = [
            i
            for i, w in enumerate(self.weights)
            if w._version != self._weight_versions[i]
            or (i in self._new and self.masters[i]._version == self._master_versions[i])
        ]
        untouched = [i for i in written if self.masters[i]._version == self._master_versions[i]]
        self.refuse_moved(written)
        # An element of a master that rounds to its weight keeps its digits; any other becomes the weight upcast.
        foreach.merge_([self.masters[i] for i in written], [self.weights[i] for i in written])
        self._record_versions(written, untouched)

    def _publish_written_masters(self) -> None:
        # A weight that was written, too, counts: its master follows before the next backward pass.
        written = [
            i
            for i, (weight, master) in enumerate(self)
            if master._version != self._master_versions[i] and weight._version == self._weight_versions[i]
        ]
        foreach.copy_cast_([self.weights[i] for i in written], [self.masters[i] for i in written])
        self._record_versions(written, written)

    def refuse_moved(self, indices: Iterable[int]) -> None:
        """Refuse weights that were moved or resized after their masters were made.

        Raises:
            ParameterError: one was.
        """
        for weight, master in ((self.weights[i], self.masters[i]) for i in indices):
            if weight.shape != master.shape or weight.device != master.device:
                raise ParameterError(
                    f"a parameter went from {tuple(master.shape)} on {master.device} to {tuple(weight.shape)} on "
                    f"{weight.device} after its float32 master was made; move or resize the model first and prepare it "
                    "afterwards"
                )

    @torch.no_grad()
    def publish(self, indices: Sequence[int] | None = None) -> None:
        """Round the masters at some places, or all, into their weights.

        Weights of other optimizers stay as they are, because autograd may have saved them: a generator's forward pass may
        come before the step of the discriminator, and its backward pass after it.
        """
        if indices is None or len(indices) == len(self.weights):
            foreach.copy_cast_(self.weights, self.masters)
        else:
            foreach.copy_cast_([self.weights[i] for i in indices], [self.masters[i] for i in indices])
        self.end_of_setup()
        self.record_published(indices)

    def end_of_setup(self) -> None:
        """After the first backward pass or step: writes through ``.data`` are not followed any more."""
        self._new.clear()

    def record_published(self, indices: Sequence[int] | None = None) -> None:
        """:meth:`publish` for an optimizer that has written its weights itself."""
        if indices is None or len(indices) == len(self.weights):
            self._weight_versions = list(map(_VERSION, self.weights))
            self._master_versions = list(map(_VERSION, self.masters))
        else:
            self._record_versions(indices, indices)

    def _record_versions(self, weights: Iterable[int], masters: Iterable[int]) -> None:
        for i in weights:
            self._weight_versions[i] = self.weights[i]._version
        for i in masters:
            self._master_versions[i] = self.masters[i]._version

    # The optimizers' groups.

    @outside_inference_mode
    def adopt(self, values: Mapping[int, Tensor] | None = None) -> None:
        """Give each low-precision parameter of the groups a master, also those that were added.

        Args:
            values: as of the class.
        """
        for optimizer in filter(None, (weak() for weak in self._optimizers)):
            store = remainder_store_of(optimizer)
            if store is not None and store not in self._stores:
                self._stores.append(store)
            for group in optimizer.param_groups:
                members = group.get("params", [])
                for position, parameter in enumerate(members):
                    if store is not None and store.has(parameter):
                        self._widen(parameter)
                        if values is not None and id(parameter) in values:
                            store.set_value(parameter, values[id(parameter)])
                    elif self._wants_masters and is_low(parameter):
                        members[position] = master = self._master_for(parameter, values or {})
                        _move_state(optimizer, parameter, master)

    def _master_for(self, weight: Tensor, values: Mapping[int, Tensor]) -> Tensor:
        index = self._index.get(id(weight))
        if index is not None:
            return self.masters[index]
        value = values.get(id(weight), weight)
        master = value.detach().to(torch.float32, copy=True).requires_grad_(weight.requires_grad)
        master.grad_dtype = None
        self._widen(weight)
        master.grad = weight.grad
        self._index[id(weight)], self._weight_of[id(master)] = len(self.weights), weight
        self.weights.append(weight)
        self.masters.append(master)
        self._new.add(len(self._weight_versions))
        self._weight_versions.append(weight._version)
        self._master_versions.append(master._version)
        self._trainable.append(weight.requires_grad)
        return master

    def _widen(self, weight: Tensor) -> None:
        """Let a low-precision leaf hold a float32 gradient, and make the one that it has float32."""
        self._widened[id(weight)] = weight
        grad, weight.grad = weight.grad, None
        weight.grad_dtype = None
        weight.grad = None if grad is None else grad.to(torch.float32)

    def release(self) -> None:
        """Put the weights back into the optimizers' groups, with their state."""
        LIVE.discard(self)
        self.agree(to_masters=False)
        for optimizer in filter(None, (weak() for weak in self._optimizers)):
            for group in optimizer.param_groups:
                for position, master in enumerate(group["params"]):
                    weight = self._weight_of.get(id(master))
                    if weight is not None:
                        group["params"][position] = weight
                        if master in optimizer.state:
                            optimizer.state[weight] = optimizer.state.pop(master)

    # Float32 values, for state dicts and loads.

    def float32_value(self, weight: Tensor) -> Tensor | None:
        """The float32 value of a low-precision weight; None if nothing holds more digits than the weight. Waits.

        It is the master, or where the weight was written since, also through ``.data``, the written value.
        """
        value, index = self.latest_value(weight), self._index.get(id(weight))
        if value is None or index is None:
            return value
        master = self.masters[index]
        is_elsewhere = value.shape != master.shape or value.device != master.device
        if is_elsewhere or master._version != self._master_versions[index]:
            return value
        value = reference.merged(master.detach(), weight.detach())
        return master if bool((value == master).all()) else value

    def latest_value(self, weight: Tensor) -> Tensor | None:
        """:meth:`float32_value` without waiting, which cannot see what was written through ``.data``."""
        index = self._index.get(id(weight))
        if index is None:
            store = self._store_of(weight)
            return None if store is None else store.fp32_value(weight)
        low, master = weight.detach(), self.masters[index]
        if low.shape != master.shape:
            return low.float()
        if low.device != master.device:
            return reference.merged(master.detach().to(low.device), low)
        if weight._version == self._weight_versions[index]:
            return master
        return reference.merged(master.detach(), low)

    def set_value(self, weight: Tensor, value: Tensor) -> Tensor:
        """Set the float32 value of a weight that the caller is about to write; returns the tensor to write to it."""
        if weight.shape != value.shape or not value.is_floating_point():
            return value
        index, store = self._index.get(id(weight)), self._store_of(weight)
        if index is not None:
            with torch.no_grad():
                self.masters[index].copy_(value)
            # The weight is the side that is written, by the caller and maybe by others after it.
            self._master_versions[index] = self.masters[index]._version
        return value if store is None else store.split(weight, value)

    def is_past_its_weight(self, weight: Tensor) -> bool:
        """Whether a weight was written through ``.data``: the run steps on from its master.

        Any other weight is its master, rounded, or becomes so in the next :meth:`agree`. Waits for the device.
        """
        index = self._index.get(id(weight))
        if index is None or index in self._new:
            return False
        low, master = weight.detach(), self.masters[index].detach()
        known = (self._weight_versions[index], self._master_versions[index])
        if known != (low._version, master._version) or (low.shape, low.device) != (
            master.shape,
            master.device,
        ):
            return False
        return not torch.equal(master.to(low.dtype), low)

    @torch.no_grad()
    def load_main(self, weight: Tensor, value: Tensor) -> None:
        """Write the tensor that an optimizer steps for a weight, and leave the weight as it is."""
        index = self._index.get(id(weight))
        self.main_of(weight).copy_(value)
        if index is not None:
            self._new.discard(index)
            self._master_versions[index] = self.masters[index]._version

    def _store_of(self, weight: Tensor) -> RemainderStore | None:
        return next((store for store in self._stores if store.has(weight)), None)


LIVE: Final[weakref.WeakSet[Pairs]] = weakref.WeakSet()
"""The pairs of every engine that is alive."""


def float32_values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """For each low-precision tensor its master, or its value in float32; any other tensor as it is. Does not wait."""
    return [_float32_value(tensor).detach() if is_low(tensor) else tensor.detach() for tensor in tensors]


def _float32_value(tensor: Tensor) -> Tensor:
    values = (pairs.latest_value(tensor) for pairs in LIVE)
    return next((value for value in values if value is not None), tensor.float())


def _move_state(optimizer: Optimizer, weight: Tensor, master: Tensor) -> None:
    """Move the optimizer state of a weight to its master, with low-precision tensors upcast to float32."""
    if weight in optimizer.state and master not in optimizer.state:
        state = optimizer.state.pop(weight)
        for key, value in state.items():
            if isinstance(value, Tensor) and is_low(value):
                state[key] = value.float()
        optimizer.state[master] = state


_VERSION: Final = attrgetter("_version")
_TRAINABLE: Final = attrgetter("requires_grad")
