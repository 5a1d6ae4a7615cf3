"""Masters that an optimizer keeps to itself, while its groups hold the low parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.amp.optimizers.form import ApexForm
from halfpeak.fused.layout import targets_of
from halfpeak.fused.optimizer import Feed, FusedOptimizer
from halfpeak.fused.roads.base import Reading


class OwnMasters(ApexForm):
    """Float32 copies of low parameters move, and the parameters are rounded from them.

    They are made at the first step, are in no ``state_dict``, as in apex, and follow whoever writes to the parameters:
    where a master still rounds to its parameter it keeps its precision. An optimizer inside this one steps them; it
    shares its groups and states.
    """

    kept = (*ApexForm.kept, "_masters")

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._masters: dict[Tensor, tuple[Tensor, int]] = {}
        super().__init__(params, defaults)

    @abstractmethod
    def inside(self, masters: Sequence[Tensor]) -> FusedOptimizer:
        """The optimizer that steps masters."""

    @abstractmethod
    def has_master(self, parameter: Tensor) -> bool:
        """Whether a parameter gets one."""

    def measure(self, feed: Feed) -> Reading:
        """See :class:`~halfpeak.fused.optimizer.FusedOptimizer`."""
        if not self._applies():
            return super().measure(feed)
        return self._enter().measure(feed._replace(lows=targets_of(self)))

    def _begin(self) -> None:
        super()._begin()
        self._inner: FusedOptimizer | None = None

    def _applies(self) -> bool:
        return any(map(self.has_master, targets_of(self)))

    def _move(self, feed: Feed, found_inf: Tensor | None = None) -> None:
        if not self._applies():
            super()._move(feed, found_inf)
            return
        targets = targets_of(self)
        inner = self._enter()
        inner._move(feed._replace(lows=targets), found_inf)  # pyright: ignore[reportPrivateUsage]
        for parameter, master in zip(targets, targets_of(inner), strict=True):
            if master in inner.state:
                self.state[parameter] = inner.state[master]
            if master is not parameter:
                self._masters[parameter] = master, parameter._version
        for group, mirror in zip(self.param_groups, inner.param_groups, strict=True):
            if "step" in mirror:
                group["step"] = mirror["step"]

    def _enter(self) -> FusedOptimizer:
        """The optimizer inside, with everything as it is now."""
        targets = targets_of(self)
        masters = {parameter: self._master(parameter) for parameter in targets}
        if self._inner is None:
            self._inner = self.inside(list(masters.values()))
        groups = [{**g, "params": [masters[p] for p in g["params"]]} for g in self.param_groups]
        self._inner.param_groups = groups
        for parameter in targets:
            row = self.state.get(parameter)
            if row is not None and self._inner.state.get(masters[parameter]) is not row:
                self._inner.state[masters[parameter]] = row
        return self._inner

    def _master(self, parameter: Tensor) -> Tensor:
        if not self.has_master(parameter):
            return parameter
        if parameter not in self._masters:
            self._masters[parameter] = parameter.detach().float(), parameter._version
        master, version = self._masters[parameter]
        if parameter._version != version:
            value = parameter.detach()
            master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))
            self._masters[parameter] = master, parameter._version
        return master
