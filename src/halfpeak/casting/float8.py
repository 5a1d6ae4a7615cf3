"""Linear layers that multiply in float8, by torchao. Only their class changes: parameters, hooks and names stay as they are."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from halfpeak.casting.modules import check_entries, ids_kept_by_user
from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.core.policy import Policy
from halfpeak.core.short_repr import short_repr

MULTIPLE: Final = 16
"""Float8 products are defined for weights whose sizes are multiples of this."""


def check_float8(models: Iterable[nn.Module], policy: Policy) -> None:
    """Check that the layers which ``policy.float8`` selects can compute in float8 on their devices.

    Raises:
        ConfigError: a dtype other than bfloat16, no layer, float8 layers already, an unmatched ``exclude``, or no float8 GPU.
        MissingExtraError: torchao is not installed.
    """
    float8 = policy.float8
    if float8 is None:
        return
    if policy.param is not torch.bfloat16:
        raise ConfigError(
            f"float8={short_repr(float8.recipe)} is for layers that are stored in bfloat16; write prepare(model, optimizer, "
            f"'O5', float8={float8.recipe!r})"
        )
    with needs_extra():
        from torchao.float8.float8_linear import Float8Linear
    models = list(models)
    check_entries("Float8(exclude=...)", float8.exclude, models)
    if any(isinstance(module, Float8Linear) for model in models for module in model.modules()):
        raise ConfigError(
            "the model has layers of torchao.float8 already; leave out float8=, or build a new model"
        )
    layers = [layer for model in models for layer in _chosen(model, policy)]
    if not layers:
        raise ConfigError(
            f"float8={short_repr(float8.recipe)} selects no layer: outside of keep_fp32 and exclude there is no "
            f"torch.nn.Linear with both sizes divisible by {MULTIPLE}; leave float8= out"
        )
    device = next(
        (layer.weight.device for layer in layers if not _computes_float8(layer.weight.device)), None
    )
    if device is not None:
        raise ConfigError(
            f"float8={short_repr(float8.recipe)} needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper, "
            f"Blackwell) or an AMD MI300, and the model is on {device}; leave it out, or prepare on the CPU, which emulates it"
        )


def to_float8(model: nn.Module, policy: Policy) -> None:
    """Make the layers that ``policy.float8`` selects multiply in float8; the CPU emulates it, to show the effect on a loss."""
    for layer in _chosen(model, policy):
        twin = _twin(layer, policy)
        vars(layer).update({name: value for name, value in vars(twin).items() if name not in vars(layer)})
        layer.__class__ = type(twin)


def from_float8(model: nn.Module, policy: Policy) -> None:
    """Undo :func:`to_float8`."""
    if policy.float8 is None:
        return
    from torchao.float8.float8_linear import Float8Linear

    plain = nn.Linear(MULTIPLE, MULTIPLE, device="meta")
    converted: list[Any] = [module for module in model.modules() if type(module) is Float8Linear]
    for layer in converted:
        layer.__class__ = nn.Linear
        for name in vars(_twin(plain, policy)).keys() - vars(plain).keys():
            del vars(layer)[name]


@contextmanager
def without_float8(models: Iterable[nn.Module], policy: Policy) -> Generator[None]:
    """Run the body with the layers of these models as they were before :func:`to_float8`."""
    models = list(models)
    try:
        for model in models:
            from_float8(model, policy)
        yield
    finally:
        for model in models:
            to_float8(model, policy)


def _chosen(model: nn.Module, policy: Policy) -> list[nn.Linear]:
    """The layers that ``policy.float8`` selects; no subclasses of ``nn.Linear``, because these may compute differently."""
    if policy.float8 is None:
        return []
    kept = ids_kept_by_user(model, (*policy.keep_fp32, *policy.float8.exclude))
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and id(module) not in kept
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    ]


def _twin(layer: nn.Linear, policy: Policy) -> Any:
    """The float8 layer that torchao makes of a layer, with the same parameters."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert policy.float8 is not None
    config = Float8LinearConfig.from_recipe_name(policy.float8.recipe)
    return convert_to_float8_training(
        layer, config=replace(config, emulate=layer.weight.device.type == "cpu")
    )


def _computes_float8(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)
