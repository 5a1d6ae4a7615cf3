"""FusedOptimizer: a torch optimizer whose step is one read and one pass over blocks of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ParameterError
from halfpeak.fused.arguments import check_group
from halfpeak.fused.books import Account, Books, settle_on_host
from halfpeak.fused.checks import check_gradients, check_parameter
from halfpeak.fused.counters import Counter
from halfpeak.fused.feed import Feed, Followers
from halfpeak.fused.forms.loading import REMAINDER, adapt_row, check_row, keep_dtypes, rows_of
from halfpeak.fused.forms.remainders import Remainders
from halfpeak.fused.forms.storage import Storage
from halfpeak.fused.layout import Layout, Piece, gradients_of, targets_of
from halfpeak.fused.orders import Orders
from halfpeak.fused.roads.base import DeviceRoad, Moves, Reading, Road
from halfpeak.fused.roads.choose import RoadName, check_wish, choose, leads_on
from halfpeak.fused.roads.tables import Tables
from halfpeak.fused.roads.triton import TritonRoad
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.stepping import hooked


class FusedOptimizer(Optimizer, ABC):
    """What the fused optimizers share. A subclass says by which rule a group is stepped.

    Attributes:
        moves: steps in which something moved, since this object was made.
        keeper: of the remainders of its weights, if it stores them so.

    Its state is torch's: ``state_dict`` has torch's layout and goes into torch's optimizer of the same rule and back.

    Args:
        params: parameters or groups, as for every torch optimizer. Dense, real, floating point.
        defaults: hyper-parameters.
        road: how kernels run: ``"auto"``, ``"eager"``, ``"compiled"`` or ``"triton"``.
        storage: the forms in which weights and state lie.
    """

    _step_supports_amp_scaling = True
    profile_hook_step = staticmethod(hooked)

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        road: RoadName = "auto",
        storage: Storage | None = None,
    ) -> None:
        check_wish(road)
        super().__init__(params, defaults)
        self._wish: RoadName = road
        self._storage = storage or Storage()
        self.keeper = self._make_keeper()
        self._followers: Followers | None = None
        self._begin()

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule by which a group is stepped."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ConfigError: a hyper-parameter is out of its range.
            ParameterError: a parameter is sparse, complex, of integers or sharded. The group was not added.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in param_group["params"]:
                check_parameter(parameter)
        except ParameterError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Nothing moves where a gradient scaler has set ``found_inf`` on the optimizer to anything but zero. On an accelerator
        nobody waits for it: the kernels read it there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        feed = self._feed or self._own_feed()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # On the CPU reading it waits for nobody.
        is_known = found_inf is None or (found_inf.device.type == "cpu" and self._wish != "triton")
        if found_inf is None or not is_known or not bool(found_inf):
            self._move(feed, None if is_known else found_inf)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero them."""
        super().zero_grad(set_to_none)
        if self.keeper is not None:
            self.keeper.zero_grad(set_to_none=set_to_none)

    def measure(self, feed: Feed) -> Reading:
        """The sum of squares of the gradients that a step would read, and whether one is not finite."""
        with torch.no_grad():
            pieces = self._pieces(feed)
            self._measured = (feed.grads, pieces)
            if not pieces:
                nothing = torch.zeros_like(feed.factor)
                return Reading(nothing, nothing.clone())
            return self._road_for(pieces).measure(pieces, feed.grads, feed.factor)

    def account(self, feed: Feed, books: Books) -> Account | None:
        """:meth:`measure`, and all that a host would decide from it, where the gradients are and without waiting.

        The coming step does not work it out again if it is fed the ``factor`` and given the ``found_inf`` of the account.

        Returns:
            None, with nothing done, where this optimizer runs no kernel that can.
        """
        if self._road is None:
            return None
        if not isinstance(self._road, DeviceRoad):
            squares, found_inf = self.measure(feed)
            return settle_on_host(books, squares, found_inf, feed.factor)
        with torch.no_grad():
            pieces = self._pieces(feed)
            self._measured = (feed.grads, pieces)
            road = self._road_for(pieces) if pieces else None
            return (
                road.account(self._moves(pieces, feed, None), books) if isinstance(road, DeviceRoad) else None
            )

    def lies_as(self, pieces: Sequence[Piece], lows: Sequence[Tensor]) -> bool:
        """Whether everything is still where it was when ``pieces`` were laid out."""
        layout = self._layout
        rules = [self.rule(group) for group in self.param_groups]
        lows = self._lows_of(lows)
        return layout is not None and layout.last is pieces and layout.is_current(self, rules, lows)

    def surrender(self) -> Tables | None:
        """The tables of the Triton road, to who captures launches that read them. Further steps make new ones."""
        return self._road.surrender() if isinstance(self._road, TritonRoad) else None

    def feed(self, feed: Feed | None) -> None:
        """What the coming steps read; None for the parameters' own gradients again."""
        self._feed = feed
        if feed is None:
            self._forget()

    def follow(self, followers: Followers | None) -> None:
        """Write low copies of weights in every step from now on; None no more."""
        self._followers = followers

    def note_replay(self) -> None:
        """What the last step ran has been run again without it."""
        if self._followers is not None and self._layout is not None:
            self._followers.note(self._layout.followed)

    @property
    def road(self) -> str:
        """How kernels run, once a step has been taken."""
        return self._wish if self._road is None else self._road.name

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout, with a step count for each parameter."""
        state, idle = super().state_dict(), self._idle_rows()
        # Parameters stepped together share one count here; torch's optimizers would count it up once for each of them.
        state["state"] = {
            key: {**row, "step": row["step"].clone()} if "step" in row else row
            for key, row in state["state"].items()
            if row and id(row) not in idle
        }
        return state

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Check what :meth:`load_state_dict` would load.

        Raises:
            StateError: a tensor has not the shape of its parameter, or a form that cannot be read here.
        """
        rows = zip(targets_of(self), self._rules_of_targets(), rows_of(state_dict), strict=False)
        for target, rule, (index, row) in rows:
            check_row(index, row, rule, target)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch's of the same rule. What is loaded is copied, in its own dtype.

        Raises:
            StateError: a tensor has not the shape of its parameter, or a form that cannot be read here.
        """
        self.check_state(state_dict)
        targets, rules = targets_of(self), self._rules_of_targets()
        before = [self.state.get(target, {}).get(REMAINDER) for target in targets]
        super().load_state_dict(cast("dict[str, Any]", state_dict))
        keep_dtypes(self, state_dict)
        for target, rule, rest in zip(targets, rules, before, strict=True):
            if rest is not None or target in self.state:
                adapt_row(self.state[target], rule, target, rest)

    def __getstate__(self) -> dict[str, Any]:
        given, idle = super().__getstate__(), self._idle_rows()
        given["state"] = defaultdict(dict, {k: row for k, row in self.state.items() if id(row) not in idle})
        return {**given, "_wish": self._wish, "_storage": self._storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_loading = hasattr(self, "keeper")
        super().__setstate__(state)
        if not is_loading:
            self.keeper, self._followers = self._make_keeper(), None
        self._begin()

    def _rules_of_targets(self) -> list[Rule]:
        return [
            self.rule(group).for_weight(target.dtype)
            for group in self.param_groups
            for target in group["params"]
        ]

    def _make_keeper(self) -> Remainders | None:
        remainder = self._storage.remainder
        return None if remainder is None else Remainders(self, remainder)

    def _idle_rows(self) -> set[int]:
        return set() if self._layout is None else self._layout.idle_rows()

    def _begin(self) -> None:
        self._layout: Layout | None = None
        self._road: Road | DeviceRoad | None = None
        self._orders: Orders | None = None
        self._feed: Feed | None = None
        self._measured: tuple[Sequence[Tensor | None], list[Piece]] | None = None
        self.moves = 0

    def _forget(self) -> None:
        """Gradients change from here on."""
        self._measured = None
        if self._road is not None:
            self._road.forget()

    def _own_feed(self) -> Feed:
        targets = targets_of(self)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        one = torch.ones((), device=targets[0].device if targets else None)
        grads = gradients_of(targets) if self.keeper is None else self.keeper.gradients_of(targets)
        return Feed(grads, targets, one if grad_scale is None else grad_scale.reciprocal())

    def _move(self, feed: Feed, found_inf: Tensor | None = None) -> None:
        measured = self._measured
        # Between measuring and stepping only an engine has been at work.
        pieces = self._pieces(feed) if measured is None or measured[0] is not feed.grads else measured[1]
        if not pieces:
            return
        layout = cast(Layout, self._layout)
        road = self._road_for(pieces)
        if isinstance(road, DeviceRoad):
            moves = self._moves(pieces, feed, found_inf)
            self._write(layout, (), lambda: road.move(moves))
        elif found_inf is None or not bool(found_inf):
            # What may raise comes first: a bad learning rate must not have counted a step.
            orders = self._orders_of(pieces).of_step(feed.factor)
            self._write(layout, layout.counters(pieces), lambda: road.update(orders, feed.grads))

    def _write(self, layout: Layout, counters: Iterable[Counter], run: Callable[[], object]) -> None:
        """Step. Whoever interrupts this has stepped, and left it half done as in any optimizer of torch's."""
        self.moves += 1
        for counter in counters:
            counter.count()
        # Kernels write through their own view of the memory; autograd must still see that these tensors change.
        torch.autograd.graph.increment_version(layout.moving)
        run()
        self._forget()
        if self.keeper is not None:
            self.keeper.note()
        if self._followers is not None:
            self._followers.note(layout.followed)

    def _lows_of(self, lows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Low weights that are written beside others: the model's, and copies of those that are not low."""
        return lows if self._followers is None else self._followers.lows_of(lows)

    def _moves(self, pieces: Sequence[Piece], feed: Feed, found_inf: Tensor | None) -> Moves:
        return Moves(pieces, self.param_groups, feed.grads, feed.factor, found_inf)

    def _orders_of(self, pieces: Sequence[Piece]) -> Orders:
        if self._orders is None or not self._orders.are_for(pieces, self.param_groups):
            self._orders = Orders(pieces, self.param_groups)
        return self._orders

    def _pieces(self, feed: Feed) -> list[Piece]:
        """Where everything lies now."""
        if self.keeper is not None:
            self.keeper.refresh()
        rules = [self.rule(group) for group in self.param_groups]
        mask = [grad is not None for grad in feed.grads]
        layout, lows = self._layout, self._lows_of(feed.lows)
        if layout is not None and layout.is_current(self, rules, lows):
            pieces = layout.pieces(mask)
            if pieces is not None:
                return pieces
        check_gradients(feed.grads)
        layout = self._layout = Layout(self, rules, lows, mask, self._layout)
        pieces = layout.pieces(mask) or []
        if self.keeper is not None:
            self.keeper.note()
        if self._road is not None:
            self._road.clear()
            if pieces and not leads_on(self._road, pieces):
                self._road = None
        return pieces

    def _road_for(self, pieces: Sequence[Piece]) -> Road | DeviceRoad:
        if self._road is None:
            self._road = choose(self._wish, pieces)
        return self._road
