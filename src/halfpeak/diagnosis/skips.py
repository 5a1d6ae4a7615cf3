"""``prepare(..., on_skip=...)``: detects skips that are not the usual search for a loss scale, and reports them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import name_list, short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import host_values, is_capturing
from halfpeak.diagnosis.diagnose import diagnose
from halfpeak.diagnosis.subject import Closure
from halfpeak.engine.engine import Engine
from halfpeak.ops.async_scalar import AsyncCopy
from halfpeak.parts.found_inf import is_first_rank, is_multi_rank

SHARE_STEPS: Final = 200
"""The number of steps over which the share of skips is computed."""

LARGEST_SHARE: Final = 0.05
"""The largest share of skips in :data:`SHARE_STEPS` that is not reported."""

QUIET: Final = 1000
"""The number of steps after a report without another report of the same kind."""

READ_EVERY: Final = 16
"""On an accelerator the counters are read once in this many steps, without waiting."""

_logger = logging.getLogger("halfpeak")


class SkipEvent(NamedTuple):
    """Why ``on_skip`` is called.

    Attributes:
        step: steps so far, including skipped ones.
        kind: ``"skip"``: a skip that lowered no scale or lowered one far below its first value, or a step that was
            taken although an output was not finite; ``"floor"``: the scale is within a factor 16 of its floor;
            ``"share"``: more than 5 % of the last 200 steps were skipped.
        message: the reason in one line.
    """

    step: int
    kind: Literal["skip", "floor", "share"]
    message: str


OnSkip = Callable[[Engine, SkipEvent], object]
"""Called with the engine and a :class:`SkipEvent`, after the step in which the skip was detected."""


class Counters(NamedTuple):
    """Numbers of a run: steps taken and skipped, and each loss's scale and clean updates."""

    num_steps: int
    num_skipped: int
    scales: tuple[float, ...]
    clean: tuple[int, ...]


class SkipJudge:
    """Tells faults from the usual search for a loss scale, by the counters of a run.

    Args:
        configs: of the loss scales.
        start: the counters before the first step.

    Example:
        >>> from halfpeak.core.schedule import ScaleConfig
        >>> judge = SkipJudge([ScaleConfig(init=8.0)], Counters(0, 0, (8.0,), (0,)))
        >>> judge.see(Counters(0, 1, (4.0,), (0,)))
        []
        >>> [event.message for event in judge.see(Counters(0, 2, (4.0,), (0,)))]
        ['step 2 was skipped, and no loss scale would help.']
    """

    def __init__(self, configs: Sequence[ScaleConfig], start: Counters) -> None:
        self._configs = configs
        self._last = self._share_since = start
        self._told: dict[str, int] = {}

    def see(
        self,
        now: Counters,
        *,
        calls: int = 1,
        is_beyond_scale: bool = False,
        nonfinite: Callable[[], Sequence[str]] = tuple,
    ) -> list[SkipEvent]:
        """What is worth a report, each kind once in 1,000 steps.

        Args:
            now: the counters now.
            calls: the number of steps since the last call.
            is_beyond_scale: whether the step is known to have gone wrong independently of the loss scale.
            nonfinite: returns the names of the gradients that made the step skip.
        """
        last, self._last = self._last, now
        step = now.num_steps + now.num_skipped
        if step - last.num_steps - last.num_skipped > calls:
            self._share_since = now  # a state was loaded
            return []
        found: list[SkipEvent] = []
        if now.num_skipped > last.num_skipped:
            found = self._of_skip(last, now, step, is_beyond_scale, nonfinite())
        elif is_beyond_scale:
            text = f"step {step} was taken, and an output of the model was not finite"
            found = [SkipEvent(step, "skip", text)]
        begin = self._share_since
        steps, skips = step - begin.num_steps - begin.num_skipped, now.num_skipped - begin.num_skipped
        if steps >= SHARE_STEPS:
            self._share_since = now
            if skips > LARGEST_SHARE * steps:
                found.append(SkipEvent(step, "share", f"{skips} of the last {steps} steps were skipped"))
        told: list[SkipEvent] = []
        for event in found:
            if step - self._told.get(event.kind, -QUIET) >= QUIET:
                self._told[event.kind] = step
                told.append(event)
        return told

    def _of_skip(
        self, last: Counters, now: Counters, step: int, is_beyond_scale: bool, names: Sequence[str]
    ) -> list[SkipEvent]:
        shown = f" Not finite: {name_list(names, 3)}." if names else ""
        was_clean = [clean + now.num_steps - last.num_steps for clean in last.clean]
        stayed = now.scales == last.scales and (not self._configs[0].dynamic or list(now.clean) == was_clean)
        found: list[SkipEvent] = []
        if stayed or is_beyond_scale:
            text = f"step {step} was skipped, and no loss scale would help.{shown}"
            found.append(SkipEvent(step, "skip", text))
        for config, scale, before in zip(self._configs, now.scales, last.scales, strict=True):
            if not config.dynamic or scale >= before:
                continue
            first = min(config.init, config.ceiling)
            # Before the first step taken, the scale is still searched for.
            if scale < first / 16 and last.num_steps:
                text = f"step {step} was skipped, and the loss scale has fallen from {first:g} to {scale:g}.{shown}"
                found.append(SkipEvent(step, "skip", text))
            if scale <= 16 * config.floor:
                text = f"the loss scale is down to {scale:g} at step {step}, where small gradients are zero"
                found.append(SkipEvent(step, "floor", text))
        return found


