"""Ranks of ``test_accelerate_ranks.py``: accelerate over FSDP2, beside a loop of their own over the same shards."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import halfpeak
from distributed.launching import Refusals
from distributed.sharded_ranks import Block, Net
from halfpeak.distributed import fully_shard
from halfpeak.integrations.accelerate import Accelerator

SCALE = halfpeak.ScaleConfig(init=1024.0)
EVERY, PASSES, HALF = 2, 12, 6
OVERFLOW = 6  # of the last rank alone, in the first pass of a window
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    # State of these after a step of zeros is not what they begin with.
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "FusedAdamW": partial(halfpeak.fused.FusedAdamW, lr=1e-2),
}
Trained = tuple[list[str], list[bool]]
"""The losses of a rank, every digit of them, and which windows it stepped."""


def batch(number: int) -> Tensor:
    """This rank's part of a batch; one process has all parts."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    return part * torch.inf if number == OVERFLOW and dist.get_rank() == dist.get_world_size() - 1 else part


def net() -> Net:
    torch.manual_seed(0)
    return Net(6)


def on_accelerators() -> None:
    """Let accelerate take this process, which has gloo alone, for one with an accelerator: only there it shards."""
    for kept in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.PartialState):
        kept._reset_state()
    accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU


def sharding(**given: Any) -> FullyShardedDataParallelPlugin:
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **blocks, **given})


class Run:
    """A training by accelerate's loop."""

    def __init__(self, level: str, optimizer: str = "AdamW", **given: Any) -> None:
        on_accelerators()
        self.accelerator = Accelerator(
            fsdp_plugin=sharding(**given),
            gradient_accumulation_steps=EVERY,
            step_scheduler_with_optimizer=False,
            level=level,
            options={"scale": SCALE, "keep_fp32": ["head"]},
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

    def resume(self, folder: Path) -> Trained:
        self.accelerator.load_state(str(folder))
        return self.train(start=HALF)


def own(level: str, optimizer: str = "AdamW") -> tuple[Trained, nn.Module]:
    """The same training by a loop of one's own."""
    model = fully_shard(net(), level, blocks=Block, keep_fp32=["head"])
    stepped = OPTIMIZERS[optimizer](model.parameters())
    engine = halfpeak.prepare(model, stepped, level, accumulate=EVERY, scale=SCALE, keep_fp32=["head"])
    schedule = torch.optim.lr_scheduler.StepLR(stepped, 1, 0.9)
    losses, outcomes = list[str](), list[bool]()
    for number in range(PASSES):
        with engine.forward(model):
            loss = model(batch(number)).float().square().mean()
        engine.backward(loss)
        if engine.micro_step % EVERY == EVERY - 1:
            engine.unscale()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        result = engine.step()
        losses.append(repr(loss.item()))
        if result.boundary:
            outcomes.append(result.stepped())
            if outcomes[-1]:
                schedule.step()
    return (losses, outcomes), model


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().full_tensor() for name, value in model.named_parameters()}  # type: ignore[attr-defined]


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    seen: dict[str, Any] = {}
    saved = folder.parent / "saved"
    if ranks == 1:
        run = Run("O2")
        return {"resumed": run.resume(saved), "weights": whole(run.model)}
    for level, optimizer in [
        *(("O2", name) for name in OPTIMIZERS),
        ("O0", "AdamW"),
        ("O1", "AdamW"),
        ("O5", "AdamW"),
    ]:
        expected, model = own(level, optimizer)
        run = Run(level, optimizer)
        seen[f"{level} {optimizer}"] = [run.train() == expected, same(whole(run.model), whole(model))]
        seen[f"outcomes {level} {optimizer}"] = expected[1]
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


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


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

    @check("ConfigError: activation_checkpointing= of FullyShardedDataParallelPlugin")
    def recomputed() -> None:
        on_accelerators()
        Accelerator(fsdp_plugin=sharding(activation_checkpointing=True), level="O2")

    @check("OrderError: AdamW has state for parameters that are not sharded yet")
    def loaded_too_early() -> None:
        on_accelerators()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch(0)).mean().backward()
        optimizer.step()
        Accelerator(fsdp_plugin=sharding(), level="O2").prepare(model, optimizer)

    return check
