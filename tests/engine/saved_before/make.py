"""The runs whose saved states lie here, written by halfpeak 0.1.0 before the names in its states changed.

    python tests/engine/saved_before/make.py        writes the files and expected.json, with the halfpeak on the path

Run it only to add a case, with the version of halfpeak that is to write its file: today's version must read old files.
It uses only the public interface, so that the tests can continue the same runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from halfpeak import amp, checkpoint, fused
from halfpeak.amp.fp16_utils import FP16_Optimizer
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from halfpeak.runner import GradientCumulativeFp16OptimizerHook, Hook, IterBasedRunner

HERE = Path(__file__).parent
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
STOP = 8
"""Passes before the state was saved, inside the third window of three passes."""
TOTAL = 15
OVERFLOWS = (1, 10)
"""The first window and the one after the resume are skipped."""

AdamW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
Fused = partial(fused.FusedAdamW, lr=1e-2, eps=1e-4)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "FusedAdamW": Fused,
    "FusedAdamW-remainder": partial(Fused, master="remainder"),
    "FusedAdamW-remainder8": partial(Fused, master="remainder8"),
    "FusedAdamW-bfloat16": partial(Fused, moments=torch.bfloat16),
    "FusedAdamW-int8": partial(Fused, moments="int8"),
    "FusedSGD": partial(fused.FusedSGD, lr=0.05, momentum=0.9),
}


def make_net(seed: int, *, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(3) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 3, bias=False), middle, nn.Linear(3, 2, bias=False))


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def factor(number: int, overflows: Sequence[int] = OVERFLOWS) -> float:
    return float("inf") if number in overflows else 1.0


class Unreduced(nn.Module):
    """Looks to an engine like ``DistributedDataParallel``: it has ``no_sync``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @contextmanager
    def no_sync(self) -> Generator[None]:
        yield

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class EngineRun:
    """``halfpeak.prepare`` with windows of three passes.

    Args:
        seed: of the first weights.
        level: the opt level.
        optimizers: names in ``OPTIMIZERS``; two of them share the weights.
        losses: number of losses.
        wrapped: which passes use :class:`Unreduced`, so that gradients wait scaled inside a window: none, ``all``, or
            the ``later`` ones. These find unscaled gradients of the first pass.
        clean: save between two windows.
        overflows: the passes with a loss of infinity.
    """

    def __init__(
        self,
        seed: int,
        level: str,
        *optimizers: str,
        losses: int = 1,
        wrapped: str = "",
        clean: bool = False,
        overflows: Sequence[int] = OVERFLOWS,
    ) -> None:
        net = make_net(seed)
        weights = list(net.parameters())
        count = len(optimizers)
        made = [OPTIMIZERS[name](weights[i::count]) for i, name in enumerate(optimizers)]
        self.engine = halfpeak.prepare(
            net,
            made if count > 1 else made[0],
            level,
            accumulate=1 if clean else 3,
            num_losses=losses,
            loss_scale=None if losses == 1 else "dynamic",
            scale=halfpeak.ScaleConfig(init=256.0, interval=2)
            if losses > 1 or level in ("O1", "O2")
            else None,
        )
        self.losses, self.wrapped, self.overflows = losses, wrapped, overflows

    def train(self, number: int) -> list[float]:
        net, found = self.engine.model, []
        apart = self.wrapped == "all" or (self.wrapped == "later" and number % 3)
        called = Unreduced(net) if apart else net
        for loss_id in range(1 if apart else self.losses):
            with self.engine.forward(called) if apart else self.engine.forward():
                x, y = make_batch(number + 100 * loss_id)
                loss = mse_loss(called(x).float(), y) * factor(number + loss_id, self.overflows)
            self.engine.backward(loss, loss_id=loss_id)
            found.append(loss.item())
        self.engine.step()
        return [*found, *(self.engine.read_scale(i) for i in range(self.losses))]

    def state(self) -> Any:
        return self.engine.state_dict()

    def load(self, state: Any) -> None:
        self.engine.load_state_dict(state)

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.engine.model, self.engine.optimizers


class AmpRun:
    """``amp.initialize`` and its three states, saved after a step."""

    def __init__(self, seed: int, level: str, optimizer: str, losses: int = 1) -> None:
        net = make_net(seed)
        made = OPTIMIZERS[optimizer](net.parameters())
        self.net, self.optimizer = amp.initialize(
            net, made, opt_level=level, num_losses=losses, loss_scale="dynamic", verbosity=0
        )
        self.losses = losses

    def train(self, number: int) -> list[float]:
        found = []
        self.optimizer.zero_grad()
        for loss_id in range(self.losses):
            x, y = make_batch(number + 100 * loss_id)
            loss = mse_loss(self.net(x).float(), y) * factor(number + loss_id)
            with amp.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
            found.append(loss.item())
        self.optimizer.step()
        return [*found, *(entry["loss_scale"] for entry in self._scalers().values())]

    def _scalers(self) -> dict[str, Any]:
        # Entries of runs that are not garbage-collected yet come first.
        entries = list(amp.state_dict().values())[-self.losses :]
        return {f"loss_scaler{i}": entry for i, entry in enumerate(entries)}

    def state(self) -> Any:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self._scalers(),
        }

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.net, [self.optimizer]


