"""Runs through a wrapper: the same bits as through the engine, resume, and settings that do not fit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.cli.main import main
from halfpeak.core.errors import ConfigError
from halfpeak.recipes.catalog import RECIPES, draft, measure, settle
from halfpeak.recipes.training import Training
from halfpeak.recipes.wrapper_driver import drive
from support.snapshot import values

CPU = torch.device("cpu")
SMALL = {"steps": 6, "batch": 8, "warmup": 0}


def training(**given: Any) -> Training:
    plan, _ = settle(draft({**SMALL, **given}), CPU)
    recipe = RECIPES[plan.recipe].build(plan, CPU)
    plan, order = measure(plan, recipe)
    return Training(plan, recipe, order, CPU, drive)


def seen(run: Training) -> list[Any]:
    return values(run.driver.model, run.driver.optimizer)


SAME: list[tuple[str, dict[str, Any]]] = [
    ("optim", {"level": "O0"}),
    ("optim", {"level": "O0", "accumulate": 3, "clip_norm": 0.5}),
    ("optim", {"level": "O0", "clip_value": 0.01}),
    *(("apex", {"level": level}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")),
    ("apex", {"level": "O2", "accumulate": 2, "clip_norm": 0.5, "max_loss_scale": 256.0, "optimizer": "sgd"}),
    (
        "apex",
        {
            "level": "O5",
            "keep_batchnorm_fp32": False,
            "cast_model_outputs": "bfloat16",
            "loss_scale": "dynamic",
        },
    ),
]


@pytest.mark.parametrize(("wrapper", "given"), SAME, ids=str)
def test_the_same_bits_as_through_the_engine(wrapper: str, given: dict[str, Any]) -> None:
    one, other = training(wrapper=wrapper, **given), training(**given)
    for _ in range(4):
        steps = [{k: v.item() for k, v in run.advance().scalars.items()} for run in (one, other)]
        if "clip_value" in given:
            steps[1].pop("grad_norm")
        assert steps[0] == steps[1]
    assert seen(one) == seen(other)
    assert repr(one.validate()) == repr(other.validate())


RESUMED = [("optim", "O0"), ("amp", "O1"), ("amp", "O4"), ("apex", "O1"), ("apex", "O2"), ("apex", "O5")]


@pytest.mark.parametrize(("wrapper", "level"), RESUMED)
def test_resume_is_bitwise(wrapper: str, level: str) -> None:
    given = {"wrapper": wrapper, "level": level, "accumulate": 2, "clip_norm": 0.5}
    straight, stopped, resumed = (training(**given) for _ in range(3))
    for _ in range(6):
        straight.advance()
    for _ in range(3):
        stopped.advance()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    for _ in range(3):
        resumed.advance()
    assert seen(resumed) == seen(straight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wrapper": "optim", "level": "O2"}, "write level='O0'"),
        ({"wrapper": "amp", "level": "O5"}, "write level='O1' or 'O4', or wrapper='apex'"),
        ({"wrapper": "amp", "master_weights": True}, "has no argument for master_weights=True; leave it out"),
        ({"wrapper": "optim", "loss_scale": 8.0}, "has no argument for loss_scale=8.0"),
        (
            {"wrapper": "apex", "level": "O1", "init_loss_scale": 8.0},
            "has no argument for init_loss_scale=8.0",
        ),
        ({"wrapper": "native"}, "'optim', 'amp', 'apex'"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        draft({**SMALL, **given})
    assert message in str(caught.value)


@pytest.mark.parametrize(("wrapper", "level"), [("optim", "O0"), ("amp", "O4"), ("apex", "O5")])
def test_auto_takes_the_nearest_level(wrapper: str, level: str) -> None:
    assert settle(draft({**SMALL, "wrapper": wrapper}), CPU)[0].level == level


@pytest.mark.parametrize(
    ("given", "scale"),
    [({}, 2.0**16), ({"init_loss_scale": 64.0}, 64.0), ({"loss_scale": 32.0}, 32.0), ({"level": "O4"}, 1.0)],
    ids=str,
)
def test_the_scale_of_amp(given: dict[str, Any], scale: float) -> None:
    run = training(**{"wrapper": "amp", "level": "O1", **given})
    assert run.advance().scalars["loss_scale"].item() == scale


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--batch", "8", "--plot", "false", "--tensorboard", "false", "--output", "out"]
    assert main(["train", "digits", "--wrapper", "apex", "--level", "O2", "--steps", "3", *options]) == 0
    assert main(["train", "--resume", "out", "--steps", "5"]) == 0
    assert json.loads(Path("out/summary.json").read_text())["steps"] == 5
    assert main(["train", "--resume", "out", "--steps", "7", "--wrapper", "amp"]) == 2
    assert "wrapper='amp' cannot run at level='O2'" in capsys.readouterr().err
