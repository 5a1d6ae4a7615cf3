"""Every way to train with halfpeak behind one small interface, for the laws in ``test_drivers.py``.

A driver defines how a run is built, how it trains one pass (forward, backward, the step at the end of a window), how it
is saved and loaded, how it steps with a closure, and how a caller drops a window after an exception. To add a driver,
write a :class:`Run` and a row of :data:`DRIVERS`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import halfpeak
from halfpeak import amp, fused
from halfpeak.amp.fp16_utils import FP16_Optimizer, convert_network
from halfpeak.integrations.timm import LossScaler
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, ScalarHistory
from halfpeak.runner import (
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
)
from halfpeak.runner.log_buffer import LogBuffer
from runner.oracle.cases import Loop
from support import nets
from support.nets import LEVELS, OPTIMIZERS, PURE, dynamic, make_batch, make_net, make_normless
from support.snapshot import values

TOTAL = 9
"""Passes of a run: three windows of three."""
SCALE = 1024.0
"""The first loss scale: a power of two at which nothing overflows by itself."""
DYNAMIC: dict[str, Any] = {"scale": halfpeak.ScaleConfig(init=SCALE, ceiling=SCALE, patience=5)}
"""The loss scale of the engine, where a run asks for it."""
AUTOCAST = {"O1": torch.float16, "O4": torch.bfloat16}
"""The dtype in which operations run, by level."""
HALF = {"O2": torch.float16, "O5": torch.bfloat16}
"""The dtype of models, by level."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of a driver's run; ``make_net`` replaces the default nets."""

    driver: str
    level: str
    optimizer: str = "adamw"
    every: int = 1
    clip: float | None = None
    has_norm: bool = True
    make_net: Callable[[int], Any] | None = None

    def __str__(self) -> str:
        extras = [f"x{self.every}"] if self.every > 1 else []
        extras += ["clipped"] if self.clip is not None else []
        return " ".join([self.driver, self.level, self.optimizer, *extras])

    def run(self, seed: int = 0) -> Run:
        """A new run; the seed makes its first weights."""
        return DRIVERS[self.driver].make(self, seed)


FACTORIES: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "FusedAdamW": partial(fused.FusedAdamW, lr=1e-3, eps=1e-4),
    "remainder": partial(fused.FusedAdamW, lr=1e-3, eps=1e-4, master="remainder", moments=torch.bfloat16),
    "8 bits": partial(fused.FusedAdamW, lr=1e-3, eps=1e-4, master="remainder8", moments="int8"),
    "FusedSGD": partial(fused.FusedSGD, lr=0.05, momentum=0.9, dampening=0.3),
    "FusedLAMB": partial(fused.FusedLAMB, lr=1e-3),
    "FusedNovoGrad": partial(fused.FusedNovoGrad, lr=1e-3),
}


