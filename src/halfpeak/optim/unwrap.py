"""Models inside parallel or compiling wrappers: finding the model, and converting it there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from halfpeak.core.errors import ParameterError
from halfpeak.core.wrappers import wrapper_of


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``DistributedDataParallel``, ``torch.compile`` and their like.

    >>> unwrap(nn.DataParallel(nn.Linear(2, 1)))
    Linear(in_features=2, out_features=1, bias=True)
    """
    while wrapper_of(model) is not None:
        inner: Any = model
        model = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    return model


def check_can_convert(model: nn.Module) -> None:
    """Raise ParameterError if the parameters of ``model`` may not change their dtype.

    FSDP1 has flattened them, or DDP reduces them in a process group of its own.
    """
    if any("FullyShardedDataParallel" in (wrapper_of(module) or "") for module in model.modules()):
        raise ParameterError(
            "FullyShardedDataParallel (FSDP1) has flattened the parameters, whose dtype can no longer change; shard the model "
            "with halfpeak.distributed.fully_shard(model, level), or use a level that converts no model: opt_level='O1' or "
            "'O4', or AmpOptimWrapper"
        )
    for wrapped in _distributed(model):
        try:
            wrapped._check_default_group()
        except RuntimeError:
            raise ParameterError(
                "DistributedDataParallel(process_group=...) must wrap the model after its parameters are converted; with an "
                "optimizer wrapper enter `with wrapper.optim_context(model): pass` once, then wrap the model"
            ) from None


def reconnect(model: nn.Module) -> None:
    """Make every ``DistributedDataParallel`` in ``model`` reduce gradients of parameters that have changed their dtype.

    The old reducer's hooks are on gradient accumulators of the old dtype and would never run again, so ranks would
    silently diverge. Restoring the module from its own pickling state builds a new reducer.
    """
    for wrapped in _distributed(model):
        hooks, wrapped._comm_hooks = list(wrapped._comm_hooks), []
        wrapped.__setstate__(wrapped.__getstate__())
        for hook, state in hooks:
            wrapped.register_comm_hook(state, hook)


def synchronised_values(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the trainable parameters inside each ``DistributedDataParallel`` in ``model``, with their values.

    DDP made the values equal, so masters may start from them; on several ranks :func:`halfpeak.prepare` rounds them.
    """
    found = (parameter for wrapped in _distributed(model) for parameter in wrapped.parameters())
    return [(parameter, parameter.data) for parameter in found if parameter.requires_grad]


def _distributed(model: nn.Module) -> Iterable[Any]:
    return [m for m in model.modules() if (wrapper_of(m) or "").endswith(".DistributedDataParallel")]
