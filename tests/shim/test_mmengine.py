"""``install("mmengine")`` against mmengine itself: its registries, its Runner, its hooks.

Set ``HALFPEAK_TEST_MMENGINE`` to a folder that holds another mmengine (``pip install --no-deps --target FOLDER
onedl-mmengine``), and the runs are repeated with that one.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.optim
import halfpeak.shim
from halfpeak.core.errors import ConfigError, RegistryError
from halfpeak.core.extras import MissingExtraError
from optim.families import ConfigDict
from support.forks import python
from support.nets import PURE, STORED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.hooks  # fills the registry of hooks  # noqa: F401
    import mmengine.optim as original
    from mmengine.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

WRAPPERS = ("OptimWrapper", "AmpOptimWrapper", "ApexOptimWrapper", "OptimWrapperDict")
CONSTRUCTOR = "DefaultOptimWrapperConstructor"
RUNS = Path(__file__).with_name("mmengine_runs")
SCRIPT = Path(__file__).with_name("mmengine_script")
OTHER = os.environ.get("HALFPEAK_TEST_MMENGINE")


def entries() -> list[list[tuple[str, Any]]]:
    registries = (OPTIM_WRAPPERS, OPTIM_WRAPPER_CONSTRUCTORS, HOOKS)
    return [list(registry.module_dict.items()) for registry in registries]


@pytest.fixture
def installed() -> Iterator[None]:
    before = entries()
    halfpeak.shim.install("mmengine")
    yield
    halfpeak.shim.uninstall("mmengine")
    assert entries() == before


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def build(**cfg: Any) -> Any:
    return original.build_optim_wrapper(model(), {"optimizer": {"type": "SGD", "lr": 0.1}, **cfg})


def test_names_mean_ours_until_they_are_given_back() -> None:
    before = entries()
    path = list(sys.meta_path)
    assert type(build()) is original.OptimWrapper
    halfpeak.shim.install("mmengine")
    assert {*WRAPPERS} <= OPTIM_WRAPPERS.module_dict.keys()
    assert {HOOKS.get(name).__module__ for name in ("DiagnosisHook", "EMAHook")} == {"halfpeak.shim.mmengine"}  # type: ignore[union-attr]
    for name in WRAPPERS:
        registered: Any = OPTIM_WRAPPERS.get(name)
        assert issubclass(registered, (getattr(halfpeak.optim, name)))
        assert issubclass(registered, getattr(original, name))
    assert issubclass(
        OPTIM_WRAPPER_CONSTRUCTORS.get(CONSTRUCTOR), halfpeak.optim.DefaultOptimWrapperConstructor
    )
    halfpeak.shim.uninstall("mmengine")
    assert entries() == before
    assert sys.meta_path == path
    assert type(build()) is original.OptimWrapper


def test_a_name_that_somebody_else_took_since_stays_theirs() -> None:
    mine = original.AmpOptimWrapper
    before = entries()
    halfpeak.shim.install("mmengine")
    taken = type("AmpOptimWrapper", (mine,), {})
    OPTIM_WRAPPERS.register_module(module=taken, force=True)
    halfpeak.shim.uninstall("mmengine")
    assert OPTIM_WRAPPERS.get("AmpOptimWrapper") is taken
    OPTIM_WRAPPERS.register_module(module=mine, force=True)
    assert entries() == before


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_call_reaches_the_original(installed: None, name: str) -> None:
    """mmengine's class provides only names that halfpeak's does not have or that only mmengine's own methods use."""
    registered: Any = OPTIM_WRAPPERS.get(name)
    left = {
        attribute
        for attribute in dir(registered)
        if owner(registered, attribute).__module__.startswith("mmengine.")
        and not (attribute.startswith("__") and attribute.endswith("__"))
    }
    assert left <= {"_clip_grad", "valid_dtypes"}
    assert owner(registered, "__init__").__module__.startswith("halfpeak.")
    assert owner(registered, "__repr__").__module__.startswith("halfpeak.")


def owner(cls: type, attribute: str) -> type:
    return next(one for one in cls.__mro__ if attribute in vars(one))


def test_the_runner_takes_each_of_them_as_its_own(installed: None) -> None:
    for name in WRAPPERS[:3]:
        wrapper = build(type=name)
        assert isinstance(wrapper, getattr(halfpeak.optim, name))
        assert isinstance(wrapper, getattr(original, name))
        assert repr(wrapper).startswith(f"Type: {name}\n")
    wrappers = OPTIM_WRAPPERS.build(
        {"type": "OptimWrapperDict", "one": build(), "two": build(type="AmpOptimWrapper")}
    )
    assert isinstance(wrappers, original.OptimWrapperDict)
    wrappers.initialize_count_status(model(), 0, 5)
    assert [wrapper._max_counts for wrapper in wrappers.values()] == [5, 5]
    # A user's constructor may return mmengine's own dict, which takes halfpeak's wrappers, too.
    assert original.OptimWrapperDict(one=build())["one"].get_lr() == {"lr": [0.1]}


