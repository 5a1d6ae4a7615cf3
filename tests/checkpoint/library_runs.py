"""Program that trains with a real library, saves, converts, and resumes.

Usage: python library_runs.py LIBRARY SAVED RESUMED CONVERSIONS, where the last is JSON: lists of the arguments path, form,
output and drop. Writes the results of both runs to save.pt and resume.pt.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from halfpeak.checkpoint import convert

warnings.simplefilter("ignore")


def make_inputs() -> torch.Tensor:
    return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))


def make_linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 3)


def accelerate(what: str, path: str) -> None:
    from accelerate import PartialState
    from accelerate.checkpointing import load_accelerator_state, save_accelerator_state

    PartialState(cpu=True)
    model, scaler = make_linear(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss = model(make_inputs()[step]).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    if what == "save":
        run(0, 4)
        Path(path).mkdir()
        save_accelerator_state(path, [model.state_dict()], [optimizer], [], [], 0, 4, scaler)
    else:
        load_accelerator_state(path, [model], [optimizer], [], [], 0, scaler)
    run(4, 8)
    torch.save({"weights": model.state_dict(), "scaler": scaler.state_dict()}, f"{what}.pt")


def lightning(what: str, path: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_linear()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).float().square().mean() * (float("inf") if index == 1 else 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (optimizer,) = trainer.optimizers
            found = {
                "optimizer": optimizer.state_dict(),
                "scaler": trainer.precision_plugin.scaler.state_dict(),
            }
            torch.save({"weights": pl_module.state_dict(), **found}, f"{what}.pt")

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Look()],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))],
    )
    module = Module()
    data = torch.utils.data.DataLoader(make_inputs(), batch_size=None)
    trainer.fit(module, data, ckpt_path=None if what == "save" else path)
    if what == "save":
        trainer.save_checkpoint(path)


def mmengine(what: str, path: str) -> None:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_linear()

        def forward(
            self, inputs: torch.Tensor, data_samples: Any = None, mode: str = "loss"
        ) -> dict[str, torch.Tensor]:
            return {"loss": self.net(inputs).square().mean()}

    data = {
        "dataset": [{"inputs": one} for one in make_inputs()],
        "batch_size": 2,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }
    runner = Runner(
        Model(),
        f"work_{what}",
        train_dataloader=data,
        train_cfg={"by_epoch": True, "max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        resume=what == "resume",
        load_from=path if what == "resume" else None,
        log_level="ERROR",
    )
    runner.train()
    torch.save({"weights": runner.model.state_dict(), "iter": runner.iter}, f"{what}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, saved, resumed, conversions = sys.argv[1:]
    globals()[library]("save", saved)
    for path, form, output, drop in json.loads(conversions):
        convert(path, form, output, drop=drop)
    globals()[library]("resume", resumed)
