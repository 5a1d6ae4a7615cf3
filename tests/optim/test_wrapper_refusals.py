"""Bad arguments raise when a wrapper is made, not at its first step, and the message says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.core.errors import (
    ClosureError,
    ConfigError,
    ConfigTypeError,
    LossIdError,
    OrderError,
)
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    BaseOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    ScalarHistory,
)
from optim.families import Unit, ours, wrap
from support.snapshot import snapshot

NAN, INF = float("nan"), float("inf")

COMMON: dict[str, list[Any]] = {
    "optimizer": [None, "SGD", [], torch.optim.SGD, {"type": "SGD"}],
    "accumulative_counts": [0, -1, 1.5, "2", None, True, NAN, INF, []],
    "clip_grad": [
        1.0,
        "norm",
        [],
        {},
        {"type": "norm"},
        {"type": "values", "clip_value": 1.0},
        {"type": None, "max_norm": 1.0},
        {"clip_value": 0.2},
        {"type": "value", "max_norm": 1.0},
        {"type": "value", "clip_value": 1.0, "max_norm": 1.0},
        {"max_norm": 1.0, "normtype": 2},
        {"max_norm": 1.0, "mode": "agc"},
        *({"max_norm": bad} for bad in (0, -1.0, NAN, "1", None, True, [])),
        *({"max_norm": 1.0, "norm_type": bad} for bad in (0, -2, NAN, "two", None)),
        *({"type": "value", "clip_value": bad} for bad in (0, -1.0, NAN, INF, "1", None)),
        {"max_norm": 1.0, "error_if_nonfinite": 1},
        {"max_norm": 1.0, "foreach": "yes"},
    ],
    "sink": [print, "hub", ScalarHistory, 0, {}],
    "accumulate": [2],
}

AMP: dict[str, list[Any]] = {
    "loss_scale": [
        "512",
        "static",
        None,
        True,
        0,
        -1.0,
        NAN,
        INF,
        [],
        ("dynamic",),
        {"init_scale": 0.0},
        {"init_scale": NAN},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"enabled": "no"},
        {"init": 1.0, "growht": 2.0},
    ],
    "dtype": ["float8", "int8", torch.int32, 16, "", [], torch.complex64],
    "use_fsdp": [1, None, "yes", True],
}

APEX: dict[str, list[Any]] = {
    "opt_level": ["02", "O9", "o1", 2, None, ""],
    "loss_scale": ["static", 0, -1, NAN, INF, [], {}],
    "enabled": [None, "True"],
    "cast_model_type": [torch.int8, "float16", torch.float16],
    "patch_torch_functions": [True],
    "keep_batchnorm_fp32": ["yes", 1, True],
    "master_weights": [True],
    "cast_model_outputs": ["float9", torch.int32, 16],
    "num_losses": [0, -1, 1.5, "2", True, None],
    "verbosity": ["loud", True],
    "min_loss_scale": [-1.0, NAN, INF, "1"],
    "max_loss_scale": [None, 0, -1.0, NAN, INF, "1"],
    "norms": ["layer", None, True],
}

LEVEL = {"patch_torch_functions": "O2", "cast_model_outputs": "O2"}
"""The opt level at which an option is refused; the other options are tested at O1."""

ROWS: list[tuple[type[OptimWrapper], str, Any]] = [
    *((cls, name, bad) for cls in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper) for name in COMMON for bad in COMMON[name]),
    *((AmpOptimWrapper, name, bad) for name in AMP for bad in AMP[name]),
    *((ApexOptimWrapper, name, bad) for name in APEX for bad in APEX[name]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "name", "bad"), ROWS, ids=lambda value: str(getattr(value, "__name__", value))[:40]
)
def test_bad_arguments(cls: type[OptimWrapper], name: str, bad: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    arguments: dict[str, Any] = {"optimizer": optimizer, name: bad}
    if cls is ApexOptimWrapper and name != "opt_level":
        arguments["opt_level"] = LEVEL.get(name, "O1")
    with pytest.raises(ConfigError) as caught:
        cls(**arguments)
    message = str(caught.value)
    assert any(word in message for word in (name, repr(bad), *map(str, bad if isinstance(bad, dict) else ())))
    assert snapshot(model, optimizer) == before


def test_no_argument_is_left_out() -> None:
    import inspect

    def names(cls: type) -> set[str]:
        return set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}

    assert names(OptimWrapper) == COMMON.keys() - {"accumulate"}
    assert names(AmpOptimWrapper) == AMP.keys()
    assert names(ApexOptimWrapper) == APEX.keys()


HINTS: dict[str, tuple[Callable[[], Any], str]] = {
    "clip by value without a type": (
        lambda: wrap(ours, clip_grad={"clip_value": 0.2}),
        "write dict(type='value', clip_value=0.2)",
    ),
    "the keyword of mmcv": (
        lambda: wrap(ours, grad_clip={"max_norm": 1.0}),
        "OptimWrapper has no keyword 'grad_clip'; did you mean 'clip_grad'?",
    ),
    "a misspelt key": (lambda: wrap(ours, clip_grad={"max_nrom": 1.0}), "did you mean 'max_norm'?"),
    "the clip of the original": (lambda: wrap(ours, clip_grad=[]), "If `clip_grad` is not None"),
    "the type of the original": (
        lambda: wrap(ours, clip_grad={"type": "l2", "max_norm": 1}),
        'type of clip_grad should be "norm" or "value"',
    ),
    "no optimizer": (lambda: AmpOptimWrapper("dynamic"), "write AmpOptimWrapper(optimizer=SGD(...))"),
    "the optimizer first": (
        lambda: ApexOptimWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)),  # type: ignore[arg-type]
        "ApexOptimWrapper needs optimizer=",
    ),
    "the scale of the original": (
        lambda: wrap(ours, "AmpOptimWrapper", loss_scale="unknown"),
        "loss_scale must be of type float",
    ),
    "a wrapper in a wrapper": (lambda: OptimWrapper(wrap(ours)[1]), "not OptimWrapper"),
    "an optimizer in a dict": (
        lambda: OptimWrapperDict(a=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)),  # type: ignore[arg-type]
        "`OptimWrapperDict` only accept",
    ),
}


@pytest.mark.parametrize("row", HINTS)
def test_messages_say_what_to_write(row: str) -> None:
    call, text = HINTS[row]
    with pytest.raises(ConfigError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("counts", [(-1, 5), (0, -2), (1.0, 5), (0, "5"), (True, 5), (0, None)], ids=str)
def test_bad_counts(counts: tuple[Any, Any]) -> None:
    model, wrapper = wrap(ours, accumulative_counts=2)
    wrapper.initialize_count_status(model, 1, 3)
    with pytest.raises(ConfigError):
        wrapper.initialize_count_status(model, *counts)
    assert (wrapper._inner_count, wrapper._max_counts, wrapper._remainder_counts) == (1, 3, 1)


@pytest.mark.parametrize("loss", [1.0, None, "loss", [torch.ones(())]], ids=str)
def test_a_loss_is_a_tensor(loss: Any) -> None:
    _, wrapper = wrap(ours)
    with pytest.raises(ConfigTypeError, match="needs a loss tensor"):
        wrapper.update_params(loss)
    assert wrapper.inner_count == 0


def test_a_failed_backward_is_not_counted() -> None:
    model, wrapper = wrap(ours, accumulative_counts=2)
    wrapper.update_params(model())
    grad = model.weight.grad.clone()
    with pytest.raises(RuntimeError, match="scalar"):
        wrapper.update_params(model() * torch.ones(2))
    with pytest.raises(RuntimeError, match="does not require grad"):
        wrapper.update_params(torch.ones(()))
    assert wrapper.inner_count == 1
    assert torch.equal(model.weight.grad, grad)
    wrapper.update_params(model())
    assert model.weight.item() == -1.0


def test_moments_that_do_not_fit() -> None:
    model = Unit()
    wrapper = ApexOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    for call in (lambda: wrapper.update_params(model()), wrapper.step):
        with pytest.raises(OrderError, match="optim_context"):
            call()
    with wrapper.optim_context(model):
        loss = model()
    with pytest.raises(LossIdError):
        wrapper.backward(loss, loss_id=1)
    with pytest.raises(ClosureError, match="accumulative_counts=2"):
        wrap(ours, accumulative_counts=2)[1].step(lambda: None)


def test_the_base_class_is_abstract() -> None:
    class Half(BaseOptimWrapper):
        def update_params(self, *args: Any, **kwargs: Any) -> None: ...
        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None: ...

    for cls in (BaseOptimWrapper, Half):
        with pytest.raises(TypeError, match="abstract"):
            cls(wrap(ours)[1].optimizer)  # type: ignore[abstract]
