"""The registries of hooks and runners, and what builds them from a configuration, which is never modified.

Compatible with mmcv 1.7.2. Each class registers itself where it is defined; ``import halfpeak.runner`` imports all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from halfpeak.core.errors import ConfigTypeError, RegistryError
from halfpeak.core.keywords import similar
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.registry import Registry
from halfpeak.runner.hook import Hook

HOOKS: Final = Registry("hook")
"""The classes that ``type`` in a hook's configuration may name."""

RUNNERS: Final = Registry("runner")
"""The classes that ``type`` in a runner's configuration may name."""

RUNNER_BUILDERS: Final = Registry("runner constructor")
"""The classes that ``constructor`` in a runner's configuration may name."""

HookConfig: TypeAlias = Mapping[str, Any] | Hook | None
"""A hook, a configuration that describes one, or None."""

_LOG_CONFIG = "dict(interval=50, hooks=[dict(type='TextLoggerHook')])"


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


def hook_of(argument: str, config: HookConfig, default: str = "") -> Hook | None:
    """The hook that ``config`` is or describes.

    Args:
        argument: the name of ``config`` in messages, such as ``"optimizer_config"``.
        default: the ``type`` of a configuration without one.

    Raises:
        ConfigTypeError: neither a dict nor a hook, or an argument that the hook does not take.
        RegistryError: the ``type`` is not registered.
    """
    if config is None or isinstance(config, Hook):
        return config
    arguments = require_dict(argument, config, f"{argument}=dict(...)", "a dict or a hook")
    return HOOKS.build(arguments, default_args={"type": default} if default else None)


def schedule_of(argument: str, config: HookConfig, suffix: str) -> Hook | None:
    """As :func:`hook_of`, but ``dict(policy="step")`` means the hook ``"Step" + suffix``."""
    if isinstance(config, Mapping) and "type" not in config:
        if not isinstance(config.get("policy"), str):
            raise ConfigTypeError(
                f"{argument} must name a policy or a type; write {argument}=dict(policy='fixed')"
            )
        # mmcv has "step" and "cyclic" in lower case, and policies of several words as in the class name.
        policy = config["policy"].title() if config["policy"].islower() else config["policy"]
        if policy + suffix not in HOOKS:
            raise _unknown_policy(argument, config["policy"], suffix)
        config = {**{key: value for key, value in config.items() if key != "policy"}, "type": policy + suffix}
    return hook_of(argument, config)


def _unknown_policy(argument: str, policy: str, suffix: str) -> RegistryError:
    known = [name.removesuffix(suffix) for name in HOOKS if name.endswith(suffix) and name != suffix]
    folded = {name.lower(): name for name in known}
    begin = [name for name in folded if name.startswith(policy.lower())]
    near = " or ".join(repr(folded[name]) for name in begin or similar(policy.lower(), list(folded)))
    return RegistryError(
        f"{argument} has no policy {short_repr(policy)}; {near and f'did you mean {near}? '}The policies are "
        f"{', '.join(sorted(known))}; one of your own is a class registered as '<Policy>{suffix}'"
    )


def loggers_of(log_config: Mapping[str, Any] | None) -> list[Hook]:
    """The loggers that ``log_config`` describes; its ``interval`` is the default of each."""
    if log_config is None:
        return []
    config = require_dict("log_config", log_config, _LOG_CONFIG)
    if "hooks" not in config or not set(config) <= {"interval", "hooks"}:
        raise ConfigTypeError(
            f"log_config must have 'hooks' and may have 'interval', but it has {sorted(map(str, config))}; write {_LOG_CONFIG}"
        )
    common = {"interval": config["interval"]} if "interval" in config else {}
    return [
        one if isinstance(one, Hook) else HOOKS.build(one, default_args=common) for one in config["hooks"]
    ]


def with_priority(hook_cfg: Mapping[str, Any]) -> tuple[Hook, int | str]:
    """The hook that a dict with ``type`` describes, and its ``priority``."""
    arguments = dict(require_dict("hook_cfg", hook_cfg, "dict(type='EMAHook', priority='NORMAL')"))
    priority = arguments.pop("priority", "NORMAL")
    return HOOKS.build(arguments), priority
