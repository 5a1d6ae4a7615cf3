"""State dicts of low-precision models: float32, exact, and working on copies of the model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import SGD

from halfpeak.casting.modules import convert_network
from halfpeak.core.errors import OrderError
from halfpeak.parts.pairs import Pairs
from halfpeak.parts.state_dict_hooks import hook_state_dict

LOW = [torch.float16, torch.bfloat16]


class Extra(nn.Module):
    """Has a weight, low and integer buffers, a buffer that is not saved, and extra state of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.extra: Any = {"seen": 5, "note": "as it is"}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Transposed(nn.Module):
    """Stores the transpose of the weight that its checkpoints hold."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = {prefix + "weight": state_dict[prefix + "weight"].t()}
        super()._load_from_state_dict(own, prefix, *args)


def exact_low(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> tuple[Pairs, dict[str, Tensor]]:
    """Make a model low, with masters that start from its float32 values; return the pairs and these values."""
    values = {id(p): p.detach().clone() for p in model.parameters()}
    state = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    convert_network(model, dtype, "none")
    pairs = Pairs([SGD(model.parameters(), lr=0.1)], values=values)
    hook_state_dict(model, pairs)
    return pairs, state


def nested() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            body=nn.Sequential(
                nn.Linear(3, 4), nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.BatchNorm1d(2)})
            ),
            head=nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(()))]),
            extra=Extra(),
        )
    )


def equal(actual: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    tensors = {name: value for name, value in actual.items() if isinstance(value, Tensor)}
    return list(tensors) == list(expected) and all(
        value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        for name, value in tensors.items()
    )


@pytest.mark.parametrize("dtype", LOW)
def test_parameters_say_what_their_masters_say(dtype: torch.dtype) -> None:
    model = nested()
    pairs, exact = exact_low(model, dtype)
    buffers = {name for name, buffer in model.named_buffers() if buffer.dtype is dtype}
    expected = {name: value.to(dtype).float() if name in buffers else value for name, value in exact.items()}
    state = model.state_dict()
    assert buffers
    assert equal(state, expected)
    assert state["extra._extra_state"] == {"seen": 5, "note": "as it is"}
    assert "extra.scratch" not in state
    assert len(pairs) == len(list(model.parameters()))


def test_every_part_speaks_float32_under_any_prefix() -> None:
    model = nested()
    _, exact = exact_low(model)
    body = model.get_submodule("body").state_dict()
    assert torch.equal(body["0.weight"], exact["body.0.weight"])
    leaf = model.get_submodule("body.1.a").state_dict(prefix="x.")
    assert torch.equal(leaf["x.weight"], exact["body.1.a.weight"])
    into: dict[str, Any] = OrderedDict(before=torch.ones(1, dtype=torch.float16))
    model.get_submodule("body.0").state_dict(destination=into, prefix="y.")
    assert into["before"].dtype is torch.float16, "not ours"
    assert torch.equal(into["y.weight"], exact["body.0.weight"])


def test_without_masters_low_values_are_widened() -> None:
    model = nested()
    convert_network(model, torch.float16, "none")
    hook_state_dict(model, Pairs([]))
    widened = {
        name: value.float() if value.is_floating_point() else value
        for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if name != "extra.scratch"
    }
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    assert state.keys() == widened.keys()
    assert all(torch.equal(state[name], widened[name]) for name in state)


def test_live_parameters_stay_with_keep_vars() -> None:
    model = nested()
    exact_low(model)
    state = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        assert state[name] is parameter


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("strict", [True, False])
def test_loading_is_exact_and_round_trips(dtype: torch.dtype, strict: bool) -> None:
    model, source = nested(), nested()
    pairs, _ = exact_low(model, dtype)
    pairs.agree()
    wanted = {name: value.clone() for name, value in source.state_dict().items() if isinstance(value, Tensor)}
    state = dict(source.state_dict())
    given = {name: id(value) for name, value in state.items()}
    model.load_state_dict(state, strict=strict)
    pairs.agree()
    assert {name: id(value) for name, value in state.items()} == given
    for name, parameter in model.named_parameters():
        master = pairs.main_of(parameter)
        assert torch.equal(master, wanted[name])
        assert torch.equal(parameter, wanted[name].to(dtype))
    again = nested()
    exact_low(again, dtype)
    again.load_state_dict(model.state_dict())
    assert equal(again.state_dict(), {n: v for n, v in model.state_dict().items() if isinstance(v, Tensor)})


def test_a_low_checkpoint_loads_too() -> None:
    model = nn.Linear(2, 2)
    pairs, _ = exact_low(model, torch.float16)
    low = {name: value.half() for name, value in nn.Linear(2, 2).state_dict().items()}
    model.load_state_dict(low)
    pairs.agree()
    assert all(torch.equal(value, low[name].float()) for name, value in model.state_dict().items())


def test_a_partial_load_leaves_the_rest_as_it_is() -> None:
    model = nested()
    pairs, exact = exact_low(model)
    pairs.agree()
    with torch.no_grad():
        model.get_parameter("body.0.bias").fill_(2.0)
    model.load_state_dict({"body.0.weight": torch.full((4, 3), 1 / 3)}, strict=False)
    pairs.agree()
    state = model.state_dict()
    assert torch.equal(state["body.0.weight"], torch.full((4, 3), 1 / 3))
    assert torch.equal(state["body.0.bias"], torch.full((4,), 2.0)), "written before the load, and not in it"
    assert torch.equal(state["body.1.a.weight"], exact["body.1.a.weight"])


def test_a_load_that_torch_refuses_leaves_the_masters_of_what_did_not_fit() -> None:
    model = nn.Linear(2, 2)
    pairs, exact = exact_low(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.zeros(3, 2), "bias": exact["bias"]})
    pairs.agree()
    assert equal(model.state_dict(), exact)


@pytest.mark.parametrize("size", [2, 3], ids=["square", "oblong"])
def test_a_module_that_loads_in_its_own_way(size: int) -> None:
    model = Transposed(size)
    pairs, _ = exact_low(model)
    pairs.agree()
    saved = torch.randn(size, 2)
    model.load_state_dict({"weight": saved})
    pairs.agree()
    master = pairs.main_of(model.weight)
    assert torch.equal(model.weight, saved.t().bfloat16())
    assert torch.equal(master.bfloat16(), model.weight), "what is stepped is what was loaded"
    assert torch.equal(model.state_dict()["weight"].bfloat16(), model.weight)


def test_a_pre_hook_that_renames_keys() -> None:
    model = nn.Linear(2, 2)

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")

    pairs, exact = exact_low(model)
    model.register_load_state_dict_pre_hook(rename)
    saved = torch.randn(2, 2)
    model.load_state_dict({"kernel": saved, "bias": exact["bias"]})
    pairs.agree()
    assert torch.equal(model.weight, saved.bfloat16())
    assert torch.equal(model.state_dict()["weight"].bfloat16(), model.weight)


def test_shared_modules_and_tied_parameters() -> None:
    shared = nn.Linear(2, 2, bias=False)
    tied = nn.Linear(2, 2, bias=False)
    tied.weight = shared.weight
    model = nn.ModuleDict({"a": shared, "b": shared, "c": tied})
    pairs, exact = exact_low(model)
    assert len(pairs) == 1
    assert equal(model.state_dict(), exact)
    value = torch.full((2, 2), 1 / 3)
    model.load_state_dict(dict.fromkeys(("a.weight", "b.weight", "c.weight"), value))
    pairs.agree()
    assert all(torch.equal(saved, value) for saved in model.state_dict().values())


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations(parametrize: Any) -> None:
    model = parametrize(nn.Linear(3, 3))
    pairs, exact = exact_low(model)
    assert any("parametrizations" in name for name in exact)
    parameters = {name for name, _ in model.named_parameters()}
    state = model.state_dict()
    assert parameters
    assert all(torch.equal(state[name], exact[name]) for name in parameters)
    model.load_state_dict(state)
    pairs.agree()
    assert all(torch.equal(model.state_dict()[name], exact[name]) for name in parameters)


def test_modules_that_are_put_below_later_are_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    _, exact = exact_low(model)
    register_parametrization(model[0], "weight", nn.Identity())
    names = {"0.bias": "0.bias", "0.parametrizations.weight.original": "0.weight"}
    assert equal(model.state_dict(), {name: exact[before] for name, before in names.items()})
    loaded = {name: exact[before] * 1.001 for name, before in names.items()}
    model.load_state_dict(loaded)
    assert equal(model.state_dict(), loaded)


def test_assigning_instead_of_copying_is_refused_before_anything_is_loaded() -> None:
    model = nested()
    exact_low(model)
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    fresh = nested().state_dict()
    for part in ("", "body", "body.1", "body.1.a"):
        prefix = part + "." if part else ""
        state = {name[len(prefix) :]: value for name, value in fresh.items() if name.startswith(prefix)}
        with pytest.raises(OrderError, match="assign=True"):
            model.get_submodule(part).load_state_dict(state, assign=True)
        for name, parameter in model.named_parameters():
            assert (id(parameter), True) == (before[name][0], torch.equal(parameter, before[name][1]))


def test_assigning_where_there_is_no_master_keeps_the_low_dtype() -> None:
    model = nested()
    convert_network(model, torch.bfloat16, "none")
    hook_state_dict(model, Pairs([]))
    model.load_state_dict(nested().state_dict(), assign=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
