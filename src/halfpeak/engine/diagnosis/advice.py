"""Advice on what to write when a tensor is not finite, by kind of fault and opt level."""

from __future__ import annotations

import torch

from halfpeak.core.policy import Policy
from halfpeak.engine.diagnosis.report import Diagnosis
from halfpeak.engine.diagnosis.trace import Event


def suggestion_for(found: Diagnosis, event: Event, policy: Policy, level: str) -> str:
    """One or two sentences on what to write.

    Args:
        found: the report, still without its suggestion.
        event: the event that the report blames.
        level: of :func:`halfpeak.prepare`; empty if another front end takes the steps, because it has no ``keep_fp32``.
    """
    where, module, tensor, fitting = found.where, found.module, found.tensor, found.largest_scale
    name = f"'{module}'" if module else "the model"
    if found.reason != "overflow":
        return _for_fault(found, name, event)
    dtype = event.summary.dtype if event.summary else ""
    largest = torch.finfo(getattr(torch, dtype)).max
    size = f"{found.value:.3g} is beyond what {dtype} holds ({largest:.3g})"
    keep = f'Write halfpeak.prepare(..., "{level}", keep_fp32=["{module}"])'
    if not level:
        keep = f'Compute {name} in float32, or go over to halfpeak.prepare(..., keep_fp32=["{module}"])'
    wider = _wider(dtype, policy, level)
    if where == "input":
        return f"{tensor}: {size}. Scale the data down before the model{wider}."
    if where == "loss":
        return f"The loss: {size}. Compute it in float32: loss_function(output.float(), target)."
    if where == "weight":
        return f"{name}.{tensor}: {size}. {keep}{wider}; weight decay keeps weights from growing so far."
    if where == "backward":
        if fitting is None:
            advice = "No loss scale helps. "
        elif fitting < 1:
            advice = (
                f"It takes a loss scale of {fitting:g} to fit this batch, so the loss itself is too large: take a mean "
                "in the place of a sum, or divide it. "
            )
        else:
            advice = (
                f"A loss scale of {fitting:g} fits this batch; a dynamic scale finds it, or write "
                f"scale=halfpeak.ScaleConfig(ceiling={fitting!r}, recovers=True). "
            )
        return advice + (f"{keep}{wider}." if module else f"Compute the loss in float32{wider}.")
    remedy = keep if module else "Compute that part of forward in float32"
    return f"{size[0].upper()}{size[1:]}. {remedy}{wider}."


def _wider(dtype: str, policy: Policy, level: str) -> str:
    """Advice to use bfloat16, which has the range of float32, if the run uses float16; else an empty string."""
    if dtype != "float16" and torch.float16 not in (policy.compute, policy.param):
        return ""
    if not level:
        return ", or use bfloat16"
    return ', or use bfloat16 ("O4")' if policy.per_op else ', or use bfloat16 ("O5")'


def _for_fault(found: Diagnosis, name: str, event: Event) -> str:
    where, tensor, reason = found.where, found.tensor, found.reason
    if where == "input" and event.is_mask_like:
        return (
            f"{tensor} holds minus infinity. A softmax takes it away where a row keeps other values, and is nan where a row "
            "holds nothing else: leave one value in each row, or write torch.finfo(torch.float32).min for minus infinity."
        )
    if where == "input":
        return f"The batch itself is not finite ({tensor} holds {reason}). Check the data; torch.isfinite(x).all() finds it."
    if where == "weight":
        return (
            f"{name}.{tensor} itself holds {reason}. Go back to a checkpoint from before. Steps with such gradients are "
            "skipped, so something else has written this weight."
        )
    if where == "loss":
        return f"All outputs are finite, and the loss is {reason} in float32, too: look for a log, root or division in it."
    if where == "backward":
        of = f" of {event.operation}" if event.operation else ""
        return (
            f"The derivative{of} in {name} is {reason} in float32, too: no loss scale helps. Roots, norms and logarithms have "
            "infinite slopes at zero: add a small number inside of them."
        )
    return (
        f"{name} makes {reason} of finite numbers in float32, too: no precision helps. Look for a logarithm, root, division "
        "or an empty mean, or a row that is masked as a whole."
    )
