"""Ranks of ``test_lightning_ranks.py``: Fabric over DDP; Fabric and Trainer over FSDP2, beside a loop of one's own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import halfpeak
from distributed.sharded_ranks import Block
from halfpeak.distributed import fully_shard
from halfpeak.integrations.lightning import EMAWeightAveraging, HalfpeakFabricPrecision, HalfpeakPrecision
from integrations.shard_loop import (
    EVERY,
    HALF,
    KEPT,
    OPTIMIZERS,
    PASSES,
    SCALE,
    Trained,
    as_torchrun,
    batch,
    net,
    own,
    same,
    whole,
)
from support.nets import make_batch, make_normless

OPTIONS = {"scale": SCALE, "keep_fp32": KEPT}


class FabricRun:
    """A training by Fabric."""

    def __init__(self, level: str, optimizer: str = "AdamW", *, sharded: bool = True) -> None:
        ranks = dist.get_world_size()

        def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
            return fully_shard(model, level, mesh=mesh["data_parallel"], blocks=Block, keep_fp32=KEPT)

        self.precision = HalfpeakFabricPrecision(level, OPTIONS)
        strategy = FabricStrategy(parallelize, ranks, 1, save_distributed_checkpoint=sharded)
        self.fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=self.precision)
        self.fabric.launch()
        self.model = self.fabric.setup_module(net())
        stepped = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(stepped, 1, 0.9)
        self.optimizer = self.fabric.setup_optimizers(stepped)
        self.precision.connect(self.model, self.optimizer)

    def train(self, start: int = 0, stop: int = PASSES) -> Trained:
        losses, stepped = list[str](), list[bool]()
        for number in range(start, stop):
            is_last = number % EVERY == EVERY - 1
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = self.model(batch(number)).float().square().mean()
                self.fabric.backward(loss / EVERY)
            losses.append(repr(loss.item()))
            if is_last:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5, error_if_nonfinite=False)
                stepped.append(self.optimizer.step().stepped())
                self.optimizer.zero_grad()
                if stepped[-1]:
                    self.schedule.step()
        return losses, stepped

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
        }

    def resume(self, path: Path) -> Trained:
        state = self.state()
        self.fabric.load(path, state)
        self.schedule.load_state_dict(state["schedule"])
        self.precision.load_state_dict(state["precision"])
        return self.train(start=HALF)


class Module(L.LightningModule):
    """A net that the strategy's mesh shards."""

    def __init__(self, level: str, optimizer: str) -> None:
        super().__init__()
        self.net, self.level, self.name = net(), level, optimizer
        self.losses = list[str]()

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):  # callbacks call it, too
            fully_shard(
                self.net, self.level, mesh=self.device_mesh["data_parallel"], blocks=Block, keep_fp32=KEPT
            )

    def training_step(self, number: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch(self.current_epoch * HALF + int(number))).float().square().mean()
        self.losses.append(repr(loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.name](self.net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    level: str,
    optimizer: str = "AdamW",
    *,
    epochs: int = 2,
    sharded: bool = True,
    path: Path | None = None,
    **options: Any,
) -> tuple[Module, L.Trainer]:
    """Two epochs are the training; ``path`` is of a checkpoint to go on from."""
    ranks, module = dist.get_world_size(), Module(level, optimizer)
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=sharded),
        gradient_clip_val=0.5,
        accumulate_grad_batches=EVERY,
        use_distributed_sampler=False,
        plugins=HalfpeakPrecision(level, OPTIONS),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = torch.utils.data.DataLoader(torch.arange(HALF), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=path)
    return module, trainer


def replicated() -> dict[str, Any]:
    """Four steps of Fabric over DDP: of two backward passes only the second reduces, and rank 1 overflows once."""
    ranks, precision = dist.get_world_size(), HalfpeakFabricPrecision("O2", {"scale": SCALE})
    strategy = "ddp" if ranks > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=precision)
    fabric.launch()
    model = make_normless()  # batch norm would see other batches on two ranks than on one
    wrapped, optimizer = fabric.setup(model, OPTIMIZERS["AdamW"](model.parameters()))
    precision.connect(wrapped, optimizer)
    shards = range(2) if ranks == 1 else [dist.get_rank()]
    stepped = list[bool]()
    for step, part in itertools.product(range(4), range(2)):
        with fabric.no_backward_sync(wrapped, enabled=part == 0):
            for shard in shards:
                x, y = make_batch(4 * step + 2 * part + shard)
                factor = torch.inf if (step, part, shard) == (2, 0, 1) else 1.0
                loss = nn.functional.mse_loss(wrapped(x * factor).float(), y)
                fabric.backward(loss / (2 * len(shards)))
        if part == 1:
            stepped.append(optimizer.step().stepped())
    return {"stepped": stepped, "weights": dict(model.state_dict())}


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    as_torchrun(rank, ranks)
    seen: dict[str, Any] = {"replicated": replicated()}
    saved = folder.parent
    if ranks == 1:
        run = FabricRun("O2")
        _, seen["outcomes"] = run.resume(saved / "Fabric")
        seen["Fabric"] = whole(run.model.module)
        module, _ = fit("O2", path=saved / "Trainer")
        seen["Trainer"] = whole(module.net)
        return seen
    for level, optimizer in (("O2", "AdamW"), ("O1", "AdamW"), ("O5", "FusedAdamW")):
        expected, model = own(level, optimizer)
        run = FabricRun(level, optimizer)
        seen["outcomes"] = expected[1]
        seen[f"Fabric {level} {optimizer}"] = [
            run.train() == expected,
            same(whole(run.model.module), whole(model)),
        ]
        expected, model = own(level, optimizer, reduces_all=True)
        module, _ = fit(level, optimizer)
        seen[f"Trainer {level} {optimizer}"] = [
            module.losses == expected[0],
            same(whole(module.net), whole(model)),
        ]
    for kind in ("sharded", "full"):
        at = saved if kind == "sharded" else folder
        expected, model = own("O2")
        run = FabricRun("O2", sharded=kind == "sharded")
        run.train(stop=HALF)
        run.fabric.save(at / "Fabric", run.state())
        again = FabricRun("O2", sharded=kind == "sharded")
        losses, _ = again.resume(at / "Fabric")
        seen[f"Fabric {kind}"] = [losses == expected[0][HALF:], same(whole(again.model.module), whole(model))]
        seen["Fabric weights"] = whole(model)
        expected, model = own("O2", reduces_all=True)
        _, trainer = fit("O2", epochs=1, sharded=kind == "sharded")
        trainer.save_checkpoint(at / "Trainer")
        module, _ = fit("O2", sharded=kind == "sharded", path=at / "Trainer")
        seen[f"Trainer {kind}"] = [module.losses == expected[0][HALF:], same(whole(module.net), whole(model))]
        seen["Trainer weights"] = whole(model)
    try:
        fit("O2", callbacks=[EMAWeightAveraging()])
    except halfpeak.ParameterError as error:
        seen["averages"] = f"ParameterError: {error}"
    return seen
