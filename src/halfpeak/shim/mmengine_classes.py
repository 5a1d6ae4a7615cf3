"""Classes that are halfpeak's and mmengine's at once: mmengine's ``Runner`` takes no wrapper that is not its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Final

from halfpeak.core.errors import RegistryError
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    Registry,
)
from halfpeak.optim.registry import Factory

_SCOPE: Final = "_scope_"
"""A key that mmengine's configurations carry, for the registry alone."""


class _Counted:
    """What mmengine's schedulers ask before they warn of a step that was forgotten: inside a window none was due."""

    _global_step: int

    def update_params(self, *args: Any, **kwargs: Any) -> None:
        super().update_params(*args, **kwargs)  # type: ignore[misc]
        if vars(self).get("_global_step") == -1:
            self._global_step = 0


def make_wrappers(optim: ModuleType) -> dict[str, type[OptimWrapper]]:
    """Each of halfpeak's wrappers as a subclass of the one that ``mmengine.optim`` has under its name.

    halfpeak's class comes first and answers every call, its constructor included. mmengine's is there for ``isinstance``.

    Args:
        optim: the module ``mmengine.optim``.
    """
    made: dict[str, type[OptimWrapper]] = {}
    for own in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper, OptimWrapperDict):
        name = own.__name__
        first = () if own is OptimWrapperDict else (_Counted,)
        made[name] = type(
            name, (*first, own, getattr(optim, name)), {"__module__": __name__, "__doc__": own.__doc__}
        )
    return made


def make_constructor(
    optim: ModuleType, wrappers: Mapping[str, type[OptimWrapper]], registries: Any
) -> type[DefaultOptimWrapperConstructor]:
    """halfpeak's constructor, which builds what mmengine's registries hold.

    Args:
        optim: the module ``mmengine.optim``.
        wrappers: what :func:`make_wrappers` made of it.
        registries: the module ``mmengine.registry``.
    """
    # Configurations in the new style name the class itself.
    instead = {getattr(optim, name): cls for name, cls in wrappers.items()}

    class Constructor(DefaultOptimWrapperConstructor):
        _optimizers: ClassVar[Registry] = _ForeignRegistry("optimizer", registries.OPTIMIZERS, {})
        _wrappers: ClassVar[Registry] = _ForeignRegistry(
            "optimizer wrapper", registries.OPTIM_WRAPPERS, instead
        )

        def __init__(
            self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
        ) -> None:
            super().__init__(optim_wrapper_cfg, _without_scope(paramwise_cfg))

    Constructor.__name__ = Constructor.__qualname__ = DefaultOptimWrapperConstructor.__name__
    Constructor.__doc__ = DefaultOptimWrapperConstructor.__doc__
    return Constructor


class _ForeignRegistry(Registry):
    """One of mmengine's registries, with the refusals of halfpeak's.

    Args:
        name: what the members are, for messages.
        registry: mmengine's.
        instead: a class that a configuration names -> the one to build.
    """

    def __init__(self, name: str, registry: Any, instead: Mapping[Any, Factory]) -> None:
        super().__init__(name)
        self._registry = registry
        self._instead = instead

    def resolve(self, cfg: Mapping[str, Any]) -> Factory:
        """The factory that ``cfg["type"]`` means: what mmengine's registry finds in the scope of ``cfg``, or itself."""
        kind = cfg.get("type")
        if not isinstance(kind, str):
            factory = super().resolve(cfg)
            return self._instead.get(factory, factory)
        with self._registry.switch_scope_and_registry(cfg.get(_SCOPE)) as registry:
            found = registry.get(kind)
        if found is None:
            raise RegistryError(
                f"{kind!r} is not a registered {self.name} of mmengine; registered are "
                f"{', '.join(sorted(self._registry.module_dict))}; add one with @register_module()"
            )
        return found

    def build(self, cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
        """Call the factory that ``cfg["type"]`` means with the rest of ``cfg`` as keyword arguments."""
        arguments = {**(default_args or {}), **cfg}
        arguments["type"] = self.resolve(arguments)
        return super().build(_without_scope(arguments))


def _without_scope(cfg: Any) -> Any:
    """``cfg`` without the key that is for registries alone, at any depth of dicts."""
    if not isinstance(cfg, Mapping):
        return cfg
    return {key: _without_scope(value) for key, value in cfg.items() if key != _SCOPE}