class SkipWatch:
    """Reads the counters of an engine after its steps and calls ``on_skip`` if they show that something is wrong.

    On the CPU it reads them after every step. On other devices it starts a copy once in :data:`READ_EVERY` steps and reads
    the copy when it has arrived, so no step waits.

    Args:
        waits: read the counters after every step on every device.
    """

    def __init__(self, on_skip: OnSkip, *, waits: bool = False) -> None:
        self._on_skip, self._waits = on_skip, waits
        self._calls = self._calls_at_last = 0
        self._copy: tuple[AsyncCopy, int] | None = None
        self._judge = SkipJudge((), Counters(0, 0, (), ()))

    def attach(self, engine: Engine) -> None:
        """Make the engine call this object after each of its steps."""
        configs = [scaler.config for scaler in engine.scalers]
        first = tuple(config.start("cpu").scale.item() for config in configs)
        self._judge = SkipJudge(configs, Counters(0, 0, first, (0,) * len(first)))
        engine.call_after_step(self)
        engine.parts.handles += self._hooks(engine)

    def __call__(self, engine: Engine, result: StepResult) -> None:
        """Called after a step. Waits for the device only with ``waits``."""
        if not result.boundary:
            return
        self._calls += 1
        states = [scaler.state for scaler in engine.scalers]
        scalars = [engine.num_steps, engine.num_skipped]
        scalars += [state.scale for state in states] + [state.clean for state in states]
        known = host_values(*scalars)
        if known is None and self._waits:
            known = torch.stack([one.float() for one in scalars]).tolist()
        if known is not None:
            self._see(engine, known, self._calls, result.nonfinite)
        elif not is_capturing(engine.device):
            if self._copy is not None and self._copy[0].is_ready():
                copy, calls = self._copy
                self._see(engine, copy.read().tolist(), calls, tuple)  # the names would wait
                self._copy = None
            if self._copy is None and self._calls % READ_EVERY == 0:
                self._copy = AsyncCopy(torch.stack([one.float() for one in scalars])), self._calls

    def _hooks(self, engine: Engine) -> list[RemovableHandle]:
        """Hooks on the engine's models."""
        return []

    def _is_beyond_scale(self) -> bool:
        """Whether the step is known to have gone wrong independently of the loss scale."""
        return False

    def _see(
        self, engine: Engine, numbers: Sequence[float], calls: int, nonfinite: Callable[[], Sequence[str]]
    ) -> None:
        since, self._calls_at_last = calls - self._calls_at_last, calls
        half = len(numbers) // 2 + 1
        events = self._judge.see(
            Counters(
                int(numbers[0]), int(numbers[1]), tuple(numbers[2:half]), tuple(map(int, numbers[half:]))
            ),
            calls=since,
            is_beyond_scale=self._is_beyond_scale(),
            nonfinite=nonfinite,
        )
        for event in events:
            self._on_skip(engine, event)


def watch_for(on_skip: object) -> SkipWatch | None:
    """The watch for an ``on_skip`` argument of :func:`halfpeak.prepare`; None for None.

    Raises:
        ConfigError: ``on_skip`` is not ``"warn"``, ``"diagnose"``, a function or None.
    """
    if on_skip is None or isinstance(on_skip, SkipWatch):
        return on_skip
    if on_skip == "warn":
        return SkipWatch(log)
    if on_skip == "diagnose":
        return DiagnosingWatch()
    if not callable(on_skip):
        raise ConfigError(
            f"on_skip={short_repr(on_skip)} must be 'warn', 'diagnose', None, or a function of the engine and a SkipEvent"
        )
    return SkipWatch(on_skip)


def log(engine: Engine, event: SkipEvent) -> None:
    """``on_skip="warn"``: log one line to the logger ``"halfpeak"``, on the first rank only."""
    if is_first_rank():
        _logger.warning("%s halfpeak.diagnose(engine, closure) names the layer.", _sentence(event.message))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


