"""DiagnosisHook: halfpeak's own hook, which names the module at fault for a skipped step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.schedule import ScaleConfig
from halfpeak.diagnosis.skips import Counters, SkipJudge, save_diagnosis
from halfpeak.diagnosis.subject import Closure
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState


@HOOKS.register_module()
class DiagnosisHook(Hook):
    """Writes ``diagnosis-<iteration>.html`` into ``work_dir`` if a loss is not finite or a skipped step is unusual.

    A skip is usual while the loss scale is searched for: it is lowered, to no less than a sixteenth of the first one after
    a step was taken. The report names the module at fault, found by a replay of ``train_step`` as in
    :func:`halfpeak.diagnose`. At most one report is written in 1,000 iterations. Every iteration waits for the device. A
    model that steps its optimizers in its own ``train_step`` is not watched. Where a NaN is stepped, in float32 without
    ``skip_nonfinite=True``, it is in the weights before the replay, and the report names the first of them.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from halfpeak.runner import IterBasedRunner
        >>> class Model(torch.nn.Linear):
        ...     def train_step(self, data, optimizer):
        ...         return dict(loss=self(data).square().mean())
        >>> model = Model(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     runner = IterBasedRunner(model, optimizer=sgd, work_dir=folder, max_iters=1)
        ...     runner.register_training_hooks(None, dict(grad_clip=None), custom_hooks_config=[dict(type="DiagnosisHook")])
        ...     runner.run([[torch.tensor([[1.0, torch.nan]])]], [("train", 1)])
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['diagnosis-1.html', 'diagnosis-1.json']
    """

    def __init__(self) -> None:
        self._judge: SkipJudge | None = None
        self._scale: float | None = None  # of the next backward pass
        self._num_steps = self._num_skipped = 0

    def after_train_iter(self, runner: RunState) -> None:
        """Look at the loss and at the result of the step, and write a report of a fault."""
        result, loss = runner.step_result, runner.outputs.get("loss")
        if result is None or not isinstance(loss, Tensor):
            return
        scale, self._scale = self._scale, float(result.scale)
        stepped = result.stepped()
        self._num_steps += stepped
        self._num_skipped += result.boundary and result.has_gradients and not stepped
        now = Counters(self._num_steps, self._num_skipped, (self._scale,), (self._num_steps,))
        if self._judge is None:
            self._judge = SkipJudge([ScaleConfig(init=self._scale)], now)
        events = self._judge.see(now, is_beyond_scale=not bool(loss.detach().isfinite().all()))
        if events:
            path = Path(runner.work_dir or ".") / f"diagnosis-{runner.iter + 1}.html"
            save_diagnosis(path, *_replay_of(runner), scale, events[0].message, runner.logger)


def _replay_of(runner: Any) -> tuple[nn.Module, Closure]:
    """The model of a runner, and a closure that computes the loss of the present batch."""
    wrapped: Any = runner.model
    # A replay must not reduce gradients over the ranks.
    model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def closure() -> Tensor:
        with ExitStack() as casts:
            casts.enter_context(runner.validation_step())
            if isinstance(runner.optimizer, OptimWrapper):
                casts.enter_context(runner.optimizer.optim_context(wrapped))
            return model.train_step(runner.data_batch, runner.optimizer)["loss"]

    return model, closure
