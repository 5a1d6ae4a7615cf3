"""Bad arguments raise when a wrapper is made, not at its first step, and the message says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak.core.errors import ClosureError, ConfigError, ConfigTypeError
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    BaseOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    ScalarHistory,
)
from optim.families import ours, wrap
from support.snapshot import snapshot

NAN, INF = float("nan"), float("inf")

BAD: dict[type[OptimWrapper], dict[str, list[Any]]] = {
    OptimWrapper: {
        "optimizer": [None, "SGD", torch.optim.SGD, {"type": "SGD"}],
        "accumulative_counts": [0, -1, 1.5, "2", None, True, NAN],
        "clip_grad": [
            1.0, [], {}, {"type": "norm"}, {"type": "values", "clip_value": 1.0}, {"type": None, "max_norm": 1.0},
            {"clip_value": 0.2}, {"type": "value", "max_norm": 1.0}, {"max_norm": 1.0, "normtype": 2},
            *({"max_norm": bad} for bad in (0, -1.0, NAN, "1", None, True)),
            *({"max_norm": 1.0, "norm_type": bad} for bad in (0, NAN, "two", None)),
            *({"type": "value", "clip_value": bad} for bad in (0, NAN, INF, "1")),
            {"max_norm": 1.0, "error_if_nonfinite": 1}, {"max_norm": 1.0, "foreach": "yes"},
        ],
        "sink": [print, "hub", ScalarHistory, 0, {}],
        "accumulate": [2],
    },
    AmpOptimWrapper: {
        "optimizer": [None],
        "accumulate": [2],
        "loss_scale": [
            "512", "static", None, True, 0, -1.0, NAN, INF, {"init_scale": 0.0}, {"growth_factor": 0.5},
            {"backoff_factor": 2.0}, {"growth_interval": 1.5}, {"enabled": "no"}, {"growht": 2.0},
        ],
        "dtype": ["float8", "int8", torch.int32, 16, "", torch.complex64],
        "use_fsdp": [1, None, True],
    },
    ApexOptimWrapper: {
        "optimizer": [None],
        "accumulate": [2],
        "opt_level": ["02", "O9", 2, None],
        "loss_scale": ["static", 0, -1, NAN, {}],
        "enabled": [None, "True"],
        "cast_model_type": [torch.int8, torch.float16],
        "patch_torch_functions": [True],
        "keep_batchnorm_fp32": ["yes", 1, True],
        "master_weights": [True],
        "cast_model_outputs": ["float9", torch.int32],
        "num_losses": [0, 1.5, "2", True, None],
        "verbosity": ["loud", True],
        "min_loss_scale": [-1.0, NAN, "1"],
        "max_loss_scale": [None, 0, NAN, INF],
        "norms": ["layer", None],
    },
}  # fmt: skip

LEVEL = {"patch_torch_functions": "O2", "cast_model_outputs": "O2"}
"""The opt level at which an option is refused; the other options are tested at O1."""


@pytest.mark.parametrize(
    ("cls", "name", "bad"),
    [(cls, name, bad) for cls in BAD for name in BAD[cls] for bad in BAD[cls][name]],
    ids=lambda value: str(getattr(value, "__name__", value))[:40],
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


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    ("cls", "arguments", "text"),
    [
        (OptimWrapper, {"clip_grad": {"clip_value": 0.2}}, "write dict(type='value', clip_value=0.2)"),
        (OptimWrapper, {"clip_grad": {"max_nrom": 1.0}}, "did you mean 'max_norm'?"),
        (OptimWrapper, {"clip_grad": []}, "If `clip_grad` is not None"),
        (OptimWrapper, {"clip_grad": {"type": "l2"}}, 'type of clip_grad should be "norm" or "value"'),
        (OptimWrapper, {"grad_clip": {}}, "OptimWrapper takes no 'grad_clip'; did you mean 'clip_grad'?"),
        (OptimWrapper, {"loss_scale": 8.0}, "OptimWrapper takes no 'loss_scale'; write AmpOptimWrapper("),
        (AmpOptimWrapper, {"opt_level": "O1"}, "AmpOptimWrapper takes no 'opt_level'; write ApexOptimWrapper("),
        (AmpOptimWrapper, {"half": True}, "It takes loss_scale, dtype, use_fsdp, optimizer, accumulative_counts"),
        (OptimWrapper, {"optimizer": wrap(ours)[1]}, "not OptimWrapper"),
        (AmpOptimWrapper, {"optimizer": None}, "write AmpOptimWrapper(optimizer=SGD(...))"),
        (AmpOptimWrapper, {"loss_scale": "unknown"}, "loss_scale must be of type float"),
        (AmpOptimWrapper, {"use_fsdp": True}, "call torch.distributed.init_process_group first"),
        (OptimWrapperDict, {}, "`OptimWrapperDict` only accepts OptimWrapper objects, not SGD for 'optimizer'"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_say_what_to_write(cls: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**{"optimizer": sgd(), **arguments})
    assert text in str(caught.value)


@pytest.mark.parametrize("counts", [(-1, 5), (0, -2), (1.0, 5), (0, "5"), (True, 5), (0, None)], ids=str)
def test_bad_counts(counts: tuple[Any, Any]) -> None:
    model, wrapper = wrap(ours, accumulative_counts=2)
    wrapper.initialize_count_status(model, 1, 3)
    with pytest.raises(ConfigError):
        wrapper.initialize_count_status(model, *counts)
    assert (wrapper._inner_count, wrapper._max_counts, wrapper._remainder_counts) == (1, 3, 1)


@pytest.mark.parametrize("loss", [1.0, None, [torch.ones(())]], ids=str)
def test_a_loss_is_a_tensor(loss: Any) -> None:
    _, wrapper = wrap(ours)
    with pytest.raises(ConfigTypeError, match="needs a loss tensor"):
        wrapper.update_params(loss)
    assert wrapper.inner_count == 0


def test_a_closure_is_a_whole_step() -> None:
    with pytest.raises(ClosureError, match="accumulative_counts=2"):
        wrap(ours, accumulative_counts=2)[1].step(lambda: None)


def test_the_base_class_is_abstract() -> None:
    class Half(BaseOptimWrapper):
        def update_params(self, *args: Any, **kwargs: Any) -> None: ...
        def backward(self, loss: Tensor, **kwargs: Any) -> None: ...

    for cls in (BaseOptimWrapper, Half):
        with pytest.raises(TypeError, match="abstract"):
            cls(sgd())  # type: ignore[abstract]