class DiagnosingWatch(SkipWatch):
    """``on_skip="diagnose"``: replays the forward passes of a skipped step and writes ``diagnosis-<step>.html``.

    Each replay uses the recorded inputs, and runs backward from the recorded gradients of the outputs. The watch reads
    the counters after every step, so it waits for the device, and keeps inputs and outputs of a step until the next. A
    CUDA graph calls no hooks, so its steps get only a line in the log.

    With other libraries' rules the loss scale falls after a non-finite loss, too. The watch reports such skips as well.

    Args:
        folder: returns the folder for the reports.
    """

    def __init__(self, folder: Callable[[], Path] = Path) -> None:
        super().__init__(self._diagnose, waits=True)
        self._folder = folder
        self._calls_of_models: list[_Call] = []
        self._is_replaying = False

    def __call__(self, engine: Engine, result: StepResult) -> None:
        """Called after a step."""
        super().__call__(engine, result)
        if result.boundary:
            self._calls_of_models.clear()

    def _hooks(self, engine: Engine) -> list[RemovableHandle]:
        """Record the models' forward passes."""
        before = [
            m.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True) for m in engine.models
        ]
        after = partial(self._after, engine)
        return before + [m.register_forward_hook(after, with_kwargs=True) for m in engine.models]

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self._is_replaying:
            kind = next((p.device.type for p in model.parameters()), "cpu")
            casts = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            self._calls_of_models.append(_Call(model, args, kwargs, casts, [], {}))

    def _after(self, engine: Engine, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self._is_replaying or not self._calls_of_models:
            return
        outputs, grads = self._calls_of_models[-1][-2:]
        for number, leaf in enumerate(_float_leaves(output)):
            outputs.append(leaf.detach())
            if leaf.requires_grad:
                leaf.register_hook(partial(_keep, grads, number, engine))

    def _is_beyond_scale(self) -> bool:
        grads = [grad for call in self._calls_of_models for grad, _ in call.grads.values()]
        # In a low dtype an inf may come from the loss scale, so only nan counts there.
        faults = [grad.isnan() if grad.dtype in LOW else ~grad.isfinite() for grad in grads]
        faults += [~output.isfinite() for call in self._calls_of_models for output in call.outputs]
        return any(bool(fault.any()) for fault in faults)

    def _diagnose(self, engine: Engine, event: SkipEvent) -> None:
        if not self._calls_of_models:  # The step was a CUDA graph, which calls no hooks.
            log(engine, event)
            return
        scales = [scale for call in self._calls_of_models for _, scale in call.grads.values()]
        self._is_replaying = True
        try:
            closure = partial(_replay, list(self._calls_of_models))
            scale = scales[0] if scales else None
            save_diagnosis(
                self._folder() / f"diagnosis-{event.step}.html", engine, closure, scale, event.message
            )
        finally:
            self._is_replaying = False


def save_diagnosis(
    path: Path,
    run: Engine | nn.Module,
    closure: Closure,
    scale: float | None,
    message: str,
    logger: Logger = _logger,
) -> None:
    """Replay a step that went wrong, write what :func:`halfpeak.diagnose` finds, and log it.

    Only logs if the replay fails, because the run goes on. On several ranks, a rank whose own replay is finite says nothing.

    Args:
        message: what is known of the step.
    """
    try:
        report = diagnose(run, closure, scale=scale)
        if report.where is not None:
            report.save(path)
        elif is_multi_rank():
            return
    except Exception as error:
        logger.warning("%s It could not be diagnosed: %s", _sentence(message), error)
        return
    where = "run again" if report.where is None else f"see {path}"
    logger.warning("%s %s; %s", _sentence(message), str(report).partition("\n")[0], where)


class _Call(NamedTuple):
    """A forward pass of a model.

    Attributes:
        casts: a ``torch.autocast`` with the settings that held around the call.
        outputs: the floating-point tensors that it returned.
        grads: the scaled gradient of each output and its loss scale, by index of the output.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casts: torch.autocast
    outputs: list[Tensor]
    grads: dict[int, tuple[Tensor, float]]


def _float_leaves(output: Any) -> list[Tensor]:
    leaves = tree_leaves(
        vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output
    )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _keep(grads: dict[int, tuple[Tensor, float]], number: int, engine: Engine, grad: Tensor) -> None:
    grads[number] = grad.detach(), engine.read_scale()


def _replay(calls: Sequence[_Call]) -> Tensor:
    """A loss whose gradients with respect to the outputs are the recorded ones, without the loss scale."""
    total = torch.zeros((), dtype=torch.float32)
    for call in calls:
        with call.casts:
            leaves = _float_leaves(call.model(*call.args, **call.kwargs))
        for number, leaf in enumerate(leaves):
            if number in call.grads:
                grad, scale = call.grads[number]
                total = total.to(leaf.device) + (leaf.float() * (grad.float() / scale)).sum()
    return total
