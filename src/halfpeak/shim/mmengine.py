"""``install("mmengine")``: puts halfpeak's wrappers, constructor and hooks into mmengine's registries, under mmengine's names.

mmengine's ``Runner`` accepts only wrappers that are instances of mmengine's classes, so each wrapper here inherits from
halfpeak's class and from mmengine's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import MissingExtraError
from halfpeak.core.keywords import Factory
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    Registry,
)
from halfpeak.optim.registry import SCOPE
from halfpeak.runner.hooks.diagnosis import DiagnosisHook as OwnHook
from halfpeak.shim.registries import put
from halfpeak.shim.spec import Shim, Undo


def set_up() -> Undo:
    """Check that mmengine is there.

    Raises:
        MissingExtraError: neither mmengine nor a fork of it is installed.
    """
    if find_spec("mmengine") is None:
        raise MissingExtraError(
            "mmengine is not installed; write pip install mmengine-lite, or use halfpeak.optim, which does not need it"
        )
    return lambda: None


def register(optim: ModuleType) -> Undo:
    """Replace mmengine's wrappers and constructor in its registries by halfpeak's.

    Args:
        optim: the module ``mmengine.optim``.

    Returns:
        A function that restores mmengine's classes. A name that was registered again in the meantime stays.
    """
    registries: Any = import_module("mmengine.registry")
    wrappers = make_wrappers(optim)
    constructor = make_constructor(optim, wrappers)
    return put([
        *((registries.OPTIM_WRAPPERS, name, cls) for name, cls in wrappers.items()),
        (registries.OPTIM_WRAPPER_CONSTRUCTORS, constructor.__name__, constructor),
    ])  # fmt: skip


class _CountsWindows:
    """Sets ``_global_step``, which mmengine's schedulers read to warn that ``step()`` was never called.

    The first ``update_params`` sets it as well, because no step is due inside an accumulation window.
    """

    _global_step: int

    def update_params(self, *args: Any, **kwargs: Any) -> None:
        super().update_params(*args, **kwargs)  # type: ignore[misc]
        if vars(self).get("_global_step") == -1:
            self._global_step = 0


def make_wrappers(optim: ModuleType) -> dict[str, type[OptimWrapper]]:
    """Each of halfpeak's wrappers as a subclass of the class with the same name in ``mmengine.optim``.

    halfpeak's class is the first base and handles every call, including ``__init__``. mmengine's is for ``isinstance``.

    Args:
        optim: the module ``mmengine.optim``.
    """
    made: dict[str, type[OptimWrapper]] = {}
    for own in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper, OptimWrapperDict):
        name = own.__name__
        first = () if own is OptimWrapperDict else (_CountsWindows,)
        made[name] = type(
            name, (*first, own, getattr(optim, name)), {"__module__": __name__, "__doc__": own.__doc__}
        )
    return made


def make_constructor(
    optim: ModuleType, wrappers: Mapping[str, type[OptimWrapper]]
) -> type[DefaultOptimWrapperConstructor]:
    """halfpeak's constructor, changed to build classes from mmengine's registries.

    Args:
        optim: the module ``mmengine.optim``.
        wrappers: the result of :func:`make_wrappers`.
    """
    # mmengine's new-style configurations have the class itself as type.
    instead = {getattr(optim, name): cls for name, cls in wrappers.items()}

    class Constructor(DefaultOptimWrapperConstructor):
        _optimizers: ClassVar[Registry] = _MmengineRegistry("optimizer of mmengine", "OPTIMIZERS", {})
        _wrappers: ClassVar[Registry] = _MmengineRegistry(
            "optimizer wrapper of mmengine", "OPTIM_WRAPPERS", instead
        )

        def __init__(
            self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
        ) -> None:
            super().__init__(optim_wrapper_cfg, _without_scope(paramwise_cfg))

    Constructor.__name__ = Constructor.__qualname__ = DefaultOptimWrapperConstructor.__name__
    Constructor.__doc__ = DefaultOptimWrapperConstructor.__doc__
    return Constructor


def register_hooks(hooks: ModuleType) -> Undo:
    """Register a ``DiagnosisHook`` that does the same as :class:`halfpeak.runner.DiagnosisHook`, and an exact ``EMAHook``.

    Args:
        hooks: the module ``mmengine.hooks``.
    """
    theirs: Any = hooks

    class DiagnosisHook(theirs.Hook):
        def __init__(self) -> None:
            self._own = OwnHook()

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            wrapper = runner.optim_wrapper
            if isinstance(wrapper, OptimWrapper) and not isinstance(wrapper, OptimWrapperDict):
                view: Any = SimpleNamespace(
                    step_result=wrapper.last_result,
                    outputs=outputs or {},
                    data_batch=data_batch,
                    optimizer=_ReplayWrapper(wrapper),
                    validation_step=nullcontext,
                    **{name: getattr(runner, name) for name in ("iter", "work_dir", "model", "logger")},
                )
                self._own.after_train_iter(view)

    DiagnosisHook.__doc__ = OwnHook.__doc__

    class EMAHook(theirs.EMAHook):
        """mmengine's, on float32 values where weights are half: it averages those, and validates without rounding them."""

        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            if not self.ema_model.update_buffers and any(map(is_low, self.src_model.parameters())):
                raise ConfigError(
                    "EMAHook would average half weights, which lose small steps; write dict(type='EMAHook', "
                    "update_buffers=True), which averages the float32 values of state_dict()"
                )
            super().after_train_iter(runner, *args, **kwargs)

        def before_val_epoch(self, runner: Any) -> None:
            self._weights = copy.deepcopy(self.src_model.state_dict())
            self.src_model.load_state_dict(self.ema_model.module.state_dict())

        def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
            self.src_model.load_state_dict(self._weights)
            del self._weights

        before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    registries: Any = import_module("mmengine.registry")
    return put([(registries.HOOKS, cls.__name__, cls) for cls in (DiagnosisHook, EMAHook)])


