"""timm's loss-scaler call: halfpeak's LossScaler over an engine, and timm's own scalers over halfpeak's GradScaler and amp."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.shim
from halfpeak.integrations.timm import LossScaler
from integrations.plain_loop import SCALE, adamw, assert_same, batches, plain_run, weights
from support.nets import LEVELS, MASTERED, make_batch, make_net

MODULES = (
    *("timm.utils.agc", "timm.utils.clip_grad", "timm.utils.cuda", "timm.utils.model_ema"),
    "timm.optim.lookahead",
)


@pytest.fixture
def timm_utils() -> Iterator[SimpleNamespace]:
    """timm's own files, loaded by path: ``import timm`` needs torchvision, and these files need only torch."""
    try:
        files = metadata.files("timm")
    except metadata.PackageNotFoundError:
        pytest.skip("timm is not installed")
    assert files is not None
    before = dict(sys.modules)
    halfpeak.shim.install()  # timm's ApexScaler imports apex.amp
    for package in ("timm", "timm.utils", "timm.optim"):
        sys.modules[package] = ModuleType(package)
    loaded: dict[str, Any] = {}
    for name in MODULES:
        path = next(file.locate() for file in files if str(file) == name.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = loaded[name.rpartition(".")[2]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    yield SimpleNamespace(**loaded)
    halfpeak.shim.uninstall()
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "timm":
            del sys.modules[name]


def prepared(level: str) -> SimpleNamespace:
    net = make_net()
    optimizer = adamw(net.parameters())
    engine = halfpeak.prepare(net, optimizer, level, scale=SCALE)
    return SimpleNamespace(net=net, optimizer=optimizer, engine=engine, loss_scaler=LossScaler(engine))


def train(run: SimpleNamespace, start: int = 0, stop: int = 8, accumulate: int = 1, **clip: Any) -> None:
    """The inner loop of timm's train_one_epoch."""
    for number, (x, y) in enumerate(batches()[start:stop]):
        need_update = (number + 1) % accumulate == 0
        with run.engine.forward():
            loss = nn.functional.mse_loss(run.net(x).float(), y) / accumulate
        run.loss_scaler(loss, run.optimizer, parameters=run.net.parameters(), need_update=need_update, **clip)
        if need_update:
            run.optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_by_value_is_the_engines_bit_for_bit(level: str) -> None:
    """``tests/laws`` covers clipping by norm and no clipping."""
    run = prepared(level)
    train(run, clip_grad=1e-3, clip_mode="value")
    assert_same(
        weights(run.net), plain_run(level, clip=lambda p: nn.utils.clip_grad_value_(list(p), 1e-3))[0]
    )
    assert (int(run.engine.num_steps), int(run.engine.num_skipped)) == (6, 2)


def test_a_model_may_be_loaded_after_the_loss_scaler() -> None:
    """A skipped first step restores the statistics of the file, not those that the new model was made with."""
    half = prepared("O2")
    train(half, stop=4)
    resumed = prepared("O2")
    resumed.loss_scaler.load_state_dict(half.loss_scaler.state_dict())
    resumed.net.load_state_dict(weights(half.net))
    train(resumed, start=4, stop=5)
    assert not resumed.loss_scaler.last.stepped()
    assert_same(weights(resumed.net), weights(half.net))


def test_adaptive_clipping_is_timms_own(timm_utils: SimpleNamespace) -> None:
    run = prepared("O2")
    train(run, clip_grad=0.01, clip_mode="agc")
    expected = plain_run("O2", clip=lambda p: timm_utils.agc.adaptive_clip_grad(list(p), 0.01))[0]
    assert_same(weights(run.net), expected)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_lookahead_is_its_rule_by_hand(level: str, resumed: bool, timm_utils: SimpleNamespace) -> None:
    """Lookahead calls no ``Optimizer.__init__``, steps another optimizer, writes parameters and counts taken steps."""

    def build() -> Any:
        net = make_net()
        optimizer = timm_utils.lookahead.Lookahead(adamw(net.parameters()), alpha=0.5, k=3)
        return halfpeak.prepare(net, optimizer, level, scale=SCALE)

    net = make_net()
    by_hand, engine = halfpeak.prepare(net, adamw(net.parameters()), level, scale=SCALE), build()
    slow: list[torch.Tensor] = []
    for x, y in batches():
        results = []
        for one in (by_hand, engine):
            with one.forward():
                loss = nn.functional.mse_loss(one.model(x).float(), y)
            one.backward(loss)
            results.append(one.step().stepped())
        assert results[0] == results[1]
        if results[0] and int(by_hand.num_steps) % 3 == 0:
            with torch.no_grad():
                fast = list(by_hand.main_params())
                slow = slow or [weight.clone() for weight in fast]
                for kept, weight in zip(slow, fast, strict=True):
                    weight.copy_(kept.add_(weight - kept, alpha=0.5))
        if resumed:
            state, engine = engine.state_dict(), build()
            engine.load_state_dict(state)
    with by_hand.forward():
        assert_same(weights(engine.model), weights(net))
    assert by_hand.num_steps == 6


def test_the_call_is_timms(timm_utils: SimpleNamespace) -> None:
    import inspect

    for theirs in (timm_utils.cuda.NativeScaler, timm_utils.cuda.ApexScaler):
        mine = inspect.signature(LossScaler.__call__).parameters
        given = inspect.signature(theirs.__call__).parameters
        assert list(mine) == list(given)
        assert all(mine[name].default == given[name].default for name in given)


def test_timms_native_scaler_over_ours_is_as_over_torchs(timm_utils: SimpleNamespace) -> None:
    results: list[list[Any]] = []
    for make in (torch.amp.GradScaler, halfpeak.GradScaler):
        scaler = timm_utils.cuda.NativeScaler("cpu")
        scaler._scaler = make("cpu", init_scale=2.0**10, growth_interval=2)
        net = make_net()
        optimizer = adamw(net.parameters())
        for number in range(6):
            x, y = make_batch(number)
            loss = nn.functional.mse_loss(net(x), y) * (torch.inf if number == 3 else 1.0)
            scaler(loss, optimizer, clip_grad=0.05, parameters=list(net.parameters()))
            optimizer.zero_grad()
        results.append([scaler.state_dict(), [value.tolist() for value in net.state_dict().values()]])
    assert results[0] == results[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_timms_apex_scaler_over_our_amp_is_the_engine_bit_for_bit(
    timm_utils: SimpleNamespace, level: str
) -> None:
    """With an overflow, and a state that is saved and loaded in the middle."""
    amp, net = timm_utils.cuda.amp, make_net()
    model, optimizer = amp.initialize(net, adamw(net.parameters()), opt_level=level, verbosity=0, norms="all")
    scaler = timm_utils.cuda.ApexScaler()
    for number, (x, y) in enumerate(batches()):
        if number == 5:
            saved = scaler.state_dict()
            scaler.load_state_dict(saved)
        loss = nn.functional.mse_loss(model(x).float(), y)
        scaler(loss, optimizer, clip_grad=0.01, parameters=model.parameters())
        optimizer.zero_grad()
    assert saved["loss_scaler0"]["loss_scale"] < 2.0**16
    found = weights(net)
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    clipped = plain_run(
        level,
        clip=lambda p: nn.utils.clip_grad_norm_(list(p), 0.01),
        scale=halfpeak.ScaleConfig(),
        op_lists="apex",
    )
    assert_same(found, clipped[0])


def test_what_cannot_be_is_said() -> None:
    run = prepared("O2")
    with pytest.raises(halfpeak.ConfigError, match="clip_mode='median'"):
        run.loss_scaler(torch.zeros(()), run.optimizer, clip_grad=1.0, clip_mode="median")
    with pytest.raises(halfpeak.OrderError, match="was not prepared"):
        run.loss_scaler(torch.zeros(()), adamw(make_net().parameters()))
    with pytest.raises(halfpeak.StateError):
        run.loss_scaler.load_state_dict({"scale": 1.0})
    with pytest.raises(halfpeak.ConfigError, match="is not an engine"):
        LossScaler(run.optimizer)  # type: ignore[arg-type]
    for option, value in {"accumulate": 2, "clip": 1.0}.items():
        net = make_net()
        engine = halfpeak.prepare(net, adamw(net.parameters()), **{option: value})
        with pytest.raises(halfpeak.ConfigError, match=f"leave {option}= out of halfpeak.prepare"):
            LossScaler(engine)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("made", ["before", "after", "before, without buffers"])
@pytest.mark.parametrize("level", LEVELS)
def test_model_ema_averages_what_the_optimizer_steps(
    timm_utils: SimpleNamespace, level: str, made: str, foreach: bool
) -> None:
    """It reads ``state_dict``, but the parameters themselves with ``exclude_buffers``: then rounded ones at O2 and O5."""
    options = {"decay": 0.9, "foreach": foreach, "exclude_buffers": made.endswith("buffers")}
    net = make_net()
    if made != "after":
        ema = timm_utils.model_ema.ModelEmaV3(net, **options)
    engine = halfpeak.prepare(net, adamw(net.parameters()), halfpeak.LEVELS[level].replace(loss_scale=64.0))
    if made == "after":
        ema = timm_utils.model_ema.ModelEmaV3(halfpeak.AveragedModel(net).module, **options)
    loss_scaler = LossScaler(engine)
    exact = {name: value.double() for name, value in ema.module.state_dict().items()}
    for number in range(20):
        x, y = make_batch(number)
        with engine.forward():
            loss = nn.functional.mse_loss(net(x).float(), y)
        loss_scaler(loss, engine.optimizers[0])
        engine.optimizers[0].zero_grad()
        ema.update(net)
        for name, value in net.state_dict().items():
            exact[name] = 0.9 * exact[name] + 0.1 * value.double()
    distance = max(
        float((value.detach() - exact[name]).abs().max()) for name, value in ema.module.named_parameters()
    )
    rounds = level in MASTERED and made.endswith("buffers")
    assert (distance < 1e-6) is not rounds
    x = make_batch(0)[0]
    served = make_net().eval()
    served.load_state_dict(ema.module.state_dict())
    assert torch.equal(ema(x), served(x))
