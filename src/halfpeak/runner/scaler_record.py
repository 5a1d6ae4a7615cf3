"""The loss scale in ``runner.meta``: a mapping that is read, and waits for the device, only when somebody looks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from halfpeak.checkpoint.foreign import to_grad_scaler, to_mmcv
from halfpeak.optim.amp_wrapper import numbers_of
from halfpeak.parts.loss_scaler import LossScaler


class ScalerRecord(Mapping[str, Any]):
    """A loss scaler's state as it is now, in the keys that mmcv wrote for it.

    Copying or saving it gives plain numbers.

    Args:
        scaler: the scaler; held for as long as the record is.
        as_mmcv: the six keys of mmcv's ``LossScaler``; otherwise those of ``torch.amp.GradScaler``.

    >>> import copy
    >>> from halfpeak.core.schedule import ScaleConfig
    >>> record = ScalerRecord(LossScaler(ScaleConfig(init=8.0)), as_mmcv=False)
    >>> record["scale"], type(copy.deepcopy(record))
    (8.0, <class 'dict'>)
    """

    def __init__(self, scaler: LossScaler, *, as_mmcv: bool) -> None:
        self._scaler, self._as_mmcv = scaler, as_mmcv

    def read(self) -> dict[str, Any]:
        """The state as a dict. Waits for the device."""
        translate = to_mmcv if self._as_mmcv else to_grad_scaler
        return translate(numbers_of(self._scaler), self._scaler.config)

    @property
    def loss_scale(self) -> float:
        """The scale. Waits for the device."""
        return self._scaler.read_scale()

    def get_scale(self) -> float:
        """The scale, as code written for ``GradScaler`` asks for it. Waits for the device."""
        return self._scaler.read_scale()

    def state_dict(self) -> dict[str, Any]:
        """The state as a dict. Waits for the device."""
        return self.read()

    def __getitem__(self, key: str) -> Any:
        return self.read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return repr(self.read())

    def __copy__(self) -> dict[str, Any]:
        return self.read()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        # The one mapping that torch.load(weights_only=True) builds from a file.
        return OrderedDict, (), None, None, iter(self.read().items())
