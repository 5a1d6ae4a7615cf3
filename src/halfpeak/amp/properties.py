"""``Properties`` and ``opt_levels`` of apex: options that check each assignment, and levels that assign them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from halfpeak.amp.session import warn_or_err
from halfpeak.core import levels
from halfpeak.core.errors import ConfigError
from halfpeak.core.messages import option_names


class Properties:
    """The options of a run as attributes; an assignment is checked like an override of ``initialize``.

    Attributes:
        options: names and values, in the order in which they are printed.

    Raises:
        ConfigError: an unknown option, or a value that contradicts the level.

    >>> properties = opt_levels["O2"](Properties())
    >>> properties.loss_scale = "128.0"
    >>> properties.options["loss_scale"], properties.keep_batchnorm_fp32
    (128.0, True)
    """

    options: dict[str, Any]

    def __init__(self, values: levels.Properties | None = None) -> None:
        known = values or levels.Properties()
        vars(self)["options"] = {name: getattr(known, name) for name in option_names(known)}

    def __getattr__(self, name: str) -> Any:
        options: dict[str, Any] = vars(self).get("options", {})
        if name in options:
            return options[name]
        if name == "patch_torch_functions_type" and options:
            return levels.get_level(options["opt_level"]).properties.patch_torch_functions_type
        raise UnknownOptionError(f"unknown option {name!r}; known options: {', '.join(options)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise UnknownOptionError(f"unknown option {name!r}; known options: {', '.join(self.options)}")
        if name not in ("enabled", "opt_level") and value is not None:
            level = self.options["opt_level"] or "O0"
            value = getattr(levels.resolve(level, **{name: value}, refuse=warn_or_err), name)
        self.options[name] = value


class UnknownOptionError(ConfigError, AttributeError):
    """No option has that name."""


@dataclass(frozen=True, slots=True)
class OptLevel:
    """One opt level; calling it with properties assigns the values of the level."""

    level: levels.Level

    @property
    def brief(self) -> str:
        """The name of the level and a short description."""
        return f"{self.level.name}:  {self.level.brief}"

    @property
    def more(self) -> str:
        """The description of the level and the page that lists its values."""
        return f"{self.level.brief.strip()} See docs/levels.md."

    def __call__(self, properties: Properties) -> Properties:
        """Assign the values of this level to ``properties``, and return them."""
        vars(properties)["options"] = Properties(self.level.properties).options
        return properties


opt_levels: Final[Mapping[str, OptLevel]] = MappingProxyType(
    {name: OptLevel(level) for name, level in levels.LEVELS.items()}
)
"""Every level by its name."""
