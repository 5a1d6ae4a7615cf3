"""Precision plugins, and callbacks that average weights, for the package ``lightning`` and its Fabric."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import Precision

from halfpeak.integrations.lightning_plugins import Averages, FabricPlugin, TrainerPlugin


class HalfpeakPrecision(TrainerPlugin, Precision):  # type: ignore[misc]
    """A level inside ``Trainer``: ``Trainer(plugins=HalfpeakPrecision())``. See :class:`TrainerPlugin`."""


class HalfpeakFabricPrecision(FabricPlugin, FabricPrecision):  # type: ignore[misc]
    """A level inside ``Fabric``: ``Fabric(plugins=HalfpeakFabricPrecision())``. See :class:`FabricPlugin`."""


class WeightAveraging(Averages, callbacks.WeightAveraging):  # type: ignore[misc]
    """Lightning's callback of that name, with the same arguments, at every level. See :class:`Averages`."""


class EMAWeightAveraging(Averages, callbacks.EMAWeightAveraging):  # type: ignore[misc]
    """Lightning's callback of that name, with the same arguments, at every level. See :class:`Averages`."""


__all__ = ["EMAWeightAveraging", "HalfpeakFabricPrecision", "HalfpeakPrecision", "WeightAveraging"]
