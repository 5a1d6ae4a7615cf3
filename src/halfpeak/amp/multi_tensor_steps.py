"""The optimizer steps of ``amp_C``: update rules on lists of tensors, in the calling convention of MultiTensorApply.

See :mod:`halfpeak.amp.multi_tensor` for the convention. Weights, gradients and moments may be low; they are computed in
float32. Nothing is checked: as in apex, inf and nan reach the weights, but for :func:`multi_tensor_sgd`, which does
nothing where the flag is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.amp.multi_tensor import TensorLists
from halfpeak.core.errors import ConfigError
from halfpeak.fused.kernel import update_of
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.rules.lamb import LAMBRule
from halfpeak.fused.rules.novograd import NovoGradRule
from halfpeak.fused.rules.sgd import SGDRule


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """:class:`~halfpeak.fused.rules.sgd.SGDRule` on ``[gradients, weights, buffers]``, and where there are four lists, the
    new weights into the last. Does nothing where the flag is set, for which it waits for the device.

    Args:
        wd: weight decay.
        first_run: a gradient becomes the buffer.
        wd_after_momentum: decay after the momentum.
        scale: what gradients are multiplied by.
    """
    if bool(noop_flag):
        return
    grads, weights, buffers, *lows = tensor_lists
    rule = SGDRule(momentum=momentum != 0, nesterov=nesterov, late=wd_after_momentum)
    group = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": wd}
    slots = [buffers] if momentum != 0 else []
    _apply(rule, group, 1 if first_run else 2, grads, weights, slots, lows=lows, factor=scale)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """:class:`~halfpeak.fused.rules.adam.AdamRule` on ``[gradients, weights, first moments, second moments]``.

    Args:
        mode: 1 decouples the weight decay, 0 adds it to the gradient.
    """
    grads, weights, *moments = tensor_lists
    rule = AdamRule(decoupled=_mode(mode), correct=bool(bias_correction))
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    _apply(rule, group, step, grads, weights, moments)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """:class:`~halfpeak.fused.rules.adagrad.AdagradRule` on ``[gradients, weights, sums]``.

    Args:
        mode: 1 decouples the weight decay, 0 adds it to the gradient.
    """
    grads, weights, sums = tensor_lists
    rule = AdagradRule(decoupled=_mode(mode), counts=False)
    _apply(rule, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, 1, grads, weights, [sums])


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """:class:`~halfpeak.fused.rules.lamb.LAMBRule` on ``[gradients, weights, first moments, second moments]``.

    Args:
        mode: 1 decouples the weight decay, 0 adds it to the gradient.
        global_grad_norm: the norm of all gradients; those are divided by what it exceeds ``max_grad_norm`` by.  # f32[1]
    """
    grads, weights, *moments = tensor_lists
    rule = LAMBRule(
        decoupled=_mode(mode),
        average=bool(grad_averaging),
        correct=bool(bias_correction),
        trusts=use_nvlamb or weight_decay != 0,
    )
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    norm = global_grad_norm.detach().reshape(())
    factor = torch.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
    _apply(rule, group, step, grads, weights, moments, factor=factor)


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """:class:`~halfpeak.fused.rules.novograd.NovoGradRule` on ``[gradients, weights, first moments]``.

    Args:
        grad_norms: the running norms, one per tensor, updated in place; the first ones are the caller's.  # f32[n]
        mode: 1 decays beside the moment, 0 inside it.
        norm_type: 2, or 0 for the largest absolute value.
    """
    if norm_type not in (0, 2):
        raise ConfigError(f"norm_type={norm_type!r} must be 2, or 0 for the largest absolute value")
    grads, weights, moments = tensor_lists
    rule = NovoGradRule(
        inside=not _mode(mode),
        average=bool(grad_averaging),
        correct=bool(bias_correction),
        largest=norm_type == 0,
        from_zero=True,
    )
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    _apply(rule, group, step, grads, weights, [moments, list(grad_norms.detach().unbind())])


@torch.no_grad()
def _apply(
    rule: Rule,
    group: Mapping[str, Any],
    step: int | Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    slots: Sequence[Sequence[Tensor]],
    *,
    lows: Sequence[Sequence[Tensor]] = (),
    factor: float | Tensor = 1.0,
) -> None:
    """One step of ``rule`` for each tensor."""
    lengths = [len(tensors) for tensors in (grads, weights, *slots, *lows)]
    if len(set(lengths)) != 1:
        raise ConfigError(
            f"tensor_lists has lists of lengths {lengths}; this operation takes lists of one length"
        )
    update = update_of(rule)
    constants = [float(number) for number in rule.constants(group, float(step))]
    written: Sequence[Tensor | None] = lows[0] if lows else [None] * len(weights)
    for i, weight in enumerate(weights):
        if not weight.numel():
            continue
        wide = torch.promote_types(weight.dtype, torch.float32)
        numbers = torch.tensor([0.0, *constants], dtype=wide, device=weight.device)
        numbers[0] = factor
        update(weight.detach(), written[i], [slot[i] for slot in slots], grads[i].detach(), numbers)


def _mode(mode: int) -> bool:
    if mode not in (0, 1):
        raise ConfigError(f"mode={mode!r} must be 1 (decay beside the gradient) or 0 (inside it)")
    return mode == 1
