"""OptimWrapperDict: several networks, each with a wrapper of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.core.errors import OrderError, RegistryError
from halfpeak.optim import OptimWrapper, OptimWrapperDict
from optim.families import Unit, ours, wrap
from support.nets import LEVELS


def pair(**options: Any) -> tuple[list[Unit], OptimWrapperDict]:
    made = [wrap(ours, **options) for _ in range(2)]
    return [model for model, _ in made], OptimWrapperDict(one=made[0][1], two=made[1][1])


def test_what_it_has_of_every_wrapper() -> None:
    models, wrappers = pair(accumulative_counts=3)
    assert isinstance(wrappers, OptimWrapper)
    wrappers.initialize_count_status(models[0], 1, 4)
    assert [wrapper._max_counts for wrapper in wrappers.values()] == [4, 4]
    wrappers["two"].initialize_count_status(models[1], 0, 8)
    assert [wrapper._max_counts for wrapper in wrappers.values()] == [4, 8]
    assert (list(wrappers.keys()), len(wrappers)) == (["one", "two"], 2)
    assert ("one" in wrappers, "x" in wrappers) == (True, False)
    assert dict(wrappers.items())["two"] is wrappers["two"]
    assert wrappers.param_groups == {name: wrapper.param_groups for name, wrapper in wrappers.items()}
    assert wrappers.get_lr() == {"one.lr": [1.0], "two.lr": [1.0]}
    assert wrappers.get_momentum() == {"one.momentum": [0], "two.momentum": [0]}
    assert repr(wrappers).startswith("name: one\nType: OptimWrapper\n")
    for model, wrapper in zip(models, wrappers.values(), strict=True):
        wrapper.backward(model())
    wrappers.zero_grad()
    assert [model.weight.grad for model in models] == [None, None]
    assert list(wrappers.state_dict()) == ["one", "two"]


@pytest.mark.parametrize(
    "method",
    ["update_params", "backward", "step", "scale_loss", "should_update", "should_sync", "optim_context"],
)
def test_what_has_no_meaning_for_several_is_refused(method: str) -> None:
    _, wrappers = pair()
    with pytest.raises(NotImplementedError, match=f"`{method}` should be called") as caught:
        getattr(wrappers, method)(torch.ones(()))
    assert isinstance(caught.value, OrderError)
    assert f"wrappers[name].{method}(" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["optimizer", "defaults", "inner_count", "base_param_settings", "message_hub"]
)
def test_attributes_of_one_wrapper_say_where_they_are(name: str) -> None:
    with pytest.raises(AttributeError, match=f"write wrappers\\['one'\\].{name}"):
        getattr(pair()[1], name)


@pytest.mark.parametrize("builtin", [KeyError, AssertionError, RegistryError])
def test_an_unknown_name(builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="no wrapper 'three'; there are 'one', 'two'"):
        pair()[1]["three"]


WRAPPERS: list[tuple[str, dict[str, Any]]] = [
    ("OptimWrapper", {}),
    ("AmpOptimWrapper", {"dtype": "float16", "loss_scale": 1024.0}),
    *(("ApexOptimWrapper", {"opt_level": level, "loss_scale": 1024.0, "verbosity": 0}) for level in LEVELS),
]


@pytest.mark.parametrize(("kind", "options"), WRAPPERS, ids=str)
def test_networks_of_a_gan_train_as_in_plain_torch(kind: str, options: dict[str, Any]) -> None:
    """``update_params`` zeroes only the gradients of its own optimizer, and the other network's stay."""
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
