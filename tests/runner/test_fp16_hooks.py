"""Fp16OptimizerHook and its accumulating form against apex's O2, torch.amp and mmcv 1.7.2, bit for bit where possible."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, StateError
from halfpeak.runner.fp16_decorators import auto_fp16
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from halfpeak.runner.hooks.small import ClosureHook
from halfpeak.runner.loop.runners import EpochBasedRunner
from halfpeak.runner.loss_scaler import MMCV_RULE, TORCH_RULE
from runner.loops import make_loop, run, step
from runner.oracle import cases
from support.nets import make_batch, make_net
from support.snapshot import values
from support.states import same, through_a_file

MMCV: dict[str, Any] = json.loads((Path(__file__).parent / "oracle" / "mmcv.json").read_text())
KINDS: dict[str, Callable[..., Any]] = {
    "Fp16OptimizerHook": Fp16OptimizerHook,
    "GradientCumulativeFp16OptimizerHook": GradientCumulativeFp16OptimizerHook,
}


@pytest.mark.parametrize("name", cases.FP16_RUNS)
def test_runs_recorded_of_mmcv(name: str) -> None:
    """Against mmcv's own master weights; mmcv sums the gradients of a window in half, the hook in float32."""
    kind, options, overflows = cases.FP16_RUNS[name]
    hook = KINDS[kind](**options, mode="master")
    found = cases.train(hook, cases.make_model(auto_fp16), overflows=overflows)
    recorded = MMCV["fp16 runs"][name]
    accumulated = "accumulated" in name
    near = {"rel": 1e-2, "abs": 1e-3} if accumulated else {"rel": 1e-4, "abs": 1e-5}
    for ours, theirs in zip(found["parameters"], recorded["parameters"], strict=True):
        assert ours == pytest.approx(theirs, **near)
    assert found["scales"] == recorded["scales"]
    for (ours, count), (theirs, expected) in zip(found["logged"], recorded["logged"], strict=True):
        assert count == expected
        assert ours == pytest.approx(theirs, rel=1e-3)
    warned = [line for line in found["lines"] if "overflow" in line]
    if not accumulated:  # accumulating, mmcv prints the old scale
        assert warned == [line for line in recorded["lines"] if "overflow" in line]
    else:
        assert warned == ["Check overflow, downscale loss scale to 128.0"]


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.fp16_enabled = False

    @auto_fp16(apply_to=("x",))
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def make_plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def test_the_default_is_the_five_steps_that_mmcv_documents() -> None:
    """Scale, backward in half, copy to float32, unscale and update, copy back: a half model, which has float32 masters."""
    assert Fp16OptimizerHook().mode == GradientCumulativeFp16OptimizerHook(4).mode == "master"
    with pytest.raises(TypeError):
        GradientCumulativeFp16OptimizerHook(4, None)  # type: ignore[call-arg]  # only the window is positional
    loop = run(make_loop(make_net()), Fp16OptimizerHook(), range(3))
    masters = [p for group in loop.optimizer.param_groups for p in group["params"]]
    assert [loop.model[i].weight.dtype for i in (0, 1, 3)] == [torch.float16, torch.float32, torch.float32]
    assert all(master.dtype is torch.float32 for master in masters)
    for low, master in zip(loop.model.parameters(), masters, strict=True):
        assert torch.equal(low, master.to(low.dtype))
    assert loop.model(make_batch(0)[0]).dtype is torch.float32
    assert all(value.dtype is not torch.float16 for value in loop.model.state_dict().values())


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_a_decorated_model_computes_in_the_low_dtype(mode: Any) -> None:
    seen: list[torch.dtype] = []
    net = Decorated()
    net.last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run(make_loop(net), Fp16OptimizerHook(mode=mode), range(2))
    assert seen == [torch.float16] * 2


