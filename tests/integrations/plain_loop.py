"""The reference run of these tests, a plain loop over an engine, and the same data and model for a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import halfpeak
from support.nets import make_batch, make_net

OVERFLOWS = (0, 4)
SCALE = halfpeak.ScaleConfig(init=2.0**10, interval=2)


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches whose number is in OVERFLOWS give non-finite gradients in every dtype."""
    found = [make_batch(number) for number in range(count)]
    return [(x * torch.inf, y) if number in OVERFLOWS else (x, y) for number, (x, y) in enumerate(found)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def make_module(package: ModuleType, build: Callable[[Any], Any] = adamw, scheduled: bool = False) -> Any:
    """A LightningModule that calls a submodule and a loss module, and records dtypes and gradient norms."""

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.criterion = nn.MSELoss()
            self.seen: list[torch.dtype] = []
            self.grads: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self.net(batch[0])
            self.seen = [output.dtype, self.net[0].weight.dtype]
            return self.criterion(output.float(), batch[1])

        validation_step = training_step

        def on_before_optimizer_step(self, optimizer: Any, *_: int) -> None:
            grads = [
                p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            self.grads.append(max((float(grad.float().norm()) for grad in grads), default=0.0))

        def configure_optimizers(self) -> Any:
            optimizer = build(self.net.parameters())
            if not scheduled:
                return optimizer
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def make_trainer(package: ModuleType, plugin: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": plugin,
    }
    return package.Trainer(**{**defaults, **options})


def loader(count: int = 8) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]


def plain_run(
    level: str,
    *,
    build: Callable[[Any], Any] = adamw,
    accumulate: int = 1,
    clip: Callable[[Iterator[Tensor]], Any] | None = None,
    count: int = 8,
    scale: halfpeak.ScaleConfig = SCALE,
    **options: Any,
) -> tuple[dict[str, Tensor], halfpeak.Engine]:
    """Run the reference loop; return the weights in float32, and the engine."""
    net = make_net()
    optimizer = build(net.parameters())
    engine = halfpeak.prepare(net, optimizer, level, scale=scale, **options)
    for number, (x, y) in enumerate(batches(count)):
        with engine.forward():
            loss = nn.functional.mse_loss(net(x).float(), y) / accumulate
        engine.backward(loss)
        if (number + 1) % accumulate:
            continue
        if clip is not None:
            clip(p for group in optimizer.param_groups for p in group["params"])
        engine.step()
    return weights(net), engine


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.float().clone() for name, value in net.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
