"""AveragedModel: torch's averages of weights (EMA, SWA), on the float32 values that an optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import NoneType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from halfpeak.casting.float8 import from_float8
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, ConfigTypeError, ParameterError
from halfpeak.core.short_repr import short_repr
from halfpeak.engine.engine import engine_of
from halfpeak.ops import foreach
from halfpeak.ops.shards import local_of
from halfpeak.ops.unsharded import is_fully_sharded
from halfpeak.parts.model_hooks import own_hooks, remove_own_hooks
from halfpeak.parts.pairs import float32_values

Tensors = list[Tensor] | tuple[Tensor, ...]

AvgFn = Callable[[Tensor, Tensor, Tensor | int], Tensor]
"""Returns a new average, from the average, the value of the weight, and the number of models averaged so far."""

MultiAvgFn = Callable[[Tensors, Tensors, Tensor | int], None]
"""The same for lists of one dtype and device. Writes the averages in place."""


class AveragedModel(swa_utils.AveragedModel):
    """``torch.optim.swa_utils.AveragedModel`` on the float32 values of the weights, at every level.

    ``module`` is a float32 copy of the model without the casts of its level. Make it before or after the model is prepared.
    :meth:`update_parameters` averages the masters where weights have them, and does not wait for the device.

    Args:
        model: the model to average.
        device: of the averages; None means that of the model.
        avg_fn: averages one tensor, such as ``torch.optim.swa_utils.get_ema_avg_fn(0.999)``.
        multi_avg_fn: averages a list of tensors in place, such as ``get_ema_multi_avg_fn(0.999)``. Without both functions
            all models count equally (SWA).
        use_buffers: average floating-point buffers, too. Otherwise, and for whole numbers, the latest values are copied.

    Raises:
        ConfigError: both functions.
        ParameterError: the model is sharded (FSDP2); copy it before ``fully_shard``.

    Example:
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
        >>> averaged.update_parameters(model)
        >>> averaged(torch.ones(3, 4)).dtype
        torch.float32
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(
                f"{type(model).__name__} is not a torch.nn.Module; write AveragedModel(model)"
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigError("AveragedModel takes avg_fn or multi_avg_fn, not both; leave one out")
        if type(device) not in (int, str, torch.device, NoneType):
            raise ConfigTypeError(
                f"device={short_repr(device)} must be a device; for a decay write AveragedModel(model, "
                f"multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn({short_repr(device)}))"
            )
        # The base class would make its own copy, and put the count on the device, where reading it is a wait.
        super().__init__(nn.Identity(), torch.device("cpu"), avg_fn, multi_avg_fn, use_buffers)
        self.module: nn.Module = float32_copy(model)
        if device is not None:
            self.module.to(device)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average the present values of ``model``. The first call copies them.

        Args:
            model: the one that was copied, or a wrapper around it.

        Raises:
            ParameterError: it has other parameters or buffers, or is sharded and ``module`` is not.
        """
        averages, values = local_of(_tensors(self.module)), local_of(float32_values(_tensors(model)))
        if [average.shape for average in averages] != [value.shape for value in values]:
            raise ParameterError(
                f"the {len(values)} parameters and buffers of {type(model).__name__} are not like the {len(averages)} "
                "averages; pass the model that AveragedModel(model) has copied, and if it is sharded, shard averaged.module in "
                "the same way"
            )
        moves, last = bool(self.n_averaged), len(averages if self.use_buffers else list(model.parameters()))
        # By device and dtype; those that are only copied have no dtype.
        groups: dict[tuple[torch.device, torch.dtype | None], tuple[list[Tensor], list[Tensor]]] = {}
        for number, (average, value) in enumerate(zip(averages, values, strict=True)):
            is_real = average.is_floating_point() or average.is_complex()
            is_averaged = moves and number < last and is_real
            group = groups.setdefault((average.device, average.dtype if is_averaged else None), ([], []))
            group[0].append(average.detach())
            group[1].append(value.to(average.device, average.dtype))
        for (_, dtype), (averages, values) in groups.items():
            (foreach.copy_cast_ if dtype is None else self._average)(averages, values)
        self.n_averaged += 1

    def _average(self, averages: list[Tensor], values: list[Tensor]) -> None:
        if self.avg_fn is None:
            multi_avg_fn = self.multi_avg_fn or swa_utils.get_swa_multi_avg_fn()
            multi_avg_fn(averages, values, self.n_averaged)
            return
        for average, value in zip(averages, values, strict=True):
            average.copy_(self.avg_fn(average, value, self.n_averaged))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to()`` and ``cuda()`` call. The count stays on the host."""
        count = self.n_averaged
        super()._apply(fn, recurse)
        self.n_averaged = count
        return self


def float32_copy(model: nn.Module) -> nn.Module:
    """A deep copy with the float32 values of the weights, and without what :func:`halfpeak.prepare` has put on the model.

    Raises:
        ParameterError: the model is sharded by ``fully_shard``.
    """
    if any(map(is_fully_sharded, model.modules())):
        raise ParameterError(
            f"{type(model).__name__} is sharded, and torch copies no sharded model; write AveragedModel(model) before "
            "fully_shard(model), and fully_shard(averaged.module) after it"
        )
    memo: dict[int, Any] = {id(hook): hook for module in model.modules() for hook in own_hooks(module)}
    tensors = _tensors(model)
    for tensor, value in zip(tensors, float32_values(tensors), strict=True):
        if is_low(tensor):
            value = value.clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    copied = copy.deepcopy(model, memo)
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        remove_own_hooks(module)
        engine = engine_of(original)
        if engine is not None:
            from_float8(module, engine.policy)
    return copied


def _tensors(model: nn.Module) -> list[Tensor]:
    """The parameters of a model, then its buffers."""
    return [*model.parameters(), *model.buffers()]