def test_a_copy_is_of_the_same_class(installed: None) -> None:
    wrapper = build(type="AmpOptimWrapper")
    twin = copy.deepcopy(wrapper)
    assert type(twin) is type(wrapper)
    assert twin.optimizer is not wrapper.optimizer


def test_a_configuration_may_name_the_class_itself(installed: None) -> None:
    cfg = ConfigDict(
        type=original.AmpOptimWrapper, dtype="bfloat16", optimizer={"type": torch.optim.SGD, "lr": 0.1}
    )
    wrapper = original.build_optim_wrapper(model(), cfg)
    assert isinstance(wrapper, halfpeak.optim.AmpOptimWrapper)  # mmengine's own refuses a CPU
    assert cfg.type is original.AmpOptimWrapper


def test_optimizers_come_from_the_registry_of_mmengine(installed: None) -> None:
    class Mine(torch.optim.SGD):
        pass

    OPTIMIZERS.register_module(module=Mine)
    try:
        assert type(build(optimizer={"type": "Mine", "lr": 0.1}).optimizer) is Mine
    finally:
        del OPTIMIZERS.module_dict["Mine"]


@pytest.mark.parametrize("scope", [{}, {"_scope_": "mmengine"}])
def test_dotted_names_mean_what_they_mean_in_mmengine(installed: None, scope: dict[str, str]) -> None:
    wrapper = build(
        type="mmengine.optim.AmpOptimWrapper",
        dtype="bfloat16",
        optimizer={"type": "torch.optim.SGD", "lr": 0.1, **scope},
        **scope,
    )
    assert isinstance(wrapper, halfpeak.optim.AmpOptimWrapper)  # mmengine's own refuses a CPU
    assert type(wrapper.optimizer) is torch.optim.SGD
    with pytest.raises(
        RegistryError, match=r"'torch\.optim\.SDG' is not a registered optimizer of mmengine; did"
    ):
        build(optimizer={"type": "torch.optim.SDG", "lr": 0.1})


def test_scopes_of_inherited_configurations_are_for_the_registry_only(installed: None) -> None:
    wrapper = build(
        type="OptimWrapper",
        _scope_="mmengine",
        clip_grad={"max_norm": 1.0, "_scope_": "mmengine"},
        optimizer={"type": "SGD", "lr": 0.1, "weight_decay": 0.1, "_scope_": "mmengine"},
        paramwise_cfg={"norm_decay_mult": 0.0, "_scope_": "mmengine"},
    )
    assert wrapper.clip_grad_kwargs == {"max_norm": 1.0}
    assert [group["weight_decay"] for group in wrapper.optimizer.param_groups] == [
        0.1,
        0.1,
        0.0,
        0.0,
        0.1,
        0.1,
    ]


def test_unknown_names_are_refused_with_those_that_there_are(installed: None) -> None:
    with pytest.raises(
        RegistryError, match=r"'AmpOptimWraper' is not a registered optimizer wrapper.*AmpOptimWrapper"
    ):
        build(type="AmpOptimWraper")
    with pytest.raises(RegistryError, match=r"'SDG' is not a registered optimizer of mmengine.*SGD"):
        build(optimizer={"type": "SDG", "lr": 0.1})
    with pytest.raises(ConfigError, match=r"there is no shim 'mmengin'; write one of .*'mmengine'"):
        halfpeak.shim.install("mmengin")


def test_without_mmengine_there_is_nothing_to_register_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmengine", None)
    path = list(sys.meta_path)
    with pytest.raises(MissingExtraError, match="pip install mmengine-lite"):
        halfpeak.shim.install("mmengine")
    assert sys.meta_path == path


def test_its_schedulers_do_not_miss_a_step_inside_a_window(installed: None) -> None:
    """Warnings are errors here; mmengine's own wrapper causes one at the first iteration."""
    net = model()
    wrapper = original.build_optim_wrapper(
        net, {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 3}
    )
    schedule = original.LinearLR(wrapper, start_factor=0.5, by_epoch=False, end=2)
    for _ in range(3):
        with wrapper.optim_context(net):
            loss = net(torch.ones(4, 4)).mean()
        wrapper.update_params(loss)
        schedule.step()
    assert wrapper.get_lr() == {"lr": [0.1]}


