"""``diagnose`` names the module at fault in models of every build, leaves the run unchanged and writes a report."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak.optim import AmpOptimWrapper
from support.nets import LEVELS, LOW, make_batch, make_net


class Failure(Exception):
    pass


class Window:
    """A run in the middle of an accumulation window, with batch norm and dropout."""

    def __init__(self, level: str) -> None:
        self.model = nn.Sequential(make_net(), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.engine = halfpeak.prepare(self.model, self.optimizer, level, accumulate=3)
        self.micro_step(0)

    def loss(self, number: int) -> Tensor:
        return self.model(make_batch(number)[0]).float().square().mean()

    def micro_step(self, number: int) -> None:
        with self.engine.forward():
            loss = self.loss(number)
        self.engine.backward(loss)
        self.engine.step()

    def seen(self) -> str:
        grads = [(id(p.grad), id(p)) for p in (*self.model.parameters(), *self.engine.main_params())]
        randoms = (random.getstate(), torch.get_rng_state().tolist())
        return repr((copy.deepcopy(self.engine.state_dict()), grads, randoms))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factor", [1.0, torch.nan, 1e30])
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_before(level: str, factor: float, raises: bool) -> None:
    """Weights, gradients, window, statistics, random state, scale and counters; the run then equals one without it."""
    run, calm = Window(level), Window(level)

    def closure() -> Tensor:
        random.random()
        with torch.no_grad():
            next(run.model.parameters()).mul_(2.0)
        with run.engine.forward():
            loss = run.loss(1) * factor
        if raises:
            raise Failure
        return loss

    random.seed(0)
    torch.manual_seed(0)
    before = run.seen()
    if raises:
        with pytest.raises(Failure):
            halfpeak.diagnose(run.engine, closure)
    else:
        fits = factor == 1.0 or (factor == 1e30 and LOW.get(level) is not torch.float16)
        assert (halfpeak.diagnose(run.engine, closure).where is None) == fits
    assert run.seen() == before
    for number in (1, 2, 3):
        for one in (run, calm):
            torch.manual_seed(number)
            one.micro_step(number)
    assert repr(run.engine.state_dict()) == repr(calm.engine.state_dict())


@dataclass
class Pair:
    first: Tensor
    second: dict[str, Tensor]


class Big(nn.Module):
    """Overflows float16 in its output, and is finite in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() * 300 * 300


class InDataclass(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x, {"big": x.abs() * 300 * 300})


