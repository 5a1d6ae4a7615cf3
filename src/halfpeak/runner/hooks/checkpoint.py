"""CheckpointHook: saves the run at intervals. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import keywords_of, unknown_key
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_flag
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.checkpoint import StrPath, checkpoint_directory, checkpoint_path
from halfpeak.runner.distributed import allreduce_params
from halfpeak.runner.hook import Hook, RunState


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Saves the run after every ``interval`` epochs or iterations, and after the last one.

    The file is written after all hooks have run for the epoch or iteration and the counters have moved on, so a resumed
    run repeats and skips nothing. ``runner.meta["hook_msgs"]["last_ckpt"]`` names the last file.

    Args:
        interval: epochs or iterations between two files; -1 saves only after the last.
        by_epoch: whether ``interval`` counts epochs or iterations.
        save_optimizer: whether to save the optimizer's state.
        out_dir: save in a subdirectory of this one, named like ``work_dir``; None saves in ``work_dir`` itself.
        max_keep_ckpts: keep only this number of files; -1 keeps all.
        save_last: always save after the last epoch or iteration.
        sync_buffer: average the model's buffers over the ranks first.
        kwargs: ``filename_tmpl``, ``meta`` and ``create_symlink`` of ``runner.save_checkpoint``. If user code overrides
            ``save_checkpoint`` in a runner, the hook calls it at once, before the counters move on.

    Raises:
        ConfigError: a value out of range, or an unknown keyword.
    """

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        out_dir: StrPath | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        sync_buffer: bool = False,
        **kwargs: Any,
    ) -> None:
        for name, number in (("interval", interval), ("max_keep_ckpts", max_keep_ckpts)):
            if isinstance(number, bool) or not isinstance(number, int) or number == 0 or number < -1:
                raise ConfigError(f"{name}={short_repr(number)} must be an integer of 1 or more, or -1")
        if kwargs.get("file_client_args") is None:
            kwargs.pop("file_client_args", None)  # mmcv's default: files of the operating system, as here
        settings = ("filename_tmpl", "meta", "create_symlink")
        for key in kwargs:
            if key not in settings:
                allowed = (*keywords_of(CheckpointHook).names, *settings)
                raise ConfigTypeError(unknown_key("CheckpointHook", key, allowed))
        self.interval = interval
        self.by_epoch = require_flag("by_epoch", by_epoch)
        self.save_optimizer = require_flag("save_optimizer", save_optimizer)
        self.out_dir = out_dir
        self.max_keep_ckpts = max_keep_ckpts
        self.save_last = require_flag("save_last", save_last)
        self.sync_buffer = require_flag("sync_buffer", sync_buffer)
        self.filename_tmpl: str = kwargs.get("filename_tmpl") or (
            "epoch_{}.pth" if by_epoch else "iter_{}.pth"
        )
        self.meta: Mapping[str, Any] | None = kwargs.get("meta")
        self.create_symlink: bool = kwargs.get("create_symlink", True)
        self.args = kwargs

    def before_run(self, runner: RunState) -> None:
        """Find the directory for checkpoints.

        Raises:
            ConfigError: neither the hook nor the runner has a directory.
        """
        self.out_dir = checkpoint_directory(self.out_dir, runner.work_dir, "CheckpointHook")
        runner.logger.info("Checkpoints will be saved to %s", self.out_dir)

    def after_train_epoch(self, runner: RunState) -> None:
        is_last = self.save_last and self.is_last_epoch(runner)
        if self.by_epoch and (self.every_n_epochs(runner, self.interval) or is_last):
            runner.logger.info("Saving checkpoint at %d epochs", runner.epoch + 1)
            self._save_checkpoint(runner)

    def after_train_iter(self, runner: RunState) -> None:
        is_last = self.save_last and self.is_last_iter(runner)
        if not self.by_epoch and (self.every_n_iters(runner, self.interval) or is_last):
            runner.logger.info("Saving checkpoint at %d iterations", runner.iter + 1)
            self._save_checkpoint(runner)

    def _save_checkpoint(self, runner: Any) -> None:
        """Save now, or as soon as the epoch or iteration is over; has the name that subclasses of mmcv's hook call."""
        assert self.out_dir is not None
        number = (runner.epoch if self.by_epoch else runner.iter) + 1
        path = checkpoint_path(self.out_dir, self.filename_tmpl, number)
        override = getattr(type(runner), "save_checkpoint", None)
        if override is not None and not override.__module__.startswith("halfpeak."):
            self._save_by_override(runner, path, number)
            return

        def save() -> None:
            if self.sync_buffer:
                allreduce_params(runner.model.buffers())
            runner.meta.setdefault("hook_msgs", {})["last_ckpt"] = str(path)
            runner.write_checkpoint(path, self.save_optimizer, self.meta, self.create_symlink)
            if runner.rank == 0:
                self._delete_old(path.parent, number)

        runner.defer(save)

    def _save_by_override(self, runner: Any, path: Path, number: int) -> None:
        """Call a user's override of ``save_checkpoint`` at once: it counts the current epoch as finished itself."""
        if self.sync_buffer:
            allreduce_params(runner.model.buffers())
        if runner.rank == 0:
            runner.save_checkpoint(str(self.out_dir), save_optimizer=self.save_optimizer, **self.args)
            self._delete_old(path.parent, number)
        runner.meta.setdefault("hook_msgs", {})["last_ckpt"] = str(path)

    def _delete_old(self, directory: Path, number: int) -> None:
        if self.max_keep_ckpts < 0:
            return
        step = max(self.interval, 1)
        newest = number + -number % step  # the last file may lie between two intervals
        for old in range(newest - self.max_keep_ckpts * step, 0, -step):
            path = directory / self.filename_tmpl.format(old)
            if not path.is_file():
                break
            path.unlink()
