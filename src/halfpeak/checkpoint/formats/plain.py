"""Files that hold one state alone: weights (which can be written, too), an optimizer, or a loss scaler."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import StateError


def write(contents: Contents) -> Files:
    """The weights in float32; low-precision weights without masters are upcast, which is exact.

    Raises:
        StateError: there are no weights.
    """
    if not contents.models:
        raise StateError("the file holds no weights")
    return OrderedDict(
        (name, value.float() if isinstance(value, Tensor) and is_low(value) else value)
        for name, value in contents.model.items()
    )


WEIGHTS = Format(
    "weights",
    "weights alone",
    target=Target("the weights alone, in float32, for model.load_state_dict", write, weights_only=True),
)
OPTIMIZER = Format("optimizer", "the state of an optimizer alone")
SCALER = Format("scaler", "the state of a loss scaler alone")
