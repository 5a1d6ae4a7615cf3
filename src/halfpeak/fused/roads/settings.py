"""Settings: how the rules and hyper-parameters of groups are told to the Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.layout import Piece
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.rules.sgd import SGDRule

NARROW: Final = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that the kernels read and write."""


class Settings(NamedTuple):
    """Which formula a kernel is compiled for; see :func:`halfpeak.ops.triton.update.update_kernel`."""

    rule: str
    option: bool | str
    other: bool


def settings_of(rule: Rule) -> Settings | None:
    """How a rule is told to the kernels; None if they do not know it.

    >>> settings_of(SGDRule(momentum=True))
    Settings(rule='sgd', option='momentum', other=False)
    """
    if isinstance(rule, AdamRule):
        return Settings("adam", rule.decoupled, rule.amsgrad)
    if isinstance(rule, SGDRule):
        option = ("nesterov" if rule.nesterov else "momentum") if rule.momentum else ""
        return Settings("sgd", option, rule.late)
    return Settings("adagrad", rule.decoupled, False) if isinstance(rule, AdagradRule) else None


def has_kernel(piece: Piece) -> bool:
    """Whether the kernels can step a piece."""
    block = piece.block
    weights = {block.weight.dtype} if block.low is None else {block.weight.dtype, block.low.dtype}
    states = {piece.counter.step.dtype, *(slot.dtype for slot in block.slots)}
    return settings_of(piece.rule) is not None and weights <= NARROW and states == {torch.float32}


def hyper(rule: Rule, group: Mapping[str, Any]) -> list[float]:
    """The row of a group: sign, lr, weight decay, two numbers of the rule, eps, and two switches of the rule."""
    sign = -1.0 if group.get("maximize") else 1.0
    row = [sign, 0.0 if lr_there(group) is not None else float(group["lr"]), float(group["weight_decay"])]
    if isinstance(rule, AdamRule):
        row += map(float, (*group["betas"], group["eps"], rule.correct, rule.decoupled))
    elif isinstance(rule, SGDRule):
        row += [float(group["momentum"]), float(group["dampening"]), 0.0, 0.0, 0.0]
    elif isinstance(rule, AdagradRule):
        row += [float(group["lr_decay"]) if rule.counts else 0.0, 0.0, float(group["eps"]), 0.0, 0.0]
    return row


def lr_there(group: Mapping[str, Any]) -> Tensor | None:
    """The learning rate as a float32 on the device, where it is kept there; None where the host has it."""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return None
    return lr if lr.dtype == torch.float32 else lr.float()
