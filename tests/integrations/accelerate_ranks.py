"""Ranks of ``test_accelerate_ranks.py``: accelerate over FSDP2, beside a loop of one's own over the same shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from distributed.launching import Refusals
from halfpeak.integrations.accelerate import Accelerator
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
    on_accelerators,
    own,
    same,
    whole,
)

CHANGED: dict[tuple[str, str], dict[str, Any]] = {
    ("O1", "AdamW"): {"compiled": True},
    ("O2", "AdamW"): {"activation_checkpointing": True},
}
"""What changes no bit of some runs."""


def sharding(**given: Any) -> FullyShardedDataParallelPlugin:
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **blocks, **given})


class Run:
    """A training by accelerate's loop."""

    def __init__(self, level: str, optimizer: str = "AdamW", *, compiled: bool = False, **given: Any) -> None:
        on_accelerators()
        self.accelerator = Accelerator(
            dynamo_backend="eager" if compiled else None,
            fsdp_plugin=sharding(**given),
            gradient_accumulation_steps=EVERY,
            step_scheduler_with_optimizer=False,
            level=level,
            options={"scale": SCALE, "keep_fp32": KEPT},
        )
        model = net()
        stepped = OPTIMIZERS[optimizer](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(stepped, 1, 0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, stepped, schedule)

    def train(self, start: int = 0, stop: int = PASSES) -> Trained:
        losses, stepped, accelerator = list[str](), list[bool](), self.accelerator
        for number in range(start, stop):
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    loss = self.model(batch(number)).float().square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(repr(loss.item()))
            if accelerator.sync_gradients:
                stepped.append(not accelerator.optimizer_step_was_skipped)
                if stepped[-1]:
                    self.schedule.step()
        return losses, stepped

    def weights(self) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in whole(model).items()}

    def resume(self, folder: Path) -> Trained:
        self.accelerator.load_state(str(folder))
        return self.train(start=HALF)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    as_torchrun(rank, ranks)
    seen: dict[str, Any] = {}
    saved = folder.parent / "saved"
    if ranks == 1:
        run = Run("O2")
        return {"resumed": run.resume(saved), "weights": whole(run.model)}
    for level, optimizer in [
        *(("O2", name) for name in OPTIMIZERS),
        ("O1", "AdamW"),
        ("O5", "AdamW"),
    ]:
        expected, model = own(level, optimizer)
        run = Run(level, optimizer)
        seen[f"{level} {optimizer}"] = [run.train() == expected, same(run.weights(), whole(model))]
        seen[f"outcomes {level} {optimizer}"] = expected[1]
        if (level, optimizer) in CHANGED:
            run = Run(level, optimizer, **CHANGED[level, optimizer])
            seen[f"changed {level}"] = [run.train() == expected, same(run.weights(), whole(model))]
    expected, model = own("O2")
    seen["weights"] = whole(model)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        run, at = Run("O2", state_dict_type=kind), saved if kind == "SHARDED_STATE_DICT" else folder / "full"
        run.train(stop=HALF)
        run.accelerator.save_state(str(at))
        again = Run("O2", state_dict_type=kind)
        losses, _ = again.resume(at)
        counters = again.accelerator.scaler.state_dict()["counters"]
        seen[kind] = [losses == expected[0][HALF:], same(whole(again.model), whole(model)), counters]
    again.train(stop=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = again.accelerator.scaler.state_dict()
    seen["inside a window"] = [
        state["window"],
        [str(one.message) for one in caught if "save after a step" in str(one.message)],
    ]
    state_dict = again.accelerator.get_state_dict(again.model)
    seen["full weights"] = {name: value.dtype for name, value in state_dict.items()}
    seen["refusals"] = dict(refusals())
    return seen


def refusals() -> Refusals:
    check = Refusals()

    @check("ConfigError: FSDP1 flattens the parameters")
    def flattened() -> None:
        on_accelerators()
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1), level="O2")

    @check("ConfigError: mixed_precision_policy= of FullyShardedDataParallelPlugin")
    def cast_twice() -> None:
        on_accelerators()
        Accelerator(fsdp_plugin=sharding(mixed_precision_policy=MixedPrecisionPolicy()), level="O2")

    @check("ConfigError: ignored_modules= cannot be combined with a level")
    def unreduced() -> None:
        on_accelerators()
        Accelerator(fsdp_plugin=sharding(ignored_modules="head"), level="O2")

    @check("ConfigError: cp_size= cannot be combined with a level")
    def context_parallel() -> None:
        on_accelerators()
        Accelerator(fsdp_plugin=sharding(), parallelism_config=ParallelismConfig(cp_size=2), level="O2")

    @check("OrderError: AdamW has state for parameters that are not sharded yet")
    def loaded_too_early() -> None:
        on_accelerators()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch(0)).mean().backward()
        optimizer.step()
        Accelerator(fsdp_plugin=sharding(), level="O2").prepare(model, optimizer)

    return check
