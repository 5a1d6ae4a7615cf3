"""Averages of weights (EMA, SWA): ``halfpeak.AveragedModel`` at every level and front end, and what other ways do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer, swa_utils

import halfpeak
from halfpeak import AveragedModel, fused
from laws.drivers import DRIVERS, Case
from support.accelerator import Device, accelerator, on_device
from support.averages import Exact
from support.nets import LEVELS, MASTERED, OPTIMIZERS, PURE, STORED, make_batch, make_net
from support.snapshot import values
from support.states import same

EMA = swa_utils.get_ema_multi_avg_fn(0.9)
HALF_WEIGHTS = tuple(level for level in LEVELS if STORED[level] is not torch.float32)
FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "FusedAdamW": lambda p: fused.FusedAdamW(p, lr=1e-3, eps=1e-4),
    "remainder": lambda p: fused.FusedAdamW(p, lr=1e-3, eps=1e-4, master="remainder"),
    "remainder8": lambda p: fused.FusedAdamW(p, lr=1e-3, eps=1e-4, master="remainder8"),
}


def prepared(
    level: str, optimizer: str = "adamw", net: nn.Module | None = None, **options: Any
) -> halfpeak.Engine:
    net = make_net() if net is None else net
    make = {**OPTIMIZERS, **FUSED}[optimizer]
    return halfpeak.prepare(
        net, make(net.parameters()), halfpeak.LEVELS[level].replace(loss_scale=64.0), **options
    )


def train(engine: halfpeak.Engine, number: int) -> halfpeak.StepResult:
    x, y = make_batch(number)
    with engine.forward():
        loss = mse_loss(engine.model(x).float(), y)
    engine.backward(loss)
    return engine.step()


def parameters_of(engine: halfpeak.Engine) -> dict[str, Tensor]:
    state = engine.model.state_dict()
    return {name: state[name] for name, _ in engine.model.named_parameters()}


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and same(ours.values(), theirs.values())


# --- the averages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*((level, "adamw") for level in LEVELS), ("O2", "FusedAdamW"), *(("O5", name) for name in FUSED)],
)
def test_it_is_as_close_to_exact_as_in_float32(level: str, optimizer: str) -> None:
    """Half an update of decay 0.999 is lost in float16, and all of it in bfloat16; float32 has an error of 1e-6."""
    before = make_net()
    averages = [AveragedModel(before, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))]
    engine = prepared(level, optimizer, before)
    averages.append(AveragedModel(engine.model, avg_fn=swa_utils.get_ema_avg_fn(0.999)))
    exact = Exact(0.999)
    for number in range(200):
        train(engine, number)
        exact.update(parameters_of(engine))
        for averaged in averages:
            averaged.update_parameters(engine.model)
    assert [exact.distance(dict(averaged.module.named_parameters())) < 1e-5 for averaged in averages] == [
        True,
        True,
    ]
    assert exact.distance(dict(engine.model.named_parameters())) > 1e-3


@pytest.mark.parametrize(
    ("driver", "level"), [(name, level) for name, one in DRIVERS.items() for level in one.levels]
)
def test_every_front_end(driver: str, level: str) -> None:
    """Made before or after the front end has prepared the model, it averages what the optimizer steps."""
    made: list[AveragedModel] = []

    def make(seed: int) -> nn.Module:
        net = make_net(seed)
        made.append(AveragedModel(net, multi_avg_fn=EMA))
        return net

    run = Case(driver=driver, level=level, make_net=make).run()
    run.train(0)
    made.append(AveragedModel(run.net, multi_avg_fn=EMA))
    exact = Exact(0.9)
    for number in range(1, 6):
        run.train(number)
        stepped = [main for group in run.optimizer.param_groups for main in group["params"]]
        exact.update(
            {name: main.float() for (name, _), main in zip(run.net.named_parameters(), stepped, strict=True)}
        )
        for averaged in made:
            averaged.update_parameters(run.net)
    first, second = made
    assert exact.distance(dict(first.module.named_parameters())) < 1e-6
    assert equal(first, second)
    x = make_batch(9)[0]
    assert torch.equal(first.eval()(x), second.eval()(x))
    run.end()


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("avg", [{}, {"avg_fn": swa_utils.get_ema_avg_fn(0.9)}, {"multi_avg_fn": EMA}])
def test_in_float32_it_is_torchs(avg: dict[str, Any], use_buffers: bool) -> None:
    engine = prepared("O0")
    ours, theirs = (
        kind(engine.model, use_buffers=use_buffers, **avg)
        for kind in (AveragedModel, swa_utils.AveragedModel)
    )
    assert isinstance(ours, swa_utils.AveragedModel)
    for number in range(4):
        train(engine, number)
        for averaged in (ours, theirs):
            averaged.update_parameters(engine.model)
    mine, state = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == state.keys()
    for name, value in state.items():
        if "num_batches" not in name:  # torch averages whole numbers, and rounds them down
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-6 if not avg else 0)
    assert mine["module.1.num_batches_tracked"] == 4
    ours.load_state_dict(state)


@pytest.mark.parametrize("level", LEVELS)
def test_buffers_are_copied_or_averaged(level: str) -> None:
    engine = prepared(level)
    copied = AveragedModel(engine.model, multi_avg_fn=EMA)
    averaged = AveragedModel(engine.model, multi_avg_fn=EMA, use_buffers=True)
    exact = Exact(0.9)
    for number in range(4):
        train(engine, number)
        exact.update(dict(engine.model[1].named_buffers()))  # type: ignore[index,operator]
        for one in (copied, averaged):
            one.update_parameters(engine.model)
    now = dict(engine.model.named_buffers())
    assert same(copied.module.buffers(), now.values())
    torch.testing.assert_close(
        averaged.module[1].running_mean.double(), exact.average["running_mean"], rtol=0, atol=1e-6
    )  # type: ignore[index]
    assert averaged.module[1].num_batches_tracked == 4  # type: ignore[index]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_weights_that_user_code_has_written_are_averaged(level: str) -> None:
    engine = prepared(level)
    averaged = AveragedModel(engine.model)
    train(engine, 0)
    with torch.no_grad():
        engine.model[4].weight.clamp_(-0.1, 0.1)  # type: ignore[index,union-attr,operator]
    averaged.update_parameters(engine.model)
    written = averaged.module[4].weight  # type: ignore[index]
    assert float(written.detach().abs().max()) == float(torch.tensor(0.1).to(STORED[level]))
    assert torch.equal(written, engine.model.state_dict()["4.weight"])


def test_tied_and_frozen_weights_and_those_of_two_engines() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.out.weight = self.into.weight
            self.other.bias.requires_grad_(False)

    net = Net()
    engines = [
        halfpeak.prepare(part, torch.optim.SGD(part.parameters(), lr=0.1), level)
        for part, level in ((nn.ModuleList([net.into, net.out]), "O5"), (net.other, "O2"))
    ]
    averaged: Any = AveragedModel(net)
    with torch.no_grad():
        for engine in engines:
            for main in engine.pairs.masters:
                main.add_(1e-6)
    averaged.update_parameters(net)
    assert averaged.module.out.weight is averaged.module.into.weight
    assert torch.equal(averaged.module.into.weight, engines[0].pairs.main_of(net.into.weight))
    assert torch.equal(averaged.module.other.bias, engines[1].pairs.main_of(net.other.bias))
    assert not averaged.module.other.bias.requires_grad


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_copy_is_a_plain_float32_module(level: str) -> None:
    engine = prepared(level)
    with engine.forward():
        engine.model(make_batch(0)[0])
    averaged = AveragedModel(engine.model).eval()
    assert {t.dtype for t in averaged.module.state_dict().values()} == {torch.float32, torch.int64}
    plain = make_net().eval()
    plain.load_state_dict(averaged.module.state_dict())
    x = make_batch(1)[0]
    assert torch.equal(averaged(x), plain(x))
    again = pickle.loads(pickle.dumps(averaged.module))
    assert "halfpeak" not in str(vars(again))
    assert torch.equal(again(x), plain(x))


def test_the_copy_of_a_model_with_kept_and_float8_layers() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 3))
    plain = copy.deepcopy(net)
    engine = halfpeak.prepare(
        net, OPTIMIZERS["sgd"](net.parameters()), "O5", float8="tensorwise", keep_fp32=["3"]
    )
    averaged = AveragedModel(net)
    assert [type(layer) for layer in averaged.module] == [type(layer) for layer in plain]  # type: ignore[arg-type]
    x = torch.randn(4, 16)
    assert torch.equal(averaged(x), plain(x))  # masters start from the exact values
    assert type(engine.model[0]) is not nn.Linear  # type: ignore[index]


@pytest.mark.parametrize("how", ["copy", "swap"])
@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*((level, "adamw") for level in LEVELS), ("O5", "remainder"), ("O2", "remainder"), ("O2", "FusedAdamW")],
)
def test_training_goes_on_with_every_digit(level: str, optimizer: str, how: str) -> None:
    plain = prepared(level, optimizer)
    for number in range(6):
        train(plain, number)
    engine = prepared(level, optimizer)
    averaged = AveragedModel(engine.model, multi_avg_fn=EMA)
    for number in range(6):
        train(engine, number)
        averaged.update_parameters(engine.model)
        engine.model.eval()
        with torch.no_grad(), engine.forward():
            if how == "copy":
                averaged.eval()(make_batch(0)[0])
            else:
                weights = copy.deepcopy(engine.model.state_dict())
                engine.model.load_state_dict(averaged.module.state_dict())
                if level not in PURE:
                    assert equal(engine.model, averaged.module)
                engine.model(make_batch(0)[0])
                engine.model.load_state_dict(weights)
        engine.model.train()
    assert values(engine.model, *engine.optimizers) == values(plain.model, *plain.optimizers)


def test_update_bn_reads_the_copy() -> None:
    engine = prepared("O5")
    averaged = AveragedModel(engine.model)
    averaged.update_parameters(engine.model)
    swa_utils.update_bn([make_batch(number)[0] for number in range(3)], averaged)
    assert averaged.module[1].num_batches_tracked == 3  # type: ignore[index]
    assert engine.model[1].num_batches_tracked == 0  # type: ignore[index,union-attr]


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "optimizer"), [*((level, "adamw") for level in LEVELS), ("O5", "remainder")]
)
def test_a_resume_is_exact(level: str, optimizer: str, tmp_path: Path) -> None:
    def build() -> tuple[halfpeak.Engine, AveragedModel]:
        engine = prepared(level, optimizer)
        return engine, AveragedModel(engine.model, multi_avg_fn=EMA, use_buffers=True)

    def go_on(engine: halfpeak.Engine, averaged: AveragedModel, numbers: range) -> None:
        for number in numbers:
            train(engine, number)
            averaged.update_parameters(engine.model)

    engine, averaged = build()
    go_on(engine, averaged, range(4))
    torch.save({"engine": engine.state_dict(), "averaged": averaged.state_dict()}, tmp_path / "run.pt")
    go_on(engine, averaged, range(4, 8))
    resumed, again = build()
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    resumed.load_state_dict(state["engine"])
    again.load_state_dict(state["averaged"])
    go_on(resumed, again, range(4, 8))
    assert equal(again, averaged)
    assert again.n_averaged == 8


# --- the device -------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with accelerator(monkeypatch) as found:
        yield found


AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": EMA, "use_buffers": True},
    "EMA, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize(
    ("level", "optimizer"), [*((level, "adamw-fused") for level in LEVELS), ("O5", "remainder")]
)
def test_an_update_does_not_wait(device: Device, level: str, optimizer: str, kind: str) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    model = on_device(net)
    device.parameters = list(model.parameters())
    engine = prepared(
        level, optimizer, model, op_lists="apex"
    )  # torch.autocast is off where torch finds no GPU
    averaged = AveragedModel(model, **AVERAGES[kind])
    for _ in range(2):
        with engine.forward():
            loss = model(torch.empty(3, 6, device="cuda")).float().square().mean()
        engine.backward(loss)
        engine.step()
    device.waits.clear()
    for _ in range(3):
        averaged.update_parameters(model)
    assert device.waits == []
    assert {p.device.type for p in averaged.module.parameters()} == {"cuda"}


def test_averages_on_another_device_or_in_another_dtype() -> None:
    engine = prepared("O5")
    averaged = AveragedModel(engine.model, device=torch.device("cpu"), multi_avg_fn=EMA).double()
    exact = Exact(0.9)
    for number in range(4):
        train(engine, number)
        averaged.update_parameters(engine.model)
        exact.update(parameters_of(engine))
    assert exact.distance(dict(averaged.module.named_parameters())) < 1e-15


def test_the_count_stays_on_the_host() -> None:
    with torch.device("meta"):
        averaged = AveragedModel(make_net())
    assert [one.to("meta").n_averaged.device.type for one in (averaged, AveragedModel(make_net()))] == [
        "cpu",
        "cpu",
    ]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_two_functions_are_refused() -> None:
    with pytest.raises(halfpeak.ConfigError, match="avg_fn or multi_avg_fn"):
        AveragedModel(make_net(), avg_fn=swa_utils.get_ema_avg_fn(), multi_avg_fn=EMA)


@pytest.mark.parametrize("other", [nn.Linear(6, 8), nn.Sequential(nn.Linear(6, 9), *make_net()[1:])])
def test_another_model_is_refused(other: nn.Module) -> None:
    averaged = AveragedModel(make_net())
    before = copy.deepcopy(averaged.state_dict())
    with pytest.raises(halfpeak.ParameterError, match="pass the model that"):
        averaged.update_parameters(other)
    assert same(averaged.state_dict().values(), before.values())


# --- other ways: the table of docs/evaluation.md ----------------------------------------------------------------------


def torchs(net: nn.Module, kind: str) -> swa_utils.AveragedModel:
    options: dict[str, Any] = {
        "lists": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)},
        "one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.999)},
    }[kind]
    return swa_utils.AveragedModel(net, **options)


@pytest.mark.parametrize("kind", ["lists", "one by one"])
@pytest.mark.parametrize("level", LEVELS)
def test_torchs_own_class(level: str, kind: str) -> None:
    """Right where weights are float32. Else torch refuses lists, and one by one it averages rounded weights."""
    net = make_net()
    averaged = torchs(net, kind)
    engine = prepared(level, net=net)
    exact = Exact(0.999)
    for number in range(20):
        train(engine, number)
        exact.update(parameters_of(engine))
        if level in HALF_WEIGHTS and kind == "lists" and number:
            with pytest.raises(RuntimeError, match=r"same dtype|expected dtype"):
                averaged.update_parameters(net)
            return
        averaged.update_parameters(net)
    assert (exact.distance(dict(averaged.module.named_parameters())) < 1e-5) is (level not in MASTERED)


def test_our_copy_of_a_prepared_model_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    AveragedModel(prepared("O5").model)
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


class ByList:
    """An average in a list of tensors, which changes places with the weights through ``.data``, as in diffusers."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.averages = [tensor.detach().clone() for tensor in tensors]

    def update(self, tensors: list[Tensor]) -> None:
        torch._foreach_lerp_(self.averages, [tensor.detach() for tensor in tensors], 0.001)

    @contextmanager
    def inside(self, net: nn.Module) -> Iterator[None]:
        before = [parameter.detach().clone() for parameter in net.parameters()]
        write_data(net, self.averages)
        yield
        write_data(net, before)


