"""Settings: how the rules and hyper-parameters of groups are told to the Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.forms.codecs import Bfloat16, Codec, Signed8, Squares8, Whole
from halfpeak.fused.forms.stored import Stored
from halfpeak.fused.layout import Piece
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.rules.lamb import LAMBRule
from halfpeak.fused.rules.novograd import NovoGradRule
from halfpeak.fused.rules.sgd import SGDRule

NARROW: Final = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that the kernels read and write."""


_FORMS: Final[Mapping[Codec, str]] = {
    Whole(): "whole",
    Bfloat16(): "nearest16",
    Bfloat16(by_chance=True): "chance16",
    Signed8(): "signed8",
    Squares8(): "squares8",
}


class Settings(NamedTuple):
    """Which formula a kernel is compiled for; see :func:`halfpeak.ops.triton.update.update_kernel`.

    Attributes:
        rule: the formula.
        option: of it.
        other: of it.
        master: bits of the weight's remainder, 0 where it has none.
        moments: the form of each slot.
        norm: what is taken of each parameter's gradient before: nothing, ``squares`` or ``largest``.
        trusts: whether a step is measured by the weight that it moves.
    """

    rule: str
    option: bool | str
    other: bool = False
    master: int = 0
    moments: tuple[str, str, str] = ("whole", "whole", "whole")
    norm: str = ""
    trusts: bool = False


def settings_of(rule: Rule) -> Settings | None:
    """How a rule is told to the kernels; None if they do not know it.

    >>> settings_of(SGDRule(momentum=True))[:3]
    ('sgd', 'momentum', False)
    """
    if isinstance(rule, Stored):
        known = settings_of(rule.rule)
        if known is None or rule.rule.layerwise:
            return None
        forms = [_FORMS[codec] for codec in rule.codecs]
        first, second, third = (*forms, *known.moments[len(forms) :])
        bits = 0 if rule.master is None else rule.master.bits
        return known._replace(master=bits, moments=(first, second, third))
    if isinstance(rule, AdamRule):
        return Settings("adam", rule.decoupled, rule.amsgrad)
    if isinstance(rule, SGDRule):
        option = ("nesterov" if rule.nesterov else "momentum") if rule.momentum else ""
        return Settings("sgd", option, rule.late)
    if isinstance(rule, LAMBRule):
        return Settings("lamb", rule.decoupled, trusts=rule.trusts)
    if isinstance(rule, NovoGradRule):
        return Settings("novograd", rule.inside, norm="largest" if rule.largest else "squares")
    return Settings("adagrad", rule.decoupled) if isinstance(rule, AdagradRule) else None


def has_kernel(piece: Piece) -> bool:
    """Whether the kernels can step a piece."""
    block, rule = piece.block, piece.rule
    weights = {block.weight.dtype} if block.low is None else {block.weight.dtype, block.low.dtype}
    parts = zip(block.slots, rule.parts, strict=True)
    return (
        settings_of(rule) is not None
        and weights <= NARROW
        and piece.counter.step.dtype == torch.float32
        and all(slot.dtype == (part.dtype or torch.float32) for slot, part in parts)
    )


def hyper(rule: Rule, group: Mapping[str, Any]) -> list[float]:
    """The row of a group: sign, lr, weight decay, two numbers of the rule, eps, and three switches of the rule."""
    if isinstance(rule, Stored):
        return hyper(rule.rule, group)
    sign = -1.0 if group.get("maximize") else 1.0
    row = [sign, 0.0 if lr_there(group) is not None else float(group["lr"]), float(group["weight_decay"])]
    if isinstance(rule, AdamRule):
        row += map(float, (*group["betas"], group["eps"], rule.correct, rule.decoupled))
    elif isinstance(rule, SGDRule):
        row += [float(group["momentum"]), float(group["dampening"])]
    elif isinstance(rule, AdagradRule):
        row += [float(group["lr_decay"]) if rule.counts else 0.0, 0.0, float(group["eps"])]
    elif isinstance(rule, LAMBRule):
        row += map(float, (*group["betas"], group["eps"], rule.correct, rule.average))
    elif isinstance(rule, NovoGradRule):
        row += map(float, (*group["betas"], group["eps"], rule.correct, rule.average, not rule.from_zero))
    return row + [0.0] * (9 - len(row))


def lr_there(group: Mapping[str, Any]) -> Tensor | None:
    """The learning rate as a float32 on the device, where it is kept there; None where the host has it."""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return None
    return lr if lr.dtype == torch.float32 else lr.float()
