"""The precision plugin for Lightning's Trainer, in both of its packages."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import halfpeak
from halfpeak.core.suitable import suitable_level
from integrations.plain_loop import SCALE, assert_same, loader, make_module, make_trainer, plain_run, weights
from support.nets import LEVELS, LOW, STORED, make_batch, make_net

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

pytestmark = [
    # Warnings of Lightning 2.6 about torch 2.13 and about these small loaders.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The .val_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
]


def of_package(name: str) -> SimpleNamespace:
    package = pytest.importorskip(PACKAGES[name])
    ours = importlib.import_module(f"halfpeak.integrations.{name}")
    return SimpleNamespace(package=package, precision=ours.HalfpeakPrecision, ours=ours)


@pytest.fixture(params=["lightning"])
def lightning(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One package, because both share the plugin's class; tests of differences are marked ``EITHER``."""
    return of_package(request.param)


EITHER = pytest.mark.parametrize("lightning", PACKAGES, indirect=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_the_engines_bit_for_bit(lightning: SimpleNamespace, level: str) -> None:
    plugin = lightning.precision(level, {"scale": SCALE})
    module = make_module(lightning.package)
    make_trainer(lightning.package, plugin).fit(module, loader())
    expected, engine = plain_run(level)
    assert_same(weights(module.net), expected)
    per_op = STORED[level] is torch.float32
    assert module.seen == [LOW.get(level, torch.float32) if per_op else torch.float32, STORED[level]]
    assert {p.dtype for p in module.parameters()} == {torch.float32}  # after fit
    state = plugin.state_dict()
    assert state["counters"] == engine.train_step.counters.state_dict()
    assert state["counters"]["num_skipped"] == (2 if level != "O0" else state["counters"]["num_skipped"])
    assert state["scalers"] == [scaler.state_dict() for scaler in engine.scalers]


LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm": (
        {"gradient_clip_val": 0.01},
        {"clip": lambda params: nn.utils.clip_grad_norm_(list(params), 0.01)},
    ),
    "value": (
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"clip": lambda params: nn.utils.clip_grad_value_(list(params), 0.001)},
    ),
    "accumulation": ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
}
"""Options of the Trainer, and of the plain loop."""


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("loop", LOOPS)
def test_lightning_clips_unscaled_gradients_and_accumulates(
    lightning: SimpleNamespace, loop: str, level: str
) -> None:
    theirs, plain = LOOPS[loop]
    module = make_module(lightning.package)
    make_trainer(lightning.package, lightning.precision(level, {"scale": SCALE}), **theirs).fit(
        module, loader()
    )
    assert_same(weights(module.net), plain_run(level, **plain)[0])
    assert 0 < module.grads[-1] < 100  # the hook before the step sees unscaled gradients, too


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_bit_for_bit(lightning: SimpleNamespace, level: str, tmp_path: Path) -> None:
    def trainer(epochs: int) -> Any:
        return make_trainer(
            lightning.package, lightning.precision(level, {"scale": SCALE}), max_epochs=epochs
        )

    whole = make_module(lightning.package, scheduled=True)
    straight = trainer(2)
    straight.fit(whole, loader(4))

    path = str(tmp_path / "half.ckpt")
    first = trainer(1)
    first.fit(make_module(lightning.package, scheduled=True), loader(4))
    first.save_checkpoint(path)
    resumed = make_module(lightning.package, scheduled=True)
    with torch.no_grad():
        resumed.net[0].weight.zero_()
    second = trainer(2)
    second.fit(resumed, loader(4), ckpt_path=path)

    assert_same(weights(resumed.net), whole.net.state_dict())
    assert second.precision_plugin.state_dict() == straight.precision_plugin.state_dict()
    assert second.global_step == straight.global_step == 8
    saved = torch.load(path, weights_only=True)
    assert {v.dtype for v in saved["state_dict"].values() if v.is_floating_point()} == {torch.float32}


