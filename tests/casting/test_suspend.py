"""Casts are off between a pair of hooks, until the one that has suspended them resumes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak.casting.casts import OpCasts
from halfpeak.casting.suspend import resume, suspend
from support.nets import product

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    casts = OpCasts(HALF)
    casts.install()
    yield
    casts.uninstall()


class Probe(torch.optim.Optimizer):
    """Records the dtype of a product in its step, and raises ``fail`` if it is set."""

    def __init__(self, inner: Probe | None = None) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.inner = inner
        self.fail: BaseException | None = None
        self.seen: list[torch.dtype] = []
        self.register_step_pre_hook(lambda *_: suspend(self))
        self.register_step_post_hook(lambda *_: resume(self))

    def step(self, closure: Any = None) -> None:
        self.seen.append(product())
        if self.inner is not None:
            self.inner.step()
            self.seen.append(product())
        if self.fail is not None:
            raise self.fail


def test_a_step_runs_without_casts() -> None:
    probe = Probe()
    probe.step()
    assert (probe.seen, product()) == ([FLOAT], HALF)


def test_casts_stay_off_until_the_same_suspender_resumes() -> None:
    probe, other = Probe(), Probe()
    probe.fail = KeyError()
    with pytest.raises(KeyError):
        probe.step()
    assert product() is FLOAT
    resume(other)
    other.step()
    assert product() is FLOAT
    probe.fail = None
    probe.step()
    assert product() is HALF


def test_steps_within_steps() -> None:
    inner = Probe()
    outer = Probe(inner)
    outer.step()
    assert (outer.seen, inner.seen, product()) == ([FLOAT] * 2, [FLOAT], HALF)


def test_a_step_in_an_inner_scope() -> None:
    probe = Probe()
    with OpCasts(torch.bfloat16):
        probe.step()
        assert product() is torch.bfloat16
    assert probe.seen == [FLOAT]
    assert product() is HALF


def test_the_weights_a_step_moved_are_cast_anew() -> None:
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    graph = layer(x)

    class Careless(Probe):
        def step(self, closure: Any = None) -> None:
            layer.weight.data.mul_(3)

    Careless().step()
    expected = nn.functional.linear(x.half(), layer.weight.detach().half(), layer.bias.detach().half())
    assert torch.equal(layer(x), expected)
    assert not torch.equal(layer(x), graph)


def test_backward_started_in_a_step_stays_uncast() -> None:
    class Closure(Probe):
        def step(self, closure: Any = None) -> None:
            closure()

    found: list[Tensor] = []
    x = torch.rand(3, 3, requires_grad=True)
    Closure().step(lambda: found.append((x @ x).sum()) or found[0].backward())
    assert found[0].dtype is FLOAT
    assert product() is HALF