def write_data(net: nn.Module, tensors: list[Tensor]) -> None:
    for parameter, value in zip(net.parameters(), tensors, strict=True):
        parameter.data.copy_(value)


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*((level, "adamw") for level in LEVELS), ("O5", "remainder"), ("O2", "FusedAdamW")],
)
def test_swaps_through_data(level: str, optimizer: str) -> None:
    """A list of ``engine.main_params()`` averages what the optimizer steps; swaps evaluate it rounded, and are undone."""
    plain, engine = prepared(level, optimizer), prepared(level, optimizer)
    net, exact = engine.model.eval(), Exact(0.999)
    plain.model.eval()
    average = ByList(engine.main_params())
    exact.update(parameters_of(engine))
    x = make_batch(0)[0]
    for number in range(20):
        train(plain, number)
        train(engine, number)
        average.update(engine.main_params())
        exact.update(parameters_of(engine))
        with average.inside(net), torch.no_grad(), engine.forward():
            output = net(x).float()
            served = make_net().eval()
            served.load_state_dict(net.state_dict())
        torch.testing.assert_close(output, served(x), rtol=0, atol=0.02)
    assert values(net, *engine.optimizers) == values(plain.model, *plain.optimizers)
    pairs = zip(average.averages, exact.average.values(), strict=True)
    distance = max(float((mean - other).abs().max()) for mean, other in pairs)
    # Neither O3 nor an optimizer with remainders has masters that could be averaged.
    assert (distance < 1e-5) is (level != "O3" and optimizer != "remainder")


def test_a_decay_in_the_place_of_the_device_is_refused() -> None:
    with pytest.raises(halfpeak.ConfigTypeError, match=r"get_ema_multi_avg_fn\(0\.99\)"):
        halfpeak.AveragedModel(nn.Linear(2, 2), 0.99)  # type: ignore[arg-type]


def test_only_a_module_is_averaged() -> None:
    engine = halfpeak.prepare(nn.Linear(2, 2), [], "O0")
    with pytest.raises(halfpeak.ConfigTypeError, match="Engine is not a torch"):
        halfpeak.AveragedModel(engine)  # type: ignore[arg-type]
