"""The same training by several libraries, each with its own checkpoint."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from halfpeak.amp.fp16_utils import FP16_Optimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper

FIRST_SCALE = 256.0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.Adam([{"params": others}, {"params": decayed, "weight_decay": 0.1}], lr=0.01)


def make_batch(step: int) -> tuple[Tensor, float]:
    """Inputs, and the factor of the loss, which makes every fifth step overflow."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    return x, float("inf") if step % 5 == 2 else 1.0


class Loop(ABC):
    """A training of one model by one library."""

    form: str

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer: Any = make_optimizer(self.model)

    @abstractmethod
    def step(self, x: Tensor, factor: float) -> None: ...

    @abstractmethod
    def save(self) -> dict[str, Any]: ...

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def scale(self) -> tuple[float, int]:
        """The loss scale, and the clean updates since it last moved."""

    def run(self, steps: range) -> Loop:
        for step in steps:
            self.step(*make_batch(step))
        return self

    def end(self) -> dict[str, Any]:
        return {"scale": self.scale(), **{name: v.float() for name, v in self.model.state_dict().items()}}


class EngineLoop(Loop):
    form = "engine"
    level = "O0"

    def __init__(self) -> None:
        super().__init__()
        self.engine = halfpeak.prepare(
            self.model,
            self.optimizer,
            halfpeak.LEVELS[self.level].replace(loss_scale="dynamic"),
            scale=halfpeak.ScaleConfig(init=FIRST_SCALE),
        )

    def step(self, x: Tensor, factor: float) -> None:
        with self.engine.forward():
            loss = self.model(x).float().square().mean() * factor
        self.engine.backward(loss)
        self.engine.step()

    def save(self) -> dict[str, Any]:
        return self.engine.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)

    def scale(self) -> tuple[float, int]:
        state = self.engine.scalers[0].state_dict()
        return float(state["scale"]), int(state["clean"])


class EngineO2Loop(EngineLoop):
    level = "O2"


class AmpLoop(Loop):
    form = "apex"
    level = "O0"

    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = amp.initialize(
            self.model,
            self.optimizer,
            opt_level=halfpeak.LEVELS[self.level].replace(loss_scale="dynamic"),
            verbosity=0,
            max_loss_scale=FIRST_SCALE,
        )

    def step(self, x: Tensor, factor: float) -> None:
        self.optimizer.zero_grad()
        loss = self.model(x).float().square().mean() * factor
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])

    def scale(self) -> tuple[float, int]:
        state = amp.state_dict()["loss_scaler0"]
        return state["loss_scale"], state["unskipped"]


class AmpO2Loop(AmpLoop):
    level = "O2"


class ScalerLoop(Loop):
    """``torch.amp.GradScaler``."""

    form = "grad_scaler"

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE)

    def step(self, x: Tensor, factor: float) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).square().mean() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def scale(self) -> tuple[float, int]:
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


class MmengineLoop(Loop):
    """mmengine's own wrapper; its check for CUDA is bypassed, because torch's scaler needs no CUDA device."""

    form = "mmengine"

    def __init__(self) -> None:
        super().__init__()
        asked, scaler = amp_optimizer_wrapper.is_cuda_available, amp_optimizer_wrapper.GradScaler
        amp_optimizer_wrapper.is_cuda_available = lambda: True
        amp_optimizer_wrapper.GradScaler = partial(torch.amp.GradScaler, "cpu")
        try:
            self.wrapper = AmpOptimWrapper(optimizer=self.optimizer, loss_scale={"init_scale": FIRST_SCALE})
        finally:
            amp_optimizer_wrapper.is_cuda_available, amp_optimizer_wrapper.GradScaler = asked, scaler

    def step(self, x: Tensor, factor: float) -> None:
        self.wrapper.update_params(self.model(x).square().mean() * factor)

    def save(self) -> dict[str, Any]:
        return {
            "meta": {"epoch": 0, "iter": 0, "mmengine_version": "0.10.7"},
            "state_dict": self.model.state_dict(),
            "optimizer": self.wrapper.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["state_dict"])
        self.wrapper.load_state_dict(copy.deepcopy(state["optimizer"]))

    def scale(self) -> tuple[float, int]:
        state = self.wrapper.loss_scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


class Fp16Loop(Loop):
    """A float16 model with ``FP16_Optimizer``, as in scripts from before amp."""

    form = "fp16_optimizer"

    def __init__(self) -> None:
        super().__init__()
        self.model.half()
        options = {"init_scale": FIRST_SCALE}
        self.optimizer = FP16_Optimizer(
            self.optimizer, dynamic_loss_scale=True, dynamic_loss_args=options, verbose=False
        )

    def step(self, x: Tensor, factor: float) -> None:
        self.optimizer.zero_grad()
        self.optimizer.backward(self.model(x.half()).float().square().mean() * factor)
        self.optimizer.step()

    def save(self) -> dict[str, Any]:
        return {"epoch": 1, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing converts to it")

    def scale(self) -> tuple[float, int]:
        state = self.optimizer.state_dict()["loss_scaler"]
        return float(state["scale"]), int(state["clean"])
