"""The optimizer hooks in the runners themselves: from a configuration, through checkpoint files, beside other hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfpeak.checkpoint import load
from halfpeak.runner import EpochBasedRunner, IterBasedRunner, auto_fp16
from support.nets import OPTIMIZERS, make_batch, make_net
from support.snapshot import values

BATCHES = [make_batch(number) for number in range(5)]
OPTIMIZER_CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {"grad_clip": {"max_norm": 0.5}},
    "accumulated": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 3},
    **{
        f"{mode} {every}": {
            "type": "GradientCumulativeFp16OptimizerHook",
            "cumulative_iters": every,
            "grad_clip": {"max_norm": 0.5},
            "loss_scale": {"init_scale": 2.0**20, "growth_interval": 2},
            "mode": mode,
        }
        for mode in ("autocast", "master")
        for every in (1, 3)
    },
}


class Model(nn.Module):
    """Overflows by itself at the first scales."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.seen: set[torch.dtype] = set()
        self.net[0].register_forward_hook(lambda module, args, output: self.seen.add(output.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        x, y = data
        loss = mse_loss(self(x).float(), y)
        return {"loss": loss, "log_vars": {"loss": loss.detach()}, "num_samples": len(x)}


class Decorated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fp16_enabled = False

    @auto_fp16(apply_to=("x",))
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def make_runner(name: str, folder: Path, *, by_epoch: bool, model: type[Model] = Model, **config: Any) -> Any:
    torch.manual_seed(0)
    built = model()
    kind = EpochBasedRunner if by_epoch else IterBasedRunner
    length = {"max_epochs": 3} if by_epoch else {"max_iters": 14}
    runner = kind(
        built,
        optimizer=OPTIMIZERS["adamw"](built.parameters()),
        work_dir=str(folder),
        meta={"seed": 0},
        **length,
    )
    runner.register_training_hooks(
        lr_config={"policy": "step", "step": [2]},
        optimizer_config=dict(OPTIMIZER_CONFIGS[name]),
        checkpoint_config={"interval": 1 if by_epoch else 4, "by_epoch": by_epoch},
        **config,
    )
    return runner


@pytest.mark.parametrize("by_epoch", [True, False], ids=["epochs", "iterations"])
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, Model) for name in OPTIMIZER_CONFIGS), ("autocast 3", Decorated), ("master 3", Decorated)],
)
def test_a_resumed_run_is_the_same_run(name: str, model: type[Model], by_epoch: bool, tmp_path: Path) -> None:
    whole = make_runner(name, tmp_path, by_epoch=by_epoch, model=model)
    whole.run([BATCHES], [("train", 1)])
    files = ["epoch_1.pth", "epoch_2.pth"] if by_epoch else ["iter_4.pth", "iter_8.pth", "iter_12.pth"]
    for file in files:
        again = make_runner(name, tmp_path / "again", by_epoch=by_epoch, model=model)
        again.resume(tmp_path / file)
        again.run([BATCHES], [("train", 1)])
        assert values(again.model, again.optimizer) == values(whole.model, whole.optimizer)
        assert again.meta.get("fp16") == whole.meta.get("fp16")
        assert (again.iter, again.steps) == (whole.iter, whole.steps)
    if " " in name:
        assert whole.steps < whole.iter
        assert whole.model.seen == {torch.float16}
        keys = load(tmp_path / files[0])["meta"]["fp16"]["loss_scaler"].keys()
        assert ("cur_scale" in keys) == ("master" in name)
    assert whole.log_buffer.val_history["loss"]
    assert ("grad_norm" in whole.log_buffer.val_history) == ("clip" in str(OPTIMIZER_CONFIGS[name]))


@pytest.mark.parametrize("name", ["fp32", "autocast 1", "master 3"])
def test_a_second_run_goes_on(name: str, tmp_path: Path) -> None:
    whole = make_runner(name, tmp_path, by_epoch=True)
    whole.run([BATCHES], [("train", 1)])
    before = values(whole.model)
    whole._max_epochs = 4
    whole.run([BATCHES], [("train", 1)])
    assert values(whole.model) != before
    assert whole.iter == 20


def test_a_checkpoint_of_masters_is_float32_and_loads_into_a_float32_model(tmp_path: Path) -> None:
    runner = make_runner("master 1", tmp_path, by_epoch=True)
    runner.run([BATCHES], [("train", 1)])
    state = load(tmp_path / "latest.pth")["state_dict"]
    masters = [p for group in runner.optimizer.param_groups for p in group["params"]]
    plain = Model()
    plain.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), masters, strict=True))
    assert any(p.dtype is torch.float16 for p in runner.model.parameters())


def test_logs_and_averages_beside_the_hooks(tmp_path: Path) -> None:
    runner = make_runner(
        "master 1",
        tmp_path,
        by_epoch=True,
        log_config={"interval": 2, "hooks": [{"type": "TextLoggerHook"}]},
        custom_hooks_config=[{"type": "EMAHook"}],
    )
    runner.run([BATCHES], [("train", 1)])
    assert any("grad_norm" in file.read_text() for file in tmp_path.glob("*.json"))
    assert all(p.isfinite().all() for p in runner.model.parameters())
