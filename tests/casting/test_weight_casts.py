"""The cache of low-precision weights: never stale, shared while a graph lives, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from halfpeak.casting.casts import OpCasts, disable_casts
from halfpeak.casting.weight_casts import WeightCache


class Twice(nn.Module):
    """Uses one weight twice, once through a tied layer, so that the second use finds the copy of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def reference(model: Twice, x: Tensor, low: torch.dtype = torch.float16) -> Tensor:
    """The output of the model with its present weights, cast by hand."""
    first, bias, second = (
        value.detach().to(low) for value in (model.first.weight, model.first.bias, model.second.weight)
    )
    return torch.nn.functional.linear(torch.nn.functional.linear(x.detach().to(low), first, bias), second)


def by_optimizer(model: Twice, make: Callable[..., torch.optim.Optimizer]) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    make(model.parameters(), lr=3.0).step()


def by_load_state_dict(model: Twice, **options: bool) -> None:
    model.load_state_dict({name: -3 * value for name, value in model.state_dict().items()}, **options)


def by_thread(model: Twice) -> None:
    """New data from a thread, where no scope sees the call."""
    thread = threading.Thread(
        target=lambda: setattr(model.first.weight, "data", -model.first.weight.detach())
    )
    thread.start()
    thread.join()


def by_swap(model: Twice) -> None:
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(-model.first.weight.detach()))
    model.second.weight = model.first.weight


MUTATIONS: dict[str, Callable[[Twice], object]] = {
    "no_grad": torch.no_grad()(lambda model: model.first.weight.mul_(-3)),
    "load_state_dict": by_load_state_dict,
    "assigned state dict": partial(by_load_state_dict, assign=True),
    "optimizer": partial(by_optimizer, make=torch.optim.SGD),
    "fused optimizer": partial(by_optimizer, make=partial(torch.optim.AdamW, fused=True)),
    "data": lambda model: model.first.weight.data.copy_(-model.first.weight.data),
    "new data": lambda model: setattr(model.first.weight, "data", -model.first.weight.detach()),
    "new data by a thread": by_thread,
    "detached alias": lambda model: model.first.weight.detach().neg_(),
    "numpy": lambda model: model.first.weight.data.numpy().__imul__(-1),
    "swap": by_swap,
    "foreach": torch.no_grad()(lambda model: torch._foreach_mul_(list(model.parameters()), -3.0)),
}

mutations = pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)


@mutations
@pytest.mark.parametrize("inside", [True, False], ids=["inside of the scope", "while casts are disabled"])
def test_no_cast_is_stale(mutate: Callable[[Twice], object], inside: bool) -> None:
    model, x = Twice(), torch.rand(2, 4, requires_grad=True)
    with OpCasts(torch.float16):
        graph = model(x)  # keeps its casts alive
        with nullcontext() if inside else disable_casts():
            mutate(model)
        after = model(x)
        with torch.no_grad():
            evaluated = model(x)
    assert not torch.equal(after, graph)
    assert torch.equal(after, reference(model, x))
    assert torch.equal(evaluated, after)


def test_a_weight_used_twice_is_cast_once_and_its_gradient_is_right() -> None:
    model, x = Twice(), torch.rand(2, 4, requires_grad=True)
    told: list[int] = []
    with OpCasts(torch.bfloat16):
        out = model(x)
        nodes = [out.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None:
                if node.name().startswith("ToCopy") and node.next_functions[0][0].name().endswith(
                    "AccumulateGrad"
                ):
                    told.append(id(node))
                nodes.extend(parent for parent, _ in node.next_functions)
        out.float().sum().backward()
    assert len(set(told)) == 3  # input, bias, and one for both uses of the weight
    weight, bias = (
        value.detach().clone().requires_grad_() for value in (model.first.weight, model.first.bias)
    )
    low = weight.bfloat16()
    hidden = torch.nn.functional.linear(x.bfloat16(), low, bias.bfloat16())
    torch.nn.functional.linear(hidden, low).float().sum().backward()
    assert torch.equal(model.first.weight.grad, weight.grad)


def test_a_copy_made_without_gradients_is_not_trained() -> None:
    model, x = Twice(), torch.rand(2, 4, requires_grad=True)
    with OpCasts(torch.float16):
        with torch.no_grad():
            kept = model(x)
            view = torch.einsum("ij->ji", model.first.weight)  # of the copy, which it keeps alive
        model(x).float().sum().backward()
        assert model.first.weight.grad is not None
        model.first.weight.grad = None
        model.first.weight.requires_grad_(False)
        frozen = model(x)
        model.first.weight.requires_grad_(True)
        model(x).float().sum().backward()
    assert not kept.requires_grad
    assert not view.requires_grad
    assert frozen.requires_grad
    assert model.first.weight.grad is not None


def test_nothing_dead_is_kept_alive() -> None:
    casts = OpCasts(torch.float16)
    with casts:
        model, x = Twice(), torch.rand(2, 4, requires_grad=True)
        out = model(x)
        weight = weakref.ref(model.first.weight)
        node = weakref.ref(model)
        del model, out
        gc.collect()
        assert weight() is None
        assert node() is None


def test_clear_and_switching_off() -> None:
    weight, x = nn.Parameter(torch.rand(3, 3)), torch.rand(3, 3, requires_grad=True)
    cache = WeightCache(torch.float16)
    kept = cache.cast(weight)
    assert cache.cast(weight) is kept
    assert len(cache) == 1
    cache.clear()
    assert len(cache) == 0
    assert cache.cast(weight) is not kept
    with OpCasts(torch.float16, cache=False):
        out = (weight @ x).sum() + (weight @ x).sum()
        out.backward()
    assert weight.grad is not None


def test_deepcopy_and_pickle_inside_the_scope() -> None:
    model, x = Twice(), torch.rand(2, 4, requires_grad=True)
    with OpCasts(torch.float16):
        out = model(x)
        clone = copy.deepcopy(model)
        other = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            clone.first.weight.zero_()
            clone.first.bias.zero_()
        assert torch.equal(model(x), out)
        assert torch.equal(other(x), out)
        assert not clone(x).any()