class Run:
    """A model in training, with one optimizer and a dynamic loss scale."""

    restores_statistics: ClassVar[bool] = True
    """Whether a skipped step restores batch-norm statistics."""
    result: halfpeak.StepResult | None = None
    """Of the last pass, not yet read from the device; None inside a window that the caller counts."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.every, self.clip = case, case.every, case.clip
        default = make_net if self.restores_statistics and case.has_norm else make_normless
        self.net: Any = (case.make_net or default)(seed)
        self.optimizer: Any = FACTORIES[case.optimizer](self.net.parameters())
        self.done = 0
        self.build()

    def build(self) -> None:
        """Prepare :attr:`net` and :attr:`optimizer`."""
        raise NotImplementedError

    def convert(self) -> None:
        """Convert the model to the level, if otherwise the first pass converts it."""

    def train(self, number: int, *, batch: Callable[[int], tuple[Tensor, Tensor]] = make_batch) -> None:
        """Train one pass over a batch, with the step at the end of a window."""
        self.take(lambda: self.loss(batch(number)))
        self.done += 1

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        """Train one pass; ``loss_of`` computes the loss."""
        self.backward(loss_of)
        self.step()

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Run forward and backward, if the caller calls them apart from the step."""
        raise NotImplementedError

    def step(self) -> None:
        """End the pass, with the step at the end of a window."""
        raise NotImplementedError

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mse_loss(self.net(batch[0]).float(), batch[1])

    @property
    def is_boundary(self) -> bool:
        """Whether the coming pass ends its window."""
        return (self.done + 1) % self.every == 0

    def moved(self) -> bool:
        """Whether the last pass moved the weights."""
        return self.result is not None and self.result.stepped()

    def scale(self) -> float:
        raise NotImplementedError

    def save(self) -> Any:
        """The state of the run, as plain data."""
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), **self.save_rest()}

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        # torch's load_state_dict keeps the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.load_rest(state)

    def save_rest(self) -> dict[str, Any]:
        """The state of the run beside model and optimizer."""
        raise NotImplementedError

    def load_rest(self, state: Any) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """Drop the window, as a caller does after an exception."""
        self.optimizer.zero_grad()
        self.done -= self.done % self.every

    def step_with(self, loss_of: Callable[[], Tensor]) -> None:
        """Step with a closure that runs forward and backward."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """Everything that training has changed, to the bit."""
        return values(self.net, self.optimizer)

    def progress(self) -> Any:
        """Loss scale and counters."""
        return self.scale()

    def end(self) -> None:
        """Remove the engine, because later backward passes look through the optimizers of all engines alive."""


class NativeRun(Run):
    """``halfpeak.prepare``."""

    overrides: ClassVar[Mapping[str, Any]] = {"loss_scale": "dynamic"}
    """Of the level."""
    options: ClassVar[Mapping[str, Any]] = {}

    def build(self) -> None:
        self.engine = halfpeak.prepare(
            self.net,
            self.optimizer,
            halfpeak.LEVELS[self.case.level].replace(**self.overrides),
            accumulate=self.every,
            clip=self.clip,
            **{**DYNAMIC, **self.options},
        )

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        with self.engine.forward():
            loss = loss_of()
        self.engine.backward(loss)

    def step(self) -> None:
        self.result = self.engine.step()

    def end(self) -> None:
        self.engine.remove()

    def scale(self) -> float:
        return self.engine.read_scale()

    def save(self) -> Any:
        return self.engine.state_dict()

    def load(self, state: Any) -> None:
        self.engine.load_state_dict(state)

    def drop(self) -> None:
        self.engine.abort()
        self.done = self.engine.micro_step

    def progress(self) -> Any:
        counters = (int(self.engine.num_steps), int(self.engine.num_skipped), self.engine.micro_step)
        return counters, [[float(part) for part in scaler.state] for scaler in self.engine.scalers]

    def step_with(self, loss_of: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            with self.engine.forward():
                loss = loss_of()
            self.engine.backward(loss)
            return loss

        self.result = self.engine.step(closure)


class RoundedRun(NativeRun):
    """The engine over a model that was low-precision before: masters begin rounded, and no norm stays in float32."""

    restores_statistics = False
    overrides: ClassVar[Mapping[str, Any]] = {"loss_scale": "dynamic", "keep_batchnorm_fp32": False}

    def build(self) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(parameter.to(HALF[self.case.level]))
        super().build()


class ApexListsRun(NativeRun):
    """The engine with apex's op lists, the reference for drivers with the interface of apex."""

    options: ClassVar[Mapping[str, Any]] = {"op_lists": "apex"}


class NormlessRun(NativeRun):
    restores_statistics = False


class StaticRun(NativeRun):
    """The engine without a loss scale."""

    overrides: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {"scale": None}


