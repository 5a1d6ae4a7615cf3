"""What AmpOptimWrapper and ApexOptimWrapper do beyond the float32 step, and OptimWrapperDict."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from halfpeak.core.errors import OrderError, RegistryError
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    ScalarHistory,
)
from halfpeak.shim.cuda_on_cpu import on_cpu
from optim.families import Unit, logged_records, new_hub, ours, wrap
from support.nets import LEVELS, MASTERED, STORED, make_batch, make_net


def step(wrapper: OptimWrapper, model: nn.Module, i: int = 0) -> Tensor:
    x, y = make_batch(i)
    with wrapper.optim_context(model):
        output = model(x)
        loss = mse_loss(output.float(), y)
    wrapper.update_params(loss)
    return output


DTYPES: list[tuple[Any, torch.dtype]] = [
    ("float16", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("float32", torch.float32),
    ("float64", torch.float64),
    (torch.float16, torch.float16),
    (None, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "computed"), DTYPES, ids=str)
def test_amp_computes_in_its_dtype(dtype: Any, computed: torch.dtype) -> None:
    """None means bfloat16 on a CPU."""
    model = nn.Linear(6, 3)
    wrapper = AmpOptimWrapper(dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(wrapper, model).dtype is computed
    assert wrapper.stepped()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert wrapper.loss_scaler.is_enabled() == (computed is torch.float16)
    assert wrapper.loss_scaler.get_scale() == (2.0**16 if computed is torch.float16 else 1.0)
    assert wrapper.last_result is not None
    assert wrapper.last_result.scale == wrapper.loss_scaler.get_scale()


@pytest.mark.parametrize(
    ("loss_scale", "scale", "grows"),
    [
        ("dynamic", 2.0**16, False),
        (512, 512.0, False),
        (0.5, 0.5, False),
        ({"init_scale": 8, "growth_interval": 1}, 16.0, True),
        ({"init_scale": 8, "growth_interval": 1, "growth_factor": 4.0, "ceiling": 16.0}, 16.0, True),
        ({"enabled": False}, 1.0, False),
        ({}, 2.0**16, False),
    ],
    ids=str,
)
def test_loss_scales(loss_scale: Any, scale: float, grows: bool) -> None:
    model, wrapper = wrap(ours, "AmpOptimWrapper", loss_scale=copy.copy(loss_scale), dtype="float16")
    before = wrapper.loss_scaler.get_scale()
    wrapper.update_params(model())
    assert wrapper.loss_scaler.get_scale() == scale
    assert (before != scale) == grows
    assert model.weight.item() == -1.0


def test_an_accelerator_computes_in_float16() -> None:
    """Also where the parameters are on the CPU, as under FSDP's CPU offload; float64 as on a CPU."""
    with on_cpu():
        for dtype, computed in ((None, torch.float16), ("float64", torch.float64)):
            model = nn.Conv2d(1, 1, 1)
            wrapper = AmpOptimWrapper(dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            with wrapper.optim_context(model):
                assert nn.Conv2d(1, 1, 1).cuda()(torch.randn(1, 1, 1, 1).cuda()).dtype is computed
            assert wrapper.loss_scaler.is_enabled() == (dtype is None)


def test_a_loop_without_optim_context_is_told_once() -> None:
    found: list[list[str]] = []
    for enters in (False, True):
        model, wrapper = wrap(ours, "AmpOptimWrapper", dtype="float16")
        with logged_records() as records:
            for _ in range(3):
                with wrapper.optim_context(model) if enters else nullcontext():
                    loss = model()
                wrapper.update_params(loss)
        found.append([record.getMessage() for record in records])
    assert len(found[0]) == 1
    assert "write `with wrapper.optim_context(model)" in found[0][0]
    assert found[1] == []


def test_backward_runs_outside_of_autocast() -> None:
    """A custom function's backward is not cast; torch's checkpointing enters autocast itself when it recomputes."""
    seen: list[tuple[bool, torch.dtype]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), (torch.eye(2) @ torch.eye(2)).dtype))
            return grad

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Probe.apply(checkpoint(self.inner, x, use_reentrant=False))

    model = Recomputing()
    wrapper = AmpOptimWrapper(dtype="bfloat16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(wrapper, model)
    assert seen == [(False, torch.float32)]
    assert wrapper.stepped()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_apex_casts_what_backward_computes_anew(level: str) -> None:
    class Recomputing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Recomputing(6, 3)
    wrapper = ApexOptimWrapper(level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(wrapper, model).dtype is (torch.float16 if level == "O1" else torch.bfloat16)
    assert wrapper.stepped()


@pytest.mark.parametrize("level", LEVELS)
def test_apex_converts_in_the_first_context(level: str) -> None:
    model = make_net()
    wrapper = ApexOptimWrapper(level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    step(wrapper, model)
    low, master = STORED[level], torch.float32 if level in MASTERED else STORED[level]
    assert model[0].weight.dtype is low
    assert model[1].weight.dtype is master
    stepped = wrapper.optimizer.param_groups[0]["params"][0]
    assert stepped.dtype is master
    assert (stepped is model[0].weight) == (level not in MASTERED)
    assert model.state_dict()["0.weight"].dtype is torch.float32


OVERRIDES: list[tuple[str, dict[str, Any], str]] = [
    ("O2", {"loss_scale": 8.0}, "scale=8.0"),
    ("O2", {"loss_scale": None}, "scale=65536.0"),
    ("O3", {"loss_scale": None}, "scale=1.0"),
    ("O2", {"enabled": False}, "weight=float32 norm=float32 output=float32 scale=None"),
    ("O2", {"cast_model_type": torch.bfloat16}, "weight=bfloat16"),
    ("O1", {"patch_torch_functions": False}, "weight=float32 norm=float32 output=float32"),
    ("O2", {"keep_batchnorm_fp32": False}, "norm=float16"),
    ("O2", {"keep_batchnorm_fp32": "False"}, "norm=float16"),
    ("O2", {"master_weights": False}, "masters=False"),
    ("O2", {"cast_model_outputs": torch.bfloat16}, "output=bfloat16"),
    ("O2", {"num_losses": 3}, "scalers=3"),
    ("O2", {"min_loss_scale": 4.0}, "floor=4.0"),
    ("O2", {"max_loss_scale": 64.0}, "scale=64.0"),
    ("O2", {"norms": "batchnorm"}, "layernorm=float16"),
]


@pytest.mark.parametrize(("level", "override", "text"), OVERRIDES, ids=str)
def test_apex_takes_every_override(level: str, override: dict[str, Any], text: str) -> None:
    def seen(**options: Any) -> str:
        model = make_net()
        wrapper = ApexOptimWrapper(level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
        with wrapper.optim_context(model):
            output = model(make_batch(0)[0])
        run = wrapper._run()
        scaler = None if run is None else run.scalers[0].part
        name = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
        return (
            f"weight={name[model[0].weight.dtype]} norm={name[model[1].weight.dtype]} output={name[output.dtype]} "
            f"scale={scaler and scaler.read_scale()} scalers={run and len(run.scalers)} floor={scaler and scaler.config.floor} "
            f"masters={run is not None and len(run.parts.pairs) > 0} layernorm={name[model[3].weight.dtype]}"
        )

    assert text in seen(**override)
    assert override == {"loss_scale": None} or text not in seen()


def test_apex_finds_the_model_inside_its_wrappers() -> None:
    inner = make_net()
    wrapper = ApexOptimWrapper("O5", optimizer=torch.optim.SGD(inner.parameters(), lr=0.1))
    step(wrapper, nn.DataParallel(inner))
    assert inner[0].weight.dtype is torch.bfloat16


def test_a_submodule_called_module_is_no_wrapper() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.module(x))

    model = Model()
    step(ApexOptimWrapper("O5", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)), model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_two_apex_wrappers_share_nothing() -> None:
    pairs = [wrap(ours, "ApexOptimWrapper", opt_level="O1") for _ in range(2)]
    for i, (model, wrapper) in enumerate(pairs):
        with wrapper.optim_context(model):
            loss = model() * (float("inf") if i else 1.0)
        wrapper.update_params(loss)
    scales = [w.state_dict()["apex_amp"]["loss_scaler0"]["loss_scale"] for _, w in pairs]
    assert scales == [2.0**16, 2.0**15]


def test_apex_clips_only_the_gradients_that_the_model_has() -> None:
    model = nn.Linear(2, 1, bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper = ApexOptimWrapper("O5", optimizer=optimizer, verbosity=0, clip_grad={"max_norm": 1e3})
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2)).sum()
    wrapper.backward(loss)
    model.bias.grad = None
    wrapper.step()
    assert wrapper.last_result is not None
    assert wrapper.last_result.grad_norm == pytest.approx(2**0.5)


def test_apex_zero_grad_drops_what_a_loss_without_the_wrapper_has_left() -> None:
    model = nn.Linear(2, 1)
    wrapper = ApexOptimWrapper("O5", optimizer=torch.optim.SGD(model.parameters(), lr=1.0), verbosity=0)
    with wrapper.optim_context(model):
        model(torch.ones(1, 2)).sum().backward()
    wrapper.zero_grad()
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2)).sum()
    wrapper.backward(loss)
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[[1.0, 1.0]], [1.0]]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_what_it_was_asked_to(set_to_none: bool) -> None:
    model, wrapper = wrap(ours)
    wrapper.update_params(model(), zero_kwargs={"set_to_none": set_to_none})
    assert (model.weight.grad is None) == set_to_none
    wrapper.update_params(model())
    assert model.weight.item() == -2.0


