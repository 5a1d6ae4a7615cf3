"""The registries of hooks and runners, and build_runner, which builds a runner from a configuration.

Compatible with mmcv 1.7.2. Each class registers itself where it is defined; ``import halfpeak.runner`` imports all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from halfpeak.optim.arguments import require_dict
from halfpeak.optim.registry import Registry

HOOKS: Final = Registry("hook")
"""The classes that ``type`` in a hook's configuration may name."""

RUNNERS: Final = Registry("runner")
"""The classes that ``type`` in a runner's configuration may name."""

RUNNER_BUILDERS: Final = Registry("runner constructor")
"""The classes that ``constructor`` in a runner's configuration may name."""


@RUNNER_BUILDERS.register_module()
class DefaultRunnerConstructor:
    """Builds the runner that ``runner_cfg["type"]`` names.

    Args:
        runner_cfg: ``type`` and arguments of the runner.
        default_args: arguments that ``runner_cfg`` leaves out: the model, the optimizer, the logger.
    """

    def __init__(self, runner_cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> None:
        self.runner_cfg = require_dict("runner_cfg", runner_cfg, "dict(type='EpochBasedRunner', ...)")
        self.default_args = default_args

    def __call__(self) -> Any:
        """Build the runner."""
        return RUNNERS.build(self.runner_cfg, default_args=self.default_args)


def build_runner_constructor(cfg: Mapping[str, Any]) -> Any:
    """Build the runner constructor whose registered name is the ``type`` of ``cfg``."""
    return RUNNER_BUILDERS.build(cfg)


def build_runner(cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
    """Build the runner that a configuration describes.

    Args:
        cfg: not modified. ``type`` names the runner; ``constructor`` names the class that reads ``cfg``.
        default_args: arguments that ``cfg`` leaves out: the model, the optimizer, the logger.

    Raises:
        RegistryError: a name that is not registered.
        ConfigTypeError: not a dict, or an argument that the runner does not take.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Linear):
        ...     def train_step(self, data, optimizer):
        ...         return dict(loss=self(data).mean())
        >>> build_runner(dict(type="EpochBasedRunner", max_epochs=2), dict(model=Model(2, 1))).max_epochs
        2
    """
    runner_cfg = dict(require_dict("cfg", cfg, "dict(type='EpochBasedRunner', max_epochs=12)"))
    constructor = runner_cfg.pop("constructor", "DefaultRunnerConstructor")
    return build_runner_constructor(
        {"type": constructor, "runner_cfg": runner_cfg, "default_args": default_args}
    )()