class AmpRun(Run):
    """``amp.initialize`` and ``amp.scale_loss``; the caller counts windows and clips."""

    def build(self) -> None:
        amp.initialize(
            self.net,
            self.optimizer,
            opt_level=self.case.level,
            loss_scale="dynamic",
            max_loss_scale=SCALE,
            norms="all",  # as the engine
            verbosity=0,
        )
        self.scaler = amp._amp_state.loss_scalers[0]

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        if self.done % self.every == 0:
            self.optimizer.zero_grad()
        with amp.scale_loss(loss_of() / self.every, self.optimizer) as scaled:
            scaled.backward()

    def step(self) -> None:
        self.result = None
        if self.is_boundary:
            if self.clip is not None:
                halfpeak.ClipNorm(max_norm=self.clip)(
                    [p.grad for p in amp.master_params(self.optimizer) if p.grad is not None]
                )
            self.optimizer.step()
            self.result = amp.last_step(self.optimizer)

    def scale(self) -> float:
        return self.scaler.loss_scale()

    def progress(self) -> Any:
        return self.scaler.state_dict()

    def end(self) -> None:
        run = amp._amp_state.run_of(self.optimizer)
        assert run is not None
        run.parts.remove()

    def save_rest(self) -> dict[str, Any]:
        return {"amp": {"loss_scaler0": self.scaler.state_dict()}}

    def load_rest(self, state: Any) -> None:
        amp.load_state_dict(state["amp"])

    def step_with(self, loss_of: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of()
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            return loss

        self.optimizer.step(closure)


class Fp16OptimizerRun(Run):
    """``FP16_Optimizer`` over a model that the caller has converted to low precision."""

    restores_statistics = False

    def build(self) -> None:
        self.dtype = HALF[self.case.level]
        convert_network(self.net, self.dtype)
        arguments = {"init_scale": SCALE, "max_loss_scale": SCALE}
        self.wrapper = FP16_Optimizer(
            self.optimizer, dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False
        )
        self.stepped = False

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss((batch[0].to(self.dtype), batch[1]))

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        if self.done % self.every == 0:
            self.wrapper.zero_grad()
        self.wrapper.backward(loss_of() / self.every)

    def step(self) -> None:
        self.stepped = self.is_boundary
        if self.is_boundary:
            if self.clip is not None:
                self.wrapper.clip_master_grads(self.clip)
            self.wrapper.step()
            self.stepped = not self.wrapper.overflow

    def moved(self) -> bool:
        return self.stepped

    def scale(self) -> float:
        return self.wrapper.loss_scale

    def save(self) -> Any:
        return {"model": self.net.state_dict(), "optimizer": self.wrapper.state_dict()}

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.wrapper.load_state_dict(state["optimizer"])

    def drop(self) -> None:
        self.wrapper.zero_grad(set_grads_to_None=True)
        self.done -= self.done % self.every

    def step_with(self, loss_of: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            self.wrapper.zero_grad()
            loss = loss_of()
            self.wrapper.backward(loss)
            return loss

        self.wrapper.step(closure)


class WrapperRun(Run):
    """The wrappers of ``halfpeak.optim``; they count windows and clip.

    ``OptimWrapper`` skips here, as the laws ask; by default it steps what comes, as mmengine's does.
    """

    def build(self) -> None:
        clip = None if self.clip is None else {"max_norm": self.clip}
        # mmengine's message hub, if an earlier test has made one, waits for the norm that it is given.
        self.wrapper = self.wrap(accumulative_counts=self.every, clip_grad=clip, sink=ScalarHistory())

    def wrap(self, **options: Any) -> OptimWrapper:
        return OptimWrapper(self.optimizer, skip_nonfinite=True, **options)

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        with self.wrapper.optim_context(self.net):
            loss = loss_of()
        self.wrapper.update_params(loss)

    def moved(self) -> bool:
        return self.wrapper.stepped()

    def scale(self) -> float:
        return 1.0

    def save(self) -> Any:
        return {"model": self.net.state_dict(), "optimizer": self.wrapper.state_dict()}

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.wrapper.load_state_dict(state["optimizer"])
        self.wrapper.initialize_count_status(self.net, self.done, -1)

    def drop(self) -> None:
        self.wrapper.zero_grad()
        self.done -= self.done % self.every
        self.wrapper.initialize_count_status(self.net, self.done, -1)

    def step_with(self, loss_of: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            self.wrapper.zero_grad()
            with self.wrapper.optim_context(self.net):
                loss = loss_of()
            self.wrapper.backward(loss)
            return loss

        self.wrapper.step(closure)


class AmpWrapperRun(WrapperRun):
    def wrap(self, **options: Any) -> OptimWrapper:
        return AmpOptimWrapper(
            {"init_scale": SCALE}, AUTOCAST[self.case.level], optimizer=self.optimizer, **options
        )

    def scale(self) -> float:
        assert isinstance(self.wrapper, AmpOptimWrapper)
        return self.wrapper.loss_scaler.get_scale()


class ApexWrapperRun(WrapperRun):
    def wrap(self, **options: Any) -> OptimWrapper:
        return ApexOptimWrapper(
            self.case.level,
            "dynamic",
            max_loss_scale=SCALE,
            norms="all",  # as the engine
            optimizer=self.optimizer,
            **options,
        )

    def convert(self) -> None:
        with self.wrapper.optim_context(self.net):
            pass

    def scale(self) -> float:
        return self.wrapper.state_dict()["apex_amp"]["loss_scaler0"]["loss_scale"]


class HookRun(Run):
    """The optimizer hooks of ``halfpeak.runner``, called as a runner calls them. Those of float32 skip here, too."""

    def build(self) -> None:
        clip = None if self.clip is None else {"max_norm": self.clip}
        self.loop = Loop(self.net, max_iters=TOTAL)
        self.loop.optimizer = self.optimizer
        self.loop.log_buffer = LogBuffer()
        self.hook: Any = self.make_hook(grad_clip=clip)
        self.loop.hook = self.hook
        self.begun = False

    def make_hook(self, **options: Any) -> Any:
        if self.every > 1:
            return GradientCumulativeOptimizerHook(self.every, skip_nonfinite=True, **options)
        return OptimizerHook(skip_nonfinite=True, **options)

    def begin(self) -> None:
        if not self.begun:
            self.loop.iter = self.done
            self.hook.before_run(self.loop)
            self.begun = True

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        self.begin()
        self.loop.iter = self.done
        with self.hook.around_train_step(self.loop) or torch.enable_grad():
            loss = loss_of()
        self.loop.outputs = {"loss": loss, "num_samples": 16}
        self.hook.after_train_iter(self.loop)

    def moved(self) -> bool:
        return self.loop.step_result.stepped()

    def scale(self) -> float:
        return float(self.loop.step_result.scale)

    def save_rest(self) -> dict[str, Any]:
        meta = {key: dict(value) for key, value in self.loop.meta.get("fp16", {}).items()}
        return {"hook": self.hook.state_dict(), "meta": {"fp16": meta} if meta else {}}

    def load_rest(self, state: Any) -> None:
        if self.begun:
            self.hook.after_run(self.loop)
            self.begun = False
        self.loop.meta = copy.deepcopy(state["meta"])
        self.begin()
        self.hook.load_state_dict(state["hook"])


class Fp16HookRun(HookRun):
    mode: ClassVar[str] = "master"
    dtypes: ClassVar[Mapping[str, torch.dtype]] = HALF

    def make_hook(self, **options: Any) -> Any:
        options |= {"mode": self.mode, "dtype": self.dtypes[self.case.level]}
        options["loss_scale"] = {"init_scale": SCALE}
        if self.every > 1:
            return GradientCumulativeFp16OptimizerHook(self.every, **options)
        return Fp16OptimizerHook(**options)


class AutocastHookRun(Fp16HookRun):
    mode = "autocast"
    dtypes = AUTOCAST


class GradScalerRun(Run):
    """``halfpeak.GradScaler`` under ``torch.autocast``; the caller counts windows, clips and zeroes gradients."""

    restores_statistics = False

    def build(self) -> None:
        self.scaler = halfpeak.GradScaler("cpu", init_scale=SCALE)

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        with torch.autocast("cpu", AUTOCAST[self.case.level]):
            loss = loss_of()
        self.scaler.scale(loss / self.every).backward()
        self.result = None
        if self.is_boundary:
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                halfpeak.ClipNorm(max_norm=self.clip)(
                    [p.grad for p in self.net.parameters() if p.grad is not None]
                )
            self.scaler.step(self.optimizer)
            self.result = self.scaler.last
            self.scaler.update()
            self.optimizer.zero_grad()

    def scale(self) -> float:
        return self.scaler.get_scale()

    def save_rest(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def load_rest(self, state: Any) -> None:
        self.scaler.load_state_dict(state["scaler"])

    def drop(self) -> None:
        self.scaler.update()
        super().drop()


class TimmRun(NativeRun):
    """timm's call over an engine. It clips; the caller divides the loss and counts windows, as in timm's script."""

    def build(self) -> None:
        self.engine = halfpeak.prepare(self.net, self.optimizer, dynamic(self.case.level), **DYNAMIC)
        self.loss_scaler = LossScaler(self.engine)

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        with self.engine.forward():
            loss = loss_of()
        self.loss_scaler(
            loss / self.every,
            self.optimizer,
            clip_grad=self.clip,
            parameters=self.net.parameters(),
            need_update=self.is_boundary,
        )
        self.result = None
        if self.is_boundary:
            self.result = self.loss_scaler.last
            self.optimizer.zero_grad()

    def save(self) -> Any:
        return {
            "state_dict": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.loss_scaler.state_dict(),
        }

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["state_dict"])
        # torch's load_state_dict keeps the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.loss_scaler.load_state_dict(state["scaler"])

    def drop(self) -> None:
        Run.drop(self)


class AccelerateRun(Run):
    """accelerate's own loop; its ``accumulate`` counts the windows."""

    def build(self) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        from halfpeak.integrations.accelerate import Accelerator

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        self.accelerator = Accelerator(
            cpu=True, level=dynamic(self.case.level), gradient_accumulation_steps=self.every, options=DYNAMIC
        )
        self.model, self.prepared = self.accelerator.prepare(self.net, self.optimizer)

    def take(self, loss_of: Callable[[], Tensor]) -> None:
        with self.accelerator.accumulate(self.model):
            with self.accelerator.autocast():
                loss = loss_of()
            self.accelerator.backward(loss)
            if self.clip is not None and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.prepared.step()
            self.prepared.zero_grad()
        self.stepped = self.is_boundary and not self.accelerator.optimizer_step_was_skipped

    def moved(self) -> bool:
        return self.stepped

    def scale(self) -> float:
        engine = self.accelerator.adapter.engine
        return 1.0 if engine is None else engine.read_scale()

    def save_rest(self) -> dict[str, Any]:
        return {"scaler": self.accelerator.scaler.state_dict()}

    def load_rest(self, state: Any) -> None:
        self.accelerator.scaler.load_state_dict(state["scaler"])
        self.accelerator.step = self.done

    def drop(self) -> None:
        super().drop()  # accelerate's own zero_grad does nothing inside a window
        self.accelerator.step = self.done


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A row of the table.

    Attributes:
        make: makes its run.
        reference: makes the engine's run that it must equal bit for bit.
        levels: the levels it has.
        saves_windows: whether a state that is saved inside a window holds its gradients.
        closures: whether it steps with a closure.
    """

    make: Callable[[Case, int], Run]
    reference: Callable[[Case, int], Run] = NativeRun
    levels: tuple[str, ...] = LEVELS
    saves_windows: bool = True
    closures: bool = True


DRIVERS: dict[str, Driver] = {
    "native": Driver(make=NativeRun),
    "amp": Driver(make=AmpRun, reference=ApexListsRun, saves_windows=False),
    "FP16_Optimizer": Driver(
        make=Fp16OptimizerRun, reference=RoundedRun, levels=("O2", "O5"), saves_windows=False
    ),
    "OptimWrapper": Driver(make=WrapperRun, reference=StaticRun, levels=("O0",)),
    "AmpOptimWrapper": Driver(make=AmpWrapperRun, levels=("O1", "O4"), closures=False),
    "ApexOptimWrapper": Driver(make=ApexWrapperRun, reference=ApexListsRun),
    "OptimizerHook": Driver(
        make=HookRun, reference=StaticRun, levels=("O0",), saves_windows=False, closures=False
    ),
    "Fp16OptimizerHook master": Driver(
        make=Fp16HookRun, levels=("O2", "O5"), saves_windows=False, closures=False
    ),
    "Fp16OptimizerHook autocast": Driver(
        make=AutocastHookRun, levels=("O1", "O4"), saves_windows=False, closures=False
    ),
    "GradScaler": Driver(
        make=GradScalerRun,
        reference=NormlessRun,
        levels=("O1", "O4"),
        saves_windows=False,
        closures=False,
    ),
    "timm": Driver(make=TimmRun, closures=False),
}
if importlib.util.find_spec("accelerate") is not None:
    DRIVERS["accelerate"] = Driver(make=AccelerateRun, saves_windows=False, closures=False)


def cases(
    *,
    windows: Sequence[tuple[int, float | None]] = ((1, None), (3, None)),
    optimizers: tuple[str, ...] = ("adamw", "FusedAdamW"),
    has_norm: bool = True,
    where: Callable[[Driver], bool] = lambda driver: True,
) -> list[Case]:
    """Cases of the drivers for which a law holds, at each of their levels.

    ``native`` runs with every optimizer in every window. With the other drivers, optimizers and windows take turns.

    Args:
        windows: passes per step, and the max norm or None.
        optimizers: by name.
        has_norm: whether the net has a batch norm.
        where: which drivers.
    """
    return [
        Case(driver=name, level=level, optimizer=optimizer, every=every, clip=clip, has_norm=has_norm)
        for name, driver in DRIVERS.items()
        if where(driver)
        for row, level in enumerate(driver.levels)
        for column, optimizer in enumerate(optimizers)
        for number, (every, clip) in enumerate(windows)
        if name == "native"
        or (number == (row + column) % len(windows) and (len(windows) > 1 or column == row % len(optimizers)))
        # A fused optimizer clips in its step, with one rounding less; accelerate takes norms in the gradients' dtype.
        if clip is None or (optimizer != "FusedAdamW" and not (name == "accelerate" and level in PURE))
    ]


def overflowing(
    run: Run, *, really: bool = True, value: float = float("inf"), place: int = 0
) -> AbstractContextManager[None]:
    """In the body, one element of one parameter's gradient is not finite."""
    return nets.overflowing(list(run.net.parameters())[place], value) if really else nullcontext()
