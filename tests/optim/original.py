"""mmengine 0.10.7, the reference of these tests. Its import warns about other packages, so warnings are ignored there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine
    from mmengine.config import ConfigDict
    from mmengine.optim import DefaultOptimWrapperConstructor, build_optim_wrapper
    from mmengine.optim.optimizer import default_constructor
    from mmengine.optim.optimizer.builder import TORCH_OPTIMIZERS

__all__ = [
    "TORCH_OPTIMIZERS",
    "ConfigDict",
    "DefaultOptimWrapperConstructor",
    "build_optim_wrapper",
    "default_constructor",
    "groups_of",
    "named_groups",
]

assert mmengine.__version__ == "0.10.7"


def groups_of(wrapper: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """For each group, the ids of its parameters in order, and all its options."""
    return [
        (
            [id(parameter) for parameter in group["params"]],
            {key: value for key, value in group.items() if key != "params"},
        )
        for group in wrapper.optimizer.param_groups
    ]


def named_groups(wrapper: Any, model: nn.Module, *options: str) -> Mapping[str, Any]:
    """The options of each parameter's group: name -> one option, or a tuple of several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: tuple(group[one] for one in options) if len(options) > 1 else group[options[0]]
        for group in wrapper.optimizer.param_groups
        for parameter in group["params"]
    }
