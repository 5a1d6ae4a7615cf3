"""GradientCumulativeFp16OptimizerHook: one half-precision step for several iterations. Answers to mmcv 1.7.2."""

from __future__ import annotations

from halfpeak.runner.hooks.accumulate import GradientCumulativeOptimizerHook
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook


class GradientCumulativeFp16OptimizerHook(GradientCumulativeOptimizerHook, Fp16OptimizerHook):
    """The windows of :class:`GradientCumulativeOptimizerHook` with the steps of :class:`Fp16OptimizerHook`.

    Gradients of a window are summed true-sized in float32. An overflow in any of its iterations skips its step.

    >>> hook = GradientCumulativeFp16OptimizerHook(cumulative_iters=4, loss_scale="dynamic", mode="master")
    >>> hook.cumulative_iters, hook.mode
    (4, 'master')
    """
