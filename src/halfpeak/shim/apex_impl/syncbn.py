"""``apex.parallel.SyncBatchNorm`` and ``convert_syncbn_model``: torch's kernels, or all-reduced sums on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfpeak.core.errors import ConfigError
from halfpeak.ops.shards import has_process_group


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with statistics over all ranks.

    On an accelerator the layer runs ``torch.nn.SyncBatchNorm.forward``. On the CPU, mean and variance come from two
    differentiable sums over the ranks. In evaluation, or with one rank on the CPU, the layer runs ``F.batch_norm``.
    Half-precision inputs are normalised in float32 and returned in their own dtype.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.
        process_group: the ranks that share statistics; None for all.
        channel_last: inputs are (N, ..., C) rather than (N, C, ...).
        fuse_relu: apply a ReLU to the output, after adding ``z``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``input``, add ``z`` (of the same shape), and apply the ReLU if ``fuse_relu``."""
        x = input.movedim(-1, 1) if self.channel_last and input.dim() > 2 else input
        out = _synchronised(self, x) if self._needs_sums(x) else self._by_torch(x)
        if x is not input:
            out = out.movedim(1, -1)
        if z is not None:
            out = out + z
        return out.relu() if self.fuse_relu else out

    def _needs_sums(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and self._is_shared() and dist.get_world_size(self.process_group) > 1

    def _is_shared(self) -> bool:
        return self.training and has_process_group()

    def _by_torch(self, x: Tensor) -> Tensor:
        # No subclass of nn.SyncBatchNorm, because DistributedDataParallel refuses that on the CPU.
        if x.device.type == "cpu" or not self._is_shared():
            return super().forward(x)
        forward: Any = nn.SyncBatchNorm.forward
        return forward(self, x)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ConfigError(f"SyncBatchNorm takes inputs of 2 dimensions at least, not {input.dim()}")

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        """Check nothing. ``torch.nn.SyncBatchNorm.forward`` calls this method."""


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Replace every batch norm by a :class:`SyncBatchNorm` with the same parameters and buffers.

    Returns ``module`` itself, unless it is a batch norm. The optimizer may be built before or after, because the
    parameters stay the same objects.
    """
    if isinstance(module, _BatchNorm):
        return _converted(module, process_group, channel_last)
    for name, child in module.named_children():
        module.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return module


def _converted(norm: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
        channel_last=channel_last,
    )
    for name, parameter in norm._parameters.items():
        new.register_parameter(name, parameter)
    for name, buffer in norm._buffers.items():
        new.register_buffer(name, buffer)
    return new.train(norm.training)


def _synchronised(norm: SyncBatchNorm, input: Tensor) -> Tensor:
    """Normalise by statistics over all ranks and update the running ones; batch sizes may differ between ranks."""
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = x.new_tensor([x.numel() // x.size(1)])
    sums = _Sum.apply(torch.cat([x.sum(dims), count]), norm.process_group)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    # From centred values: E[x^2] - E[x]^2 loses all digits where the mean is large.
    variance = _Sum.apply(centred.square().sum(dims), norm.process_group) / count
    _move_running(norm, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(input.dtype)


@torch.no_grad()
def _move_running(norm: SyncBatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum)


class _Sum(torch.autograd.Function):
    """Sums a tensor over the ranks; the backward pass sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sum over the ranks."""
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sum the gradient over the ranks."""
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
