"""Settings of a training: checked values, and the order in which layers of settings override each other."""

from __future__ import annotations

import itertools
import os
from dataclasses import fields
from typing import Any

import pytest
import torch

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.suitable import suitable_level
from halfpeak.recipes.catalog import build_config, choose_level
from halfpeak.recipes.device import find_device, repeatable, threads
from halfpeak.recipes.optimizers import LOW_EPSILON, OPTIMIZERS, build_optimizer, learning_rate
from halfpeak.recipes.precision import level_of
from halfpeak.recipes.sampler import BatchSampler
from halfpeak.recipes.settings import (
    CHANGEABLE,
    RECIPES,
    TrainConfig,
    find_recipe,
    merge_layers,
    parse_values,
)
from halfpeak.recipes.training import require_same


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lvel": "O2"}, "unknown setting 'lvel'; did you mean level?"),
        ({"zzz": 1}, "the settings are recipe, level"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"lr": -0.1}, "lr=-0.1 must be above 0"),
        ({"lr": float("nan")}, "lr=nan must be finite"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"init_loss_scale": "2**"}, "init_loss_scale='2**' must be a number"),
        ({"init_loss_scale": "9**9999"}, "must be a number"),
        ({"steps": "2**3"}, "must be a whole number"),
        ({"steps": 1.5}, "steps=1.5 must be a whole number"),
        ({"batch": True}, "batch=True must be a whole number"),
        ({"plot": 1}, "plot=1 must be true or false"),
        ({"cast_model_type": "int8"}, "'float16', 'bfloat16', 'float32'"),
        ({"loss_scale": "big"}, "loss_scale='big' must be a number, 'dynamic'"),
        ({"steps": 1, "epochs": 1.0}, "exclude each other"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "exclude each other"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "is above max_loss_scale"),
        ({"level": "02"}, "letter O, not the digit zero; did you mean O2?"),
        ({"level": "Auto"}, "did you mean auto?"),
        (
            {"level": "O7"},
            "level 'O7'; write one of auto, O0, O1, O2, O3, O4, O5, with the letter O, not the digit zero",
        ),
        ({"level": "O1", "master_weights": True}, "makes no sense with opt_level='O1'"),
        ({"optimizer": "admaw"}, "did you mean adamw?"),
        ({"recipe": "pysource", "size": "huge"}, "size='huge' must be one of tiny, small"),
        ({"steps": 10**5000}, "steps=an integer of 16610 bits must be below 2**63"),
        (
            {"level": [[[[["O2"] * 9] * 9] * 9] * 9]},
            "level=[a list of 9] must be text",
        ),
        ({"size": "tiny"}, "recipe 'digits' has no setting 'size' (given: 'tiny'); leave it out"),
        ({"recipe": "digit"}, "did you mean digits?"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 900


def test_a_wrong_type_is_a_type_error() -> None:
    with pytest.raises(ConfigTypeError):
        parse_values({"steps": []})


def test_text_is_read_as_the_type_of_the_setting() -> None:
    given = {"lr": "1e-3", "steps": "7", "plot": "False", "loss_scale": "128", "clip_norm": 1, "output": "x"}
    assert parse_values(given) == {
        "lr": 0.001,
        "steps": 7,
        "plot": False,
        "loss_scale": 128.0,
        "clip_norm": 1.0,
        "output": "x",
    }


@pytest.mark.parametrize(
    ("text", "value"), [("2**16", 65536.0), ("2**-14", 2.0**-14), ("1.5e1 ** 2", 225.0), ("2.0**24", 2.0**24)]
)
def test_a_number_may_be_a_power(text: str, value: float) -> None:
    names = ("init_loss_scale", "min_loss_scale", "max_loss_scale", "loss_scale")
    assert parse_values(dict.fromkeys(names, text)) == dict.fromkeys(names, value)


def test_later_layers_win_and_lengths_replace_each_other() -> None:
    config = build_config({"steps": 10, "lr": 0.5, "seed": 3}, {"epochs": 2.0, "lr": 0.25})
    assert (config.steps, config.epochs, config.lr, config.seed, config.batch) == (None, 2.0, 0.25, 3, 64)
    assert merge_layers({"clip_norm": 1.0}, {"clip_value": 2.0}) == {"clip_value": 2.0}


def test_no_layer_is_edited() -> None:
    first, second = {"steps": "10"}, {"epochs": "2"}
    build_config(first, second)
    assert (first, second) == ({"steps": "10"}, {"epochs": "2"})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_brings_what_a_configuration_needs(name: str) -> None:
    config = build_config({"recipe": name})
    assert config.recipe == name
    assert set(config.values()) == {item.name for item in fields(TrainConfig)}
    assert TrainConfig.from_values({k: v for k, v in config.values().items() if v is not None}) == config


def test_the_level_suits_the_device_unless_one_was_asked_for() -> None:
    config, reason = choose_level(build_config(), torch.device("cpu"))
    assert config.level == suitable_level("cpu").level
    assert "bfloat16" in reason
    assert choose_level(build_config({"level": "O1"}), torch.device("cpu"))[0].level == "O1"


def test_overrides_reach_the_properties() -> None:
    config = build_config(
        {"level": "O2", "cast_model_type": "bfloat16", "master_weights": False, "loss_scale": 8}
    )
    found = level_of(config).properties
    assert (found.cast_model_type, found.master_weights, found.loss_scale) == (torch.bfloat16, False, 8.0)


def test_a_changed_setting_is_named_unless_it_is_free() -> None:
    saved = build_config({"seed": 1}).values()
    require_same(saved, build_config({"seed": 1, "steps": 5, "output": "elsewhere", "log_every": 3}))
    with pytest.raises(ConfigError, match=r"lr was 0.1 and is 0.2; seed was 1 and is 2"):
        require_same(saved, build_config({"seed": 2, "lr": 0.2}))
    assert {item.name for item in fields(TrainConfig)} >= CHANGEABLE


def test_every_batch_of_an_epoch_is_new_and_any_can_be_asked_for() -> None:
    sampler = BatchSampler(samples=10, batch=3, seed=5)
    epoch = torch.cat([sampler.indices(number) for number in range(3)])
    assert len(set(epoch.tolist())) == 9
    later = sampler.indices(7)
    assert torch.equal(BatchSampler(samples=10, batch=3, seed=5).indices(7), later)
    assert not torch.equal(BatchSampler(samples=10, batch=3, seed=6).indices(7), later)
    with pytest.raises(ConfigError, match=r"batch=11 is more than.*write batch=10 or less"):
        BatchSampler(samples=10, batch=11, seed=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_low", [False, True])
def test_every_optimizer_is_built_with_two_groups(name: str, steps_low: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(build_config({"optimizer": name}), model, steps_low=steps_low)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
    if name != "sgd":
        assert (optimizer.param_groups[0]["eps"] == LOW_EPSILON) == steps_low


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_and_never_rises_again(schedule: str) -> None:
    config = build_config({"schedule": schedule, "warmup": 5, "lr": 1.0, "schedule_steps": 50})
    rates = [learning_rate(config, taken) for taken in range(80)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(after <= before for before, after in itertools.pairwise(rates[4:]))
    assert rates[50:] == [1.0 if schedule == "constant" else pytest.approx(0.01)] * 30


def test_devices_are_found_by_name() -> None:
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device='tpu' is not on this machine; write one of auto, cpu"):
        find_device("tpu")
    with pytest.raises(ConfigError, match="unknown recipe"):
        find_recipe(None)


def test_repeatable_puts_everything_back_when_its_body_raises() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, dict(os.environ)

    def fail() -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), repeatable(True):
        fail()
    after = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, dict(os.environ)
    assert after == before


def test_threads_are_put_back_when_the_body_raises() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), threads(before + 1):
        fail()
    assert torch.get_num_threads() == before
    assert RECIPES["digits"].defaults["threads"] == 1
    assert "threads" not in RECIPES["pysource"].defaults
