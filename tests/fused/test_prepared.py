"""Every fused optimizer under ``halfpeak.prepare``, compared with a hand-written loop with masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfpeak
from fused.reference import CASES
from halfpeak.fused import FusedAdamW
from halfpeak.fused.backends.choose import BackendName
from support.states import same

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""The import of torch's compiler gives this warning."""

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_masters_and_weights_are_bit_for_bit_those_of_a_loop_by_hand(name: str, level: str) -> None:
    kind, options = CASES[name]
    batches = [torch.randn(8, 6) for _ in range(4)]

    model = make()
    engine = halfpeak.prepare(
        model, kind(model.parameters(), backend="eager", **options), level, loss_scale=64.0
    )
    for x in batches:
        with engine.forward():
            loss = model(x).square().mean()
        engine.backward(loss)
        engine.step()

    twin = make()
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in twin.parameters()]
    twin.to(LEVELS[level])
    optimizer = kind(masters, backend="eager", **options)
    for x in batches:
        twin.zero_grad()
        (twin(x.to(LEVELS[level])).float().square().mean() * 64.0).backward()
        for master, low in zip(masters, twin.parameters(), strict=True):
            assert low.grad is not None
            master.grad = low.grad.float() / 64.0
        optimizer.step()
        with torch.no_grad():
            for master, low in zip(masters, twin.parameters(), strict=True):
                low.copy_(master)

    assert same(model.parameters(), twin.parameters())
    stepped = [p for group in engine.optimizers[0].param_groups for p in group["params"]]
    assert same(stepped, masters)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("level", LEVELS)
def test_low_and_unscaled_gradients_in_turns(level: str, backend: BackendName) -> None:
    batches = [torch.randn(8, 6) for _ in range(4)]
    seen: list[list[nn.Parameter]] = []
    for unscales in ((True, False), (True, True)):
        model = make()
        optimizer = FusedAdamW(model.parameters(), lr=0.01, backend=backend)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=64.0, clip=0.1)
        for step, x in enumerate(batches):
            with engine.forward():
                loss = model(x).square().mean()
            engine.backward(loss)
            if unscales[step % 2]:
                engine.unscale()
            if not step % 2:
                for grad in engine.main_grads():
                    grad.div_(3)
            engine.step()
        seen.append(list(model.parameters()))
    assert same(*seen)