# Logging


@pytest.mark.parametrize("clip", [{"max_norm": 0.5}, {"type": "value", "clip_value": 0.5}], ids=str)
def test_own_history_where_a_sink_is_given(clip: dict[str, Any]) -> None:
    with new_hub() as hub:
        history = ScalarHistory()
        model, wrapper = wrap(ours, clip_grad=clip, sink=history, accumulative_counts=2)
        for factor in (1.0, 3.0, 8.0, 8.0):
            wrapper.update_params(model() * factor)
        assert not hub.log_scalars
        assert history.read("train/grad_norm") == ([2.0, 8.0] if "max_norm" in clip else [])
        assert model.weight.item() == pytest.approx(-1.0)
    assert wrapper.message_hub is history


def test_a_sink_that_is_a_container_gets_the_first_scalar() -> None:
    class Scalars(dict[str, Tensor]):
        def update_scalar(self, key: str, value: Tensor) -> None:
            self[key] = value

    with new_hub():
        model, wrapper = wrap(ours, clip_grad={"max_norm": 0.5}, sink=Scalars())
        assert isinstance(wrapper.message_hub, Scalars), "an empty dict is false, and given all the same"
        wrapper.update_params(model() * 4)
        assert wrapper.message_hub == {"train/grad_norm": torch.tensor(4.0)}


