"""Training steps with a fault in the loss or in the gradient of the output."""

from __future__ import annotations

from typing import Any

import torch

import halfpeak


def run(engine: halfpeak.Engine, steps: int, *, loss: float = 0.0, grad: float = 0.0) -> Any:
    """Steps of a model of four inputs. Each loss is multiplied by ``1 + loss``; ``grad`` is added to the output's gradient.

    The result of the last step.
    """
    result: Any = None
    for _ in range(steps):
        with engine.forward():
            out = engine.model(torch.full((2, 4), 0.1))
            out.register_hook(lambda found: found + grad)
            value = out.float().square().mean() * (1 + loss)
        engine.backward(value)
        result = engine.step()
    return result
