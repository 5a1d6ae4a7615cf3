"""Tools of the reliability tests: a digest of a run, a snapshot of the process, and small nets to train."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak import Engine
from halfpeak.fused import FusedAdamW, FusedSGD
from halfpeak.parts.loss_scaler import LossScaler
from support.nets import LEVELS as LEVELS
from support.snapshot import raw

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True),
    "FusedAdamW": lambda parameters: FusedAdamW(parameters, lr=0.01, eps=1e-4),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.05, momentum=0.9, dampening=0.3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4, foreach=True),
}
"""``eps`` is large enough for float16, in which O3 steps."""


def net(*, norm: str = "layer", seed: int = 0) -> nn.Sequential:
    """Eight parameter tensors and, with ``norm="batch"``, running statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = nn.BatchNorm1d(6) if norm == "batch" else nn.LayerNorm(6)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), middle, nn.Linear(6, 2))


def batch(step: int) -> Tensor:
    """The input of one iteration, the same in every run.  # f32[8, 4]"""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 + step))


def state_hash(*things: Any) -> str:
    """SHA-256 over everything that training carries from one iteration to the next; dtypes and shapes included.

    Args:
        things: engines, modules, optimizers, loss scalers, tensors, and nested containers of them and of plain values.
            An engine stands for its models, masters, optimizers, loss scalers and counters. Gradients do not count.
    """
    digest = hashlib.sha256()
    for thing in things:
        _feed(digest, thing)
    return digest.hexdigest()


def _feed(digest: Any, thing: Any) -> None:
    if isinstance(thing, Engine):
        masters = [master for _, master in thing.pairs]
        counters = (int(thing.num_steps), int(thing.num_skipped), thing.micro_step)
        _feed(digest, (thing.models, masters, thing.optimizers, thing.scalers, counters))
    elif isinstance(thing, nn.Module):
        _feed(digest, (dict(thing.named_parameters()), dict(thing.named_buffers())))
    elif isinstance(thing, Optimizer):
        # The saved state, because a fused optimizer may hold memory without values yet.
        saved = thing.state_dict()
        _feed(digest, [[saved["state"].get(i) for i in group["params"]] for group in saved["param_groups"]])
        _feed(digest, [[(k, v) for k, v in group.items() if k != "params"] for group in thing.param_groups])
    elif isinstance(thing, LossScaler):
        _feed(digest, list(thing.state))
    elif isinstance(thing, Tensor):
        digest.update(f"{thing.dtype} {tuple(thing.shape)};".encode())
        digest.update(raw(thing))
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            digest.update(f"{key}:".encode())
            _feed(digest, value)
    elif isinstance(thing, (list, tuple)):
        digest.update(f"{len(thing)}[".encode())
        for value in thing:
            _feed(digest, value)
    else:
        digest.update(f"{thing!r};".encode())


def global_snapshot(models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()) -> dict[str, Any]:
    """Everything in the process, the models and the optimizers that must not change, except tensor values."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    spaces = (torch, torch.Tensor, torch.nn.functional, torch.nn.modules.rnn, torch.optim.Optimizer)
    return {
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda", "ipu")
        ],
        "autocast nesting": nesting,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "function modes": function_modes(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "namespaces": [{name: id(value) for name, value in vars(space).items()} for space in spaces],
        "warnings": list(warnings.filters),
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "files": open_files(),
        "models": [_module_shape(module) for model in models for module in model.modules()],
        "optimizers": [_optimizer_shape(optimizer) for optimizer in optimizers],
    }


def function_modes() -> list[tuple[Any, ...]]:
    """The function modes of this thread, with the rules that casting scopes now follow."""
    torch.add(torch.zeros(()), 0)  # ends a suspension of casts that an exception left open
    modes = torch.overrides._get_current_function_mode_stack()
    return [
        (
            id(mode),
            id(getattr(mode, "lookup", None)),
            getattr(mode, "key", None),
            len(getattr(mode, "_holders", ())),
        )
        for mode in modes
    ]


def open_files() -> int | None:
    """The number of open file descriptors, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None


def _module_shape(module: nn.Module) -> tuple[Any, ...]:
    hooks = {name: list(value) for name, value in vars(module).items() if name.endswith("_hooks")}
    return sorted(vars(module)), hooks, module.training


def _optimizer_shape(optimizer: Optimizer) -> tuple[Any, ...]:
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    groups = [(sorted(group), [id(p) for p in group["params"]]) for group in optimizer.param_groups]
    return sorted(vars(optimizer)), [list(hook) for hook in hooks], groups


def train(engine: Engine, steps: Sequence[int], *, poison: Callable[[int], float] | None = None) -> None:
    """Native iterations on :func:`batch`; ``poison(step)`` multiplies the loss (inf makes the step overflow)."""
    for step in steps:
        with engine.forward():
            loss = engine.model(batch(step)).float().square().mean()
        engine.backward(loss if poison is None else loss * poison(step))
        engine.step()