@EITHER
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_waits_where_a_step_is_skipped(lightning: SimpleNamespace, level: str) -> None:
    module = make_module(lightning.package, scheduled=True)
    trainer = make_trainer(lightning.package, lightning.precision(level, {"scale": SCALE}))
    trainer.fit(module, loader())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 / 2**6


@EITHER
def test_fitting_again_and_validating(lightning: SimpleNamespace) -> None:
    """The module is float32 between fits, and the second fit continues with the loss scale of the first."""
    plugin = lightning.precision("O2", {"scale": SCALE})
    module = make_module(lightning.package)
    trainer = make_trainer(lightning.package, plugin)
    trainer.fit(module, loader(3))
    scale, exact = plugin.state_dict()["scalers"], module.net[0].weight.detach().clone()
    assert not torch.equal(exact, exact.half().float())
    trainer.validate(module, loader(3), verbose=False)
    assert torch.equal(module.net[0].weight, exact)
    assert module.seen[1] is torch.float16
    make_trainer(lightning.package, plugin, max_steps=0).fit(module, loader(3))
    assert plugin.state_dict()["scalers"] == scale
    make_trainer(lightning.package, plugin).fit(module, loader(3))
    assert not torch.equal(module.net[0].weight, exact)
    assert not module.net[0]._forward_pre_hooks


def test_a_training_step_that_returns_nothing_is_no_step(lightning: SimpleNamespace) -> None:
    module = make_module(lightning.package, scheduled=True)
    module.training_step = lambda batch, batch_idx: None
    before = module.net[0].weight.detach().clone()
    trainer = make_trainer(lightning.package, lightning.precision("O2"))
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer.fit(module, loader(2))
    assert torch.equal(module.net[0].weight, before)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_window_that_ends_with_a_batch_without_loss_is_stepped(
    lightning: SimpleNamespace, level: str
) -> None:
    def run(plugin: Any) -> dict[str, Tensor]:
        module = make_module(lightning.package, lambda params: torch.optim.SGD(params, lr=0.05))
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(batch, batch_idx) if batch_idx % 2 == 0 else None
        trainer = make_trainer(lightning.package, plugin, accumulate_grad_batches=2)
        data = torch.utils.data.DataLoader([make_batch(number) for number in range(8)], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, data)
        return weights(module.net)

    for ours, theirs in zip(
        run(lightning.precision(halfpeak.LEVELS[level].replace(loss_scale=64.0))).values(),
        run([]).values(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if level == "O0" else 5e-3)


@EITHER
def test_lbfgs(lightning: SimpleNamespace) -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    losses = []
    module = make_module(lightning.package, build)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: losses.append(step(make_batch(1), 0)) or losses[-1]
    make_trainer(lightning.package, lightning.precision("O5")).fit(module, loader(4))
    assert losses[-1] < losses[0]


def test_it_goes_on_from_a_run_of_lightnings_mixed_precision(
    lightning: SimpleNamespace, tmp_path: Path
) -> None:
    theirs = getattr(importlib.import_module(f"{lightning.package.__name__}.plugins"), "MixedPrecision")  # noqa: B009
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    path = str(tmp_path / "theirs.ckpt")
    trainer = make_trainer(lightning.package, theirs("16-mixed", "cpu", scaler), max_steps=3)
    trainer.fit(make_module(lightning.package), loader())
    trainer.save_checkpoint(path)
    plugin = lightning.precision("O1")
    make_trainer(lightning.package, plugin, max_steps=3).fit(
        make_module(lightning.package), loader(), ckpt_path=path
    )
    assert plugin.state_dict()["scalers"][0]["scale"] == scaler.get_scale() == 256.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": "02"}, "Unexpected optimization level '02'"),
        ({"options": {"clip": 1.0}}, "gradient_clip_val"),
        ({"options": {"accumulate": 2}}, "accumulate_grad_batches"),
        ({"options": {"loss_scal": 2}}, "unknown option 'loss_scal'"),
    ],
)
def test_bad_options_are_named_at_once(
    lightning: SimpleNamespace, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(halfpeak.ConfigError, match=words):
        lightning.precision(**options)
    with pytest.raises(halfpeak.ConfigTypeError, match=r"options=\{'scale': \.\.\.\}"):
        lightning.precision("O2", scale=SCALE)


def test_a_module_of_bare_parameters_has_nothing_to_convert(lightning: SimpleNamespace) -> None:
    class Bare(lightning.package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.weight], lr=0.1)

    with pytest.raises(halfpeak.ParameterError, match="no submodule with parameters"):
        make_trainer(lightning.package, lightning.precision("O2")).fit(Bare(), loader(1))


