"""``apex.amp``: the names and the private state that scripts rely on."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import amp as native
from halfpeak import shim

LEVELS = list(halfpeak.LEVELS)
pytestmark = pytest.mark.usefixtures("apex_installed")


@pytest.fixture
def amp(apex_installed: None) -> Any:
    from apex import amp

    return amp


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, amp: Any, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(8, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_is_a_package(amp: Any) -> None:
    """DeepSpeed prints ``__path__``, timm looks into ``__dict__``."""
    assert isinstance(amp, ModuleType)
    assert len(amp.__path__) == 1
    assert amp.__name__ == "apex.amp"
    assert amp.__package__ == "apex.amp"
    assert {"initialize", "state_dict", "load_state_dict"} <= amp.__dict__.keys()
    assert importlib.reload(amp) is amp


@pytest.mark.parametrize("level", LEVELS)
def test_the_attributes_of_an_initialised_optimizer(amp: Any, level: str) -> None:
    model, optimizer = make()
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    stash = optimizer._amp_stash
    masters = list(amp.master_params(optimizer))
    assert optimizer._lazy_init_maybe_master_weights() is None
    stash.lazy_init_called = True
    assert not stash.already_patched
    low = [p for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
    assert {id(p) for p in stash.all_fp16_params} == {id(p) for p in low}
    if level in ("O2", "O5"):
        assert all(p.dtype is torch.float32 for p in masters)
        assert len(stash.all_fp32_from_fp16_params) == len(low) == 4
        assert len(stash.all_fp32_from_fp32_params) == 2
        both = stash.all_fp32_from_fp16_params + stash.all_fp32_from_fp32_params
        assert {id(p) for p in both} == {id(p) for p in masters}
    else:
        assert not stash.all_fp32_from_fp16_params
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    assert not stash.params_have_scaled_gradients


def test_the_attributes_are_not_copied_and_go_with_the_shim(amp: Any) -> None:
    model, optimizer = make()
    other_model, disabled = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp.initialize(other_model, disabled, opt_level="O1", enabled=False)
    assert not hasattr(disabled, "_amp_stash")
    assert not hasattr(copy.deepcopy(optimizer), "_amp_stash")
    step = type(optimizer).step
    assert "step" not in vars(optimizer)
    shim.uninstall()
    assert not [name for name in vars(optimizer) if "amp" in name or "master" in name]
    assert type(optimizer).step is step
    train(model, optimizer, native, 1)


def test_each_optimizer_of_a_list_has_attributes(amp: Any) -> None:
    (one, first), (two, second) = make(), make()
    amp.initialize([one, two], [first, second], opt_level="O1", verbosity=0)
    assert first._amp_stash is not second._amp_stash


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_resume_of_deep_learning_examples(amp: Any, when: str) -> None:
    """The scripts save masters in the checkpoint themselves, and restore them through private names."""

    def trained(saved: dict[str, Any] | None) -> tuple[nn.Module, Any]:
        model, optimizer = make()
        if saved is not None and when == "before":
            model.load_state_dict(saved["model"])
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            optimizer._lazy_init_maybe_master_weights()
            optimizer._amp_stash.lazy_init_called = True
            optimizer.load_state_dict(saved["optimizer"])
            for parameter, value in zip(amp.master_params(optimizer), saved["master params"], strict=True):
                parameter.data.copy_(value.data)
            optimizer._master_params_to_model_params()
        return model, optimizer

    model, optimizer = trained(None)
    train(model, optimizer, amp, 5)
    saved = copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
        }
    )
    straight = train(model, optimizer, amp, 4)
    again, optimizer_again = trained(saved)
    assert train(again, optimizer_again, amp, 4) == straight
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
