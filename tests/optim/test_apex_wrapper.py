"""ApexOptimWrapper: the levels and options of ``amp.initialize``. ``tests/laws`` compares it with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import halfpeak.optim as ours
from halfpeak.core.errors import LossIdError, OrderError
from halfpeak.optim import ApexOptimWrapper
from optim.families import Unit, wrap
from optim.test_optim_wrapper import Foreign
from support.nets import LEVELS, MASTERED, STORED, make_batch, make_net


def apex(level: str, model: nn.Module, **options: Any) -> ApexOptimWrapper:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ApexOptimWrapper(level, optimizer=optimizer, **{"verbosity": 0, **options})


def step(wrapper: ApexOptimWrapper, model: nn.Module) -> Tensor:
    x, y = make_batch(0)
    with wrapper.optim_context(model):
        output = model(x)
        loss = mse_loss(output.float(), y)
    wrapper.update_params(loss)
    assert wrapper.stepped()
    return output


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_context_converts_the_model(level: str) -> None:
    model = make_net()
    wrapper = apex(level, model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    step(wrapper, model)
    low, master = STORED[level], torch.float32 if level in MASTERED else STORED[level]
    assert model[0].weight.dtype is low
    assert model[1].weight.dtype is master
    stepped = wrapper.optimizer.param_groups[0]["params"][0]
    assert stepped.dtype is master
    assert (stepped is model[0].weight) == (level not in MASTERED)
    assert model.state_dict()["0.weight"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_reach_what_backward_computes_anew(level: str) -> None:
    class Recomputing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Recomputing(6, 3)
    assert step(apex(level, model), model).dtype is (torch.float16 if level == "O1" else torch.bfloat16)


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("O2", {"loss_scale": 8.0}, "scale=8.0"),
    ("O2", {"loss_scale": None}, "scale=65536.0"),
    ("O3", {"loss_scale": None}, "scale=1.0"),
    ("O1", {"loss_scale": 8.0, "min_loss_scale": 4.0, "max_loss_scale": None}, "scale=8.0"),
    ("O2", {"enabled": False}, "weight=float32 batchnorm=float32 output=float32 scale=None"),
    ("O2", {"cast_model_type": torch.bfloat16}, "weight=bfloat16"),
    ("O1", {"patch_torch_functions": False}, "weight=float32 batchnorm=float32 output=float32"),
    ("O2", {"keep_batchnorm_fp32": False}, "batchnorm=float16"),
    ("O2", {"keep_batchnorm_fp32": "False"}, "batchnorm=float16"),
    ("O2", {"master_weights": False}, "masters=False"),
    ("O2", {"cast_model_outputs": torch.bfloat16}, "output=bfloat16"),
    ("O2", {"num_losses": 3}, "scalers=3"),
    ("O2", {"min_loss_scale": 4.0}, "floor=4.0"),
    ("O2", {"max_loss_scale": 64.0}, "scale=64.0"),
    ("O2", {"norms": "all"}, "layernorm=float32"),
]


@pytest.mark.parametrize(("level", "options", "text"), OPTIONS, ids=str)
def test_every_option_has_its_effect(level: str, options: dict[str, Any], text: str) -> None:
    def seen(**options: Any) -> str:
        model = make_net()
        wrapper = apex(level, model, **options)
        with wrapper.optim_context(model):
            output = model(make_batch(0)[0])
        run = wrapper._run()
        scaler = None if run is None else run.scalers[0].part
        name = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
        return (
            f"weight={name[model[0].weight.dtype]} batchnorm={name[model[1].weight.dtype]} output={name[output.dtype]} "
            f"scale={scaler and scaler.read_scale()} scalers={run and len(run.scalers)} floor={scaler and scaler.config.floor} "
            f"masters={run is not None and len(run.parts.pairs) > 0} layernorm={name[model[3].weight.dtype]}"
        )

    assert text in seen(**options)
    assert options == {"loss_scale": None} or text not in seen()


@pytest.mark.parametrize("verbosity", [0, 1, None])
def test_it_prints_its_table_and_each_skip(verbosity: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    model = Unit()
    wrapper = apex("O2", model, verbosity=verbosity)
    printed = []
    for factor in (0.25, float("inf"), 0.25):
        with wrapper.optim_context(model):
            wrapper.update_params(model().float() * factor)
        printed.append(capsys.readouterr().out)
    if verbosity == 0:
        assert printed == ["", "", ""]
    else:
        assert printed[0].startswith("Selected optimization level O2")
        skip = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
        assert printed[1:] == [skip, ""]


@pytest.mark.parametrize("enabled", [False, 0])
def test_disabled_it_is_a_plain_wrapper(enabled: Any) -> None:
    options = {"opt_level": "no level", "loss_scale": "none", "num_losses": -1}
    model, wrapper = wrap(ours, "ApexOptimWrapper", enabled=enabled, **options)
    wrapper.update_params(model())
    assert (model.weight.item(), model.weight.dtype) == (-1.0, torch.float32)


class WithPartNamedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


@pytest.mark.parametrize("around", [nn.DataParallel, nn.Module.eval])
def test_it_finds_the_model_inside_its_wrappers_and_no_part_of_it(around: Any) -> None:
    model = WithPartNamedModule()
    step(apex("O5", model), around(model))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_two_wrappers_have_a_scale_each() -> None:
    pairs = [wrap(ours, "ApexOptimWrapper", opt_level="O1", verbosity=0) for _ in range(2)]
    for i, (model, wrapper) in enumerate(pairs):
        with wrapper.optim_context(model):
            loss = model() * (float("inf") if i else 1.0)
        wrapper.update_params(loss)
    scales = [w.state_dict()["apex_amp"]["loss_scaler0"]["loss_scale"] for _, w in pairs]
    assert scales == [2.0**16, 2.0**15]


def test_it_clips_only_the_gradients_that_the_model_has() -> None:
    model = nn.Linear(2, 1)
    wrapper = apex("O5", model, clip_grad={"max_norm": 1e3})
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2)).sum()
    wrapper.backward(loss)
    model.bias.grad = None
    wrapper.step()
    assert wrapper.last_result is not None
    assert wrapper.last_result.grad_norm == pytest.approx(2**0.5)


def test_zero_grad_drops_what_a_loss_without_the_wrapper_has_left() -> None:
    model = nn.Linear(2, 1)
    wrapper = apex("O5", model)
    with wrapper.optim_context(model):
        model(torch.ones(1, 2)).sum().backward()
    wrapper.zero_grad()
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2)).sum()
    wrapper.backward(loss)
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[[1.0, 1.0]], [1.0]]


def test_what_comes_before_the_first_context_and_what_amp_does_not_know_is_refused() -> None:
    model, wrapper = wrap(ours, "ApexOptimWrapper", verbosity=0)
    for call in (lambda: wrapper.update_params(model()), wrapper.step):
        with pytest.raises(OrderError, match="optim_context"):
            call()
    with wrapper.optim_context(model):
        loss = model()
    with pytest.raises(LossIdError):
        wrapper.backward(loss, loss_id=1)
    foreign: Any = Foreign(model.weight)
    wrapper = ApexOptimWrapper(optimizer=foreign)
    with pytest.raises(TypeError, match=r"Foreign is not a torch\.optim\.Opt"), wrapper.optim_context(model):
        pass