class Written(nn.Module):
    """A model written for torch.autocast, without casts for low-precision weights."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.criterion, self.how = make_plain(), nn.MSELoss(), how

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.net(x) if y is None else mse_loss(self.net(x), y)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        x, y = data
        match self.how:
            case "forward":
                loss = mse_loss(self(x), y)
            case "loss in forward":
                loss = self(x, y)
            case "without forward":
                loss = self.criterion(self.net(x), y)
            case "a function of weights":
                loss = mse_loss(nn.functional.linear(self.net[:3](x), self.net[3].weight), y)
            case _:
                with torch.autocast("cpu", torch.float16):
                    loss = mse_loss(self.net(x), y)
        return {"loss": loss, "log_vars": {"loss": loss.detach()}, "num_samples": len(x)}

    def val_step(self, data: Any, optimizer: Any = None) -> dict[str, Any]:
        return self.train_step(data, optimizer)


WAYS = ["forward", "loss in forward", "without forward", "a function of weights", "own autocast"]


@pytest.mark.parametrize("how", WAYS)
def test_masters_train_models_written_for_autocast(how: str) -> None:
    """They train and validate as with autocast, up to rounding."""
    found: dict[str, Any] = {}
    for mode in ("autocast", "master"):
        model = Written(how)
        made = EpochBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=8)
        made.register_optimizer_hook({"type": "Fp16OptimizerHook", "mode": mode})
        seen: list[torch.dtype] = []
        model.net[0].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        made.run([[make_batch(0)] * 4, [make_batch(0)]], [("train", 1), ("val", 1)])
        assert seen == [torch.float16] * 40
        assert made.steps == 32
        found[mode] = made.log_buffer.val_history["loss"][-1]
    assert found["master"] == pytest.approx(found["autocast"], rel=0.02)
    x, y = make_batch(0)
    assert found["master"] < 0.9 * mse_loss(make_plain()(x), y).item()


def test_autocast_is_as_it_was_where_forward_raises() -> None:
    loop = run(make_loop(make_plain()), Fp16OptimizerHook(), range(1))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="shapes"):
            loop.model(torch.ones(2, 5))
        assert torch.is_autocast_enabled("cpu")


def test_masters_belong_to_their_parameters_whatever_the_order() -> None:
    """mmcv paired masters by position, so an optimizer over some of the parameters trained the wrong ones."""
    net, plain = make_plain(), make_plain()
    loop = make_loop(net)
    loop.optimizer = torch.optim.SGD([net[3].bias, net[0].weight], lr=0.1)
    run(loop, Fp16OptimizerHook(mode="master", loss_scale=1.0), range(3))
    moved = [
        not torch.equal(a.half(), b.half())
        for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True)
    ]
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, did in zip(names, moved, strict=True) if did] == ["0.weight", "3.bias"]


@pytest.mark.parametrize("mode", ["autocast", "master"])
@pytest.mark.parametrize("loss_scale", [512.0, 512, "dynamic"])
def test_the_scale_in_meta(mode: Any, loss_scale: Any) -> None:
    hook = Fp16OptimizerHook(loss_scale=loss_scale, mode=mode)
    loop = make_loop(make_net())
    del loop.meta  # a runner with only the documented attributes
    hook.before_run(loop)
    assert "fp16" not in loop.meta
    step(loop, hook, 0)
    record = loop.meta["fp16"]["loss_scaler"]
    step(loop, hook, 1, overflow=True)
    keys = (
        {"cur_scale", "cur_iter", "mode", "last_overflow_iter", "scale_factor", "scale_window"}
        if mode == "master"
        else {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    )
    assert set(record) == keys
    copied = copy.deepcopy(loop.meta)
    assert type(copied["fp16"]["loss_scaler"]) is dict
    assert through_a_file(loop.meta) == copied
    hook.after_run(loop)
    assert json.loads(json.dumps(loop.meta)) == copied
    assert (
        hook.loss_scaler.loss_scale
        == copied["fp16"]["loss_scaler"]["cur_scale" if mode == "master" else "scale"]
    )


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_states_of_mmcv_and_of_torch_are_restored(mode: Any) -> None:
    rule = {"mode": "dynamic", "scale_factor": 2.0, "scale_window": 1000}
    theirs = {"cur_scale": 128.0, "cur_iter": 9, "last_overflow_iter": 5, **rule}
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    torchs = {"scale": 128.0, "_growth_tracker": 3, **rule}
    for saved in (theirs, torchs):
        for loss_scale, expected in (("dynamic", 128.0), (64.0, 64.0)):
            loop, hook = make_loop(make_net()), Fp16OptimizerHook(loss_scale=loss_scale, mode=mode)
            loop.meta = {"fp16": {"loss_scaler": dict(saved)}}
            hook.before_run(loop)
            assert hook.loss_scaler.loss_scale == expected
            assert loop.meta == {"fp16": {"loss_scaler": saved}}
    loop, hook = make_loop(make_net()), Fp16OptimizerHook(loss_scale="dynamic", mode=mode)
    loop.meta = {"fp16": {"loss_scaler": {"cur_scale": 1.0}}}
    with pytest.raises(StateError, match="missing are 'cur_iter'"):
        hook.before_run(loop)
    hook = run(make_loop(make_net()), Fp16OptimizerHook(loss_scale="dynamic", mode=mode), range(1)).hook
    hook.loss_scaler.load_state_dict(theirs)
    assert hook.loss_scaler.get_scale() == 128.0


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_a_static_scale_skips_too(mode: Any) -> None:
    loop = make_loop(make_net())
    hook = Fp16OptimizerHook(mode=mode)
    run(loop, hook, range(2))
    before = values(loop.model)
    step(loop, hook, 2, overflow=True)
    assert values(loop.model) == before
    assert not loop.step_result.stepped()
    assert loop.handler.lines == ["Check overflow, skip a step at the static loss scale 512.0"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"init_scale": 8.0, "mode": "static"}, {"init": 8.0, "dynamic": False}),
        ({"scale_factor": 4.0}, {"growth": 4.0, "backoff": 0.25}),
        ({"scale_window": 7}, {"interval": 7}),
        ({"growth_factor": 4.0, "backoff_factor": 0.25}, {"growth": 4.0, "backoff": 0.25}),
        ({"growth_interval": 7}, {"interval": 7}),
        ({"patience": 3}, {"patience": 3}),
        ({"init_scale": 2.0**40}, {"init": 2.0**40, "ceiling": 2.0**40}),
        ({"init_scale": 0.25}, {"init": 0.25, "floor": 0.25}),
        ({"enabled": False}, {"init": 1.0, "dynamic": False}),
    ],
)
def test_dicts_of_every_vocabulary(given: dict[str, Any], expected: dict[str, Any]) -> None:
    kept = dict(given)
    for mode, rule in (("autocast", TORCH_RULE), ("master", MMCV_RULE)):
        assert Fp16OptimizerHook(loss_scale="dynamic", mode=mode).loss_scaler.scaler.config == rule  # type: ignore[arg-type]
    assert (TORCH_RULE.floor, MMCV_RULE.floor) == (2.0**-126, 1.0)
    scale = Fp16OptimizerHook(loss_scale=given, mode="master").loss_scaler.scaler.config
    assert {key: getattr(scale, key) for key in expected} == expected
    assert given == kept


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"loss_scale": "512"}, ConfigTypeError, "must be of type float"),
        ({"loss_scale": True}, ConfigTypeError, "must be of type float"),
        ({"loss_scale": None}, ConfigTypeError, "must be of type float"),
        ({"loss_scale": -1.0}, ConfigError, "above zero"),
        ({"loss_scale": {"init_scal": 1.0}}, ConfigTypeError, "did you mean 'init_scale'"),
        ({"loss_scale": {"mode": "fast"}}, ConfigError, "'dynamic' or 'static'"),
        ({"loss_scale": {"enabled": 1}}, ConfigTypeError, "enabled=1"),
        ({"loss_scale": {"scale_window": 0}}, ConfigError, "interval=0"),
        ({"mode": "masters"}, ConfigError, "'autocast'"),
        ({"dtype": "float32"}, ConfigError, "not a low dtype"),
        ({"bucket_size_mb": 0}, ConfigError, "-1"),
        ({"bucket_size_mb": "25"}, ConfigError, "-1"),
        ({"coalesce": "yes"}, ConfigTypeError, "coalesce"),
        ({"distributed": None}, ConfigTypeError, "distributed"),
        ({"detect_anomalous_params": True}, TypeError, "detect_anomalous_params"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments(kind: str, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        KINDS[kind](**options)
    if "loss_scale" in options:
        with pytest.raises(ValueError, match=says):  # what mmcv raised
            KINDS[kind](**options)


class Copies(Fp16OptimizerHook):
    """The bodies of mmcv's two methods, as users copied and changed them."""

    def copy_grads_to_fp32(self, fp16_net: nn.Module, fp32_weights: Any) -> None:
        self.calls = [*getattr(self, "calls", []), "grads"]
        for fp32, fp16 in zip(fp32_weights, fp16_net.parameters(), strict=True):
            if fp16.grad is not None:
                if fp32.grad is None:
                    fp32.grad = fp32.data.new(fp32.size())
                fp32.grad.copy_(fp16.grad)
        fp32_weights[0].grad.mul_(0.5)

    def copy_params_to_fp16(self, fp16_net: nn.Module, fp32_weights: Any) -> None:
        self.calls.append("params")
        for fp16, fp32 in zip(fp16_net.parameters(), fp32_weights, strict=True):
            fp16.data.copy_(fp32.data)
        next(fp16_net.parameters()).data.clamp_(-0.125, 0.125)


