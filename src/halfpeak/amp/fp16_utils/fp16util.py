"""Half models and master parameters by hand: the functions of ``apex.fp16_utils.fp16util``, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfpeak.casting.modules import convert_network, is_kept_fp32
from halfpeak.casting.tree import cast_tree
from halfpeak.core.errors import ConfigError, ParameterError
from halfpeak.ops import foreach


class tofp16(nn.Module):
    """A module that returns its input in float16."""

    def forward(self, input: Tensor) -> Tensor:
        """``input.half()``."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Convert every affine batch norm in ``module`` to float32 in place; returns ``module``."""
    for layer in module.modules():
        if is_kept_fp32(layer, "batchnorm"):
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Convert ``network`` to float16, except its affine batch norms, and put a module that casts its input before it.

    The keys of the state dict get the prefix ``1.``.

    >>> network_to_half(nn.Linear(2, 2))(torch.ones(1, 2)).dtype
    torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """A network in float16, except its affine batch norms. Casts the inputs to float16, but not the output.

    Floating-point tensors are cast in positional and keyword arguments and in nested containers.

    Args:
        network: converted in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cast the inputs and call the network."""
        return self.network(*cast_tree(inputs, torch.float16), **cast_tree(kwargs, torch.float16))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trainable parameters of a model, and float32 copies for an optimizer to step.

    Args:
        flat_master: make one flat parameter of all copies.

    >>> model_params, master_params = prep_param_lists(nn.Linear(2, 3).half(), flat_master=True)
    >>> len(model_params), [(p.shape, p.dtype) for p in master_params]
    (2, [(torch.Size([9]), torch.float32)])

    Raises:
        ParameterError: ``flat_master`` with parameters on several devices, or without any.
    """
    model_params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [parameter.detach().to(torch.float32, copy=True) for parameter in model_params]
    if not flat_master:
        return model_params, [copy.requires_grad_() for copy in copies]
    devices = {copy.device for copy in copies}
    if len(devices) != 1:
        has = f"has them on {', '.join(sorted(map(str, devices)))}" if devices else "has none"
        raise ParameterError(
            f"flat_master=True joins all trainable parameters into one on one device, and this model {has}; write "
            "flat_master=False"
        )
    master = nn.Parameter(torch.cat([copy.reshape(-1) for copy in copies]))
    master.grad = torch.zeros_like(master)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients from model to masters, upcast to float32. The gradients stay scaled.

    A parameter without gradient leaves its master without one.

    Args:
        model_params: from :func:`prep_param_lists`, like the next two.

    Raises:
        ConfigError: the shapes in the lists do not match.
        ParameterError: ``flat_master``, and a parameter has no gradient.
    """
    if flat_master:
        missing = [i for i, parameter in enumerate(model_params) if parameter.grad is None]
        if missing:
            raise ParameterError(
                f"flat_master=True steps all parameters as one, and model_params[{missing[0]}] has no gradient; give it one, "
                "or write flat_master=False"
            )
        master = _flat_master(model_params, master_params)
        master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        targets = _views(master.grad, model_params)
        foreach.copy_cast_(targets, [_dense(parameter.grad) for parameter in model_params])
        return
    _check_pairs(model_params, master_params)
    pairs = list(zip(model_params, master_params, strict=True))
    for parameter, master in pairs:
        if parameter.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = torch.empty_like(master)
    live = [(parameter, master) for parameter, master in pairs if parameter.grad is not None]
    foreach.copy_cast_([m.grad for _, m in live], [_dense(p.grad) for p, _ in live])  # type: ignore[misc]


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy values from masters to model, rounding them.

    Raises:
        ConfigError: the shapes in the lists do not match.
    """
    if flat_master:
        sources = _views(_flat_master(model_params, master_params).detach(), model_params)
    else:
        _check_pairs(model_params, master_params)
        sources = list(master_params)
    foreach.copy_cast_(list(model_params), sources)


def to_python_float(t: Any) -> Any:
    """The number in a tensor of one element, or the first item of anything else."""
    return t.item() if hasattr(t, "item") else t[0]


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


def _check_pairs(model_params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    if [p.shape for p in model_params] != [m.shape for m in master_params]:
        raise ConfigError(
            f"{len(model_params)} model parameters and {len(master_params)} masters do not have the same shapes; pass the "
            "two lists that prep_param_lists returned, with the same flat_master"
        )


def _flat_master(model_params: Sequence[Tensor], master_params: Sequence[Tensor]) -> Tensor:
    size = sum(parameter.numel() for parameter in model_params)
    if len(master_params) != 1 or master_params[0].numel() != size:
        raise ConfigError(
            f"flat_master=True takes one master of {size} elements, not {[m.numel() for m in master_params]}; pass "
            "the two lists that prep_param_lists(model, flat_master=True) returned"
        )
    return master_params[0]


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
