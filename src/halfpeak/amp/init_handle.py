"""``amp.init``, apex's older entry point, and the optimizers that its handle wraps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.ambient import Handle, disable_casts
from halfpeak.amp.frontend import initialize
from halfpeak.amp.handle import scale_loss
from halfpeak.amp.registration import make_casts
from halfpeak.amp.session import _amp_state
from halfpeak.casting.casts import OpCasts
from halfpeak.core.errors import ConfigError, LossIdError
from halfpeak.core.short_repr import short_repr


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> InitHandle:
    """Switch per-operation casts on for this thread, without a model; apex's predecessor of ``initialize``.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: the loss scale of the optimizers that the handle wraps: a number, or ``"dynamic"``.
        enable_caching: share the cast of a weight among its uses.
        verbose: print every cast.
        allow_banned: compute binary cross-entropy of low-precision input in float32 instead of raising an error.
        patch_type: the low-precision dtype of the casts.
    """
    if loss_scale != "dynamic" and not isinstance(loss_scale, (int, float)):
        raise ConfigError(f"loss_scale={short_repr(loss_scale)} must be 'dynamic' or a number")
    if not enabled:
        return InitHandle(None, loss_scale=loss_scale)
    casts = make_casts(patch_type, 2 if verbose else 0, cache=enable_caching, allow_banned=allow_banned)
    return InitHandle(casts, loss_scale=loss_scale, cache=enable_caching, verbose=verbose)


class InitHandle(Handle):
    """The handle that :func:`init` returns: casts for the thread, and loss scaling for the optimizers it wraps."""

    def __init__(
        self, casts: OpCasts | None, *, loss_scale: Any, cache: bool = True, verbose: bool = False
    ) -> None:
        super().__init__(casts, cache=cache, verbose=verbose)
        self.enabled = casts is not None
        self.loss_scale = loss_scale

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer to scale its losses: ``with optimizer.scale_loss(loss) as scaled_loss: ...``.

        Args:
            optimizer: prepared in place.
            num_loss: backward passes per step; each has its own loss scaler.
        """
        return OptimWrapper(optimizer, self, num_loss)


class OptimWrapper:
    """An optimizer with one loss scaler for each loss of a step; the losses must come in the same order each step.

    ``step`` runs without casts, unless it gets a closure. If one of the losses overflowed, the step is skipped and a
    line is printed. Every other attribute is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, handle: InitHandle, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._num_loss = num_loss
        self._position = 0
        if not handle.enabled:
            return
        initialize(
            [],
            optimizer,
            opt_level="O1",
            patch_torch_functions=False,
            loss_scale=handle.loss_scale,
            num_losses=num_loss,
            verbosity=0,
        )
        # initialize must not print its table, which describes another entry point; skipped steps are reported.
        run = _amp_state.run_of(optimizer)
        assert run is not None
        run.verbosity = 1

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Generator[Tensor]:
        """Yield the next loss of this step times its scale.

        Raises:
            LossIdError: the step has more than ``num_loss`` losses.
        """
        if not self._handle.enabled:
            yield loss
            return
        if self._position >= self._num_loss:
            raise LossIdError(
                f"loss {self._position + 1} of a step with num_loss={self._num_loss}; write "
                f"wrap_optimizer(optimizer, num_loss={self._position + 1}), or step after each"
            )
        with scale_loss(loss, self._optimizer, loss_id=self._position) as scaled:
            yield scaled
        self._position += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless one of the losses overflowed."""
        self._position = 0
        if closure is not None:
            return self._optimizer.step(closure)
        with disable_casts():
            return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # copy and pickle look up attributes before __init__
            raise AttributeError(name)
        return getattr(self._optimizer, name)