def test_overrides_of_the_two_copies_are_called() -> None:
    """Once before and once after each step; what they write is what the optimizer reads, and the forward pass."""
    own, built = (make_loop(make_plain()) for _ in range(2))
    for loop, kind in ((own, Copies), (built, Fp16OptimizerHook)):
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        run(loop, kind(loss_scale=64.0), range(1))
    first, other = (loop.optimizer.param_groups[0]["params"][0] for loop in (own, built))
    start = make_plain()[0].weight
    torch.testing.assert_close(first - start, (other - start) / 2, rtol=0, atol=1e-7)
    for number in range(1, 4):
        step(own, own.hook, number, overflow=number == 2)
        assert own.model[0].weight.abs().max() <= 0.125
    assert own.hook.calls == ["grads", "params"] * 2 + ["grads"] + ["grads", "params"]


class Head(nn.Linear):
    fp16_enabled = False

    @auto_fp16(apply_to=("x",), out_fp32=True)
    def forward(self, x: Tensor) -> Tensor:
        self.computed_in = super().forward(x).dtype
        return super().forward(x)


class Detector(nn.Module):
    """Detector with casts of their own, as in CMT and StreamPETR."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Head(3, 4), Head(4, 2)

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        return {"loss": self.head(self.backbone(data)).square().mean()}


class KeepsHead(Fp16OptimizerHook):
    """As CustomFp16OptimizerHook of CMT with ``custom_fp16=dict(head=False)``."""

    def before_run(self, runner: Any) -> None:
        super().before_run(runner)
        runner.model.head.fp16_enabled = False


def test_a_part_may_stay_in_float32_with_autocast_only() -> None:
    def train(mode: Any) -> Detector:
        model = Detector()
        runner = EpochBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=1)
        runner.register_optimizer_hook(KeepsHead(mode=mode))
        runner.run([torch.ones(2, 4, 3)], [("train", 1)])
        return model

    model = train("autocast")
    assert (model.backbone.computed_in, model.head.computed_in) == (torch.float16, torch.float32)
    with pytest.raises(ConfigError, match=r"fp16_enabled of 'head' is False.*write mode='autocast'"):
        train("master")


class Documented(Fp16OptimizerHook):
    """The steps of mmcv's documentation, written by hand."""

    def after_train_iter(self, runner: Any) -> None:
        runner.model.zero_grad()
        runner.optimizer.zero_grad()
        scale = self.loss_scaler.loss_scale
        (runner.outputs["loss"] * scale).backward()
        weights = [p for group in runner.optimizer.param_groups for p in group["params"]]
        self.copy_grads_to_fp32(runner.model, weights)
        overflow = self.loss_scaler.has_overflow(weights)
        if not overflow:
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.div_(scale)
            self.clip_grads(weights)
            runner.optimizer.step()
            self.copy_params_to_fp16(runner.model, weights)
        self.loss_scaler.update_scale(overflow)
        runner.meta.setdefault("fp16", {})["loss_scaler"] = self.loss_scaler.state_dict()