def test_own_history_without_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    model, wrapper = wrap(ours, clip_grad={"max_norm": 0.5})
    with new_hub() as hub:
        assert wrapper.message_hub is hub
    monkeypatch.delitem(sys.modules, "mmengine.logging")
    wrapper.update_params(model() * 4)
    assert wrapper.message_hub is wrapper.history
    assert {key: value.item() for key, value in wrapper.history.current().items()} == {"train/grad_norm": 4.0}


def test_a_history_keeps_the_newest() -> None:
    history = ScalarHistory(limit=2)
    for value in range(4):
        history.update_scalar("a", torch.tensor(float(value)))
    assert history.read("a") == [2.0, 3.0]
    assert history.read("b") == []


# Several wrappers


def pair(**options: Any) -> tuple[list[Unit], OptimWrapperDict]:
    made = [wrap(ours, **options) for _ in range(2)]
    return [model for model, _ in made], OptimWrapperDict(one=made[0][1], two=made[1][1])


def test_the_dict_of_wrappers() -> None:
    models, wrappers = pair(accumulative_counts=3)
    wrappers.initialize_count_status(models[0], 1, 4)
    assert [wrapper._max_counts for wrapper in wrappers.values()] == [4, 4]
    wrappers["two"].initialize_count_status(models[1], 0, 8)
    assert [wrapper._max_counts for wrapper in wrappers.values()] == [4, 8]
    assert (list(wrappers.keys()), len(wrappers), "one" in wrappers, "x" in wrappers) == (
        ["one", "two"],
        2,
        True,
        False,
    )
    assert dict(wrappers.items())["two"] is wrappers["two"]
    assert wrappers.param_groups == {name: wrapper.param_groups for name, wrapper in wrappers.items()}
    assert wrappers.get_lr() == {"one.lr": [1.0], "two.lr": [1.0]}
    assert wrappers.get_momentum() == {"one.momentum": [0], "two.momentum": [0]}
    assert repr(wrappers).startswith("name: one\nType: OptimWrapper\n")
    for model, wrapper in zip(models, wrappers.values(), strict=True):
        wrapper.backward(model())
    wrappers.zero_grad()
    assert [model.weight.grad for model in models] == [None, None]
    saved = wrappers.state_dict()
    assert list(saved) == ["one", "two"]
    wrappers.load_state_dict(saved)
    wrappers.load_state_dict({})
    assert list(copy.deepcopy(wrappers).keys()) == ["one", "two"]
    assert isinstance(wrappers, OptimWrapper)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("update_params", (torch.ones(()),)),
        ("backward", (torch.ones(()),)),
        ("step", ()),
        ("scale_loss", (torch.ones(()),)),
        ("should_update", ()),
        ("should_sync", ()),
        ("optim_context", (nn.Identity(),)),
    ],
)
def test_what_has_no_meaning_for_several_is_refused(method: str, arguments: tuple[Any, ...]) -> None:
    _, wrappers = pair()
    with pytest.raises(NotImplementedError, match=f"`{method}` should be called") as caught:
        getattr(wrappers, method)(*arguments)
    assert isinstance(caught.value, OrderError)
    assert f"wrappers[name].{method}(" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["optimizer", "defaults", "inner_count", "base_param_settings", "message_hub", "history"]
)
def test_attributes_of_one_wrapper_say_where_they_are(name: str) -> None:
    _, wrappers = pair()
    with pytest.raises(AttributeError, match=f"write wrappers\\['one'\\].{name}"):
        getattr(wrappers, name)


