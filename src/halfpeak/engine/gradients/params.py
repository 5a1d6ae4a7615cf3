"""The parameters of one optimizer as pairs: the model parameter, and the main parameter that the optimizer steps."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Final, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.ops.foreach import gradients_of
from halfpeak.state.masters import Masters

_TRAINABLE: Final = attrgetter("requires_grad")


class ParamPair(NamedTuple):
    """Autograd writes ``model.grad``; the optimizer reads ``main.grad``. Without a master both are one tensor."""

    model: Tensor
    main: Tensor

    def has_gradient(self) -> bool:
        """Whether there is a gradient on either side."""
        return self.model.grad is not None or self.main.grad is not None


class ParamPairs(list[ParamPair]):
    """A list of pairs, never changed. Each side is also a list of its own, because steps loop over a side in C.

    Attributes:
        model_params: of all pairs.
        main_params: of all pairs.
        unmastered: parameters without a master.
        low_params: parameters with a master.
        masters: the masters of ``low_params``, or placeholders if the optimizer keeps remainders instead.
    """

    def __init__(self, pairs: Iterable[ParamPair] = ()) -> None:
        super().__init__(pairs)
        self.model_params = [pair.model for pair in self]
        self.main_params = [pair.main for pair in self]
        self.unmastered = [pair.model for pair in self if pair.model is pair.main]
        self.low_params = [pair.model for pair in self if pair.model is not pair.main]
        self.masters = [pair.main for pair in self if pair.model is not pair.main]

    @cached_property
    def smallest(self) -> ParamPair | None:
        """The smallest pair with a master, where a sentinel needs the least memory; None if no pair has one."""
        sizes = list(map(Tensor.numel, self.low_params))
        index = sizes.index(min(sizes)) if sizes else None
        return None if index is None else ParamPair(self.low_params[index], self.masters[index])

    def main_grads(self) -> list[Tensor]:
        """The gradients that the optimizer reads."""
        return [grad for grad in gradients_of(self.main_params) if grad is not None]

    def with_gradient(self) -> list[Tensor]:
        """The main parameters that have a gradient."""
        grads = gradients_of(self.main_params)
        return list(compress(self.main_params, map(is_not, grads, repeat(None))))

    def has_low_gradient(self, ignored: Tensor | None = None) -> bool:
        """Whether a parameter with a master has a ``.grad`` of its own, which no optimizer reads.

        Args:
            ignored: a gradient that does not count, such as a sentinel.
        """
        return not {id(None), id(ignored)}.issuperset(map(id, gradients_of(self.low_params)))


class ParamTable:
    """The parameters in an optimizer's groups at the time the table was made; valid while :meth:`is_current`.

    Attributes:
        members: the parameters in the groups, in order.
        main_params: for each member, the holder of its unscaled gradient: a master, the parameter itself, or the
            placeholder of a remainder.
        model_params: for each member, the low-precision parameter of that master, or the member itself.
        all_pairs: every pair once, frozen parameters included.
        pairs: the trainable pairs, and frozen ones with a gradient on the main parameter, because optimizers step it.
        master_indices: the indices in :class:`~halfpeak.state.masters.Masters` of the members that are masters.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        self.members = params_of(optimizer)
        self._masters, self._num_masters = masters, len(masters)
        self.model_params = [masters.model_param_of(member) for member in self.members]
        self.master_indices = masters.indices_of(self.members)
        mains = map(masters.of, self.model_params)
        self.main_params = [m if main is None else main for m, main in zip(self.members, mains, strict=True)]
        self._trainable = list(map(_TRAINABLE, self.model_params)), list(map(_TRAINABLE, self.members))
        pairs = map(ParamPair, self.model_params, self.main_params)
        self.all_pairs = list({id(pair.model): pair for pair in pairs}.values())
        self.pairs = ParamPairs(
            pair for pair in self.all_pairs if pair.model.requires_grad or pair.main.grad is not None
        )

    def pairs_with_frozen(self, earlier: ParamPairs | None, stashed: Container[int] = ()) -> ParamPairs:
        """:attr:`pairs`, and those of ``earlier``, the pairs of a window, that were frozen since but have a gradient.

        Args:
            stashed: ids of model parameters whose gradient is kept apart from ``.grad``.
        """
        if earlier is None or earlier is self.pairs:
            return self.pairs
        own = {id(pair.model): pair for pair in self.pairs}
        frozen = {
            id(pair.model): pair
            for pair in earlier
            if id(pair.model) not in own and (pair.has_gradient() or id(pair.model) in stashed)
        }
        if not frozen:
            return self.pairs
        # In the order of the groups, because a norm adds up squares in that order.
        wanted = own | frozen
        places = [id(pair.model) for pair in self.all_pairs]
        return ParamPairs([wanted[key] for key in dict.fromkeys([*places, *frozen]) if key in wanted])

    def grad_holders(self, earlier: ParamPairs | None) -> list[Tensor]:
        """Every tensor that may hold a gradient, also of ``earlier``: the pairs of a window, maybe of other groups."""
        own = [*self.model_params, *self.main_params]
        if earlier is None or earlier is self.pairs:
            return own
        return [*own, *earlier.model_params, *earlier.main_params]

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether groups, ``requires_grad`` and the number of masters are as they were when the table was made."""
        return (
            len(self._masters) == self._num_masters
            and are_params_of(optimizer, self.members)
            and list(map(_TRAINABLE, self.model_params)) == self._trainable[0]
            and list(map(_TRAINABLE, self.members)) == self._trainable[1]
        )