class OfGradScaler(Fp16OptimizerHook):
    """The steps of mmcv 1.7.2 with today's torch, as users of mmselfsup wrote them."""

    def after_train_iter(self, runner: Any) -> None:
        self.loss_scaler.scale(runner.outputs["loss"]).backward()
        self.loss_scaler.unscale_(runner.optimizer)
        norm = self.clip_grads(runner.model.parameters())
        runner.log_buffer.update({"grad_norm": float(norm)}, runner.outputs["num_samples"])  # type: ignore[arg-type]
        self.loss_scaler.step(runner.optimizer)
        self.loss_scaler.update(self._scale_update_param)
        runner.meta.setdefault("fp16", {})["loss_scaler"] = self.loss_scaler.state_dict()
        runner.model.zero_grad()
        runner.optimizer.zero_grad()


@pytest.mark.parametrize("by_hand", [Documented, OfGradScaler])
@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_the_steps_of_mmcv_may_be_written_by_hand(mode: Any, by_hand: Any) -> None:
    scale = {"init_scale": 64.0, "scale_window": 2}
    options: dict[str, Any] = {"grad_clip": {"max_norm": 0.25}, "loss_scale": scale}
    own, built = (
        run(make_loop(make_net(), "adamw"), kind(**options, mode=mode), range(6), (2,))
        for kind in (by_hand, Fp16OptimizerHook)
    )
    # Batch-norm statistics are not compared: only the hook's own step restores them after an overflow.
    assert same(own.model.parameters(), built.model.parameters())
    assert own.meta["fp16"]["loss_scaler"] == built.hook.loss_scaler.state_dict()
    assert built.hook.loss_scaler.cur_scale == 128.0