@pytest.mark.parametrize(("level", "refused"), [("O2", True), ("O5", True), ("O1", False)])
def test_finetuning_is_refused_where_the_optimizer_has_masters(
    lightning: SimpleNamespace, level: str, refused: bool
) -> None:
    class Finetuning(lightning.package.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    def build(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in module.net.parameters() if p.requires_grad], lr=0.1)

    module = make_module(lightning.package, build)
    before = module.net[0].weight.clone()
    plugin = lightning.precision(level, {"scale": SCALE})
    trainer = make_trainer(lightning.package, plugin, callbacks=[Finetuning()], max_epochs=2)
    if refused:
        with pytest.raises(halfpeak.ConfigError, match=f"at {level} the optimizer has their masters"):
            trainer.fit(module, loader())
    else:
        trainer.fit(module, loader())
        assert not torch.equal(module.net[0].weight, before)


@EITHER
def test_the_trainer_takes_the_plugin_and_its_default_level(lightning: SimpleNamespace) -> None:
    plugin = lightning.precision()
    trainer = make_trainer(lightning.package, plugin)
    assert trainer.precision_plugin is plugin
    trainer.fit(make_module(lightning.package), loader(2))
    suitable = suitable_level("cpu").level
    assert plugin.adapter.level is halfpeak.LEVELS[suitable]
    assert trainer.precision == {"O0": "32-true", "O5": "bf16-true"}[suitable]


def make_gan(package: Any) -> Any:
    class Gan(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            noise, real = batch
            of_generator, of_critic = self.optimizers()
            for optimizer in (of_generator, of_critic):
                self.toggle_optimizer(optimizer)
                fake = self.critic(self.generator(noise)).float().mean()
                loss = -fake if optimizer is of_generator else fake - self.critic(real).float().mean()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

    return Gan()


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_toggled_optimizers_of_a_gan_train_their_own_networks(lightning: SimpleNamespace, level: str) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(6, 3, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(4)
    ]
    batches = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    module, plain = make_gan(lightning.package), make_gan(lightning.package)
    make_trainer(lightning.package, lightning.precision(halfpeak.LEVELS[level].replace(loss_scale=64.0))).fit(
        module, batches
    )
    make_trainer(lightning.package, []).fit(plain, batches)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if level == "O0" else 5e-3)
        assert ours.requires_grad


@EITHER
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_manual_optimization_with_two_optimizers_and_a_schedule_of_each(
    lightning: SimpleNamespace, level: str
) -> None:
    class Pair(lightning.package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList([make_net(0), make_net(1)])

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]
            schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
            return optimizers, [{"scheduler": one, "interval": "step"} for one in schedules]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                factor = torch.inf if number == 0 and batch_idx == 1 else 1.0
                loss = nn.functional.mse_loss(self.nets[number](batch[0]).float(), batch[1])
                self.manual_backward(loss * factor)
                optimizer.step()
                optimizer.zero_grad()
            for schedule in self.lr_schedulers():
                schedule.step()

    module, plugin = Pair(), lightning.precision(level, {"scale": SCALE})
    trainer = make_trainer(lightning.package, plugin)
    data = torch.utils.data.DataLoader([make_batch(number) for number in range(3)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data)
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers] == [0.025, 0.0125]
    assert plugin.state_dict()["counters"] == {"micro_step": 6, "num_steps": 5, "num_skipped": 1}
    for number, net in enumerate(module.nets):
        assert not torch.equal(net[0].weight, make_net(number)[0].weight)
        assert torch.isfinite(net[0].weight).all()


