"""What a fused optimizer reads and writes beside its parameters: gradients from elsewhere, low weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Feed(NamedTuple):
    """What a step reads instead of the parameters' own gradients. Lists go by the order of the groups.

    Attributes:
        grads: the gradient for each parameter, or None.
        lows: the model's weight for each parameter that is a master of one, else the parameter itself.
        factor: what a gradient is multiplied by before the rule sees it: it unscales and clips.  # f32[]
    """

    grads: Sequence[Tensor | None]
    lows: Sequence[Tensor]
    factor: Tensor


class Followers(Protocol):
    """Low copies of weights, which follow them: a step writes both."""

    def lows_of(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The copy of each weight, equal to it now; or the weight itself, where it has none."""
        ...

    def note(self, moved: Sequence[Tensor]) -> None:
        """A step has moved these weights, and written the copies that were told for them."""
        ...