class Holder(nn.Module):
    """``part`` between two linear layers, called by ``how``."""

    def __init__(self, part: nn.Module, how: Callable[[Holder, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.last, self.how = nn.Linear(4, 4), part, nn.Linear(4, 1), how
        nn.init.ones_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self, self.first(x)))


def functional(holder: Holder, h: Tensor) -> Tensor:
    return holder.part(h.abs() * 300 * 300)


class Twice(nn.Module):
    """One layer under two names, whose second call overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.one.weight, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


BUILDS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "plain": (lambda: Holder(Big(), lambda m, h: m.part(h)), "part", "output[0]"),
    "dataclass": (
        lambda: Holder(InDataclass(), lambda m, h: m.part(h).second["big"]),
        "part",
        "output.second['big']",
    ),
    "functional": (lambda: Holder(nn.Identity(), functional), "", "part.input[0]"),
    "in place": (
        lambda: Holder(nn.Sequential(Big(), nn.ReLU(inplace=True)), lambda m, h: m.part(h)),
        "part.0",
        "output[0]",
    ),
    "checkpointed": (
        lambda: Holder(Big(), lambda m, h: checkpoint(m.part, h, use_reentrant=False)),
        "part",
        "output[0]",
    ),
    "reentrant": (
        lambda: Holder(Big(), lambda m, h: checkpoint(m.part, h, use_reentrant=True)),
        "part",
        "output[0]",
    ),
    "shared, called twice": (Twice, "one", "output[0]"),
    "compiled": (
        lambda: Holder(torch.compile(Big(), backend="eager"), lambda m, h: m.part(h)),  # type: ignore[arg-type]
        "part._orig_mod",
        "output[0]",
    ),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("prepared", [False, True])
def test_the_module_at_fault(build: str, prepared: bool) -> None:
    make, module, tensor = BUILDS[build]
    model = make()
    x = torch.ones(2, 4) * 3
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2") if prepared else None
    found = halfpeak.diagnose(model, lambda: model(x).float().mean(), level="O2")
    assert (found.where, found.module, found.tensor, found.reason) == ("forward", module, tensor, "overflow")
    assert 65504 < found.value < 1e8
    assert engine is None or halfpeak.diagnose(engine, lambda: model(x).float().mean()) == found


def test_a_compiled_model_runs_uncompiled() -> None:
    model = BUILDS["plain"][0]()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    compiled: Any = torch.compile(model, backend="eager")
    for run in (engine, compiled):
        assert halfpeak.diagnose(run, lambda: compiled(torch.ones(2, 4) * 3).float().mean()).module == "part"


@pytest.mark.usefixtures("one_rank")
def test_ranks_do_not_wait_for_each_other() -> None:
    """Under DistributedDataParallel no collective is called, and the next pass reduces gradients as ever."""
    model = BUILDS["plain"][0]()
    engine = halfpeak.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), halfpeak.LEVELS["O2"].replace(loss_scale=0.01)
    )
    wrapped = nn.parallel.DistributedDataParallel(model)
    reduced: list[bool] = []

    def reduce(bucket: Any) -> Any:
        reduced.append(True)
        future = torch.futures.Future[Tensor]()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, lambda state, bucket: reduce(bucket))
    for run in (engine, wrapped):
        found = halfpeak.diagnose(run, lambda: wrapped(torch.ones(2, 4) * 3).float().mean())
        assert found.module == "part"
    assert not reduced
    with engine.forward(wrapped):
        loss = wrapped(torch.ones(2, 4) * 1e-4).float().mean()
    engine.backward(loss)
    assert engine.step().stepped()
    assert reduced


def test_a_mask_is_not_blamed() -> None:
    """Minus infinity that a softmax removes is no overflow, and a later overflow is still found."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x, mask = torch.randn(3, 2, 8), nn.Transformer.generate_square_subsequent_mask(3)
    assert halfpeak.diagnose(model, lambda: model(x, mask).mean(), level="O2").where is None
    hook = model.linear2.register_forward_hook(lambda m, i, output: output * 1e9)
    found = halfpeak.diagnose(model, lambda: model(x, mask).mean(), level="O2")
    assert (found.where, found.module, found.reason) == ("forward", "linear2", "overflow")
    hook.remove()


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)


def test_an_infinity_that_is_in_float32_too_and_does_no_harm_is_not_blamed() -> None:
    model = nn.Sequential(Infinite(), nn.Hardtanh(), nn.Linear(4, 1))
    nn.init.constant_(model[2].weight, 0.5)
    assert halfpeak.diagnose(model, lambda: model(torch.ones(2, 4)).mean() / 256, level="O2").where is None
    model[2].register_forward_hook(lambda m, i, output: output * 1e9)
    found = halfpeak.diagnose(model, lambda: model(torch.ones(2, 4)).mean() / 256, level="O2")
    assert (found.where, found.module, found.reason) == ("forward", "2", "overflow")


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.mT + mask).softmax(-1) @ x


@pytest.mark.parametrize("inner", [False, True])
def test_a_row_that_is_masked_as_a_whole(inner: bool) -> None:
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, torch.full((3, 3), -torch.inf))

    model = Masking() if inner else Attention()
    x = torch.randn(3, 8, requires_grad=True)
    given = (x,) if inner else (x, torch.full((3, 3), -torch.inf))
    found = halfpeak.diagnose(model, lambda: model(*given).mean())
    expected = ("forward", "", "attention.input[1]") if inner else ("input", "", "input[1]")
    assert (found.where, found.module, found.tensor) == expected
    assert found.reason == "inf"
    assert inner or "torch.finfo(torch.float32).min" in found.suggestion


