"""Steps and modules without casts: these are back afterwards; after a step that raised, from the next forward pass on."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfpeak.casting.casts import OpCasts
from halfpeak.casting.suspend import StepWithoutCasts, WithoutCasts
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
        self.model = nn.Identity()
        StepWithoutCasts().hook_all([self], [self.model])

    def step(self, closure: Any = None) -> None:
        self.seen.append(product())
        if self.inner is not None:
            with contextlib.suppress(KeyError):
                self.inner.step()
            self.seen.append(product())
        if self.fail is not None:
            raise self.fail


def test_a_step_runs_without_casts() -> None:
    probe = Probe()
    probe.step()
    assert (probe.seen, product()) == ([FLOAT], HALF)


def test_the_forward_pass_after_a_step_that_raised_has_casts() -> None:
    probe = Probe()
    probe.fail = KeyError("kept")
    alive = weakref.ref(probe)
    with pytest.raises(KeyError):
        probe.step()
    probe.model(torch.ones(1))
    assert product() is HALF
    probe.fail = None
    probe.step()
    assert (probe.seen, product()) == ([FLOAT] * 2, HALF)
    del probe
    gc.collect()
    assert alive() is None


def test_steps_within_steps() -> None:
    inner = Probe()
    outer = Probe(inner)
    outer.step()
    assert (outer.seen, inner.seen, product()) == ([FLOAT] * 2, [FLOAT], HALF)
    inner.fail = KeyError()
    outer.step()
    inner.model(torch.ones(1))
    assert (outer.seen, product()) == ([FLOAT] * 4, HALF)
    outer.fail = ValueError()
    with pytest.raises(ValueError):
        outer.step()
    outer.model(torch.ones(1)), inner.model(torch.ones(1))
    assert product() is HALF


def test_a_step_in_an_inner_scope() -> None:
    probe = Probe()
    with OpCasts(torch.bfloat16):
        probe.step()
        assert product() is torch.bfloat16
        probe.fail = KeyError()
        with pytest.raises(KeyError):
            probe.step()
        probe.model(torch.ones(1))
        assert product() is torch.bfloat16
    assert probe.seen == [FLOAT] * 2
    assert product() is HALF


@pytest.mark.parametrize("fails", [False, True])
def test_the_weights_a_step_moved_are_cast_anew(fails: bool) -> None:
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    graph = layer(x)

    class Careless(Probe):
        def step(self, closure: Any = None) -> None:
            layer.weight.data.mul_(3)
            if fails:
                raise KeyError

    careless = Careless()
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        careless.step()
    careless.model(torch.ones(1))
    expected = nn.functional.linear(x.half(), layer.weight.detach().half(), layer.bias.detach().half())
    assert torch.equal(layer(x), expected)
    assert not torch.equal(layer(x), graph)


class Module(nn.Module):
    """Records the dtype of a product in its forward pass, and raises ``fail`` if it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.fail: BaseException | None = None
        WithoutCasts().hook(self)

    def forward(self, x: Tensor, inner: Module | None = None) -> Tensor:
        if inner is not None:
            with contextlib.suppress(KeyError):
                inner(x)
        self.seen.append(product())
        if self.fail is not None:
            raise self.fail
        return x


def test_a_module_runs_without_casts_also_in_itself_and_when_it_raises() -> None:
    module, x = Module(), torch.ones(1)
    module(x, module)
    assert (module.seen, product()) == ([FLOAT] * 2, HALF)
    module.fail = KeyError()
    with pytest.raises(KeyError):
        module(x, module)
    assert (module.seen, product()) == ([FLOAT] * 4, HALF)


def test_recomputation_that_stops_early_puts_casts_back() -> None:
    module, x = Module(), torch.ones(1, requires_grad=True)
    checkpoint(lambda x: module(x.exp()).exp(), x, use_reentrant=False).sum().backward()
    assert (module.seen, product()) == ([FLOAT] * 2, HALF)


def test_copies_and_pickles_have_hooks_of_their_own() -> None:
    module = Module()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(torch.ones(1))
        assert (other.seen, module.seen, product()) == ([FLOAT], [], HALF)
        (own,), (first,) = other._forward_pre_hooks.values(), module._forward_pre_hooks.values()
        assert own.__self__ is not first.__self__


def test_backward_started_in_a_step_stays_uncast() -> None:
    class Closure(Probe):
        def step(self, closure: Any = None) -> None:
            closure()

    found: list[Tensor] = []
    x = torch.rand(3, 3, requires_grad=True)
    Closure().step(lambda: found.append((x @ x).sum()) or found[0].backward())
    assert found[0].dtype is FLOAT
    assert product() is HALF