class _ReplayWrapper:
    """Stands in for a wrapper while ``train_step`` of mmengine's models is replayed: it casts and does not step."""

    def __init__(self, wrapper: OptimWrapper) -> None:
        self.optim_context = wrapper.optim_context

    def update_params(self, loss: Any) -> None:
        """Do nothing. ``train_step`` returns the loss."""


class _MmengineRegistry(Registry):
    """A view of one of mmengine's registries, with halfpeak's checks and messages.

    Dotted names are imported, as in mmengine, so that its configurations run unedited.

    Args:
        name: a noun for the members, for messages.
        mmengine: mmengine's name for the registry.
        instead: a class given as ``type`` -> the class to build.
    """

    _imports = True

    def __init__(self, name: str, mmengine: str, instead: Mapping[Any, Factory]) -> None:
        super().__init__(name, mmengine=mmengine)
        self._instead = instead

    def resolve(self, cfg: Mapping[str, Any]) -> Factory:
        """The factory that ``cfg["type"]`` names in the scope of ``cfg``, after replacement by ``instead``."""
        factory = super().resolve(cfg)
        return self._instead.get(factory, factory)

    def _in_mmengine(self, name: str, scope: str | None) -> Factory | None:
        with self._root().switch_scope_and_registry(scope) as registry:
            return registry.get(name)

    def build(self, cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
        """Call the factory of ``cfg["type"]`` with the rest of ``cfg`` as keyword arguments."""
        arguments = {**(default_args or {}), **cfg}
        return super().build({**_without_scope(arguments), "type": self.resolve(arguments)})


def _without_scope(cfg: Any) -> Any:
    """``cfg`` without the key ``_scope_``, at any depth of dicts."""
    if not isinstance(cfg, Mapping):
        return cfg
    return {key: _without_scope(value) for key, value in cfg.items() if key != SCOPE}


MMENGINE: Final = Shim(
    after_import={"mmengine.optim": register, "mmengine.hooks": register_hooks},
    setup=set_up,
    page="docs/compat/mmengine.md",
)
