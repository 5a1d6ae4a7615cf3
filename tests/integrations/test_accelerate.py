"""halfpeak's Accelerator with a level, and accelerate's own Accelerator with halfpeak's scaler."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak.core.suitable import suitable_level
from integrations.plain_loop import SCALE, adamw, assert_same, batches, plain_run, weights
from support.nets import LOW, OPTIMIZERS, make_net, poison

accelerate = pytest.importorskip("accelerate")


from halfpeak.integrations.accelerate import Accelerator, AcceleratorScaler  # noqa: E402


class Run:
    """A model and an optimizer under an accelerator, with a schedule."""

    def __init__(self, level: str, build: Any = adamw, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, level=level, options={"scale": SCALE}, **options)
        self.net = make_net()
        optimizer = build(self.net.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.net, optimizer, schedule)

    def train(self, start: int = 0, stop: int = 8, clip: float | None = None) -> list[bool]:
        skipped: list[bool] = []
        for x, y in batches()[start:stop]:
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss = nn.functional.mse_loss(self.model(x).float(), y)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                skipped.append(self.accelerator.optimizer_step_was_skipped)
        return skipped


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_schedule_waits_where_a_step_is_skipped(level: str) -> None:
    run = Run(level)
    skipped = run.train(clip=0.01)
    assert [number for number, skip in enumerate(skipped) if skip] == [0, 4]
    assert run.schedule.scheduler.last_epoch == 6
    by_hand = plain_run(level, clip=lambda params: nn.utils.clip_grad_norm_(list(params), 0.01))
    assert_same(weights(run.net), by_hand[0])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # of the compiler itself
@pytest.mark.parametrize(("level", "backend"), [("O1", "no"), ("O4", "no"), ("O1", "eager")])
def test_a_prepared_model_casts_its_forward_pass_and_returns_float32(level: str, backend: str) -> None:
    run = Run(level, dynamo_backend=backend)
    run.accelerator.autocast = nullcontext  # a loop without it, as with accelerate's own mixed_precision
    seen: list[torch.dtype] = []
    run.net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run.net[1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())  # as hooks of FSDP2 break it
    assert run.model(batches()[1][0]).dtype is torch.float32
    run.train()
    assert set(seen) == {LOW[level]}
    assert_same(weights(run.net), plain_run(level)[0])


def test_a_copy_of_a_prepared_model_computes_with_its_own_weights() -> None:
    run, x = Run("O4"), batches()[1][0]
    run.net.eval()
    copied, saved = copy.deepcopy(run.net), io.BytesIO()
    torch.save(run.net, saved)
    with torch.no_grad():
        run.net[0].weight.zero_()
        run.net[4].weight.zero_()
    assert not torch.equal(copied(x), run.net(x))
    assert torch.equal(copied(x), make_net().eval()(x))  # in float32
    saved.seek(0)
    assert_same(weights(torch.load(saved, weights_only=False)), weights(copied))
    plain = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    seen: list[torch.dtype] = []
    run.net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    plain(x)
    assert seen == [torch.float32]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("build", [adamw, halfpeak.fused.FusedAdamW])
def test_a_resumed_run_goes_on_bit_for_bit(level: str, build: Any, tmp_path: Path) -> None:
    whole = Run(level, build)
    whole.train()
    half = Run(level, build)
    half.train(stop=5)
    half.accelerator.save_state(str(tmp_path))
    resumed = Run(level, build)
    resumed.train(stop=2)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(start=5)
    assert_same(weights(resumed.net), weights(whole.net))
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


def test_statistics_of_an_overflowed_pass_are_put_back_after_a_resume(tmp_path: Path) -> None:
    run = Run("O2", gradient_accumulation_steps=2)
    run.train(start=4, stop=5)  # an overflow, and the window stays open
    assert not run.net[1].running_mean.isfinite().all()
    run.accelerator.save_state(str(tmp_path))
    resumed = Run("O2", gradient_accumulation_steps=2)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.accelerator.step = 1
    for each in (run, resumed):
        assert each.train(start=5, stop=6) == [True]
        assert_same(weights(each.net), weights(make_net()))


def test_clipping_by_value_reaches_the_masters() -> None:
    run = Run("O2", lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    x, y = batches()[1]
    before = weights(run.net)
    run.accelerator.backward(nn.functional.mse_loss(run.model(x), y))
    run.accelerator.clip_grad_value_(run.model.parameters(), 1e-3)
    run.optimizer.step()
    moved = max(
        float((new - before[name]).abs().max()) for name, new in weights(run.net).items() if "weight" in name
    )
    assert moved == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_reduction_can_be_triggered_after_forward_passes_without_one(one_rank: None, level: str) -> None:
    """As accelerate's documentation shows it."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True, level=level, options={"scale": SCALE})
    model, optimizer = accelerator.prepare(DistributedDataParallel(net), optimizer)
    before = weights(net)
    with model.no_sync():
        losses = [model(torch.ones(3, 4) * number).float().square().mean() for number in (1, 2)]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert not torch.equal(weights(net)["weight"], before["weight"])
    engine = accelerator.adapter.connected()
    with model.no_sync():
        model(torch.ones(3, 4))
    with suppress(ArithmeticError), accelerator.trigger_sync_in_backward(model):
        assert engine.parts.reduces[net]
        raise ArithmeticError
    assert not engine.parts.reduces[net]


