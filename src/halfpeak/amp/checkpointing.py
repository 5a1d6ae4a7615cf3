"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers, in apex's format."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from halfpeak.amp.session import _amp_state
from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``, one entry per loss scaler.

    Together with ``model.state_dict()``, which holds the masters' values, and ``optimizer.state_dict()``, this is
    everything that a bitwise resume needs. The scalers of several runs are listed in the order of the ``initialize``
    calls. Before the first call there are none. Waits for the device.

    Args:
        destination: filled and returned, if given.
    """
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.all_scalers()):
        result[f"loss_scaler{index}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Restore what :func:`state_dict` returned, or what apex saved.

    Entries are loaded in order into the scalers of all runs, or of the last ``initialize`` if the numbers differ. If
    they still differ, a warning is printed and as many as fit are loaded, as in apex. A static scale keeps its value.

    Raises:
        StateError: an unknown key, or an entry with a missing or impossible value. Nothing was loaded.
    """
    require_mapping(state_dict, "the amp state")
    unexpected = [key for key in state_dict if not (isinstance(key, str) and "loss_scaler" in key)]
    if unexpected:
        listed = ", ".join(f'"{key}"' if isinstance(key, str) else short_repr(key) for key in unexpected[:5])
        raise StateError(f"unexpected key(s) in the amp state: {listed}; pass what amp.state_dict() gave")
    entries = list(state_dict.values())
    all_scalers, latest = _amp_state.all_scalers(), _amp_state.loss_scalers
    scalers = all_scalers if len(entries) == len(all_scalers) else latest
    if len(entries) != len(scalers):
        print(f"Warning: the amp state holds {len(entries)} loss scaler(s), this run has {len(scalers)}")
    for index in range(len(scalers), len(entries)):
        print(f"Skipping loss_scaler[{index}]: num_losses={len(scalers)}")
    parsed = [(scaler, scaler.parse(entry)) for scaler, entry in zip(scalers, entries, strict=False)]
    for scaler, entry in parsed:
        if not scaler.dynamic:
            entry["scale"] = scaler.loss_scale()
        scaler.part.load_state_dict(entry)
        scaler.clear_overflow_state()