def test_an_unknown_name() -> None:
    _, wrappers = pair()
    with pytest.raises(KeyError, match="no wrapper 'three'; there are 'one', 'two'") as caught:
        wrappers["three"]
    assert isinstance(caught.value, RegistryError)


# From a configuration


WRAPPERS: list[tuple[str, dict[str, Any]]] = [
    ("OptimWrapper", {}),
    ("AmpOptimWrapper", {"dtype": "float16", "loss_scale": 1024.0}),
    *(("ApexOptimWrapper", {"opt_level": level, "loss_scale": 1024.0}) for level in LEVELS),
]


@pytest.mark.parametrize(("kind", "options"), WRAPPERS, ids=lambda one: str(one))
def test_update_params_through_the_other_network_then_the_other_updates(
    kind: str, options: dict[str, Any]
) -> None:
    """As in plain torch, ``update_params`` zeroes only the gradients of its own optimizer."""
    torch.manual_seed(0)
    networks = [nn.Linear(3, 4), nn.Linear(4, 1)]
    plain = copy.deepcopy(networks)
    x, real = torch.linspace(-1, 1, 18).view(6, 3), torch.linspace(-1, 2, 24).view(6, 4)
    optimizers, others = (
        [torch.optim.SGD(n.parameters(), lr=0.1) for n in each] for each in (networks, plain)
    )
    wrappers = [getattr(ours, kind)(optimizer=optimizer, **options) for optimizer in optimizers]
    for wrapper, network in zip(wrappers, networks, strict=True):
        with wrapper.optim_context(network):  # ApexOptimWrapper converts the model here
            pass
    for _ in range(3):
        with wrappers[0].optim_context(networks[0]), wrappers[1].optim_context(networks[1]):
            loss = networks[1](networks[0](x)).float().square().mean()
        wrappers[0].update_params(loss)
        with wrappers[1].optim_context(networks[1]):
            loss = networks[1](real).float().mean()
        wrappers[1].update_params(loss)
        plain[1](plain[0](x)).square().mean().backward()
        others[0].step()
        others[0].zero_grad()
        plain[1](real).mean().backward()
        others[1].step()
        others[1].zero_grad()
    after = [[v.float() for n in each for v in n.state_dict().values()] for each in (networks, plain)]
    torch.testing.assert_close(*after, rtol=0, atol=0.005)
