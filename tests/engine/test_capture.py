"""A step captured in a CUDA graph equals an ordinary step, also if it skips; capturing trains nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
import support.triton
from halfpeak.core.errors import ConfigError, ConfigTypeError, LossScaleCollapse, OrderError
from halfpeak.engine.cuda_graph import WARM_UPS, CapturedFunction
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedNovoGrad
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.triton import is_installed, kernels
from support.graph import emulate_graphs
from support.states import differences
from support.triton import DEVICES, INTERPRETER_WARNS

pytestmark = INTERPRETER_WARNS


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate CUDA graphs where there is no CUDA; the test of the error on the CPU undoes this."""
    if is_installed() and not torch.cuda.is_available():
        emulate_graphs(monkeypatch)


class Run(support.triton.Run):
    """A run with clipping, whose loss function can be captured."""

    def __init__(self, device: str, *args: Any, **options: Any) -> None:
        super().__init__(device, *args, **{"clip": 1.0, **options})

    def capture(self) -> CapturedFunction:
        return self.engine.capture(self.loss, *self.batch(99))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_captured_has_run_before(level: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose first launch is captured would be compiled and loaded during the capture."""
    module = kernels()
    control, keeps_books = module.control, list[bool]()

    def noted(*args: Any, scale: Any = None, **kwargs: Any) -> None:
        keeps_books.append(scale is not None)
        control(*args, scale=scale, **kwargs)

    monkeypatch.setattr(module, "control", noted)
    Run(device, level).capture()
    # The first warm-up measures and decides in separate calls, because it chooses the backend.
    assert keeps_books[-WARM_UPS:] == [True] * WARM_UPS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_replays_are_the_steps(level: str, device: str) -> None:
    # No overflow under a static scale: the host would take part in the ordinary engine's steps until one is finite.
    bad = 3 if level in ("O1", "O2") else None
    plain, graphed = Run(device, level), Run(device, level)
    for run in (plain, graphed):
        run.step(0)
    captured = graphed.capture()
    for step in range(1, 7):
        factor = float("inf") if step == bad else 1.0
        result = plain.step(step, factor)
        loss_again, result_again = captured(*graphed.batch(step, factor))
        assert torch.equal(plain.last_loss, loss_again)
        assert torch.equal(result.found_inf, result_again.found_inf)
        assert float(result.found_inf) == (step == bad)
        assert torch.equal(result.scale, result_again.scale)
        assert result.grad_norm is not None
        assert result_again.grad_norm is not None
        assert torch.equal(result.grad_norm, result_again.grad_norm) or step == bad
    assert not differences(plain.state(), graphed.state())
    assert plain.engine.micro_step == graphed.engine.micro_step == 7


FORMS: dict[str, Callable[..., FusedOptimizer]] = {
    "LAMB": functools.partial(FusedLAMB, lr=0.01, max_grad_norm=0.5),
    "NovoGrad": functools.partial(FusedNovoGrad, lr=0.01),
    "8 bits": functools.partial(FusedAdamW, lr=0.01, master="remainder8", moments="int8"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_replays_are_the_steps_of_every_rule_and_form(name: str, device: str) -> None:
    plain, graphed = (Run(device, "O5", FORMS[name]) for _ in range(2))
    for run in (plain, graphed):
        run.step(0)
    captured = graphed.capture()
    for step, factor in enumerate((float("inf"), 1.0), 1):
        plain.step(step, factor)
        captured(*graphed.batch(step, factor))
    assert not differences(plain.state(), graphed.state())


@pytest.mark.parametrize("device", DEVICES)
def test_capturing_trains_nothing(device: str) -> None:
    run = Run(device)
    for step in range(2):
        run.step(step)
    before, generator = run.state(), torch.get_rng_state()
    run.capture()
    assert not differences(before, run.state())
    assert torch.equal(generator, torch.get_rng_state())
    assert not run.engine.is_open
    assert all(p.grad is None for group in run.optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_loss_that_is_still_referenced_is_refused(level: str, device: str) -> None:
    run = Run(device, level)
    with run.engine.forward():
        loss = run.loss(run.there[0], 1.0)
    run.engine.backward(loss)
    run.engine.step()
    with pytest.raises(OrderError, match="write `del loss`"):
        run.capture()
    del loss
    run.capture()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("good", [0, 1, WARM_UPS])
def test_a_loss_function_that_raises_leaves_no_trace(good: int, device: str) -> None:
    run, calls = Run(device), iter(range(WARM_UPS + 1))
    run.step(0)
    before = run.state()

    def failing(inputs: Tensor, factor: Tensor) -> Tensor:
        loss = run.loss(inputs, factor)
        if next(calls) == good:
            raise KeyError("mine")
        return loss

    with pytest.raises(KeyError, match="mine"):
        run.engine.capture(failing, *run.batch(99))
    if good < WARM_UPS or device == "cuda":
        # Not in the emulation, which runs the forward pass that it records.
        assert not differences(before, run.state())
    plain = Run(device)
    if good < WARM_UPS:
        for step in range(2):
            plain.step(step)
        run.step(1)
        assert not differences(plain.state(), run.state())


@pytest.mark.parametrize("device", DEVICES)
def test_hyper_parameters_and_the_scale_are_data(device: str) -> None:
    """Also in a step that is captured before the first step."""
    plain, graphed = Run(device), Run(device)
    captured = graphed.capture()
    for step in range(4):
        for run in (plain, graphed):
            run.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            if step == 2:
                run.optimizer.param_groups[0]["weight_decay"] = 0.3
                run.engine.scalers[0].set_scale(64.0)
        plain.step(step)
        captured(*graphed.batch(step))
    assert not differences(plain.state(), graphed.state())


@pytest.mark.parametrize("device", DEVICES)
def test_ordinary_steps_and_replays_take_turns(device: str) -> None:
    plain, graphed = Run(device), Run(device)
    captured = graphed.capture()
    for step in range(6):
        plain.step(step)
        if step % 2:
            graphed.step(step)
        else:
            captured(*graphed.batch(step))
    assert not differences(plain.state(), graphed.state())


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_goes_on_in_the_graph_or_says_that_it_cannot(device: str) -> None:
    run = Run(device)
    run.step(0)
    captured = run.capture()
    saved = run.state()
    captured(*run.batch(1))
    run.engine.load_state_dict(saved)
    with pytest.raises(OrderError, match=r"capture\(\.\.\.\) again"):
        captured(*run.batch(1))
    assert not differences(saved, run.state())


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_that_cannot_fall_is_noticed(device: str) -> None:
    patience = halfpeak.ScaleConfig(init=2.0, floor=1.0, patience=4)
    run = Run(device, scale=patience)
    captured = run.capture()

    def many() -> None:
        for _ in range(50):
            captured(*run.batch(0, float("nan")))
            if device == "cuda":
                torch.cuda.synchronize()

    with pytest.raises(LossScaleCollapse):
        many()


@pytest.mark.parametrize("device", DEVICES)
def test_skips_of_replays_are_told_and_those_of_the_capture_are_not(device: str) -> None:
    told: list[str] = []
    run = Run(device, level="O5", on_skip=lambda engine, event: told.append(event.message))
    captured = run.capture()
    for index in range(5 if device == "cpu" else 40):
        captured(*run.batch(index, float("nan") if index == 2 else 1.0))
        if device == "cuda":
            torch.cuda.synchronize()
    step = 3 if device == "cpu" else 16
    assert told == [f"step {step} was skipped, and no loss scale would help."]


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    run = Run(device)
    captured = run.capture()
    inputs, factor = run.batch(0)
    with pytest.raises(ConfigError, match="capture one for each shape"):
        captured(inputs[:3], factor)
    with pytest.raises(ConfigError, match="capture one for each shape"):
        captured(inputs)
    with pytest.raises(ConfigTypeError, match="int"):
        run.engine.capture(run.loss, inputs, 3)  # type: ignore[arg-type]
    with run.engine.forward():
        loss = run.loss(inputs, factor)
    run.engine.backward(loss)
    with pytest.raises(OrderError, match="window is open"):
        captured(inputs, factor)
    with pytest.raises(OrderError, match="window is open"):
        run.capture()


class OwnStep(FusedAdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def hooked(model: nn.Module) -> FusedAdamW:
    optimizer = FusedAdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any], str]] = {
    "torch's": (lambda m: torch.optim.AdamW(m.parameters()), {}, "FusedAdamW"),
    "a hook": (hooked, {}, "neither hooks"),
    "a step of its own": (lambda m: OwnStep(m.parameters()), {}, "this OwnStep has one"),
    "accumulation": (lambda m: FusedAdamW(m.parameters()), {"accumulate": 2}, "accumulate=2"),
    "two losses": (lambda m: FusedAdamW(m.parameters()), {"num_losses": 2}, "num_losses=2"),
    "a clip in Python": (
        lambda m: FusedAdamW(m.parameters()),
        {"clip": halfpeak.ClipValue(value=1.0)},
        "clip=1.0",
    ),
    "eager": (lambda m: FusedLAMB(m.parameters(), backend="eager"), {}, "FusedLAMB.*one device"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(name: str, device: str) -> None:
    build, options, message = REFUSED[name]
    model = nn.Linear(3, 2).to(device)
    engine = halfpeak.prepare(model, build(model), "O2", **options)
    with pytest.raises(ConfigError, match=message):
        engine.capture(lambda x: model(x).float().sum(), torch.ones(1, 3, device=device))


def test_on_the_cpu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run = Run("cpu")
    with pytest.raises(ConfigError, match=r"on cpu; write engine\.forward\(\).*torch\.compile"):
        run.capture()
