"""Subclasses, optimizers and loss scalers of user code: wrappers call their methods as mmengine calls them."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

import halfpeak.optim as ours
from halfpeak.core.errors import ClosureError, ConfigTypeError, LossScaleCollapse
from halfpeak.fused import FusedSGD
from optim.families import FAMILIES, logged, new_hub
from optim.families import on_cpu as on_cpu

Methods = dict[str, Callable[..., Any]]


def own_step(self: Any, **kwargs: Any) -> None:
    if self.clip_grad_kwargs:
        self._clip_grad()
    self.optimizer.step(**kwargs)


def scaler_step(self: Any, **kwargs: Any) -> None:
    self.loss_scaler.unscale_(self.optimizer)
    self._clip_grad()
    self.loss_scaler.step(self.optimizer, **kwargs)
    self.loss_scaler.update(self._scale_update_param)


def scaler_step_alone(self: Any, **kwargs: Any) -> None:
    self.loss_scaler.step(self.optimizer, **kwargs)
    self.loss_scaler.update(self._scale_update_param)


def own_backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)
    self._inner_count += 1


def scaler_backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
    self.loss_scaler.scale(loss).backward(**kwargs)
    self._inner_count += 1


def own_clip(self: Any) -> None:
    for group in self.optimizer.param_groups:
        assert self.clip_func(group["params"], **self.clip_grad_kwargs) > 0
    self.message_hub.update_scalar("train/own_norm", 1.0)


def own_counts(self: Any, model: nn.Module, init_counts: int, max_counts: int) -> None:
    self._inner_count, self._max_counts = init_counts, max_counts
    self._remainder_counts = max_counts % self._accumulative_counts


def own_update(self: Any) -> bool:
    return self._inner_count % 3 == 0


def own_zero(self: Any, **kwargs: Any) -> None:
    self.optimizer.zero_grad(set_to_none=False, **kwargs)


CASES: dict[str, tuple[str, Methods]] = {
    "nothing": ("OptimWrapper", {}),
    "step": ("OptimWrapper", {"step": own_step}),
    "backward": ("OptimWrapper", {"backward": own_backward}),
    "backward and step": ("OptimWrapper", {"backward": own_backward, "step": own_step}),
    "_clip_grad": ("OptimWrapper", {"_clip_grad": own_clip}),
    "_clip_grad and step": ("OptimWrapper", {"_clip_grad": own_clip, "step": own_step}),
    "initialize_count_status": ("OptimWrapper", {"initialize_count_status": own_counts}),
    "should_update": ("OptimWrapper", {"should_update": own_update}),
    "zero_grad": ("OptimWrapper", {"zero_grad": own_zero}),
    "amp": ("AmpOptimWrapper", {}),
    "amp step": ("AmpOptimWrapper", {"step": scaler_step}),
    "amp backward": ("AmpOptimWrapper", {"backward": scaler_backward}),
    "amp backward and step": ("AmpOptimWrapper", {"backward": scaler_backward, "step": scaler_step}),
    "amp backward and a step without clip": (
        "AmpOptimWrapper",
        {"backward": scaler_backward, "step": scaler_step_alone},
    ),
    "amp _clip_grad": ("AmpOptimWrapper", {"_clip_grad": own_clip}),
}


class Recording(torch.optim.SGD):
    """An SGD whose ``step`` and ``zero_grad`` take an extra argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def step(self, closure: Any = None, *, note: Any = None) -> Any:
        self.seen.append(note)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True, note: Any = None) -> None:
        self.seen.append(note)
        super().zero_grad(set_to_none)


