"""What a fused optimizer cannot step: parameters, gradients and states, each with a way on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfpeak.core.errors import ParameterError


def check_parameter(target: Tensor) -> None:
    """Raise ParameterError for a parameter that no kernel here can step."""
    if (
        not target.is_floating_point()
        or target.layout is not torch.strided
        or type(target.data) is not Tensor
    ):
        kind = (
            type(target.data).__name__
            if type(target.data) is not Tensor
            else f"{target.layout} {target.dtype}"
        )
        raise ParameterError(
            f"a fused optimizer steps dense real tensors, and this parameter is a {kind}; use torch.optim for it"
        )


def check_gradients(grads: Sequence[Tensor | None]) -> None:
    """Raise ParameterError for a sparse gradient. A layer gives sparse ones always or never, so once is enough."""
    for grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            raise ParameterError(
                f"a fused optimizer steps dense gradients, and this one is {grad.layout}; build the layer with sparse=False, "
                "or step it by torch.optim.SparseAdam or SGD"
            )


def check_state(name: str, value: Tensor, place: Tensor) -> None:
    """Raise ParameterError for a state of another shape than its place."""
    if value.shape != place.shape:
        raise ParameterError(
            f"the state {name!r} of a parameter has shape {tuple(value.shape)} instead of {tuple(place.shape)}; "
            "load the state of this model's optimizer"
        )
