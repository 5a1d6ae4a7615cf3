"""Shadow weights: low copies of float32 weights that are held from step to step, and who writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfpeak.casting.cache import WeightCache, is_capturing
from halfpeak.casting.walk import to


class Shadow:
    """The low copies of one weight.

    Attributes:
        weight: with it, so that no other object gets its id.
        copy: what operations are given, or None.
        version: of the weight when ``copy`` was made.
        address: where the weight lay then.
        memory: what lay there. Once that is gone, another tensor that is assigned to ``weight.data`` may get its address.
        home: the copy that an optimizer writes beside the weight in its steps, or None. What is cast anew meanwhile never
            writes over it, because graphs may have saved it.
    """

    __slots__ = ("address", "copy", "home", "memory", "version", "weight")

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.copy: Tensor | None = None
        self.home: Tensor | None = None
        self.version = self.address = -1
        self.memory = StorageWeakRef(weight.untyped_storage())

    def put(self, copy: Tensor) -> None:
        """Give operations ``copy``, as long as the weight stays as it is now."""
        address = self.weight.data_ptr()
        if address != self.address or self.memory.expired():
            self.memory = StorageWeakRef(self.weight.untyped_storage())
        self.copy, self.version, self.address = copy, self.weight._version, address

    def forget(self) -> None:
        """Give operations nothing made so far."""
        self.copy, self.version = None, -1

    def is_current(self) -> bool:
        """Whether ``copy`` is of the weight as it is now."""
        return (
            self.version == self.weight._version
            and self.address == self.weight.data_ptr()
            and not self.memory.expired()
        )

    def settle(self) -> Tensor | None:
        """The copy that an optimizer is to write, equal to the weight as it is now; None if no operation has asked for one."""
        if not (self.weight.requires_grad and _is_copy(self.home, self.weight)):
            self.home = None
        if self.home is None:
            self.home = self.copy if self.is_current() and _is_copy(self.copy, self.weight) else None
        elif self.copy is not self.home or not self.is_current():
            with torch.no_grad():
                self.home.copy_(self.weight)
            self.put(self.home)
        return self.home


class ShadowWeights(WeightCache):
    """Casts a weight once for all graphs until :meth:`clear`, and holds the copies itself.

    Several backward passes, recomputed checkpoints and passes without gradients use one cast, biases and frozen weights
    included. The cast is a node of autograd that saves nothing, so graph after graph passes through it and each brings
    the weight a gradient of its own.

    An optimizer that can write a low weight beside each weight is given the copies by :meth:`homes`. Those are right
    after each of its steps, and nothing is cast any more.

    >>> weight, shadows = nn.Parameter(torch.eye(2)), ShadowWeights(torch.bfloat16)
    >>> with torch.no_grad():
    ...     first = shadows.cast(weight)
    >>> shadows.cast(weight) is first, first.requires_grad
    (True, True)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._shadows: dict[int, Shadow] = {}
        self._homes: list[Homes] = []
        self.generation = 0

    def __len__(self) -> int:
        return len(self._shadows)

    def cast(self, weight: nn.Parameter) -> Tensor:
        """The low copy of ``weight``; differentiable, also where gradients are off, because later uses may need it."""
        shadow = self._shadows.get(id(weight))
        if (
            shadow is not None
            and shadow.version == weight._version
            and shadow.address == weight.data_ptr()
            and not _EXPIRED(shadow.memory.cdata)
            and shadow.copy is not None
            and shadow.copy.requires_grad is weight.requires_grad
            and not is_capturing(weight)
        ):
            return shadow.copy
        if torch.is_inference_mode_enabled() or is_capturing(weight):
            return to(weight, self._dtype)
        with torch.enable_grad():
            copy = to(weight, self._dtype)
        if id(weight) not in self._escaped and not is_functorch_wrapped_tensor(copy):
            if shadow is None:
                shadow = self._shadows[id(weight)] = Shadow(weight)
            if shadow.home is None and weight.requires_grad:
                self.generation += 1
            shadow.put(copy)
        return copy

    def drop(self, weight: nn.Parameter) -> None:
        """Forget the copy of ``weight``: it has changed."""
        shadow = self._shadows.get(id(weight))
        if shadow is not None:
            self._forget(shadow)

    def escape(self, weight: nn.Parameter) -> None:
        """Forget the copy of ``weight`` and share no other: from now on it can change unseen."""
        self._escaped.add(id(weight))
        self._shadows.pop(id(weight), None)
        self.generation += 1

    def clear(self) -> None:
        """Forget every copy. Weights whose memory was handed out stay excluded."""
        for shadow in list(self._shadows.values()):
            self._forget(shadow)

    def drop_unwritten(self) -> None:
        """Let go of the copies that no optimizer writes: between steps nobody watches over those."""
        loose = [shadow for shadow in self._shadows.values() if shadow.home is None]
        if loose:
            written = {id(weight) for homes in self._homes for weight in homes if weight.requires_grad}
            for shadow in loose:
                if id(shadow.weight) not in written:
                    self._forget(shadow)

    def homes(self) -> Homes:
        """The copies that one optimizer writes, for it to follow."""
        homes = Homes(self)
        self._homes.append(homes)
        return homes

    def leave(self, homes: Homes) -> None:
        """Undo :meth:`homes`: nobody writes those copies any more."""
        self._homes = [known for known in self._homes if known is not homes]
        self.generation += 1
        for weight in homes:
            self._shadows.pop(id(weight), None)

    def of(self, weight: Tensor) -> Shadow | None:
        """The shadow of a weight, if it has one."""
        return self._shadows.get(id(weight))

    def _forget(self, shadow: Shadow) -> None:
        shadow.forget()
        if shadow.home is None:
            self._shadows.pop(id(shadow.weight), None)


