"""The average of weights that ``halfpeak.AveragedModel`` is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Exact:
    """A moving average by hand, in float64, of the values that ``state_dict`` saves."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    def update(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            new = value.detach().double()
            self.average[name] = self.decay * self.average.get(name, new) + (1 - self.decay) * new

    def distance(self, averages: Mapping[str, Tensor]) -> float:
        """The largest distance of an average."""
        return max(
            float((averages[name].detach() - exact).abs().max()) for name, exact in self.average.items()
        )