CALLBACKS: dict[str, dict[str, Any]] = {
    "WeightAveraging": {},
    "EMAWeightAveraging": {"decay": 0.5},
    "StochasticWeightAveraging": {"swa_lrs": 0.05, "swa_epoch_start": 1},
}


def averaged_run(
    lightning: SimpleNamespace, plugin: Any, callback: Any, epochs: int = 2, ckpt_path: str | None = None
) -> tuple[Any, Any]:
    module = make_module(lightning.package, lambda params: torch.optim.SGD(params, lr=0.05))
    trainer = make_trainer(lightning.package, plugin, callbacks=[callback], max_epochs=epochs)
    data = torch.utils.data.DataLoader([make_batch(number) for number in range(8)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("level", LEVELS)
def test_lightnings_averages_are_right_or_refused(lightning: SimpleNamespace, level: str, name: str) -> None:
    """At the end of a run Lightning puts the averages into the module: those of the same run in float32."""

    def make() -> Any:
        return getattr(lightning.package.callbacks, name)(**CALLBACKS[name])

    if STORED[level] is not torch.float32:
        with pytest.raises(halfpeak.ConfigError, match=r"EMAWeightAveraging, or HalfpeakPrecision\('O1'\)"):
            averaged_run(lightning, lightning.precision(level), make())
        return
    module, _ = averaged_run(
        lightning, lightning.precision(halfpeak.LEVELS[level].replace(loss_scale=64.0)), make()
    )
    plain, _ = averaged_run(lightning, [], make())
    for key, theirs in plain.state_dict().items():
        tolerance = {"O0": 1e-6, "O1": 2e-3, "O4": 1e-2}[level]
        torch.testing.assert_close(module.state_dict()[key], theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
def test_our_averages_are_of_what_the_optimizer_steps(
    lightning: SimpleNamespace, level: str, tmp_path: Path
) -> None:
    """Validation changes neither the run nor the averages."""
    exact: dict[str, Tensor] = {}
    seen: list[dict[str, Tensor]] = []
    present: list[dict[str, Tensor]] = []

    class Checked(lightning.ours.WeightAveraging):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module, *args)
            present.append(copy.deepcopy(module.state_dict()))
            for name, value in present[-1].items():
                exact[name] = 0.9 * exact.get(name, value.double()) + 0.1 * value.double()

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(copy.deepcopy(module.state_dict()))
            super().on_validation_epoch_end(trainer, module)
            if not trainer.sanity_checking:
                assert_same(module.state_dict(), present[-1])

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            super().on_train_epoch_end(trainer, module)
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    def plugin() -> Any:
        return lightning.precision(halfpeak.LEVELS[level].replace(loss_scale=64.0))

    path = str(tmp_path / "half.ckpt")
    callback = Checked()
    module, _ = averaged_run(lightning, plugin(), callback)
    plain, _ = averaged_run(lightning, plugin(), lightning.package.Callback())
    assert_same(present[-1], plain.state_dict())
    for name, value in callback._average_model.module.named_parameters():
        assert float((value.detach() - exact[name]).abs().max()) < 1e-6
        if level != "O3":
            assert torch.equal(seen[-1][name], value)
            assert torch.equal(module.state_dict()[name], value)

    resumed = Checked()
    averaged_run(lightning, plugin(), resumed, ckpt_path=path)
    assert_same(weights(resumed._average_model), weights(callback._average_model))


@EITHER
def test_our_callbacks_take_lightnings_arguments(lightning: SimpleNamespace) -> None:
    callback = lightning.ours.EMAWeightAveraging(decay=0.5, update_starting_at_step=7)
    module, _ = averaged_run(lightning, lightning.precision("O5"), callback, epochs=1)
    assert callback._average_model.n_averaged == 1
    assert_same(weights(callback._average_model.module), weights(module))