def test_the_loss_scaler_in_another_order() -> None:
    hook = Fp16OptimizerHook(loss_scale={"init_scale": 8.0})
    loop = make_loop(make_net())
    with pytest.raises(OrderError, match="only in a run"):
        hook.loss_scaler.unscale_(loop.optimizer)
    with pytest.raises(OrderError, match=r"super\(\)\.before_run"):
        hook.after_train_iter(step_outputs(loop))
    hook.before_run(loop)
    with pytest.raises(OrderError, match="follows unscale_"):
        hook.loss_scaler.update()
    hook.loss_scaler.update(4.0)
    hook.loss_scaler.scale(loop.model(make_batch(0)[0]).square().mean()).backward()
    first = next(loop.model.parameters())
    assert first.grad is not None
    scaled = first.grad.float()
    for _ in range(2):  # a second call changes nothing
        hook.loss_scaler.unscale_(loop.optimizer)
        assert torch.equal(first.grad, scaled / 4.0)
    hook.loss_scaler.update()
    with pytest.raises(OrderError, match="was not prepared"):
        hook.loss_scaler.unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def step_outputs(loop: Any) -> Any:
    loop.outputs = {"loss": loop.model(make_batch(0)[0]).square().mean()}
    return loop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_an_override_of_clip_grads_is_called_with_unscaled_gradients(kind: str, mode: str) -> None:
    norms: list[Tensor] = []

    def clip_grads(self: Any, params: Any) -> Any:
        norms.append(super(own, self).clip_grads(params))
        return norms[-1]

    own: Any = type("Own", (KINDS[kind],), {"clip_grads": clip_grads})
    options: dict[str, Any] = {"grad_clip": {"max_norm": 0.25}, "loss_scale": 64.0, "mode": mode}
    ours = run(make_loop(make_net(), "adamw"), own(**options), range(4), (2,))
    theirs = run(make_loop(make_net(), "adamw"), KINDS[kind](**options), range(4), (2,))
    assert values(ours.model, ours.optimizer) == values(theirs.model, theirs.optimizer)
    logged = [[entry["grad_norm"] for entry, _ in loop.log_buffer.entries] for loop in (ours, theirs)]
    assert len(norms) == len(logged[0]) == 4
    finite = [norm for norm in norms if norm.isfinite()]
    assert 0 < len(finite) < 4
    assert all(torch.equal(a, b) for a, b in zip(*logged, strict=True) if b.isfinite())


