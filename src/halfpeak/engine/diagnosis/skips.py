"""``prepare(..., on_skip=...)``: detects skips that are not the usual search for a loss scale, and reports them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import host_values, is_capturing
from halfpeak.engine.diagnosis.diagnose import diagnose
from halfpeak.engine.engine import Engine, engine_of
from halfpeak.ops.async_scalar import AsyncCopy
from halfpeak.state.found_inf import is_first_rank, is_multi_rank

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


class _Counters(NamedTuple):
    """Numbers of a run: steps taken and skipped, and each loss's scale and clean updates."""

    num_steps: int
    num_skipped: int
    scales: tuple[float, ...]
    clean: tuple[int, ...]


class SkipWatch:
    """Reads the counters of an engine after its steps and calls ``on_skip`` if they show that something is wrong.

    On the CPU it reads them after every step. On other devices it starts a copy once in :data:`READ_EVERY` steps and reads
    the copy when it has arrived, so no step waits.

    Args:
        waits: read the counters after every step on every device.
    """

    def __init__(self, on_skip: OnSkip, *, waits: bool = False) -> None:
        self._on_skip, self._waits = on_skip, waits
        self._calls = 0
        self._copy: tuple[AsyncCopy, int] | None = None
        self._last: _Counters | None = None
        self._share_since: _Counters | None = None
        self._calls_at_last = 0
        self._told: dict[str, int] = {}

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
            self._judge(engine, result, known, self._calls)
        elif not is_capturing(engine.device):
            if self._copy is not None and self._copy[0].is_ready():
                copy, calls = self._copy
                self._judge(engine, result, copy.read().tolist(), calls)
                self._copy = None
            if self._copy is None and self._calls % READ_EVERY == 0:
                self._copy = AsyncCopy(torch.stack([one.float() for one in scalars])), self._calls

    def attach(self, engine: Engine) -> None:
        """Make the engine call this object after each of its steps."""
        first = tuple(scaler.config.start("cpu").scale.item() for scaler in engine.scalers)
        self._last = self._share_since = _Counters(0, 0, first, (0,) * len(first))
        engine.set_after_step(self, self._hooks(engine))

    def __deepcopy__(self, memo: dict[int, Any]) -> SkipWatch:
        """A watch for a copied engine, without reports so far."""
        return SkipWatch(self._on_skip, waits=self._waits)

    def _hooks(self, engine: Engine) -> list[RemovableHandle]:
        """Hooks on the engine's models."""
        return []

    def _is_beyond_scale(self) -> bool:
        """Whether the step is known to have gone wrong independently of the loss scale."""
        return False

    def _judge(self, engine: Engine, result: StepResult, numbers: Sequence[float], calls: int) -> None:
        num_steps, num_skipped, *others = numbers
        half = len(others) // 2
        scales, clean = tuple(others[:half]), tuple(map(int, others[half:]))
        now = _Counters(int(num_steps), int(num_skipped), scales, clean)
        last, self._last = self._last, now
        since, self._calls_at_last = calls - self._calls_at_last, calls
        step = now.num_steps + now.num_skipped
        if last is None or self._share_since is None or step - last.num_steps - last.num_skipped > since:
            self._share_since = now  # The engine is a copy, or a state was loaded.
            return
        begin = self._share_since
        if now.num_skipped > last.num_skipped:
            self._judge_skip(engine, result, last, now, step)
        elif self._is_beyond_scale():
            self._tell(
                engine, step, "skip", f"step {step} was taken, and an output of the model was not finite"
            )
        steps = step - begin.num_steps - begin.num_skipped
        if steps >= SHARE_STEPS:
            skips = now.num_skipped - begin.num_skipped
            if skips > LARGEST_SHARE * steps:
                self._tell(engine, step, "share", f"{skips} of the last {steps} steps were skipped")
            self._share_since = now

    def _judge_skip(
        self, engine: Engine, result: StepResult, last: _Counters, now: _Counters, step: int
    ) -> None:
        configs = [scaler.config for scaler in engine.scalers]
        names = () if host_values(result.found_inf) is None and not self._waits else result.nonfinite()
        shown = f" Not finite: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}." if names else ""
        was_clean = [clean + now.num_steps - last.num_steps for clean in last.clean]
        stayed = now.scales == last.scales and (not configs[0].dynamic or list(now.clean) == was_clean)
        if stayed or self._is_beyond_scale():
            self._tell(engine, step, "skip", f"step {step} was skipped, and no loss scale would help.{shown}")
        for config, scale, before in zip(configs, now.scales, last.scales, strict=True):
            if not config.dynamic:
                continue
            first = min(config.init, config.ceiling)
            # Before the first step taken, the scale is still searched for.
            if scale < before and scale < first / 16 and last.num_steps:
                text = f"step {step} was skipped, and the loss scale has fallen from {first:g} to {scale:g}.{shown}"
                self._tell(engine, step, "skip", text)
            if scale < before and scale <= 16 * config.floor:
                text = f"the loss scale is down to {scale:g} at step {step}, where small gradients are zero"
                self._tell(engine, step, "floor", text)

    def _tell(self, engine: Engine, step: int, kind: Literal["skip", "floor", "share"], message: str) -> None:
        if step - self._told.get(kind, -QUIET) >= QUIET:
            self._told[kind] = step
            self._on_skip(engine, SkipEvent(step, kind, message))


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

    def __deepcopy__(self, memo: dict[int, Any]) -> SkipWatch:
        """A watch for a copied engine that only logs, because the models of the copy have no hooks."""
        return SkipWatch(log)

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
        path = self._folder() / f"diagnosis-{event.step}.html"
        scales = [scale for call in self._calls_of_models for _, scale in call.grads.values()]
        self._is_replaying = True
        try:
            report = diagnose(
                engine, partial(_replay, list(self._calls_of_models)), scale=scales[0] if scales else None
            )
            if report.where is not None:
                report.save(path)
            elif is_multi_rank():
                return  # This rank's replay is finite, so the fault is on another rank.
        except Exception as error:  # A failed report must not end the run.
            _logger.warning("%s It could not be diagnosed: %s", _sentence(event.message), error)
            return
        finally:
            self._is_replaying = False
        headline = str(report).partition("\n")[0]
        where = "run again" if report.where is None else f"see {path}"
        _logger.warning("%s %s; %s", _sentence(event.message), headline, where)


def diagnose_into(folder: str | Path, model: nn.Module, known: set[Engine]) -> None:
    """Make each engine that trains ``model`` or a part of it write its diagnoses into ``folder``.

    Args:
        model: bare or in any wrapper.
        known: engines to leave out, because an earlier call attached them; this call adds the engines it attaches.
    """
    for engine in filter(None, map(engine_of, model.modules())):
        if engine not in known:
            known.add(engine)
            DiagnosingWatch(lambda: Path(folder)).attach(engine)


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
