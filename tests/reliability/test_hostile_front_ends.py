"""The front ends refuse damaged states as the engine does: with a StateError, and nothing changed."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import halfpeak
from halfpeak import GradScaler, amp
from halfpeak.amp.fp16_utils import FP16_Optimizer
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict
from halfpeak.parts.loss_scaler import LossScaler as StateScaler
from halfpeak.runner.loss_scaler import LossScaler
from halfpeak.runner.step_counter import StepCounter
from reliability.support import batch, net, state_hash
from support.damage import damaged

CASES = 1000 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 60
Parts = tuple[Callable[[], Any], Callable[[Any], object]]
"""How to save, and how to load."""


def sgd(model: torch.nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def of_wrapper(kind: type[OptimWrapper], **options: Any) -> Parts:
    model = net()
    wrapper = kind(optimizer=sgd(model), accumulative_counts=2, **options)
    for step in range(3):
        with wrapper.optim_context(model):
            loss = model(batch(step)).square().mean()
        wrapper.update_params(loss)
    return wrapper.state_dict, wrapper.load_state_dict


def of_wrappers() -> Parts:
    both = OptimWrapperDict(a=OptimWrapper(sgd(net())), b=AmpOptimWrapper(optimizer=sgd(net())))
    return both.state_dict, both.load_state_dict


def of_amp() -> Parts:
    model = net()
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0, num_losses=2)
    return amp.state_dict, amp.load_state_dict


def of_fp16_optimizer() -> Parts:
    model = net().half()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, verbose=False)
    return optimizer.state_dict, optimizer.load_state_dict


def of_loop() -> Parts:
    model = net()
    engine = halfpeak.prepare(model, sgd(model), "O2", accumulate=3)
    for step in range(2):
        with engine.forward():
            loss = model(batch(step)).square().mean()
        engine.backward(loss)
        engine.step()
    return engine.loop_state_dict, engine.load_loop_state_dict


def of_object(one: Any) -> Parts:
    return one.state_dict, one.load_state_dict


FRONT_ENDS: dict[str, Callable[[], Parts]] = {
    "GradScaler": lambda: of_object(GradScaler("cpu")),
    "LossScaler of the engine": lambda: of_object(StateScaler(halfpeak.ScaleConfig())),
    "LossScaler of mmcv": lambda: of_object(LossScaler()),
    "amp": of_amp,
    "FP16_Optimizer": of_fp16_optimizer,
    "OptimWrapper": lambda: of_wrapper(OptimWrapper),
    "AmpOptimWrapper": lambda: of_wrapper(AmpOptimWrapper, loss_scale="dynamic"),
    "ApexOptimWrapper": lambda: of_wrapper(ApexOptimWrapper, opt_level="O2"),
    "OptimWrapperDict": of_wrappers,
    "loop": of_loop,
    "StepCounter": lambda: of_object(StepCounter()),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_states(name: str) -> None:
    save, load = FRONT_ENDS[name]()
    good = copy.deepcopy(save())
    image, refused = state_hash(save()), 0
    for case in range(CASES):
        what, state = damaged(good, random.Random(f"{name} {case}"))
        try:
            load(state)
        except halfpeak.StateError:
            refused += 1
            assert state_hash(save()) == image, what
        except Exception as error:
            raise AssertionError(what) from error
        else:
            state_hash(save())
            load(copy.deepcopy(good))
            image = state_hash(save())
    assert refused > CASES // 3


class Trained(torch.nn.Module):
    """A model of mmcv's runners."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def train_step(self, data: torch.Tensor, optimizer: Any) -> dict[str, Any]:
        return {"loss": self.net(data).square().mean(), "num_samples": len(data)}


def runner(kind: str) -> Any:
    model = Trained()
    length = {"max_epochs": 2} if kind == "EpochBasedRunner" else {"max_iters": 8}
    made = getattr(halfpeak.runner, kind)(model, optimizer=sgd(model), logger=getLogger("halfpeak"), **length)
    made.register_training_hooks({"policy": "step", "step": [1]}, {"type": "Fp16OptimizerHook"})
    return made


@pytest.mark.parametrize("kind", ["EpochBasedRunner", "IterBasedRunner"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_of_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [batch(step) for step in range(4)]
    source = runner(kind)
    source.run([data], [("train", 1)])
    good, refused = copy.deepcopy(source.checkpoint()), 0
    good["meta"].update(epoch=1, iter=4)
    for case in range(CASES):
        what, state = damaged(good, random.Random(f"{kind} {case}"))
        monkeypatch.setattr("halfpeak.runner.loop.base.read_checkpoint", lambda *_, state=state: state)
        target = runner(kind)
        image = state_hash(target.model.state_dict())
        try:
            if not isinstance(state, dict):
                continue  # such a file is refused where it is read
            target.resume(tmp_path / "run.pth")
        except halfpeak.StateError:
            refused += 1
            assert state_hash(target.model.state_dict()) == image, what
            continue
        except Exception as error:
            raise AssertionError(what) from error
        try:
            target.run([data], [("train", 1)])
        except halfpeak.StateError:
            refused += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert refused > CASES // 4