def train(family: ModuleType, kind: str, methods: Methods, hub: Any, **updates: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Recording(model.parameters(), lr=0.1, momentum=0.9)
    cls = types.new_class("Own", (getattr(family, kind),), exec_body=lambda body: body.update(methods))
    options = {"loss_scale": 8.0} if kind == "AmpOptimWrapper" else {}
    wrapper = cls(optimizer=optimizer, accumulative_counts=2, clip_grad={"max_norm": 0.5}, **options)
    wrapper.initialize_count_status(model, 0, 6)
    for _ in range(6):
        wrapper.update_params(model(torch.randn(8, 4)).square().mean(), **updates)
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return values, [logged(hub, f"train/{name}_norm") for name in ("grad", "own")], optimizer.seen


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("updates", [{}, {"step_kwargs": {"note": 1}}], ids=["", "kwargs"])
def test_an_override_trains_as_in_the_original(case: str, updates: dict[str, Any]) -> None:
    found: list[Any] = []
    for family in FAMILIES.values():
        with new_hub() as hub:
            found.append(train(family, *CASES[case], hub, **updates))
    (mine, my_norms, my_notes), (original, norms, notes) = found
    torch.testing.assert_close(mine, original)
    for one, other in zip(my_norms, norms, strict=True):
        assert one == pytest.approx(other)
    assert my_notes == notes


def test_the_optimizer_steps_in_place_of_the_wrapper() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Recording([weight], lr=0.5)
    wrapper = ours.OptimWrapper(optimizer=optimizer)
    wrapper.backward(weight.sum())
    optimizer.step(note="mine")
    wrapper.zero_grad(note="mine")
    assert weight.tolist() == [0.5, 0.5]
    assert (weight.grad, optimizer.seen) == (None, ["mine", "mine"])


def test_a_step_of_an_override_counts_as_taken() -> None:
    weight = nn.Parameter(torch.ones(2))
    own = type("Own", (ours.OptimWrapper,), {"step": own_step})
    wrapper = own(torch.optim.SGD([weight], lr=0.5), accumulative_counts=2)
    moved = []
    for _ in range(4):
        wrapper.update_params(weight.sum())
        moved.append(wrapper.stepped())
    assert moved == [False, True, False, True]


def test_a_scale_that_an_override_uses_falls_and_grows() -> None:
    weight = nn.Parameter(torch.ones(2))
    scale = {"init_scale": 8.0, "growth_interval": 2}
    own = type("Own", (ours.AmpOptimWrapper,), {"backward": scaler_backward, "step": scaler_step})
    wrapper = own(optimizer=torch.optim.SGD([weight], lr=0.0), loss_scale=scale, dtype="float16")
    assert isinstance(wrapper.loss_scaler, torch.amp.GradScaler)
    scales = []
    for factor in (float("inf"), 1.0, 1.0):
        wrapper.update_params(weight.sum() * factor)
        scales.append(wrapper.loss_scaler.get_scale())
    assert scales == [4.0, 4.0, 8.0]


class Foreign:
    """An optimizer that is no ``torch.optim.Optimizer``."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}]
        self.defaults = {"lr": 0.5}
        self.saved: Any = None

    def step(self, factor: float = 1.0) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= factor * group["lr"] * parameter.grad

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: Any) -> None:
        self.saved = state


@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_a_foreign_optimizer_trains(kind: str) -> None:
    weight = nn.Parameter(torch.full((1,), 3.0))
    optimizer = Foreign(weight)
    options = {} if kind == "OptimWrapper" else {"loss_scale": 4.0, "dtype": "float16"}
    wrapper = getattr(ours, kind)(
        optimizer=optimizer,
        accumulative_counts=2,
        clip_grad={"max_norm": 1.0},
        sink=ours.ScalarHistory(),
        **options,
    )
    for _ in range(2):
        with wrapper.optim_context(nn.Identity()):
            loss = weight.sum() * 2
        wrapper.update_params(loss, step_kwargs={"factor": 2.0})
    torch.testing.assert_close(weight.detach(), torch.full((1,), 2.0))
    assert wrapper.message_hub.read("train/grad_norm") == [2.0]
    assert (wrapper.get_lr(), wrapper.inner_count) == ({"lr": [0.5]}, 2)
    state = wrapper.state_dict()
    assert set(state) == {"mine"} | ({"loss_scaler"} if options else set())
    wrapper.load_state_dict(state)
    assert optimizer.saved["mine"] == 1


def test_frozen_parameters_do_not_count_in_the_norm_of_a_foreign_optimizer() -> None:
    weight, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    frozen.grad = torch.full((1,), 100.0)
    optimizer: Any = Foreign(weight)
    optimizer.param_groups[0]["params"].append(frozen)
    history = ours.ScalarHistory()
    ours.OptimWrapper(optimizer, clip_grad={"max_norm": 1.0}, sink=history).update_params(weight.sum() * 2)
    assert (weight.item(), history.read("train/grad_norm")) == (pytest.approx(0.5), [2.0])


def test_a_step_with_arguments_is_told_by_stepped() -> None:
    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None, note: str = "") -> Any:  # type: ignore[override]
            return super().step(closure)

    weight = nn.Parameter(torch.ones(1))
    wrapper = ours.OptimWrapper(Noting([weight], lr=0.5))
    told: list[bool] = []
    for factor in (1.0, float("inf")):
        wrapper.backward(weight.sum() * factor)
        wrapper.step(note="this one")
        told.append(wrapper.stepped())
        wrapper.zero_grad()
    assert (told, weight.item()) == ([True, False], 0.5)


def test_a_mock_is_called_as_the_original_calls_it() -> None:
    optimizer, scaler, loss = MagicMock(spec=torch.optim.Optimizer), MagicMock(), MagicMock()
    optimizer.defaults, optimizer.param_groups = {}, [{}]
    for plain in (ours.OptimWrapper(optimizer), ours.ApexOptimWrapper(optimizer=optimizer)):
        plain.step()
        optimizer.step.assert_called_once_with()
        plain.zero_grad()
        optimizer.zero_grad.assert_called_once_with()
        optimizer.reset_mock()
    ours.OptimWrapper(optimizer).backward(loss, retain_graph=True)
    loss.backward.assert_called_once_with(retain_graph=True)
    amp = ours.AmpOptimWrapper(loss_scale=2.0, optimizer=optimizer)
    amp.loss_scaler = scaler
    amp.backward(1)  # type: ignore[arg-type]
    scaler.scale.assert_called_once_with(1)
    scaler.scale.return_value.backward.assert_called_once_with()
    amp.step()
    scaler.step.assert_called_once_with(optimizer)
    scaler.update.assert_called_once_with(2.0)


def test_a_loss_scaler_of_your_own_decides() -> None:
    weight = nn.Parameter(torch.ones(2))
    wrapper = ours.AmpOptimWrapper(optimizer=torch.optim.SGD([weight], lr=0.5), dtype="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    wrapper.loss_scaler = scaler
    assert wrapper.loss_scaler is scaler
    wrapper.update_params(weight.sum())
    wrapper.update_params(weight.sum() * float("inf"))
    assert (weight.tolist(), scaler.get_scale()) == ([0.5, 0.5], 16.0)
    state = wrapper.state_dict()
    assert state["loss_scaler"] == scaler.state_dict()
    state["loss_scaler"]["scale"] = 64.0
    wrapper.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    for bad in (512.0, None):
        with pytest.raises(ConfigTypeError, match=r"has no scale\(\)"):
            wrapper.loss_scaler = bad


def test_two_wrappers_share_a_loss_scaler() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (
        ours.AmpOptimWrapper(
            optimizer=torch.optim.SGD([weight], lr=0.5), loss_scale={"init_scale": 32.0}, dtype="float16"
        )
        for weight in weights
    )
    first.update_params(weights[0].sum())
    second.loss_scaler = first.loss_scaler
    assert second.loss_scaler is first.loss_scaler
    for factor in (1.0, float("inf")):
        second.update_params(weights[1].sum() * factor)
        first.update_params(weights[0].sum())
    assert [weight.tolist() for weight in weights] == [[-0.5, -0.5], [0.5, 0.5]]
    assert first.loss_scaler.get_scale() == 16.0


def test_a_loss_scaler_set_in_an_open_window_drops_its_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    wrapper = ours.AmpOptimWrapper(
        optimizer=torch.optim.SGD([weight], lr=0.5), dtype="float16", accumulative_counts=2
    )
    wrapper.update_params(weight.sum())
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    wrapper.loss_scaler = scaler
    wrapper.update_params(weight.sum())
    assert weight.tolist() == [0.75, 0.75]
    for factor in (1.0, float("inf")):
        wrapper.update_params(weight.sum() * factor)
    assert (weight.tolist(), scaler.get_scale()) == ([0.75, 0.75], 16.0)


def apex_wrapper(**options: Any) -> tuple[nn.ParameterList, nn.Parameter, ours.ApexOptimWrapper]:
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    weight = model[0]
    return model, weight, ours.ApexOptimWrapper(optimizer=torch.optim.SGD([weight], lr=0.5), **options)


@pytest.mark.parametrize("enabled", [False, 0])
def test_apex_disabled_is_a_plain_wrapper(enabled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, weight, wrapper = apex_wrapper(enabled=enabled, opt_level="no level", loss_scale="none", num_losses=-1)
    wrapper.backward(weight.sum())
    wrapper.step()
    assert (weight.tolist(), weight.dtype) == ([0.5, 0.5], torch.float32)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verbosity", [0, 1, None])
def test_apex_prints_its_table_and_each_skip(
    verbosity: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, weight, wrapper = apex_wrapper(opt_level="O2", verbosity=verbosity)
    printed = []
    for factor in (0.25, float("inf"), 0.25):
        with wrapper.optim_context(model):
            wrapper.update_params(weight.float().sum() * factor)
        printed.append(capsys.readouterr().out)
    if verbosity == 0:
        assert printed == ["", "", ""]
    else:
        assert printed[0].startswith("Selected optimization level O2")
        skip = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
        assert printed[1:] == [skip, ""]


def test_apex_ignores_bounds_of_a_static_scale() -> None:
    model, _, wrapper = apex_wrapper(loss_scale=8.0, min_loss_scale=4.0, max_loss_scale=None)
    with wrapper.optim_context(model):
        assert wrapper.state_dict()["apex_amp"]["loss_scaler0"]["loss_scale"] == 8.0


def test_apex_says_that_a_foreign_optimizer_cannot_be_converted() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    wrapper = ours.ApexOptimWrapper(optimizer=Foreign(model[0]))
    with (
        pytest.raises(TypeError, match=r"Foreign is not a torch\.optim\.Optimizer"),
        wrapper.optim_context(model),
    ):
        pass


def super_clip(self: Any) -> None:
    super(type(self), self)._clip_grad()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("clip", [None, own_clip, super_clip])
def test_the_gradients_of_a_closure_are_clipped(
    clip: Callable[..., Any] | None, optimizer: type[Any]
) -> None:
    weight = nn.Parameter(torch.ones(1))
    own: Any = type("Own", (ours.OptimWrapper,), {} if clip is None else {"_clip_grad": clip})
    wrapper = own(optimizer=optimizer([weight], lr=1.0), clip_grad={"max_norm": 0.5})

    def closure(factor: float = 10.0) -> Tensor:
        wrapper.zero_grad()
        loss = weight.sum() * factor
        wrapper.backward(loss)
        return loss

    wrapper.step(closure)
    assert weight.item() == pytest.approx(0.5)
    with pytest.raises(LossScaleCollapse, match="the gradients of the closure are not finite"):
        wrapper.step(lambda: closure(float("inf")))
    assert weight.item() == pytest.approx(0.5)


def test_a_loss_scale_takes_no_closure() -> None:
    weight = nn.Parameter(torch.ones(1))
    wrapper = ours.AmpOptimWrapper(optimizer=torch.optim.SGD([weight], lr=1.0), dtype="float16")
    with pytest.raises(ClosureError, match="a loss scale takes no closure"):
        wrapper.step(lambda: weight.sum())


@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_an_override_sees_unscaled_gradients_of_a_fused_optimizer(kind: str) -> None:
    weight, norms = nn.Parameter(torch.ones(1)), []
    own = type("Own", (getattr(ours, kind),), {"_clip_grad": lambda self: norms.append(weight.grad.item())})  # type: ignore[union-attr]
    options = {"loss_scale": 8.0, "dtype": "float16"} if kind == "AmpOptimWrapper" else {}
    wrapper = own(optimizer=FusedSGD([weight], lr=1.0), clip_grad={"max_norm": 0.5}, **options)
    wrapper.update_params(weight.sum() * 10)
    assert (norms, weight.item()) == ([10.0], -9.0)


def test_a_loss_scaler_unscales_the_gradients_of_a_fused_optimizer() -> None:
    class Own(ours.AmpOptimWrapper):
        def step(self, closure: Any = None, **kwargs: Any) -> None:
            self.loss_scaler.unscale_(self.optimizer)
            norms.append(weight.grad.item())  # type: ignore[union-attr]
            self.loss_scaler.step(self.optimizer)

    weight, norms = nn.Parameter(torch.ones(1)), []
    Own(optimizer=FusedSGD([weight], lr=1.0), loss_scale=8.0, dtype="float16").update_params(
        weight.sum() * 10
    )
    assert (norms, weight.item()) == ([10.0], -9.0)
