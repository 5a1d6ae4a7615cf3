"""One thing that was saved by itself: weights, an optimizer, or a loss scaler; and weights alone, written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.checkpoint.canonical import Contents, is_weights, scaler_kind
from halfpeak.checkpoint.formats.format import Files, Format, Target
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import StateError

_WHERE = "(the file)"


def read(tree: Any) -> Contents | None:
    """The contents of a file that is one state dict."""
    contents = Contents()
    if not isinstance(tree, Mapping):
        contents.rest[_WHERE] = tree
    elif is_weights(tree):
        contents.form, contents.models[_WHERE] = "weights", tree
    elif scaler_kind(tree) is not None:
        contents.form = "scaler"
        contents.add_scaler(_WHERE, tree)
    elif contents.add_optimizer(_WHERE, tree):
        contents.form = contents.form if contents.form == "fp16_optimizer" else "optimizer"
    else:
        return None
    return contents


def write(contents: Contents) -> Files:
    """float32: masters where there were any; low-precision weights are upcast, which is exact.

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
    read,
    Target("the weights alone, in float32, for model.load_state_dict", write, weights_only=True),
)
OPTIMIZER = Format("optimizer", "the state of an optimizer alone", read)
SCALER = Format("scaler", "the state of a loss scaler alone", read)
