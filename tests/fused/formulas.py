"""LAMB and NovoGrad written by hand, one parameter at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETAS = (0.8, 0.95)


def lamb(
    weights: list[Tensor],
    batches: list[list[Tensor]],
    *,
    lr: float = 0.02,
    eps: float = 1e-6,
    decay: float = 0.1,
    limit: float = 1.0,
    decoupled: bool = True,
    average: bool = True,
    correct: bool = True,
    everywhere: bool = False,
) -> list[Tensor]:
    """The weights after the batches."""
    beta1, beta2 = BETAS
    weights = [weight.double() for weight in weights]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for t, batch in enumerate(batches, 1):
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in batch))
        divisor = norm / limit if norm > limit else 1.0
        for i, weight in enumerate(weights):
            g = batch[i].double() / divisor
            if not decoupled:
                g = g + decay * weight
            first[i] = beta1 * first[i] + (1 - beta1 if average else 1.0) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g**2
            m = first[i] / (1 - beta1**t) if correct else first[i]
            v = second[i] / (1 - beta2**t) if correct else second[i]
            update = m / (v.sqrt() + eps)
            if decoupled:
                update = update + decay * weight
            size, move = float(weight.norm()), float(update.norm())
            rescaled = (everywhere or decay != 0) and size > 0 and move > 0
            weights[i] = weight - lr * (size / move if rescaled else 1.0) * update
    return weights


def novograd(
    weights: list[Tensor],
    batches: list[list[Tensor]],
    *,
    lr: float = 0.02,
    eps: float = 1e-6,
    decay: float = 0.1,
    inside: bool = False,
    average: bool = True,
    correct: bool = True,
    inf: bool = False,
    from_zero: bool = False,
) -> list[Tensor]:
    """The weights after the batches."""
    beta1, beta2 = BETAS
    weights = [weight.double() for weight in weights]
    moments = [torch.zeros_like(weight) for weight in weights]
    norms = [0.0] * len(weights)
    for t, batch in enumerate(batches, 1):
        for i, weight in enumerate(weights):
            g = batch[i].double()
            if not g.numel():
                continue
            now = float(g.abs().max()) if inf else float(g.norm())
            if t == 1 and not from_zero:
                norms[i] = now
            elif inf:
                norms[i] = beta2 * norms[i] + (1 - beta2) * now
            else:
                norms[i] = math.sqrt(beta2 * norms[i] ** 2 + (1 - beta2) * now**2)
            divisor = norms[i] / (math.sqrt(1 - beta2**t) if correct else 1.0) + eps
            if inside:
                g = g / divisor + decay * weight
            moments[i] = beta1 * moments[i] + (1 - beta1 if average else 1.0) * g
            m = moments[i] / (1 - beta1**t) if correct else moments[i]
            update = m if inside else m / divisor + decay * weight
            weights[i] = weight - lr * update
    return weights
