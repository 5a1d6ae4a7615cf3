"""MMDistributedDataParallel: torch's wrapper with the steps that a runner calls. Answers to mmcv 1.7.2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.runner import stepping


class MMDistributedDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` around a model with ``train_step``: its gradients are averaged over the ranks.

    ``train_step`` takes the place of the inner ``forward``. ``val_step`` goes to the model directly, because ranks may
    hold different numbers of validation batches and nothing is to be reduced.

    Args:
        module: the model.
        args: of ``DistributedDataParallel``, as are the keywords.

    Raises:
        ConfigTypeError: the model has no ``train_step``.
    """

    _steps: bool = False

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        stepping.check_model(module, None)
        super().__init__(module, *args, **kwargs)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's ``train_step``; the backward pass of its loss reduces the gradients."""
        self._steps = True
        try:
            return self(*inputs, **kwargs)
        finally:
            self._steps = False

    def val_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        """The model's ``val_step``; it gets the optimizer if it has a place for it."""
        return stepping.val_step(self.module, data, optimizer, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._steps:
            return super()._run_ddp_forward(*inputs, **kwargs)
        with self._inside_ddp_forward():
            return self.module.train_step(*inputs, **kwargs)