def run(shim: str, folder: Path, other: str | None = None) -> dict[str, Any]:
    """Run ``mmengine_runs`` in a new process; return its results."""
    # Without it, mmengine-lite 0.10.7 cannot read its own checkpoints under today's torch.
    environment = {} if other else {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    path = [Path(other)] if other else []
    done = python(str(RUNS), shim, str(folder / "found.json"), folder=folder, path=path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module", params=["installed", *(["other"] if OTHER else [])])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("mmengine", tmp_path_factory.mktemp("runs"), OTHER if request.param == "other" else None)


@pytest.fixture(scope="module", params=["installed", *(["other"] if OTHER else [])])
def own_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("apex", tmp_path_factory.mktemp("runs"), OTHER if request.param == "other" else None)


LOOPS = (
    "OptimWrapper",
    "AmpOptimWrapper float16",
    "ApexOptimWrapper O1",
    "ApexOptimWrapper O2",
)


@pytest.mark.parametrize("name", LOOPS)
def test_an_unchanged_configuration_trains(runs: dict[str, Any], name: str) -> None:
    found = runs[f"loop {name}"]
    assert found["wrapper"] == ["halfpeak.shim.mmengine", name.split()[0]]
    assert found["last"] < found["first"] / 4
    assert found["accuracy"] > 0.7
    assert found["equal"], "not the same bits as a loop with halfpeak.optim"


@pytest.mark.parametrize("name", LOOPS)
def test_hooks_of_the_runner_see_what_they_need(runs: dict[str, Any], name: str) -> None:
    found = runs[f"loop {name}"]
    warm_up = [0.1 * (0.1 + 0.9 * min(i, 7) / 7) for i in range(20)]
    assert found["lr"] == pytest.approx(warm_up)  # ParamSchedulerHook; RuntimeInfoHook logged it
    assert found["norms"] == 7  # once per step: six windows of three, and one of two
    assert {"loss", "lr", "base_lr", "grad_norm", "accuracy"} <= set(found["logged"])  # LoggerHook


@pytest.mark.parametrize("name", ["AmpOptimWrapper float16", "ApexOptimWrapper O2"])
def test_a_resumed_run_goes_on_bit_for_bit(runs: dict[str, Any], name: str) -> None:
    found = runs[f"resume {name}"]
    assert found["trained"] == [1]
    assert found["window"], "the epoch should end inside a window"
    assert found["weights"]
    assert found["momenta"]
    assert found["averages"] is (True if name == "ApexOptimWrapper O2" else None)


@pytest.mark.parametrize("name", ["AmpOptimWrapper float16", "ApexOptimWrapper O2"])
def test_the_diagnosis_hook_names_the_layer(runs: dict[str, Any], name: str) -> None:
    assert runs[f"diagnosed {name}"] == [["forward", "norm", "overflow"]]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_the_ema_hook_averages_what_the_optimizer_steps(runs: dict[str, Any], level: str) -> None:
    """Validations evaluate the averages and round neither them nor the weights; at O3 they evaluate rounded ones."""
    found = runs[f"averages {level}"]
    assert found["distance"] < 1e-6
    assert found["weights"]
    assert found["evaluated"] == [level not in PURE] * 2
    is_half = STORED[level] is not torch.float32
    assert ("write dict(type='EMAHook', update_buffers=True)" in found["refused"]) is is_half
    assert bool(found["refused"]) is is_half


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mmengines_own_apex_wrapper_works_over_our_apex(own_runs: dict[str, Any], level: str) -> None:
    found = own_runs[f"loop ApexOptimWrapper {level}"]
    assert found["wrapper"] == ["mmengine.optim.optimizer.apex_optimizer_wrapper", "ApexOptimWrapper"]
    assert found["last"] < found["first"] / 4
    assert found["equal"], "not the same bits as a loop with halfpeak.optim"
    resumed = own_runs[f"resume ApexOptimWrapper {level}"]
    assert resumed["trained"] == [1]
    assert resumed["weights"]
    assert resumed["momenta"]


def test_a_script_with_several_wrappers_runs_unedited(tmp_path: Path) -> None:
    done = python("-m", "halfpeak", "run", "--shim", "mmengine", str(SCRIPT), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["wrappers"] == ["halfpeak", "halfpeak"]
    assert found["device"] == "cpu"
    assert sum(found["loss"][-5:]) < sum(found["loss"][:5]) / 2
    assert found["lr"] == ["train/body.lr", "train/head.lr"]
