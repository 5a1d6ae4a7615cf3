"""Old scripts, rewritten: the result equals the golden diffs, runs, and gives the same losses."""

from __future__ import annotations

import difflib
import os
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("libcst")

from halfpeak.migrate import TARGETS, Target, rewrite
from halfpeak.runner import EpochBasedRunner, Fp16OptimizerHook
from migrate.scripts import CORPUS, SCRIPTS, rewritten, run, source
from support.nets import LEVELS
from support.states import differences

BY_LEVEL = ("dcgan", "function", "glue", "imagenet", "quiet", "segmentation", "swav", "trainer", "uniter")
"""Scripts that take ``--opt-level``."""

NATIVE = ("dcgan", "function", "imagenet", "plain", "quiet", "swav", "trainer")
"""Scripts whose loop ``--to halfpeak`` rewrites in full."""


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_diff_is_the_golden_one(name: str, to: Target) -> None:
    """To update the diffs, run ``HALFPEAK_GOLDEN=write pytest tests/migrate/test_corpus.py`` and read them."""
    golden = CORPUS / f"{name}.{to}.diff"
    shown = report(name, to)
    if os.environ.get("HALFPEAK_GOLDEN") == "write":
        golden.write_text(shown)
    assert shown == golden.read_text()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_second_time_changes_nothing(name: str, to: Target) -> None:
    once = rewritten(name, to).source
    assert rewrite(once, to).source == once


CASES = [(name, level) for name in BY_LEVEL for level in (LEVELS if name in NATIVE else ("O1", "O2", "O5"))]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_the_same_losses_at_every_level(name: str, level: str) -> None:
    arguments = ["--opt_level" if name == "dcgan" else "--opt-level", level]
    text = source(name)
    before = run(text, name, arguments)
    assert not differences(run(rewritten(name, "amp").source, name, arguments), before)
    if name in NATIVE:
        native = rewritten(name, "halfpeak").source
        assert b"halfpeak.prepare" in native
        assert b"scale_loss" not in native
        assert not differences(run(native, name, arguments), before)


def test_the_levels_of_the_corpus_are_told_apart() -> None:
    """If levels gave equal losses, the test above would prove nothing."""
    losses = [torch.stack(run(source("imagenet"), "imagenet", ["--opt-level", level])) for level in LEVELS]
    assert len({tuple(one.tolist()) for one in losses}) == len(LEVELS)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["cpu_amp", "cuda_amp", "plain"])
def test_the_same_losses_with_torch_amp(name: str, to: Target) -> None:
    """``plain`` runs on the CPU, whose casts are the same for these layers, so that the test needs no CUDA."""
    new = rewritten(name, to).source.decode()
    if name == "plain":
        new = new.replace('"cuda"', '"cpu"')
    assert "apex" not in new
    assert "torch.cuda.amp" not in new
    assert not differences(run(new, name), run(source(name), name))


def test_a_loop_that_overflows_is_in_the_corpus() -> None:
    """Equal losses do not show that steps were skipped; a lower loss scale does."""
    text = (
        source("plain").decode()
        + "\nlosses.append(torch.tensor(amp._amp_state.loss_scalers[0].loss_scale()))\n"
    )
    assert run(text, "plain")[-1] < 2.0**16


@pytest.mark.parametrize("to", ["halfpeak", "amp"])
def test_the_same_losses_with_a_runner(to: Target) -> None:
    new = rewritten("mmcv_model", to).source
    assert b"mmcv" not in new
    assert not differences(run(new, "mmcv_model"), run(source("mmcv_model"), "mmcv_model"))


def test_the_same_losses_with_a_configuration() -> None:
    """mmcv's tools built the hook from two entries; the new configuration has one, with the name of the hook."""
    old, new = (
        entries(text) for text in (source("mmcv_config"), rewritten("mmcv_config", "halfpeak").source)
    )
    hook = Fp16OptimizerHook(**old.pop("optimizer_config"), **old.pop("fp16"), distributed=False)
    config = new.pop("optimizer_config")
    assert old == new
    assert not differences(train(config), train(hook))
    assert differences(train(config), train({}))


def entries(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(text, {}, found)
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.losses: list[torch.Tensor] = []

    def train_step(self, data: torch.Tensor, optimizer: object) -> dict[str, Any]:
        loss = self.net(data).float().square().mean()
        self.losses.append(loss.detach().clone())
        return {"loss": loss, "log_vars": {}, "num_samples": len(data)}


def train(hook: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    runner = EpochBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=2)
    runner.register_optimizer_hook(hook)
    runner.run([[torch.randn(4, 8) for _ in range(3)]], [("train", 1)])
    return model.losses


def report(name: str, to: Target) -> str:
    """A diff with one line of context, and the findings."""
    old = source(name)
    result = rewritten(name, to)
    lines = [text.decode().splitlines(keepends=True) for text in (old, result.source)]
    diff = "".join(difflib.unified_diff(*lines, f"{name}.py", f"{name}.py --to {to}", n=1))
    return diff + "".join(f"{name}.py:{finding}\n" for finding in result.findings)
