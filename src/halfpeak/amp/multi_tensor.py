"""``apex.multi_tensor_apply`` and the ``amp_C`` operations behind it, on any device, through torch's foreach kernels.

Every operation takes ``(chunk_size, noop_flag, tensor_lists, *args)``, the calling convention of :class:`MultiTensorApply`.
``chunk_size`` steered apex's kernels and has no effect here. ``noop_flag`` is a tensor of one element, of any dtype; an
operation sets it to 1 and never back to 0.

The optimizer steps (``multi_tensor_sgd`` to ``multi_tensor_novograd``) compute in float32, or float64 for float64
weights, whatever the dtypes of gradients and moments. As in apex, they check nothing: inf and nan reach the weights.
Only :func:`multi_tensor_sgd` reads the flag, and does nothing if it is set. ``mode`` is 1 to decouple the weight decay,
and 0 to add it to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfpeak.core.dtypes import is_low, largest
from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.backends.kernels import update_of
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.rules.lamb import LAMBRule
from halfpeak.fused.rules.novograd import NovoGradRule
from halfpeak.fused.rules.sgd import SGDRule
from halfpeak.ops import foreach

T = TypeVar("T")
TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls an operation with a chunk size in front of its arguments.

    >>> x, out, flag = [torch.ones(2)], [torch.empty(2)], torch.zeros(1, dtype=torch.int32)
    >>> multi_tensor_applier(multi_tensor_scale, flag, [x, out], 0.5)
    >>> out, flag
    ([tensor([0.5000, 0.5000])], tensor([0], dtype=torch.int32))
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., T], noop_flag: Tensor, tensor_lists: TensorLists, *args: Any) -> T:
        """``op(chunk_size, noop_flag, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """``out = in * scale`` for ``tensor_lists = [in, out]``; the flag is set if an input is not finite.

    Low-precision tensors are multiplied in float32 and rounded once. Outputs are always written, and may be the inputs.
    """
    sources, targets = _lists(tensor_lists, 2)
    if not sources:
        return
    _check(sources, noop_flag)
    with torch.no_grad():
        foreach.copy_cast_(targets, torch._foreach_mul(_upcast(sources), scale))


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """``out = a * x + b * y`` for ``tensor_lists = [x, y, out]``; the flag is set if a checked input is not finite.

    Args:
        arg_to_check: 0 checks x, 1 checks y, -1 both.
    """
    if arg_to_check not in (-1, 0, 1):
        raise ConfigError(f"arg_to_check={short_repr(arg_to_check)} must be 0 (x), 1 (y) or -1 (both)")
    x, y, out = _lists(tensor_lists, 3)
    if not x:
        return
    _check([*(x if arg_to_check != 1 else ()), *(y if arg_to_check != 0 else ())], noop_flag)
    with torch.no_grad():
        total = torch._foreach_mul(_upcast(x), a)
        torch._foreach_add_(total, torch._foreach_mul(_upcast(y), b))
        foreach.copy_cast_(out, total)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all elements of ``tensor_lists = [x]``; the flag is set if the norm is not finite.

    Returns:
        The norm, and the norm of each tensor (empty unless ``per_tensor``), in float32.  # f32[1], f32[n] or f32[0]
    """
    (x,) = _lists(tensor_lists, 1)
    return _norms(_upcast(x), noop_flag, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of ``x * inv_scale`` as :func:`multi_tensor_l2norm` does; x is not changed."""
    (x,) = _lists(tensor_lists, 1)
    with torch.no_grad():
        unscaled = torch._foreach_mul(_upcast(x), inv_scale.reshape(())) if x else []
    return _norms(unscaled, noop_flag, per_tensor)


def update_scale_hysteresis(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Move a loss scale in place by the rule of :func:`halfpeak.core.schedule.advance`, and return it.

    The scale falls after ``hysteresis`` overflows; an update without overflow restores that count. apex's kernel let
    the scale fall to 0; here it stops at the smallest normal float32.

    Args:
        scale: f32[1]; likewise ``found_inf``.
        growth_tracker: i32[1], clean updates in a row.
        hysteresis_tracker: i32[1], overflows left before the scale falls.

    Raises:
        ConfigError: a factor, the interval or the hysteresis is out of its range.
    """
    limits = torch.finfo(torch.float32)
    rule = ScaleConfig(
        growth=growth_factor,
        backoff=backoff_factor,
        interval=growth_interval,
        hysteresis=hysteresis,
        floor=limits.tiny,
        ceiling=largest(torch.float32),
        patience=None,
    )
    stuck = torch.zeros_like(growth_tracker)
    state = advance(rule, ScaleState(scale, growth_tracker, hysteresis_tracker, stuck), found_inf)
    growth_tracker.copy_(state.clean)
    hysteresis_tracker.copy_(state.grace)
    return scale.copy_(state.scale)


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
    """Apply :class:`~halfpeak.fused.rules.sgd.SGDRule` to ``[gradients, weights, buffers]``. A fourth list receives the
    new weights. Does nothing if the flag is set; reading the flag waits for the device.

    Args:
        wd: weight decay.
        first_run: the gradient is copied into the momentum buffer.
        wd_after_momentum: add the weight decay after the momentum.
        scale: factor for the gradients.
    """
    if bool(noop_flag):
        return
    grads, weights, buffers, *low_weights = tensor_lists
    rule = SGDRule(momentum=momentum != 0, nesterov=nesterov, late=wd_after_momentum)
    group = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": wd}
    states = [buffers] if momentum != 0 else []
    _apply(
        rule, group, 1 if first_run else 2, grads, weights, states, low_weights=low_weights, multiplier=scale
    )


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
    """Apply :class:`~halfpeak.fused.rules.adam.AdamRule` to ``[gradients, weights, first moments, second moments]``.

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
    """Apply :class:`~halfpeak.fused.rules.adagrad.AdagradRule` to ``[gradients, weights, sums]``.

    Args:
        mode: 1 decouples the weight decay, 0 adds it to the gradient.
    """
    grads, weights, sums = tensor_lists
    rule = AdagradRule(decoupled=_mode(mode), step_scope="nowhere")
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
    """Apply :class:`~halfpeak.fused.rules.lamb.LAMBRule` to ``[gradients, weights, first moments, second moments]``.

    Args:
        global_grad_norm: the norm of all gradients; above ``max_grad_norm`` gradients are scaled down to it.  # f32[1]
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
    multiplier = torch.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
    _apply(rule, group, step, grads, weights, moments, multiplier=multiplier)


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
    """Apply :class:`~halfpeak.fused.rules.novograd.NovoGradRule` to ``[gradients, weights, first moments]``.

    Args:
        grad_norms: the running norms, one per tensor, updated in place; the caller initialises them.  # f32[n]
        mode: 1 adds the weight decay to the update, 0 to the moment.
        norm_type: 2, or 0 for the largest absolute value.
    """
    if norm_type not in (0, 2):
        raise ConfigError(f"norm_type={short_repr(norm_type)} must be 2, or 0 for the largest absolute value")
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


def _lists(tensor_lists: TensorLists, count: int) -> list[list[Tensor]]:
    lists = [list(tensors) for tensors in tensor_lists]
    _check_lengths(lists, count)
    return lists


def _check_lengths(lists: TensorLists, count: int | None = None) -> None:
    lengths = [len(tensors) for tensors in lists]
    if len(lengths) != (count or len(lengths)) or len(set(lengths)) != 1:
        expected = "lists" if count is None else f"{count} lists"
        raise ConfigError(
            f"tensor_lists has lists of lengths {lengths}; this operation expects {expected} of equal length"
        )


def _upcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().float() if is_low(tensor) else tensor.detach() for tensor in tensors]


def _check(tensors: Sequence[Tensor], noop_flag: Tensor) -> None:
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    foreach.check_([tensor.detach() for tensor in tensors], found_inf)
    noop_flag.copy_(torch.maximum(noop_flag, found_inf.to(noop_flag)))


def _norms(
    tensors: list[Tensor] | tuple[Tensor, ...], noop_flag: Tensor, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_zeros(0, dtype=torch.float32)
    norms = torch.stack([norm.to(noop_flag.device, torch.float32) for norm in torch._foreach_norm(tensors)])
    norm = torch.linalg.vector_norm(norms).reshape(1)
    noop_flag.copy_(torch.maximum(noop_flag, (~torch.isfinite(norm)).to(noop_flag).reshape(noop_flag.shape)))
    return norm, norms if per_tensor else norms[:0]


@torch.no_grad()
def _apply(
    rule: Rule,
    group: Mapping[str, Any],
    step: int | Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    low_weights: Sequence[Sequence[Tensor]] = (),
    multiplier: float | Tensor = 1.0,
) -> None:
    """Take one step of ``rule`` for each weight."""
    _check_lengths([grads, weights, *states, *low_weights])
    update = update_of(rule)
    constants = [float(number) for number in rule.constants(group, float(step))]
    written: Sequence[Tensor | None] = low_weights[0] if low_weights else [None] * len(weights)
    for i, weight in enumerate(weights):
        if not weight.numel():
            continue
        dtype = torch.promote_types(weight.dtype, torch.float32)
        numbers = torch.tensor([0.0, *constants], dtype=dtype, device=weight.device)
        numbers[0] = multiplier
        update(weight.detach(), written[i], [state[i] for state in states], grads[i].detach(), numbers)


def _mode(mode: int) -> bool:
    if mode not in (0, 1):
        raise ConfigError(
            f"mode={short_repr(mode)} must be 1 (decoupled weight decay) or 0 (weight decay added to the gradient)"
        )
    return mode == 1
