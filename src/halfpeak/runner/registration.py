"""From a training configuration to hooks: ``lr_config`` and its like. Answers to mmcv 1.7.2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

from halfpeak.core.errors import ConfigTypeError
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook
from halfpeak.runner.priority import Priority

HookConfig: TypeAlias = Mapping[str, Any] | Hook | None
"""A hook, what to build one from, or none."""


class Registration:
    """The half of a runner that turns configurations into hooks. No configuration is changed."""

    optimizer: Any
    _hooks: list[Hook]

    @abstractmethod
    def register_hook(self, hook: Hook, priority: int | str | Priority = "NORMAL") -> None:
        """Add a hook."""

    def register_hook_from_cfg(self, hook_cfg: Mapping[str, Any]) -> None:
        """Add the hook that a dict describes: ``type``, its arguments, and ``priority``."""
        arguments = dict(_require_mapping("hook_cfg", hook_cfg, "dict(type='EMAHook', priority='NORMAL')"))
        priority = arguments.pop("priority", "NORMAL")
        self.register_hook(HOOKS.build(arguments), priority=priority)

    def register_lr_hook(self, lr_config: HookConfig) -> None:
        """Add the learning-rate schedule: ``dict(policy='step', step=[8, 11])``, or a hook."""
        self._register_policy(lr_config, "LrUpdaterHook", "VERY_HIGH", "lr_config")

    def register_momentum_hook(self, momentum_config: HookConfig) -> None:
        """Add the momentum schedule: ``dict(policy='cyclic')``, or a hook."""
        self._register_policy(momentum_config, "MomentumUpdaterHook", "HIGH", "momentum_config")

    def register_optimizer_hook(self, optimizer_config: HookConfig) -> None:
        """Add the hook that steps: ``dict(grad_clip=...)``, a dict with ``type``, or a hook.

        Without ``type``, it is the hook that drives a wrapper where the optimizer is one, else ``OptimizerHook``.
        """
        wrapped = isinstance(self.optimizer, BaseOptimWrapper)
        default = "OptimWrapperHook" if wrapped else "OptimizerHook"
        self._register(optimizer_config, default, "ABOVE_NORMAL", "optimizer_config")

    def register_checkpoint_hook(self, checkpoint_config: HookConfig) -> None:
        """Add the hook that saves: ``dict(interval=1)``, or a hook."""
        self._register(checkpoint_config, "CheckpointHook", "NORMAL", "checkpoint_config")

    def register_timer_hook(self, timer_config: HookConfig) -> None:
        """Add the hook that measures time: ``dict(type='IterTimerHook')``, or a hook."""
        self._register(timer_config, "IterTimerHook", "LOW", "timer_config")

    def register_profiler_hook(self, profiler_config: HookConfig) -> None:
        """Add the hook that profiles: ``dict(profile_iters=2)``, or a hook."""
        self._register(profiler_config, "ProfilerHook", "NORMAL", "profiler_config")

    def register_logger_hooks(self, log_config: Mapping[str, Any] | None) -> None:
        """Add loggers: ``dict(interval=50, hooks=[dict(type='TextLoggerHook')])``."""
        if log_config is None:
            return
        example = "dict(interval=50, hooks=[dict(type='TextLoggerHook')])"
        config = _require_mapping("log_config", log_config, example)
        if "hooks" not in config or not set(config) <= {"interval", "hooks"}:
            raise ConfigTypeError(
                f"log_config has 'interval' and 'hooks', not {sorted(map(str, config))}; write {example}"
            )
        common = {"interval": config["interval"]} if "interval" in config else {}
        for one in config["hooks"]:
            hook = one if isinstance(one, Hook) else HOOKS.build(one, default_args=common)
            self.register_hook(hook, priority="VERY_LOW")

    def register_custom_hooks(self, custom_config: list[HookConfig] | HookConfig) -> None:
        """Add any hooks: objects, or dicts with ``type`` and perhaps ``priority``."""
        for one in custom_config if isinstance(custom_config, (list, tuple)) else [custom_config]:
            if isinstance(one, Hook):
                self.register_hook(one)
            elif one is not None:
                self.register_hook_from_cfg(one)

    def register_training_hooks(
        self,
        lr_config: HookConfig,
        optimizer_config: HookConfig = None,
        checkpoint_config: HookConfig = None,
        log_config: Mapping[str, Any] | None = None,
        momentum_config: HookConfig = None,
        timer_config: HookConfig = {"type": "IterTimerHook"},  # noqa: B006 - only read
        custom_hooks_config: list[HookConfig] | HookConfig = None,
    ) -> None:
        """Add everything that a usual run needs.

        ::

            VERY_HIGH 10     learning rate
            HIGH 30          momentum
            ABOVE_NORMAL 40  optimizer
            NORMAL 50        checkpoints, then custom hooks
            LOW 70           timer
            VERY_LOW 90      loggers

        Raises:
            RegistryError: a hook that is not registered.
            ConfigError: an argument that its hook refuses. No hook was added.
        """
        before = list(self._hooks)
        try:
            self.register_lr_hook(lr_config)
            self.register_momentum_hook(momentum_config)
            self.register_optimizer_hook(optimizer_config)
            self.register_checkpoint_hook(checkpoint_config)
            self.register_timer_hook(timer_config)
            self.register_logger_hooks(log_config)
            self.register_custom_hooks(custom_hooks_config)
        except Exception:
            for hook in (hook for hook in self._hooks if hook not in before):
                del hook.priority
            self._hooks[:] = before
            raise

    def _register_policy(self, config: HookConfig, suffix: str, priority: str, name: str) -> None:
        if isinstance(config, Mapping) and "type" not in config:
            if not isinstance(config.get("policy"), str):
                raise ConfigTypeError(f"{name} needs the name of a policy; write dict(policy='fixed')")
            # "step" and "cyclic" are written small; names of several words as they are.
            policy = config["policy"].title() if config["policy"].islower() else config["policy"]
            arguments = {key: value for key, value in config.items() if key != "policy"}
            config = {**arguments, "type": policy + suffix}
        self._register(config, "", priority, name)

    def _register(self, config: HookConfig, default: str, priority: str, name: str) -> None:
        if config is None:
            return
        hook = config
        if not isinstance(hook, Hook):
            arguments = _require_mapping(name, config, f"{name}=dict(...)")
            hook = HOOKS.build(arguments, default_args={"type": default} if default else None)
        self.register_hook(hook, priority=priority)


def _require_mapping(name: str, value: object, example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{name} must be a dict or a hook, not {type(value).__name__}; write {example}")
    return value
