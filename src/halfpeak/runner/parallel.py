"""MMDataParallel and MMDistributedDataParallel: wrappers with ``train_step``. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.wrappers import wrapper_of
from halfpeak.runner import model_step


class MMDataParallel(DataParallel[nn.Module]):
    """A model on one device, to which it moves the tensors of each batch. Without an accelerator this is the CPU.

    Args:
        module: the model; for training it needs ``train_step``.
        device_ids: one number; ``[-1]`` means the CPU.
        kwargs: passed to ``torch.nn.DataParallel``.

    Raises:
        ConfigError: more than one device. Several devices need one process each.

    >>> class Model(nn.Linear):
    ...     def train_step(self, data, optimizer):
    ...         return dict(loss=self(data).mean())
    >>> import torch
    >>> list(MMDataParallel(Model(2, 1)).train_step(torch.ones(1, 2), None))
    ['loss']
    """

    def __init__(self, module: nn.Module, device_ids: Any = (0,), **kwargs: Any) -> None:
        if len(device_ids) != 1:
            raise ConfigError(
                f"device_ids={short_repr(device_ids)} must name one device; use torchrun and "
                "MMDistributedDataParallel for several"
            )
        if device_ids[0] != -1:
            super().__init__(module, device_ids=list(device_ids), **kwargs)
            return
        nn.Module.__init__(self)  # DataParallel.__init__ would use an accelerator if there is one
        self.module, self.device_ids = module, []

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's ``train_step``."""
        inputs, kwargs = self._move(inputs, kwargs)
        return self.module.train_step(*inputs, **kwargs)  # type: ignore[operator]

    def val_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        """Call the model's ``val_step``, with the optimizer if its signature has a parameter for it."""
        (data,), kwargs = self._move((data,), kwargs)
        return model_step.val_step(self.module, data, optimizer, kwargs)

    def _move(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.device_ids:
            return inputs, kwargs
        moved: Any = self.scatter(inputs, kwargs, self.device_ids)
        return moved[0][0], moved[1][0]


def is_module_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a parallel or compiling wrapper around a model.

    >>> is_module_wrapper(DataParallel(nn.Linear(2, 1)))
    True
    """
    return wrapper_of(module) is not None


class MMDistributedDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` around a model with ``train_step``, which runs in place of the model's ``forward``.

    ``val_step`` bypasses ``DistributedDataParallel``, because ranks may have different numbers of validation batches
    and validation reduces nothing.

    Args:
        module: the model.
        args: passed to ``DistributedDataParallel``, like the keywords.

    Raises:
        ConfigTypeError: the model has no ``train_step``.
    """

    _steps: bool = False

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        model_step.check_model(module, None)
        super().__init__(module, *args, **kwargs)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's ``train_step``; the backward pass of its loss reduces the gradients over the ranks."""
        self._steps = True
        try:
            return self(*inputs, **kwargs)
        finally:
            self._steps = False

    def val_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        """Call the model's ``val_step``, with the optimizer if its signature has a parameter for it."""
        return model_step.val_step(self.module, data, optimizer, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._steps:
            return super()._run_ddp_forward(*inputs, **kwargs)
        with self._inside_ddp_forward():
            return self.module.train_step(*inputs, **kwargs)
