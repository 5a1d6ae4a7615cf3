"""Masters: the float32 copies of low parameters that an optimizer steps. The only code that swaps its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError, ParameterError
from halfpeak.ops import foreach


class Masters:
    """Pairs of a low parameter and its float32 master, by identity, each once however many groups name it.

    A master takes the place of its parameter in the optimizer's groups and inherits its state. :meth:`publish` rounds
    the masters back into the parameters; :meth:`refresh` follows whoever wrote to the parameters in the meantime.

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

    def __init__(self) -> None:
        self._low: list[nn.Parameter] = []
        self._high: list[Tensor] = []
        self._versions: list[int] = []
        self._index: dict[int, int] = {}
        self._low_of: dict[int, nn.Parameter] = {}
        self._dirty = False

    def __len__(self) -> int:
        return len(self._low)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Pairs of (low parameter, master)."""
        return iter(zip(self._low, self._high, strict=True))

    def of(self, parameter: Tensor) -> Tensor | None:
        """The master of a low parameter, or None."""
        index = self._index.get(id(parameter))
        return None if index is None else self._high[index]

    def low_of(self, master: Tensor) -> nn.Parameter | None:
        """The low parameter that a master belongs to, or None."""
        return self._low_of.get(id(master))

    def adopt(self, optimizer: Optimizer, values: Mapping[int, Tensor] | None = None) -> None:
        """Put a master in the place of every trainable low parameter of the optimizer that has none yet.

        State that the optimizer holds for the parameter moves to the master, in float32.

        Args:
            optimizer: changed in place; its group dicts and lists stay the same objects.
            values: float32 values to start from, by ``id`` of the parameter. Without one, a master starts from the
                low parameter widened.
        """
        for group in optimizer.param_groups:
            parameters = group["params"]
            for position, parameter in enumerate(parameters):
                if is_low(parameter) and parameter.requires_grad:
                    parameters[position] = self._master_for(parameter, values or {})
                    _move_state(optimizer, parameter, parameters[position])

    def release(self, optimizer: Optimizer) -> None:
        """Undo :meth:`adopt`: put the low parameters back into the optimizer's groups, with their state."""
        for group in optimizer.param_groups:
            parameters = group["params"]
            for position, master in enumerate(parameters):
                low = self.low_of(master)
                if low is not None:
                    parameters[position] = low
                    if master in optimizer.state:
                        optimizer.state[low] = optimizer.state.pop(master)

    def mark_stepped(self) -> None:
        """Say that an optimizer is about to move the masters: :meth:`refresh` must not undo it."""
        self._dirty = bool(self._low)

    def publish(self) -> None:
        """Round every master into its low parameter."""
        with torch.no_grad():
            foreach.copy_cast_(self._low, self._high)
        self._versions = [parameter._version for parameter in self._low]
        self._dirty = False

    def refresh(self) -> None:
        """Follow whoever wrote to the low parameters since the last publish: load, broadcast, clamp, re-initialise.

        Element by element, a master stays where it rounds to its parameter (nobody wrote there) and takes the widened
        parameter elsewhere. Nothing waits for the device. Writes through ``.data`` are seen only before the first
        step, because they leave no trace.

        Raises:
            ParameterError: a parameter changed its shape or device; prepare again after moving a model.
        """
        if self._dirty:
            self.publish()
        for index, (low, high) in enumerate(self):
            if low._version == self._versions[index]:
                continue
            if low.shape != high.shape or low.device != high.device:
                raise ParameterError(
                    f"a parameter went from {tuple(high.shape)} on {high.device} to {tuple(low.shape)} on "
                    f"{low.device} after its float32 master was made; move or resize the model first and prepare it afterwards"
                )
            with torch.no_grad():
                high.copy_(torch.where(high.to(low.dtype) == low, high, low.to(high.dtype)))
            self._versions[index] = low._version

    def take(self, parameter: Tensor, value: Tensor) -> None:
        """Set the master of a low parameter to a loaded value, before rounding reaches the parameter."""
        high = self.of(parameter)
        if high is not None and high.shape == value.shape and value.is_floating_point():
            with torch.no_grad():
                high.copy_(value)

    def note_load(self, parameters: Iterable[Tensor]) -> None:
        """Say that the parameters now hold what :meth:`take` gave to their masters."""
        for parameter in parameters:
            index = self._index.get(id(parameter))
            if index is not None:
                self._versions[index] = parameter._version

    def _master_for(self, parameter: nn.Parameter, values: Mapping[int, Tensor]) -> Tensor:
        known = self.of(parameter)
        if known is not None:
            return known
        value = values.get(id(parameter))
        high = (parameter.detach() if value is None else value.detach()).to(torch.float32, copy=True)
        high.requires_grad_(True)
        vars(high)["_halfpeak"] = _Bound()
        self._index[id(parameter)] = len(self._low)
        self._low_of[id(high)] = parameter
        self._low.append(parameter)
        self._high.append(high)
        # -1 is never a version: the first refresh compares values, so that writes through .data before it are seen.
        self._versions.append(-1)
        return high


class _Bound:
    """Sits on a master and refuses to be copied: an optimizer copied alone would step masters of no model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model, so a copy of it alone would train nothing; write "
            "copy.deepcopy(engine) to copy model, optimizer and masters together, or use optimizer.state_dict()"
        )

    def __reduce__(self) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model and cannot be pickled alone; save engine.state_dict() or "
            "optimizer.state_dict() instead"
        )


def _move_state(optimizer: Optimizer, parameter: Tensor, master: Tensor) -> None:
    """Hand the optimizer's state of a parameter to its master; what was low becomes float32."""
    if parameter in optimizer.state and master not in optimizer.state:
        state = optimizer.state.pop(parameter)
        for key, value in state.items():
            if isinstance(value, Tensor) and is_low(value):
                state[key] = value.float()
        optimizer.state[master] = state
