"""Precision plugins for ``lightning.pytorch`` and ``lightning.fabric``, of the package ``lightning``."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision

from halfpeak.integrations.lightning_plugins import FabricPlugin, TrainerPlugin


class HalfpeakPrecision(TrainerPlugin, Precision):  # type: ignore[misc]
    """A level inside ``Trainer``: ``Trainer(plugins=HalfpeakPrecision())``. See :class:`TrainerPlugin`."""


class HalfpeakFabricPrecision(FabricPlugin, FabricPrecision):  # type: ignore[misc]
    """A level inside ``Fabric``: ``Fabric(plugins=HalfpeakFabricPrecision())``. See :class:`FabricPlugin`."""


__all__ = ["HalfpeakFabricPrecision", "HalfpeakPrecision"]