class Steep(torch.autograd.Function):
    """The identity, whose backward pass multiplies the gradient by ``slope``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.slope, None


@pytest.mark.parametrize(
    ("level", "slope", "scale"), [("O2", 2.0**10, 512.0), ("O1", 2.0**10, 512.0), ("O2", 2.0**50, None)]
)
def test_an_overflow_in_the_backward_pass_alone(level: str, slope: float, scale: float | None) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x, slope)

    model = nn.Sequential(nn.Linear(1, 1), Part(), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.9)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    found = halfpeak.diagnose(engine, lambda: model(torch.ones(1, 1)).float().sum() / 8)
    assert (found.where, found.module, found.tensor) == ("backward", "1", "grad_input[0]")
    assert (found.reason, found.largest_scale) == ("overflow", scale)


def test_advice_is_such_that_the_front_end_can_follow_it() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(first, last)
    nn.init.constant_(first.weight, 1.0)
    nn.init.constant_(last.weight, 5e4)
    wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")

    def loss(factor: float) -> Tensor:
        with wrapper.optim_context(model):
            return model(torch.ones(2, 4)).float().mean() * factor

    found = halfpeak.diagnose(_seen(wrapper, model), lambda: loss(1.0))
    assert (found.where, found.module) == ("forward", "1")
    assert found.suggestion.endswith(
        """Compute '1' in float32, or go over to halfpeak.prepare(..., keep_fp32=["1"]), or use bfloat16."""
    )
    nn.init.constant_(last.weight, 1.0)
    found = halfpeak.diagnose(model, lambda: loss(1e7))
    assert found.where == "backward"
    assert found.largest_scale is not None
    assert found.largest_scale < 1
    assert "take a mean in the place of a sum" in found.suggestion


def test_only_what_overflowed_is_marked() -> None:
    """Not the gradient of the output, although autograd transposes the gradient of the weight."""
    model = nn.Linear(4, 1)
    found = halfpeak.diagnose(model, lambda: model(torch.full((2, 4), 1e3)).mean() / 100, level="O2")
    assert (found.where, found.tensor) == ("backward", "weight.grad")
    assert [line.split()[1] for line in str(found).splitlines() if line.startswith(">")] == ["weight.grad"]


def _seen(wrapper: AmpOptimWrapper, model: nn.Module) -> nn.Module:
    with wrapper.optim_context(model):
        return model


def test_the_report_is_a_table_a_page_and_json(tmp_path: Path) -> None:
    model = BUILDS["plain"][0]()
    found = halfpeak.diagnose(model, lambda: model(torch.ones(2, 4) * 3).mean(), level="O2")
    table = str(found).splitlines()
    (marked,) = [line for line in table if line.startswith(">")]
    assert marked.split()[1:3] == ["output[0]", "float16"]
    assert "inf" in marked
    assert found.suggestion.endswith('Use bfloat16 ("O5").')
    cause = next(frame for frame in found.frames if frame.is_cause)
    inputs = model.first(torch.ones(2, 4) * 3).abs()
    assert cause.tensors["input[0]"].largest == pytest.approx(inputs.max().item(), rel=2e-3)
    assert cause.tensors["output[0]"].posinf
    assert found.value == pytest.approx(model.part(inputs).max().item(), rel=2e-3)
    found.save(tmp_path / "diagnosis.html")
    data = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (data["where"], data["module"], data["frames"][0]["module"]) == ("forward", "part", "first")
    page = (tmp_path / "diagnosis.html").read_text()
    assert page.count("<svg") == 1
    assert page.count('class="bad"') >= 1
    assert "http" not in page


@pytest.mark.parametrize(
    ("run", "closure", "message"),
    [
        (3, lambda: None, "int is neither an engine nor a module"),
        (nn.Linear(1, 1), torch.ones(()), "Tensor is no closure"),
        (nn.Linear(1, 1), lambda: None, "the closure returned None"),
        (nn.Linear(1, 1), lambda: torch.ones(2), r"shape \(2,\); it must return the loss"),
    ],
)
def test_what_cannot_be_replayed_is_refused(run: Any, closure: Any, message: str) -> None:
    with pytest.raises(halfpeak.ConfigTypeError, match=message):
        halfpeak.diagnose(run, closure)


def test_the_engine_takes_no_step_in_a_replay() -> None:
    model = make_net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    with pytest.raises(halfpeak.OrderError, match="return the loss"):
        halfpeak.diagnose(engine, lambda: engine.backward(model(make_batch(0)[0]).mean()))  # type: ignore[arg-type,return-value]