class Homes:
    """The shadow weights that one optimizer writes beside the weights that it moves.

    Its steps keep asking, so looking whether all is as it was runs in C.
    """

    def __init__(self, shadows: ShadowWeights) -> None:
        self._cache = shadows
        self._generation = -1
        self._weights: list[Tensor] = []
        self._lows: list[Tensor] = []
        self._shadows: list[Shadow] = []
        self._moved: Sequence[Tensor] = ()
        self._written: list[Shadow] = []
        self._left: list[Shadow] = []

    def __iter__(self) -> Iterator[Tensor]:
        """The weights that the optimizer has asked about."""
        return iter(self._weights)

    def lows_of(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What is to be written beside each weight: its shadow, which is right now, or for want of one the weight itself."""
        if not self._is_settled(weights):
            self._weights = list(weights)
            self._lows, self._shadows, self._moved = [], [], ()
            for weight in weights:
                shadow = self._cache.of(weight)
                home = None if shadow is None else shadow.settle()
                self._lows.append(weight if home is None else home)
                if shadow is not None and home is not None:
                    self._shadows.append(shadow)
            self._generation = self._cache.generation
        return self._lows

    def note(self, moved: Sequence[Tensor]) -> None:
        """A step has written some weights and their shadows. Those of others are cast anew, as without an optimizer's help."""
        if moved is not self._moved:
            ids = set(map(id, moved))
            self._moved = moved
            self._written = [shadow for shadow in self._shadows if id(shadow.weight) in ids]
            self._left = [shadow for shadow in self._shadows if id(shadow.weight) not in ids]
        for shadow in self._written:
            if shadow.home is not None:
                shadow.put(shadow.home)
        for shadow in self._left:
            shadow.forget()

    def _is_settled(self, weights: Sequence[Tensor]) -> bool:
        shadows = self._shadows
        own = list(map(_WEIGHT, shadows))
        return (
            self._generation == self._cache.generation
            and len(weights) == len(self._weights)
            and all(map(is_, weights, self._weights))
            and all(map(is_, map(_COPY, shadows), map(_HOME, shadows)))
            and list(map(_VERSION, shadows)) == list(map(_TENSOR_VERSION, own))
            and list(map(_ADDRESS, shadows)) == list(map(Tensor.data_ptr, own))
            and not any(map(_EXPIRED, map(_MEMORY, shadows)))
        )


_WEIGHT: Final = attrgetter("weight")
_COPY: Final = attrgetter("copy")
_HOME: Final = attrgetter("home")
_VERSION: Final = attrgetter("version")
_ADDRESS: Final = attrgetter("address")
_MEMORY: Final = attrgetter("memory.cdata")
_EXPIRED: Final[Callable[[int], Any]] = torch.UntypedStorage._expired
_TENSOR_VERSION: Final = attrgetter("_version")


def _is_copy(copy: Tensor | None, weight: Tensor) -> bool:
    """Whether gradients of ``copy`` reach ``weight`` as it is now: its memory may be another, or elsewhere."""
    if copy is None or copy.shape != weight.shape or copy.device != weight.device or copy.grad_fn is None:
        return False
    end: Any = copy.grad_fn.next_functions[0][0]
    # torch.utils.swap_tensors makes the same parameter another end of graphs.
    return getattr(end, "variable", None) is weight
