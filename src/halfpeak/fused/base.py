"""FusedOptimizer: a torch optimizer that reads all gradients once and updates all weights in one pass over flat buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypedDict, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ParameterError, StateError
from halfpeak.core.optimizer_state import check_optimizer_state, params_of
from halfpeak.fused.backends.base import Backend, BackendStep, GradStats, HostBackend
from halfpeak.fused.backends.choose import BackendName, check_backend, choose, still_fits
from halfpeak.fused.backends.triton_tables import AddressTables
from halfpeak.fused.decision import DecisionInputs, StepDecision, StepInputs
from halfpeak.fused.flat.layout import BufferSlice, FlatLayout, unstepped_row
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.fused.state_dtypes.loading import adapt_row, check_row, keep_dtypes
from halfpeak.fused.state_dtypes.quantized_rule import StateFormat
from halfpeak.fused.state_dtypes.remainders import Remainders
from halfpeak.fused.step_hooks import with_step_hooks
from halfpeak.fused.validation import check_gradients, check_group, check_parameter
from halfpeak.ops.foreach import gradients_of
from halfpeak.ops.shards import has_shards, local_gradients, local_of, shard_like, sum_over


class FusedOptions(TypedDict, total=False):
    """Keywords that every fused optimizer takes.

    Attributes:
        maximize: ascend the gradient instead of descending it.
        backend: which kernels run: ``"auto"``, ``"eager"``, ``"compiled"`` or ``"triton"``.
    """

    maximize: bool
    backend: BackendName


class FusedOptimizer(Optimizer, ABC):
    """Base class of the fused optimizers. A subclass names the update rule of a parameter group.

    Attributes:
        remainders: the rounding remainders of low-precision weights; None if the optimizer stores none.

    ``state_dict`` has torch's layout and loads into torch's optimizer of the same rule, and the other way round.

    Args:
        params: dense real floating-point parameters or groups, as for every torch optimizer.
        defaults: hyper-parameters.
        state_format: how weights and state are stored.
        maximize, backend: see :class:`FusedOptions`.
    """

    copied: ClassVar[tuple[str, ...]] = ("_requested", "_state_format")
    """Attributes that a copy or a pickle keeps beside the state, added to the ``copied`` of all base classes."""

    _masters: Mapping[Tensor, Tensor] = MappingProxyType({})
    """Float32 masters that a subclass steps in place of their parameters."""
    _step_supports_amp_scaling = True
    profile_hook_step = staticmethod(with_step_hooks)

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        state_format: StateFormat | None = None,
        maximize: bool | None = None,
        backend: BackendName = "auto",
    ) -> None:
        self._requested: BackendName = check_backend(backend)
        if maximize is not None:
            defaults = {**defaults, "maximize": maximize}
        self._state_format = state_format or StateFormat()
        super().__init__(params, defaults)
        self.remainders = self._make_remainders()
        self._reset()

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule by which a group is updated.

        Raises:
            ConfigError: the group differs in a hyper-parameter that must be the same in all groups.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or must be the same in all groups.
            ParameterError: a parameter is sparse, complex or integer, or is sharded and the rule needs the whole
                parameter. The group is not added.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            rule = self.rule(self.param_groups[-1])
            for parameter in param_group["params"]:
                check_parameter(parameter, rule.for_weight(parameter))
        except (ConfigError, ParameterError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        The step is skipped if a gradient scaler has set the optimizer's ``found_inf`` to a value other than zero. On an
        accelerator the kernels read ``found_inf``, so the host does not wait.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = self._step_inputs or self._own_inputs()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu" and self._requested != "triton":
            # Reading a value on the CPU does not wait.
            if bool(found_inf):
                return loss
            found_inf = None
        self._update(inputs, found_inf)
        return loss

    def measure(self, inputs: StepInputs) -> GradStats:
        """Return the sum of squares of the gradients that a step would read, and whether one of them is not finite."""
        with torch.no_grad():
            slices = self._slices(inputs)
            self._measured = (inputs.grads, slices)
            if not slices:
                nothing = torch.zeros_like(inputs.multiplier)
                return GradStats(nothing, nothing.clone())
            backend = self._backend_for(slices)
            parts = cast(FlatLayout, self._layout).by_split
            found = [backend.measure(part, inputs.grads, inputs.multiplier) for part in parts.values()]
            if not any(parts):
                return found[0]
            sums = [sum_over(torch.stack(stats), split) for stats, split in zip(found, parts, strict=True)]
            squares, found_inf = torch.stack(sums).sum(0)
            return GradStats(squares, (found_inf != 0).to(squares))

    def decide(self, inputs: StepInputs, decision_inputs: DecisionInputs) -> StepDecision | None:
        """Measure the gradients and decide on their device whether to step, without waiting for that device.

        The next step reuses the result if it gets the ``multiplier`` and the ``found_inf`` of the decision.

        Returns:
            None if it cannot decide: before the first step, without a kernel for it, on the host, with shards.
        """
        if self._backend is None or isinstance(self._backend, HostBackend) or has_shards(inputs.model_params):
            return None
        with torch.no_grad():
            slices = self._slices(inputs)
            self._measured = (inputs.grads, slices)
            step = self._backend_step(slices, inputs, None)
            return self._backend_for(slices).decide(step, decision_inputs) if slices else None

    def matches_layout(self, slices: Sequence[BufferSlice], model_params: Sequence[Tensor]) -> bool:
        """Whether weights and state are still in the memory of ``slices``."""
        layout = self._layout
        rules = [self.rule(group) for group in self.param_groups]
        return layout is not None and layout.last is slices and layout.is_current(self, rules, model_params)

    def detach_tables(self) -> AddressTables | None:
        """Hand the Triton backend's address tables to a captured graph that reads them; later steps build new ones."""
        return None if self._backend is None else self._backend.detach_tables()

    def set_step_inputs(self, inputs: StepInputs | None) -> None:
        """Set the inputs of the next steps; None for the parameters' own gradients."""
        self._step_inputs = inputs
        if inputs is None:
            self._invalidate_grads()

    @property
    def backend(self) -> str:
        """The backend that runs the kernels; before the first step, the requested one."""
        return self._requested if self._backend is None else self._backend.name

    def initial_row(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first step, in the dtypes and shapes in which this optimizer stores it."""
        rule = self.rule(group).for_weight(parameter)
        (own,) = local_of([parameter.detach()])
        num_full = len(rule.state_names) - rule.per_param_scalars
        row: dict[str, Any] = {}
        for i, (part, start) in enumerate(zip(rule.storage, rule.initial(group), strict=True)):
            dtype = part.dtype or torch.promote_types(own.dtype, torch.float32)
            if i >= num_full:
                row[part.name] = torch.full((), start, dtype=dtype, device=own.device)
            elif part.block_size > 1:
                local = own.new_full(part.shape_for(own.shape), start, dtype=dtype)
                row[part.name] = shard_like(local, parameter, part.shape_for(parameter.shape))
            else:
                row[part.name] = shard_like(torch.full_like(own, start, dtype=dtype), parameter)
        if rule.step_scope == "parameter":
            row["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout, with a step count for each parameter."""
        state = super().state_dict()
        # Parameters that step together share one count, which torch's optimizers would increment once per parameter.
        state["state"] = {
            key: {**row, "step": row["step"].clone()} if "step" in row else row
            for key, row in self._stepped_rows(state["state"]).items()
        }
        return state

    def check_state(self, state_dict: Mapping[str, Any], what: str = "state") -> None:
        """Check a state before :meth:`load_state_dict` loads it.

        Args:
            what: the state as an expression, for the message.

        Raises:
            StateError: a hyper-parameter is out of its range, or a tensor has another shape than its parameter or a
                dtype that this optimizer cannot read.
        """
        rules = dict(zip(params_of(self), self._rules_of_targets(), strict=True))
        check_optimizer_state(
            self, state_dict, what, lambda target, _, row, name: check_row(rules[target], target, row, name)
        )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            try:
                check_group({**group, **saved})
            except ConfigError as error:
                raise StateError(f"in a parameter group of {what}, {error}") from None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch's optimizer of the same rule. Tensors are copied with their dtype.

        Raises:
            StateError: see :meth:`check_state`.
        """
        self.check_state(state_dict)
        targets, rules = params_of(self), self._rules_of_targets()
        before = [self.state.get(target, {}).get(REMAINDER) for target in targets]
        super().load_state_dict(cast("dict[str, Any]", state_dict))
        keep_dtypes(self, state_dict)
        for target, rule, rest in zip(targets, rules, before, strict=True):
            if rest is not None or target in self.state:
                adapt_row(self.state[target], rule, target, rest)

    def __getstate__(self) -> dict[str, Any]:
        given = super().__getstate__()
        given["state"] = defaultdict(dict, self._stepped_rows(self.state))
        names = (name for cls in type(self).__mro__ for name in vars(cls).get("copied", ()))
        return {**given, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_loading = hasattr(self, "remainders")
        super().__setstate__(state)
        if not is_loading:
            self.remainders = self._make_remainders()
        self._reset()

    def _rules_of_targets(self) -> list[Rule]:
        return [
            self.rule(group).for_weight(target) for group in self.param_groups for target in group["params"]
        ]

    def _make_remainders(self) -> Remainders | None:
        remainder = self._state_format.remainder
        return None if remainder is None else Remainders(self, remainder)

    def _stepped_rows(self, rows: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """The state rows without what was made for a step that was skipped."""
        idle = set[int]() if self._layout is None else self._layout.idle_rows()
        kept = {key: unstepped_row(row) if id(row) in idle else row for key, row in rows.items()}
        return {key: row for key, row in kept.items() if row}

    def _reset(self) -> None:
        self._layout: FlatLayout | None = None
        self._backend: Backend | None = None
        self._step_inputs: StepInputs | None = None
        self._measured: tuple[Sequence[Tensor | None], list[BufferSlice]] | None = None

    def _invalidate_grads(self) -> None:
        """Forget results computed from the gradients, because the gradients are about to change."""
        self._measured = None
        if self._backend is not None:
            self._backend.invalidate_grads()

    def _own_inputs(self) -> StepInputs:
        targets = params_of(self)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        one = torch.ones((), dtype=torch.float32, device=targets[0].device if targets else None)
        return StepInputs(
            local_gradients(gradients_of(targets), targets),
            targets,
            one if grad_scale is None else grad_scale.reciprocal(),
        )

    def _update(self, inputs: StepInputs, found_inf: Tensor | None = None) -> None:
        measured = self._measured
        # Only engine code runs between measure and step, so the layout needs no second check.
        slices = self._slices(inputs) if measured is None or measured[0] is not inputs.grads else measured[1]
        if not slices:
            return
        run = self._backend_for(slices).prepare(self._backend_step(slices, inputs, found_inf))
        if run is None:
            return
        layout = cast(FlatLayout, self._layout)
        # Kernels write through other views of the memory; autograd must still see that these tensors changed.
        torch.autograd.graph.increment_version(layout.written)
        inside, outside = [view for _, view in layout.guests], [guest for guest, _ in layout.guests]
        if inside:
            torch._foreach_copy_(inside, outside)
        run()
        if inside:
            torch._foreach_copy_(outside, inside)
        self._invalidate_grads()
        if self.remainders is not None:
            self.remainders.note()

    def _backend_step(
        self, slices: Sequence[BufferSlice], inputs: StepInputs, found_inf: Tensor | None
    ) -> BackendStep:
        return BackendStep(slices, self.param_groups, inputs.grads, inputs.multiplier, found_inf)

    def _slices(self, inputs: StepInputs) -> list[BufferSlice]:
        """The slices of the parameters with a gradient. A new layout is built if a tensor has moved or was replaced."""
        if self.remainders is not None:
            self.remainders.refresh()
        rules = [self.rule(group) for group in self.param_groups]
        mask = [grad is not None for grad in inputs.grads]
        layout, model_params = self._layout, inputs.model_params
        if layout is not None:
            layout.check_counts()
        if layout is not None and layout.is_current(self, rules, model_params):
            slices = layout.slices(mask)
            if slices is not None:
                return slices
        check_gradients(inputs.grads)
        self._measured = None
        if self._backend is not None:
            self._backend.invalidate_layout()
        layout = self._layout = FlatLayout(self, rules, model_params, mask, layout, self._masters)
        slices = layout.slices(mask) or []
        if self.remainders is not None:
            self.remainders.note()
        if slices and self._backend is not None and not still_fits(self._backend, slices):
            self._backend = None
        return slices

    def _backend_for(self, slices: Sequence[BufferSlice]) -> Backend:
        if self._backend is None:
            self._backend = choose(self._requested, slices)
        return self._backend