WRAPPERS: dict[str, Callable[..., OptimWrapper]] = {
    "plain": OptimWrapper,
    "amp": lambda optimizer, **options: AmpOptimWrapper(
        {"init_scale": 2.0**12, "growth_interval": 2}, "float16", optimizer=optimizer, **options
    ),
    **{
        level: lambda optimizer, level=level, **options: ApexOptimWrapper(
            level, optimizer=optimizer, **options
        )
        for level in LEVELS
    },
}


class WrapperRun:
    """A wrapper of ``halfpeak.optim`` with windows of three passes."""

    def __init__(self, seed: int, kind: str, optimizer: str) -> None:
        self.net = make_net(seed)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.wrapper = WRAPPERS[kind](self.optimizer, accumulative_counts=3)
        self.count(0)

    def count(self, done: int) -> None:
        self.wrapper.initialize_count_status(self.net, done, TOTAL)

    def train(self, number: int) -> list[float]:
        x, y = make_batch(number)
        with self.wrapper.optim_context(self.net):
            loss = mse_loss(self.net(x).float(), y) * factor(number)
        self.wrapper.update_params(loss)
        return [loss.item(), float(self.wrapper.stepped())]

    def state(self) -> Any:
        return {"model": self.net.state_dict(), "optimizer": self.wrapper.state_dict()}

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.wrapper.load_state_dict(state["optimizer"])
        self.count(STOP)

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.net, [self.optimizer]


class ScalerRun:
    """``halfpeak.GradScaler`` under autocast, saved after a step."""

    def __init__(self, seed: int, optimizer: str) -> None:
        self.net = make_net(seed, norm=False)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.scaler = halfpeak.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def train(self, number: int) -> list[float]:
        x, y = make_batch(number)
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(self.net(x).float(), y) * factor(number)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return [loss.item(), self.scaler.get_scale()]

    def state(self) -> Any:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.net, [self.optimizer]


