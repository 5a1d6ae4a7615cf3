"""``apex.parallel.LARC`` as of apex 25.04: layer-wise adaptive learning rates around any optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.delegation import delegated
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.schedule import require_scale


class LARC(Optimizer):
    """Scale the gradient of each parameter by a local learning rate, then step the optimizer inside.

    Large Batch Training of Convolutional Networks, You et al. 2017 (arXiv:1708.03888). For a parameter p with gradient
    g in a group with learning rate lr and weight decay wd::

        a = trust_coefficient * |p| / (|g| + wd * |p| + eps)
        if clip: a = min(a / lr, 1)         # LARC; else LARS
        g = (g + wd * p) * a                # and the optimizer inside sees no weight decay

    Where |p| or |g| is 0, g stays and nothing decays, as in apex. Norms are computed in float32 at least, without waiting for
    the device. With weight decay, a sparse gradient becomes dense, because every row decays.

    Groups, state, ``defaults``, state dicts and their hooks are those of the optimizer inside, :attr:`optim`; step hooks are
    LARC's own and run around the whole step. So LR schedulers, ``halfpeak.prepare`` and ``amp.initialize`` accept LARC.

    Args:
        optimizer: the optimizer inside.
        clip: limit the local rate to the optimizer's own (LARC); False scales without a limit (LARS).
        eps: keeps the quotient finite.

    Raises:
        ConfigTypeError: ``optimizer`` is not an optimizer.
        ConfigError: ``trust_coefficient`` or ``eps`` is out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.1), trust_coefficient=0.01)
        >>> weight.grad = torch.tensor([0.0, 1.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([3.0000, 3.9500])
    """

    optim: Optimizer
    trust_coefficient: float
    clip: bool
    eps: float

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer; write LARC(SGD(...))"
            )
        if eps != 0:
            require_scale("eps", eps)
        # Not super().__init__(), which makes groups; this makes only what step hooks and schedulers need.
        self.__setstate__(
            {
                "optim": optimizer,
                "trust_coefficient": require_scale("trust_coefficient", trust_coefficient),
                "clip": bool(clip),
                "eps": float(eps),
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, **{name: getattr(state["optim"], name) for name in _SHARED_HOOKS}})

    def __repr__(self) -> str:
        own = f"trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}"
        return f"LARC({own}, optim={self.optim!r})"

    param_groups: list[dict[str, Any]] = delegated("optim.param_groups")
    state: defaultdict[Tensor, Any] = delegated("optim.state")
    defaults: dict[str, Any] = delegated("optim.defaults")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, so a run can be resumed with or without LARC."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call ``zero_grad`` of the optimizer inside."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapt the gradients, after each call of the closure if there is one, and step the optimizer inside.

        The groups get their weight decay back afterwards, even if the optimizer inside raises.
        """
        with self._without_decay() as decays:
            if closure is None:
                self._adapt(decays)
                return self.optim.step()

            def adapted() -> Any:
                loss = closure()
                self._adapt(decays)
                return loss

            return self.optim.step(adapted)

    @contextmanager
    def _without_decay(self) -> Generator[list[float]]:
        """Set the weight decay of every group to 0 in the body, and yield the former values."""
        groups = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, _ in groups:
                group["weight_decay"] = 0.0
            yield decays
        finally:
            for group, decay in groups:
                group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt(self, decays: list[float]) -> None:
        for group, decay in zip(self.param_groups, decays, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = self._adapted(parameter, parameter.grad, group["lr"], decay)

    def _adapted(self, parameter: Tensor, grad: Tensor, lr: float | Tensor, decay: float) -> Tensor:
        grad = grad.coalesce() if grad.is_sparse else grad
        param_norm, grad_norm = _norm(parameter), _norm(grad.values() if grad.is_sparse else grad)
        adapts = (param_norm != 0) & (grad_norm != 0)
        rate = self.trust_coefficient * param_norm / (grad_norm + decay * param_norm + self.eps)
        if self.clip:
            rate = torch.clamp(rate / lr, max=1.0)
        if decay:
            grad = grad.to_dense() if grad.is_sparse else grad
            grad.add_(parameter * torch.where(adapts, decay, 0.0))
        return grad.mul_(torch.where(adapts, rate, 1.0))


_SHARED_HOOKS: Final = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if is_low(tensor) else None)