def test_preparing_again_goes_on_with_the_values_and_the_scale() -> None:
    run = Run("O2")
    run.train(stop=2)
    exact = weights(run.net)
    run.model, run.optimizer = run.accelerator.prepare(run.net, adamw(run.net.parameters()))
    assert_same(weights(run.net), exact)
    assert run.accelerator.scaler.state_dict()["counters"] == {
        "micro_step": 2,
        "num_steps": 1,
        "num_skipped": 1,
    }
    run.train(start=2, stop=4)
    assert run.accelerator.scaler.state_dict()["counters"]["num_steps"] == 3


def test_the_default_level_suits_the_device() -> None:
    accelerator, net = Accelerator(cpu=True), make_net()
    accelerator.prepare(net, adamw(net.parameters()))
    assert accelerator.adapter.level is halfpeak.LEVELS[suitable_level("cpu").level]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(halfpeak.ConfigError, match=r"leave mixed_precision.* level='O5'"):
        Accelerator(cpu=True, mixed_precision="bf16")
    # accelerate's state of the process is not made yet, so that the next call can be right.
    with pytest.raises(halfpeak.ConfigError, match="clip_grad_norm_"):
        Accelerator(cpu=True, options={"clip": 1.0})
    accelerator = Accelerator(cpu=True)
    net = make_net()
    with pytest.raises(halfpeak.ConfigError, match="without its model"):
        accelerator.prepare(adamw(net.parameters()))
    with pytest.raises(halfpeak.OrderError, match=r"accelerator\.prepare\(model, optimizer\)"):
        accelerator.backward(net(batches()[1][0]).sum())
    _, first = accelerator.prepare(net, adamw(net.parameters()))
    other = make_net()
    accelerator.prepare(other, adamw(other.parameters()))
    with pytest.raises(
        halfpeak.OrderError, match=r"accelerator\.prepare\(one, other, optimizer, other_optimizer\)"
    ):
        first.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accelerates_own_loop_with_our_scaler_knows_what_was_skipped(name: str) -> None:
    """With torch's scaler accelerate 1.15 misses a skip in a fused kernel, and the scheduler advances."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    # accelerate scales on accelerators only; this is what it sets there.
    accelerator.native_amp = True
    accelerator.scaler = AcceleratorScaler("cpu", init_scale=2.0**10)
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    skipped: list[bool] = []
    for number, (x, y) in enumerate(batches(4)[1:]):
        accelerator.backward(nn.functional.mse_loss(model(x).float(), y))
        if number == 1:
            poison(net[0].weight)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert number == 1 or 0 < float(norm) < 100
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False]
    assert schedule.scheduler.last_epoch == 2
    assert accelerator.scaler.get_scale() == 2.0**9
