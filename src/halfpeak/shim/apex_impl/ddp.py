"""``apex.parallel.DistributedDataParallel``: torch's class with apex's arguments."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import require_scale

_BASE: Final = nn.parallel.DistributedDataParallel
# torch 2.13 renamed the argument and warns about the old name.
_KNOWN: Final = inspect.signature(_BASE.__init__).parameters
_NO_BUFFERS: Final[dict[str, Any]] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}
BYTES: Final = 4  # of a float32 gradient: apex counts buckets in elements, torch in MiB


class DistributedDataParallel(_BASE):
    """Averages gradients over the ranks while ``backward`` runs, on any device and backend.

    Parameters and buffers are broadcast from rank 0 once; buffers are not sent again, as in apex. ``no_sync()`` of
    torch, which apex lacks, does the same as :meth:`disable_allreduce`.

    Args:
        module: the model, of which each rank has a copy; ``state_dict()`` has the prefix ``module.``.
        message_size: the least number of elements that are reduced together.
        delay_allreduce: for models that do not use every parameter in every pass: sets ``find_unused_parameters``. Used
            parameters are still reduced during the pass.
        shared_param: refused, as in apex.
        allreduce_trigger_params: no effect; torch detects itself when a bucket is full.
        retain_allreduce_buffers: no effect; gradients are in ``.grad``.
        allreduce_always_fp32: sum half-precision gradients in float32.
        num_allreduce_streams: no effect; torch uses its own stream.
        allreduce_communicators: no effect.
        gradient_average: divide by the number of ranks; False leaves the sum.
        gradient_predivide_factor: divide by this before the sum, and to average, by ``ranks / factor`` after it.
        gradient_average_split_factor: refused, as in apex.
        prof: no effect; use torch.profiler.

    Raises:
        ConfigError: an argument that apex had removed, or a factor that is not a finite number above zero.
        ValueError: there is no process group; call ``torch.distributed.init_process_group`` first.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ConfigError(
                "shared_param was removed from apex; leave it out, shared parameters work without it"
            )
        if gradient_average_split_factor is not None:
            raise ConfigError(
                "gradient_average_split_factor was renamed in apex; write gradient_predivide_factor=..."
            )
        factor = require_scale("gradient_predivide_factor", gradient_predivide_factor)
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ConfigError(
                "allreduce_trigger_params and delay_allreduce=True exclude each other; leave out one of them"
            )
        super().__init__(
            module,
            **_NO_BUFFERS,
            bucket_cap_mb=max(message_size * BYTES / 2**20, 1.0),
            find_unused_parameters=delay_allreduce,
        )
        if factor != 1 or not gradient_average or allreduce_always_fp32:
            hook = _Reduction(factor, average=gradient_average, upcast=allreduce_always_fp32)
            self.register_comm_hook(None, hook.reduce)

    def disable_allreduce(self) -> None:
        """Stop reducing gradients, from the next forward pass on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, from the next forward pass on."""
        self.require_backward_grad_sync = True


@dataclass(frozen=True)
class _Reduction:
    """The communication hook for a bucket of gradients that is not simply averaged."""

    # torch compares the hook's annotations with types, so this file must not import annotations from __future__.

    factor: float
    average: bool
    upcast: bool

    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Divide by the factor, sum over the ranks, divide by the rest."""
        gradients = bucket.buffer()
        summed = gradients.float() if self.upcast else gradients
        if self.factor != 1:
            summed.div_(self.factor)
        rest = dist.get_world_size() / self.factor if self.average else 1.0

        def finish(done: torch.futures.Future[Any]) -> Tensor:
            return gradients.copy_(summed.div_(rest))

        work: Any = dist.all_reduce(summed, async_op=True)
        return work.get_future().then(finish)