class OldOptimizerRun:
    """``FP16_Optimizer`` of apex's first interface, saved after a step."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.net, self.dtype = make_net(seed, norm=False).to(dtype), dtype
        inside = AdamW(self.net.parameters())
        self.optimizer = FP16_Optimizer(
            inside,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 1024.0, "scale_window": 3},
            verbose=False,
        )

    def train(self, number: int) -> list[float]:
        x, y = make_batch(number)
        self.optimizer.zero_grad()
        loss = mse_loss(self.net(x.to(self.dtype)).float(), y) * factor(number)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return [loss.item(), float(self.optimizer.loss_scale)]

    def state(self) -> Any:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.net, [self.optimizer.optimizer]


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = make_net(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        x, y = make_batch(int(data))
        loss = mse_loss(self(x).float(), y) * factor(int(data))
        return {"loss": loss, "log_vars": {}, "num_samples": len(x)}


class _Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_train_iter(self, runner: Any) -> None:
        self.found += [runner.outputs["loss"].item(), float(runner.step_result.scale)]


class RunnerRun:
    """A checkpoint that a runner of ``halfpeak.runner`` wrote inside a window of three iterations."""

    def __init__(self, seed: int, mode: str, optimizer: str) -> None:
        self.model, self.hook = _Model(seed), _Losses()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        silent = logging.getLogger("saved before")
        silent.disabled = True
        self.runner = IterBasedRunner(
            self.model, optimizer=self.optimizer, logger=silent, max_iters=TOTAL, meta={}
        )
        hook = GradientCumulativeFp16OptimizerHook(
            3, mode=mode, loss_scale={"init_scale": 2.0**14, "growth_interval": 2}
        )
        self.runner.register_hook(hook, priority="ABOVE_NORMAL")
        self.runner.register_hook(self.hook, priority="LOW")

    def run(self) -> list[float]:
        self.runner.run([torch.arange(TOTAL)], [("train", 1)])
        return self.hook.found

    def parts(self) -> tuple[nn.Module, list[Any]]:
        return self.model, [self.optimizer]


class _Writing(Hook):
    def __init__(self, path: Path) -> None:
        self.path = path

    def after_train_iter(self, runner: Any) -> None:
        if runner.iter + 1 == STOP:
            runner.write_checkpoint(self.path)


CASES: dict[str, Callable[[int], Any]] = {}
"""Makes each run from the seed of its weights. The files are named after the keys."""


def _engine(level: str, *optimizers: str, **options: Any) -> Callable[[int], EngineRun]:
    return lambda seed: EngineRun(seed, level, *optimizers, **options)


for _level in LEVELS:
    CASES[f"engine-{_level}-AdamW"] = _engine(_level, "AdamW")
CASES["engine-O2-clean"] = _engine("O2", "SGD", clean=True)
CASES["engine-O2-overflow"] = _engine("O2", "SGD", overflows=(7,))
for _level in ("O0", "O2", "O5"):
    CASES[f"engine-{_level}-FusedAdamW"] = _engine(_level, "FusedAdamW")
for _form in ("bfloat16", "int8"):
    CASES[f"engine-O2-{_form}"] = _engine("O2", f"FusedAdamW-{_form}")
for _form in ("remainder", "remainder8"):
    CASES[f"engine-O5-{_form}"] = _engine("O5", f"FusedAdamW-{_form}")
for _level in ("O1", "O2"):
    CASES[f"engine-{_level}-two-losses"] = _engine(_level, "SGD", losses=2)
    CASES[f"engine-{_level}-two-optimizers"] = _engine(_level, "SGD", "FusedSGD")
    CASES[f"engine-{_level}-scaled"] = _engine(_level, "SGD", wrapped="all")
CASES["engine-O0-scaled-later"] = _engine("O0", "SGD", losses=2, wrapped="later")
CASES["engine-O2-scaled-later"] = _engine("O2", "SGD", wrapped="later")
for _level in ("O1", "O2", "O5"):
    CASES[f"amp-{_level}"] = partial(AmpRun, level=_level, optimizer="SGD")
CASES["amp-O2-two-losses"] = partial(AmpRun, level="O2", optimizer="SGD", losses=2)
CASES["amp-O5-remainder"] = partial(AmpRun, level="O5", optimizer="FusedAdamW-remainder")
for _kind in ("plain", "amp", "O2"):
    CASES[f"wrapper-{_kind}"] = partial(WrapperRun, kind=_kind, optimizer="SGD")
CASES["wrapper-O5-FusedSGD"] = partial(WrapperRun, kind="O5", optimizer="FusedSGD")
CASES["scaler"] = partial(ScalerRun, optimizer="SGD")
CASES["FP16_Optimizer"] = partial(OldOptimizerRun, dtype=torch.float16)
RUNNERS: dict[str, Callable[[int], RunnerRun]] = {
    "runner-master": partial(RunnerRun, mode="master", optimizer="SGD")
}


def digest(run: Any) -> str:
    """Hash of what a run leaves: parameters, buffers, stepped parameters and the values of the optimizers' states."""
    net, optimizers = run.parts()
    found = hashlib.sha256()
    saved = [optimizer.state_dict() for optimizer in optimizers]
    tensors = [*net.parameters(), *net.buffers(), *net.state_dict().values()]
    tensors += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for state in saved:
        for _, entries in sorted(state["state"].items()):
            # Sorted by content, because the names of entries may change.
            values = (value for value in entries.values() if isinstance(value, Tensor))
            tensors += sorted(values, key=lambda value: (str(value.dtype), _bytes(value)))
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()[:32]


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def probe() -> str:
    """Hash of a short training without halfpeak, because another processor may round sums differently."""
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        net = make_net(0, norm=dtype is torch.float32).to(dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for number in range(3):
            x, y = make_batch(number)
            optimizer.zero_grad()
            mse_loss(net(x.to(dtype)).float(), y).backward()
            optimizer.step()
        for parameter in net.parameters():
            found.update(_bytes(parameter))
    return found.hexdigest()[:32]


def _write() -> None:
    expected: dict[str, Any] = {
        "halfpeak": halfpeak.__version__,
        "torch": torch.__version__,
        "probe": probe(),
    }
    for name, make in CASES.items():
        run = make(0)
        for number in range(STOP):
            run.train(number)
        checkpoint.save(HERE / f"{name}.pt", run.state(), keep_previous=False)
        numbers = [one.hex() for number in range(STOP, TOTAL) for one in run.train(number)]
        expected[name] = {"numbers": numbers, "digest": digest(run)}
    for name, make_runner in RUNNERS.items():
        run = make_runner(0)
        run.runner.register_hook(_Writing(HERE / f"{name}.pth"), priority="VERY_LOW")
        numbers = [one.hex() for one in run.run()[2 * STOP :]]
        expected[name] = {"numbers": numbers, "digest": digest(run)}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(_write())