@pytest.mark.parametrize("mode", ["autocast", "master"])
@pytest.mark.parametrize(
    "hook", [Fp16OptimizerHook, lambda **o: GradientCumulativeFp16OptimizerHook(cumulative_iters=2, **o)]
)
def test_gradients_that_the_optimizer_does_not_step_are_dropped_with_the_others(hook: Any, mode: str) -> None:
    """As in mmcv: a layer that the optimizer gets later begins without gradients of earlier windows."""
    found: list[Tensor] = []
    for numbers in (range(3), range(2, 3)):
        net = make_net()
        loop = make_loop(net)
        loop.optimizer = torch.optim.SGD(net[0].parameters(), lr=0.0)
        run(loop, hook(loss_scale=64.0, mode=mode), numbers)
        grad = list(net.parameters())[-1].grad
        assert grad is not None
        found.append(grad)
    assert torch.equal(*found)


class Parts(nn.Module):
    """A model whose ``train_step`` calls a part of it, as those of GANs do; the second loss is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.calls = 0

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        self.calls += 1
        loss = self.net(data).float().square().mean()
        return {"loss": loss * float("inf") if self.calls == 2 else loss}


@pytest.mark.parametrize(
    "config",
    [
        {"skip_nonfinite": True},
        {"type": "GradientCumulativeOptimizerHook", "skip_nonfinite": True},
        {"type": "Fp16OptimizerHook", "mode": "autocast"},
        {"type": "GradientCumulativeFp16OptimizerHook"},
    ],
    ids=lambda config: config.get("type"),
)
def test_a_skip_keeps_statistics_that_a_hook_wrote_for_a_model_without_forward(
    config: dict[str, Any],
) -> None:
    def write(runner: Any) -> None:
        runner.model.net[1].running_mean.fill_(7.0)

    model = Parts()
    runner = EpochBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=2)
    runner.register_training_hooks(
        None, config, custom_hooks_config=[ClosureHook("before_train_epoch", write)]
    )
    runner.run([[torch.randn(4, 3)]], [("train", 1)])
    assert not runner.step_result.stepped()
    assert model.net[1].running_mean.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_a_model_has_one_hook_in_a_run(mode: Any) -> None:
    """After the run another one may take a model with float32 weights; masters stay with their hook."""
    loop = make_loop(make_net())
    hook = Fp16OptimizerHook(mode=mode)
    run(loop, hook, range(2))
    with pytest.raises(OrderError, match="register one optimizer hook per run"):
        Fp16OptimizerHook(mode=mode).before_run(loop)
    hook.after_run(loop)
    if mode == "autocast":
        run(loop, Fp16OptimizerHook(mode=mode), range(2, 4))
    else:
        run(loop, hook, range(2, 4))
    assert loop.step_result.stepped()


def test_a_refused_model_is_as_before() -> None:
    net = Decorated()
    loop = make_loop(net)
    loop.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    before = values(net)
    for mode in ("autocast", "master"):
        with pytest.raises(TypeError, match="belongs to the models"):
            Fp16OptimizerHook(mode=mode).before_run(loop)  # type: ignore[arg-type]
    assert values(net) == before
    assert not net.fp16_enabled
