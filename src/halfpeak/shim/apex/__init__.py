"""The ``apex`` package, as of 25.04. Its modules are imported when they are first asked for."""

from halfpeak.shim.emulated.deprecation import DeprecatedFeatureWarning, deprecated_warning

__all__ = ["DeprecatedFeatureWarning", "deprecated_warning"]
