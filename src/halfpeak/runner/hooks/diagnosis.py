"""DiagnosisHook: writes a report on steps that are skipped for reasons other than the search for a loss scale."""

from __future__ import annotations

from halfpeak.engine.diagnosis.skips import diagnose_into
from halfpeak.engine.engine import Engine
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunnerView


@HOOKS.register_module()
class DiagnosisHook(Hook):
    """Writes ``diagnosis-<step>.html`` into ``work_dir`` if a loss is not finite or a skipped step is unusual.

    The report names the module at fault, found by a replay of the step as in :func:`halfpeak.diagnose`; see
    ``on_skip="diagnose"`` of :func:`halfpeak.prepare`. At most one report is written in 1,000 steps. Every step waits
    for the device to learn of a skip. If the model enters ``optim_context`` in its own ``train_step``, the hook watches
    from the second step on.

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
        self._known: set[Engine] = set()

    def before_train_iter(self, runner: RunnerView) -> None:
        """Attach to engines of the model; an engine may be created after the run has begun."""
        diagnose_into(runner.work_dir or ".", runner.model, self._known)
