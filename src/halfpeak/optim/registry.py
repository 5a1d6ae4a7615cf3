"""A closed registry: names that a configuration may use, and the factory of each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar, overload

from halfpeak.core.errors import ConfigTypeError, RegistryError
from halfpeak.core.keywords import Factory, did_you_mean, keywords_of, name_of, unknown_key
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_dict, require_flag

F = TypeVar("F", bound=Factory)

SCOPE: Final = "_scope_"
"""A key of mmengine's configurations that only the registry reads."""


class Registry:
    """A closed table from names to factories.

    A name in a configuration means exactly what was registered under it. Names are never imported, so an untrusted
    configuration can build only registered members. User code that calls :meth:`build` may pass a factory instead.

    Args:
        name: the kind of members, for messages: ``"optimizer"``.
        mmengine: the name of mmengine's registry of the same kind. If mmengine is imported, its members are found too:
            by name, by ``scope.Name``, and in its default scope.

    >>> OPTIMIZERS = Registry("optimizer")
    >>> @OPTIMIZERS.register_module()
    ... class Walk:
    ...     def __init__(self, params, lr, momentum=0.0):
    ...         self.lr = lr
    >>> OPTIMIZERS.build({"type": "Walk", "params": [], "lr": 0.1}).lr
    0.1
    >>> OPTIMIZERS.build({"type": "Walk", "params": [], "lr": 0.1, "momentun": 0.9})
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: Walk takes no 'momentun'; did you mean 'momentum'? It takes params, lr, momentum
    >>> OPTIMIZERS.build({"type": "os.abort"})
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.RegistryError: 'os.abort' is not a registered optimizer, and dotted names are never imported; ...
    """

    _imports: ClassVar[bool] = False

    def __init__(self, name: str, *, mmengine: str = "") -> None:
        self.name = name
        self._mmengine = mmengine
        self._members: dict[str, Factory] = {}

    def __repr__(self) -> str:
        return f"Registry({self.name!r}: {', '.join(sorted(self._members))})"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Factory:
        """The factory of that name.

        Raises:
            RegistryError: the name is not registered. The message suggests similar names.
        """
        found = self.get(name)
        if found is None:
            dotted = ", and dotted names are never imported" if "." in name and not self._imports else ""
            known = sorted({*self._members, *getattr(self._root(), "module_dict", ())})
            raise RegistryError(
                f"{short_repr(name)} is not a registered {self.name}{dotted}; {did_you_mean(name, known)}Registered are "
                f"{', '.join(known) or 'none'}; add one with @register_module()"
            )
        return found

    @property
    def module_dict(self) -> Mapping[str, Factory]:
        """The members, read-only."""
        return MappingProxyType(self._members)

    def get(self, name: str) -> Factory | None:
        """The factory of that name, or None."""
        return self._members.get(name) or self._in_mmengine(name, None)

    def _root(self) -> Any:
        """Return mmengine's registry of the same kind; None if mmengine is not imported."""
        return getattr(sys.modules.get("mmengine.registry"), self._mmengine or "-", None)

    def _in_mmengine(self, name: str, scope: str | None) -> Factory | None:
        """Return what mmengine's registry has under a name, or None. A name never selects a module to import."""
        root = self._root()
        if root is None:
            return None
        prefix, dot, leaf = name.rpartition(".")
        if dot:
            if prefix == root.scope and leaf in self._members:
                return self._members[leaf]
            place = root if prefix == root.scope else root.children.get(prefix)
            return None if place is None else _registered(place, leaf)
        with root.switch_scope_and_registry(scope) as place:
            while place is not None:
                found = _registered(place, leaf)
                if found is not None:
                    return found
                place = place.parent
        return None

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, *, module: F
    ) -> F: ...
    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: None = None
    ) -> Callable[[F], F]: ...
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: Factory | None = None
    ) -> Any:
        """Add a factory: ``register_module(module=SGD)``, or as a decorator ``@register_module()``.

        Args:
            name: the name, or several; by default the factory's own.
            force: replace a factory that has the name already.

        Raises:
            RegistryError: the name is taken.
            ConfigTypeError: ``module`` is not a class or function, or ``name`` is not a name. Names have no dots.
        """
        if name is not None and not isinstance(name, str) and not _is_names(name):
            raise ConfigTypeError(
                f"name={short_repr(name)} must be a string or a sequence of strings; write name='MyOptimizer', or as a "
                "decorator @register_module() with its brackets"
            )
        require_flag("force", force)

        def register(factory: F) -> F:
            self._add(factory, name, force)
            return factory

        return register if module is None else register(module)

    def _add(self, factory: Any, name: str | Sequence[str] | None, force: bool) -> None:
        if not (inspect.isclass(factory) or inspect.isfunction(factory)):
            raise ConfigTypeError(
                f"{short_repr(factory)} is not a class or function; only these can be registered"
            )
        names = factory.__name__ if name is None else name
        names = [names] if isinstance(names, str) else list(names)
        for one in names:
            if not one or "." in one:
                raise ConfigTypeError(
                    f"name={short_repr(one)} must not be empty or have dots; write 'MyOptimizer'"
                )
            if one in self._members and not force:
                owner = self._members[one]
                raise RegistryError(
                    f"{short_repr(one)} is already registered as {self.name} by {owner.__module__}; choose another name, "
                    "or write force=True to replace it"
                )
        self._members.update(dict.fromkeys(names, factory))

    def resolve(self, cfg: Mapping[str, Any]) -> Factory:
        """Return the factory for ``cfg["type"]``: a registered name, or the factory itself.

        Raises:
            RegistryError: no ``type``, or a name that is not registered.
            ConfigTypeError: ``type`` is neither a name nor callable.
        """
        if "type" not in cfg:
            raise RegistryError(
                f"the configuration of the {self.name} has no 'type' (keys: {short_repr(list(cfg))}); add type= with the "
                f"name of a registered {self.name}"
            )
        kind = cfg["type"]
        if isinstance(kind, str):
            scoped = self._in_mmengine(kind, cfg[SCOPE]) if cfg.get(SCOPE) else None
            return scoped or self[kind]
        if not callable(kind):
            raise ConfigTypeError(
                f"type={short_repr(kind)} must be the name of a registered {self.name}, or a class"
            )
        return kind

    def build(self, cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
        """Call the factory for ``cfg["type"]`` with the rest of ``cfg`` as keyword arguments.

        Args:
            cfg: not changed.
            default_args: values for keys that ``cfg`` lacks, which may include ``type``.

        Raises:
            RegistryError: no ``type``, or a name that is not registered.
            ConfigTypeError: not a dict, or an argument that the factory does not take.
        """
        default_args = {} if default_args is None else default_args
        for what, value in (("cfg", cfg), ("default_args", default_args)):
            require_dict(what, value, "dict(type='...')")
        arguments = {**default_args, **cfg}
        factory = self.resolve(arguments)
        del arguments["type"]
        if self._mmengine:
            arguments.pop(SCOPE, None)
        takes = keywords_of(factory)
        for key in arguments:
            if key not in takes.names and not takes.is_open:
                raise ConfigTypeError(unknown_key(name_of(factory), key, takes.names))
        return factory(**arguments)


def _registered(registry: Any, name: str) -> Factory | None:
    """Import the modules that an mmengine registry lists for its members; return what it has under a name, or None."""
    registry.import_from_location()
    return registry.module_dict.get(name)


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
