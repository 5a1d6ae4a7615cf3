"""Several runs in one process: each computes in its own precision, whatever casts another has given to the thread."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak import amp
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class _Net(nn.Module):
    """Records the dtype of its product, also when checkpointing computes it again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def _product(self, x: Tensor) -> Tensor:
        product = self.layer(x)
        self.dtypes.append(product.dtype)
        return product * product

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._product, x, use_reentrant=False)


Begin = Callable[
    [nn.Module, torch.optim.Optimizer], tuple[AbstractContextManager[Any], Callable[[Tensor], None]]
]


def _engine(level: str, **options: Any) -> Begin:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        engine = halfpeak.prepare(model, optimizer, level, **options)
        return engine.forward(), engine.backward

    return begin


def _wrapper(kind: Callable[..., OptimWrapper], **options: Any) -> Begin:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        wrapper = kind(optimizer=optimizer, **options)
        return wrapper.optim_context(model), wrapper.backward

    return begin


FRONT_ENDS: dict[str, tuple[Begin, torch.dtype, torch.dtype]] = {
    **{
        f"engine-{level}": (_engine(level), dtype, evaluated)
        for level, dtype, evaluated in (
            ("O0", torch.float32, torch.float32),
            ("O2", torch.float16, torch.float16),
            ("O4", torch.bfloat16, torch.float16),
            ("O5", torch.bfloat16, torch.bfloat16),
        )
    },
    "torch-O4": (_engine("O4", op_lists="torch"), torch.bfloat16, torch.float16),
    # These wrap an optimizer, and leave no hook on a model that is called outside of their context.
    "OptimWrapper": (_wrapper(OptimWrapper), torch.float32, torch.float16),
    "AmpOptimWrapper": (_wrapper(AmpOptimWrapper, dtype="bfloat16"), torch.bfloat16, torch.float16),
    "ApexOptimWrapper": (_wrapper(ApexOptimWrapper, opt_level="O5"), torch.bfloat16, torch.bfloat16),
}
"""How each begins a run, the dtype of its product in training, and in an evaluation outside of its own context.

``tests/amp/test_runs.py`` has several runs of amp.
"""


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("amp_first", [True, False])
def test_amp_casts_the_thread_then_another_run_computes_in_its_own_precision(
    front_end: str, amp_first: bool
) -> None:
    """In forward and in recomputation; in an evaluation, the thread's casts apply to models that nobody has hooked."""
    begin, dtype, evaluated = FRONT_ENDS[front_end]
    alive, model = nn.Linear(4, 4), _Net()
    optimizer, x = sgd(model), torch.ones(2, 4)

    def cast_the_thread() -> None:
        amp.initialize(alive, sgd(alive), opt_level="O1", verbosity=0)

    if amp_first:
        cast_the_thread()
    forward, backward = begin(model, optimizer)
    if not amp_first:
        cast_the_thread()
    with forward:
        output = model(x)
    backward(output.float().mean())
    with torch.no_grad():
        model(x)
    assert model.dtypes == [dtype, dtype, evaluated]
    assert alive(x).dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_copy_of_a_model_computes_as_the_model_does_beside_another_run(level: str) -> None:
    models = {"O1": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    for kind, model in models.items():
        amp.initialize(model, sgd(model), opt_level=level if kind == "other" else kind, verbosity=0)
    x = torch.ones(2, 4)
    for model in models.values():
        assert copy.deepcopy(model)(x).dtype is model(x).dtype
