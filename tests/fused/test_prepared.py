"""Every fused optimizer under ``halfpeak.prepare``, compared with a hand-written loop with masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfpeak
from fused.reference import CASES
from halfpeak.fused import FusedAdamW
from halfpeak.fused.backends.choose import BackendName
from promises.by_hand import ByHand, Prepared
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
    hand, ours = (
        made(
            level,
            [make()],
            lambda nets: kind(nets[0].parameters(), backend="eager", **options),
            scale=64.0,
        )
        for made in (ByHand, Prepared)
    )
    for _ in range(4):
        x = torch.randn(8, 6)
        for loop in (hand, ours):
            loop.backward(loop.output(x).square().mean())
            loop.step()
    assert same(ours.tensors("model"), hand.tensors("model"))
    assert same(ours.tensors("optimizer"), hand.tensors("optimizer"))


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("level", LEVELS)
def test_low_and_unscaled_gradients_in_turns(level: str, backend: BackendName) -> None:
    batches = [torch.randn(8, 6) for _ in range(4)]
    seen: list[list[nn.Parameter]] = []
    for unscales in ((True, False), (True, True)):
        model = make()
        optimizer = FusedAdamW(model.parameters(), lr=0.01, backend=backend)
        engine = halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0), clip=0.1)
        for step, x in enumerate(batches):
            with engine.forward():
                loss = model(x).square().mean()
            engine.backward(loss)
            if unscales[step % 2]:
                engine.unscale()
            if not step % 2:
                for main in engine.main_params():
                    assert main.grad is not None
                    main.grad.div_(3)
            engine.step()
        seen.append(list(model.parameters()))
    assert same(*seen)
