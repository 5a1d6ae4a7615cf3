"""Building hooks from training configurations such as ``lr_config``. Compatible with mmcv 1.7.2.

No function here modifies a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from halfpeak.core.errors import ConfigTypeError
from halfpeak.optim.arguments import require_dict
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook

HookConfig: TypeAlias = Mapping[str, Any] | Hook | None
"""A hook, a configuration that describes one, or None."""

_LOG_CONFIG = "dict(interval=50, hooks=[dict(type='TextLoggerHook')])"


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
        config = {**{key: value for key, value in config.items() if key != "policy"}, "type": policy + suffix}
    return hook_of(argument, config)


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
