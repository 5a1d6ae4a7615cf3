"""ApexOptimWrapper: a wrapper that trains at an opt level, without apex. Compatible with mmengine 0.10.7."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from torch import Tensor, nn

from halfpeak.checkpoint.scaler_states import from_apex, to_apex
from halfpeak.core.dtypes import parse_dtype
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.levels import resolve
from halfpeak.core.messages import level_table, overflow_line
from halfpeak.core.policy import NormRule
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import build
from halfpeak.optim import resume_state
from halfpeak.optim.amp_wrapper import require_optimizer
from halfpeak.optim.arguments import require_choice
from halfpeak.optim.loss_scale import SkipCount
from halfpeak.optim.unwrap import check_can_convert, reconnect, synchronised_values, unwrap
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.state.found_inf import is_first_rank


class ApexOptimWrapper(OptimWrapper):
    """Optimizer wrapper at an opt level, O0 to O5, with every override of ``apex.amp.initialize``.

    The first :meth:`optim_context` converts model and optimizer, also a model inside a parallel wrapper, and applies a
    state that was loaded before. Casts of O1 and O4 hold inside :meth:`optim_context` and in backward.

    The arguments that are not explained here are those of :func:`halfpeak.prepare`.

    Args:
        opt_level: ``"O0"`` to ``"O5"``.
        loss_scale: ``"dynamic"``, a number, or None for the level's own.
        enabled: False, or 0, makes this a plain :class:`OptimWrapper`, whatever the other arguments are.
        num_losses: number of loss scalers; ``backward(loss, loss_id=...)`` chooses.
        verbosity: 1 (and None) prints the properties when the model is converted, and a line after skipped steps; 0
            prints nothing.
        min_loss_scale: floor of a dynamic scale; None means 2**-14. A static scale ignores floor and ceiling.
        max_loss_scale: ceiling of a dynamic scale.
        norms: which layers stay float32: ``"all"``, or ``"batchnorm"``, apex's rule.
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

    _KEYS = ("apex_amp", resume_state.RESUME_KEY)

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
        norms: NormRule = "all",
        **kwargs: Any,
    ) -> None:
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
        self._norms: NormRule = require_choice("norms", norms, get_args(NormRule))
        self._wrapped: nn.Module | None = None
        self._loss_id = 0
        self._skips: SkipCount | None = None
        super().__init__(**require_optimizer(kwargs, type(self)))
        self._made_config = self._make_config()

    def backward(self, loss: Tensor, *, loss_id: int = 0, **kwargs: Any) -> None:
        """Run backward with the loss scale of ``loss_id``, and count one backward pass.

        Raises:
            OrderError: before the first :meth:`optim_context`, which converts the model.
        """
        self._loss_id = loss_id
        self._run_backward(loss, loss_id, kwargs)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """As :meth:`OptimWrapper.step`; also prints a line about skipped steps, unless ``verbosity`` is 0."""
        super().step(closure, **kwargs)
        if self._skips is not None and self._skips.has_grown(self._ready()):
            scaler = self._ready().scaler(self._loss_id)
            print(overflow_line(self._loss_id, scaler.read_scale(), dynamic=scaler.config.dynamic))

    @property
    def _is_watched(self) -> bool:
        return bool(self.enabled) or super()._is_watched

    def _config(self) -> EngineConfig:
        return self._made_config

    def _make_config(self) -> EngineConfig:
        if not self.enabled:
            return super()._config()
        properties = resolve(
            self.opt_level,
            cast_model_type=self.cast_model_type,
            patch_torch_functions=self.patch_torch_functions,
            keep_batchnorm_fp32=self.keep_batchnorm_fp32,
            master_weights=self.master_weights,
            loss_scale=self.loss_scale,
        )
        output = None if self.cast_model_outputs is None else parse_dtype(self.cast_model_outputs)
        return replace(
            super()._config(),
            properties=properties,
            policy=properties.policy(norms=self._norms, output=output),
            scale=properties.bounded_scale(self.min_loss_scale, self.max_loss_scale),
            num_losses=self.num_losses,
        )

    def _prepare(self, model: nn.Module) -> None:
        if not self.enabled:
            super()._prepare(model)
            return
        if self._engine is None:
            self._wrapped = model
        self._ready()

    def _build(self) -> Engine:
        if not self.enabled:
            return super()._build()
        if self._wrapped is None:
            raise OrderError(
                "the model is not known yet; run the forward pass inside `with wrapper.optim_context(model):`"
            )
        wrapped, model = self._wrapped, unwrap(self._wrapped)
        if self._is_converting():
            check_can_convert(wrapped)
        values = synchronised_values(wrapped)
        if self._pending:
            # A layer that is frozen now may have had masters in the run that was saved.
            values += [
                (parameter, parameter.data) for parameter in model.parameters() if not parameter.requires_grad
            ]
        engine = build(self._made_config, [model], [self.optimizer], reducer=self._reducer())
        for parameter, value in values:
            engine.masters.set_value(parameter, value)
        if self._is_converting():
            reconnect(wrapped)
        if self.verbosity != 0 and is_first_rank():
            print(level_table(self._made_config.properties))
            self._skips = SkipCount(engine)
        return engine

    def _is_converting(self) -> bool:
        return self._made_config.policy.param is not None

    def _extra_state(self) -> dict[str, Any]:
        state = super()._extra_state()
        if self._engine is not None:
            state["apex_amp"] = to_apex([scaler.state_dict() for scaler in self._engine.scalers])
        return {"apex_amp": {}, **state}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        apex = state.get("apex_amp")
        if apex is not None and require_mapping(apex, "the entry 'apex_amp' of the state"):
            from_apex(apex)
        if self._engine is not None:
            super()._check_state(state)
        elif resume_state.RESUME_KEY in state:
            resume_state.check_resume_format(state[resume_state.RESUME_KEY])

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        saved = from_apex(state.get("apex_amp") or {})
        for scaler, numbers in zip(engine.scalers, saved, strict=False):
            if scaler.config.dynamic:
                scaler.load_translated(numbers)

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None and self._is_converting():
            raise OrderError(
                "this wrapper has converted a model and cannot be pickled; save model.state_dict() and "
                "wrapper.state_dict(), or write copy.deepcopy((model, wrapper))"
            )
        return {**super().__getstate__(), "_wrapped": None}
