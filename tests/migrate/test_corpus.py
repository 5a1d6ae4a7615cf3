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
from support.states import differences


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


# At O1, torch's layer norm returns float32, and apex's the dtype of its input, so larc has other losses there.
@pytest.mark.parametrize(
    ("name", "level"),
    [("segmentation", "O1"), ("segmentation", "O2"), ("segmentation", "O5"), ("larc", "O2"), ("larc", "O5")],
)
def test_the_same_losses_as_with_apex(name: str, level: str) -> None:
    new = rewritten(name, "halfpeak").source
    assert b"apex" not in new
    arguments = ["--opt-level", level]
    ours, theirs = run(new, name, arguments), run(source(name), name, arguments)
    if name == "larc":  # apex's layer norm is torch's afterwards, which rounds a low one elsewhere
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)
    else:
        assert not differences(ours, theirs)


def test_the_levels_of_the_corpus_are_told_apart() -> None:
    """If levels gave equal losses, the test above would prove nothing."""
    losses = [
        torch.stack(run(source("larc"), "larc", ["--opt-level", level])) for level in ("O1", "O2", "O5")
    ]
    assert len({tuple(one.tolist()) for one in losses}) == len(losses)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["cpu_amp", "cuda_amp"])
def test_the_same_losses_with_torch_amp(name: str, to: Target) -> None:
    new = rewritten(name, to).source
    assert b"torch.cuda.amp" not in new
    assert not differences(run(new, name), run(source(name), name))


def test_the_same_losses_with_a_runner() -> None:
    new = rewritten("mmcv_model", "halfpeak").source
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
