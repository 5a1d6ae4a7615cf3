"""ApexOptimWrapper: a wrapper that trains at an opt level, over halfpeak.amp. Compatible with mmengine 0.10.7."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from halfpeak import amp
from halfpeak.amp.run import Run
from halfpeak.amp.session import _amp_state
from halfpeak.casting.casts import casts_on, disable_casts
from halfpeak.checkpoint.scaler_states import from_apex
from halfpeak.core.dtypes import parse_dtype
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.levels import resolve
from halfpeak.core.policy import NormRule
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.optim.amp_wrapper import base_keywords
from halfpeak.optim.arguments import require_choice, require_count
from halfpeak.optim.base import is_torch_optimizer
from halfpeak.optim.unwrap import check_can_convert, reconnect, synchronised_values, unwrap
from halfpeak.optim.window import WINDOW_KEY
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.parts.window import Held

_OPTIONS: Final = (
    "opt_level", "loss_scale", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
    "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale", "norms",
)  # fmt: skip
"""The arguments of ``amp.initialize``, under the names of the attributes."""


class ApexOptimWrapper(OptimWrapper):
    """Trains at an opt level, O0 to O5, with every option of ``amp.initialize``.

    The first :meth:`optim_context` calls ``amp.initialize``, also for a model inside a parallel wrapper, and loads a state
    that was given before. :meth:`backward` is ``amp.scale_loss``. ``enabled=False`` makes this a plain
    :class:`OptimWrapper` that skips non-finite steps, too.

    Args:
        opt_level: like the next eleven arguments, of :func:`halfpeak.amp.initialize`. Their order is mmengine's.
        kwargs: of :class:`OptimWrapper`; ``optimizer`` is required.

    Raises:
        ConfigError: an unknown level, or an override that the level does not allow.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> wrapper = ApexOptimWrapper("O5", optimizer=optimizer, verbosity=0)
        >>> with wrapper.optim_context(model):
        ...     loss = model(torch.ones(4, 2)).mean()
        >>> wrapper.update_params(loss)
        >>> model.weight.dtype
        torch.bfloat16
    """

    def __init__(
        self,
        opt_level: str = "O1",
        loss_scale: float | str | None = "dynamic",
        enabled: bool = True,
        cast_model_type: Any = None,
        patch_torch_functions: Any = None,
        keep_batchnorm_fp32: Any = None,
        master_weights: Any = None,
        cast_model_outputs: Any = None,
        num_losses: int = 1,
        verbosity: int | None = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
        *,
        norms: NormRule = "batchnorm",
        **kwargs: Any,
    ) -> None:
        super().__init__(**base_keywords(kwargs, type(self)))
        if not isinstance(enabled, int):
            raise ConfigTypeError(f"enabled={short_repr(enabled)} must be True or False")
        if isinstance(verbosity, bool) or not isinstance(verbosity, int | None):
            raise ConfigTypeError(f"verbosity={short_repr(verbosity)} must be an integer; write verbosity=1")
        self.opt_level = opt_level
        self.loss_scale = loss_scale
        self.enabled = enabled
        self.cast_model_type = cast_model_type
        self.patch_torch_functions = patch_torch_functions
        self.keep_batchnorm_fp32 = keep_batchnorm_fp32
        self.master_weights = master_weights
        self.cast_model_outputs = cast_model_outputs
        self.num_losses = num_losses
        self.verbosity = verbosity
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.norms: NormRule = require_choice("norms", norms, get_args(NormRule))
        # Entries of a state that was loaded before the model was converted. Until then they are saved unchanged.
        self._loaded: dict[str, Any] = {}
        self._converts = bool(enabled) and self._check_options()

    def _check_options(self) -> bool:
        """Refuse what ``amp.initialize`` would refuse; return whether the level changes the dtype of parameters."""
        properties = resolve(
            self.opt_level,
            cast_model_type=self.cast_model_type,
            patch_torch_functions=self.patch_torch_functions,
            keep_batchnorm_fp32=self.keep_batchnorm_fp32,
            master_weights=self.master_weights,
            loss_scale=self.loss_scale,
        )
        output = None if self.cast_model_outputs is None else parse_dtype(self.cast_model_outputs)
        properties.bounded_scale(self.min_loss_scale, self.max_loss_scale)
        require_count("num_losses", self.num_losses, 1, "; write num_losses=1")
        return properties.policy(norms=self.norms, output=output).param is not None

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """Run the forward pass of ``model`` with the casts of its level, and under ``no_sync`` inside a window."""
        if not self.enabled:
            with super().optim_context(model):
                yield
            return
        run = self._run() or self._initialize(model)
        self._stats = run.parts.stats
        with self._reducing(model), casts_on(run.casts):
            yield

    def backward(self, loss: Tensor, *, loss_id: int = 0, **kwargs: Any) -> None:
        """Run backward with the loss scale of ``loss_id``, and count one backward pass.

        Raises:
            OrderError: before the first :meth:`optim_context`, which converts the model.
        """
        if not self.enabled:
            super().backward(loss, **kwargs)
            return
        self._require_run()
        self.last_result = None
        with amp.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
            scaled.backward(**kwargs)
        self._inner_count += 1

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Clip, then step by the optimizer's own ``step``, which amp makes skip. As :meth:`OptimWrapper.step`."""
        if not (self.enabled and is_torch_optimizer(self.optimizer)):
            super().step(closure, **kwargs)
            return
        self._require_run()
        if closure is not None:
            self.optimizer.step(closure=self._checking(closure), **kwargs)
        else:
            self._require_reduced()
            self._clip_and_check()
            self.optimizer.step(**kwargs)
        self.last_result = amp.last_step(self.optimizer)._replace(grad_norm=self._norm)

    def _clip_and_check(self) -> Tensor:
        if not self.enabled:
            return super()._clip_and_check()
        self._norm = None
        if self.clip_grad_kwargs:
            self._require_run().parts.agree()  # user code may have dropped gradients of the model
            with disable_casts():
                self._clip_grad()
        return torch.zeros((), dtype=torch.float32)  # amp checks the gradients

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`OptimWrapper.state_dict`, with the loss scales; before the first :meth:`optim_context` there are none."""
        run = self._run()
        scalers = [] if run is None else run.scalers
        scales = {f"loss_scaler{number}": scaler.state_dict() for number, scaler in enumerate(scalers)}
        return {**super().state_dict(), "apex_amp": scales, **self._loaded}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`OptimWrapper.check_state_dict`."""
        super().check_state_dict(state_dict)
        if state_dict.get("apex_amp") is not None:
            from_apex(require_mapping(state_dict["apex_amp"], "the entry 'apex_amp' of the state"))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As :meth:`OptimWrapper.load_state_dict`. A static scale keeps its value."""
        super().load_state_dict(state_dict)
        if self.enabled:
            self._loaded = {key: state_dict[key] for key in ("apex_amp", WINDOW_KEY) if state_dict.get(key)}
            run = self._run()
            if run is not None:
                run.parts.window_of(self.optimizer).drop()
                self._apply_loaded(run)

    def _load_window(self, saved: Mapping[str, Any]) -> None:
        self._inner_count = saved["inner_count"]
        if not self.enabled:
            super()._load_window(saved)

    def _has_window(self) -> bool:
        return WINDOW_KEY in self._loaded or super()._has_window()

    # The run of amp.

    def _run(self) -> Run | None:
        """The run of the optimizer; None before the first :meth:`optim_context`."""
        return _amp_state.run_of(self.optimizer)

    def _require_run(self) -> Run:
        run = self._run()
        if run is None:
            raise OrderError(
                "the model is not known yet; run the forward pass inside `with wrapper.optim_context(model):`"
            )
        return run

    def _initialize(self, model: nn.Module) -> Run:
        if self._converts:
            check_can_convert(model)
        values = synchronised_values(model)
        amp.initialize(unwrap(model), self.optimizer, **{name: getattr(self, name) for name in _OPTIONS})
        run = self._require_run()
        for parameter, value in values:
            run.parts.pairs.set_value(parameter, value)
        if self._converts:
            reconnect(model)
        self._apply_loaded(run)
        return run

    def _apply_loaded(self, run: Run) -> None:
        """Load the entries of a state that only a run can take."""
        loaded, self._loaded, self._stats = self._loaded, {}, run.parts.stats
        for scaler, numbers in zip(run.scalers, from_apex(loaded.get("apex_amp") or {}), strict=False):
            scaler.part.load_translated(numbers)  # a static scale keeps its value
        if WINDOW_KEY in loaded:
            saved = loaded[WINDOW_KEY]
            window, losses = run.parts.window_of(self.optimizer), saved["held"]
            super()._load_window({**saved, "scale": 1.0} if losses else saved)
            if losses:  # the next pass multiplies them to its own scale
                scale = torch.full_like(run.parts.scalers[0].state.scale, saved["scale"])
                scalers = [scaler for i, scaler in enumerate(run.parts.scalers) if i in losses]
                window.hold(dict.fromkeys(scalers, scale), scale, reduced=False)
            run.parts.agree()

    def _loss_scale(self) -> Tensor | float:
        held = self._held()
        return 1.0 if held is None else held.scale

    def _held_losses(self) -> list[int]:
        run, held = self._run(), self._held()
        return [] if run is None or held is None else [run.loss_ids.get(loss, 0) for loss in held.losses]

    def _held(self) -> Held | None:
        run = self._run()
        return None if run is None else run.parts.window_of(self.optimizer).held
