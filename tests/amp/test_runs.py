"""Several initialize calls in one process: each run gives the results that it gives alone, and leaves no state behind."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfpeak import amp
from support.nets import LEVELS, LOW, OPTIMIZERS, make_batch, make_net, product
from support.snapshot import values


class Trainee:
    """One run: a model, an optimizer and data of its own, with the loss computed outside the model."""

    def __init__(self, level: str, seed: int = 0, kind: str = "sgd", **options: Any) -> None:
        self.net: nn.Module = make_net(seed)
        self.optimizer = OPTIMIZERS[kind](self.net.parameters())
        self.seed = seed
        amp.initialize(
            self.net, self.optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0, **options
        )
        self.scalers = amp._amp_state.loss_scalers

    def step(self, number: int, overflow: bool = False) -> None:
        x, y = make_batch(100 * self.seed + number)
        self.optimizer.zero_grad()
        with amp.scale_loss(mse_loss(self.net(x), y), self.optimizer) as scaled:
            scaled.backward()
            if overflow:
                next(self.net.parameters()).grad[0, 0] = float("inf")
        self.optimizer.step()

    def result(self) -> list[Any]:
        return [values(self.net, self.optimizer), [(s.loss_scale(), s._unskipped) for s in self.scalers]]


def stop_casts() -> None:
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()


@functools.cache
def alone(level: str, seed: int) -> list[Any]:
    trainee = Trainee(level, seed)
    for number in range(6):
        trainee.step(number, overflow=number == 3)
    result = trainee.result()
    stop_casts()
    return result


PAIRS = [(a, b) for a in LEVELS for b in LEVELS]


class TestSideBySide:
    @pytest.mark.parametrize(("first", "second"), PAIRS)
    def test_neither_disturbs_the_other(self, first: str, second: str) -> None:
        one = Trainee(first, 1)
        for number in range(2):
            one.step(number)
        two = Trainee(second, 2)
        for number in range(2, 6):
            two.step(number - 2)
            one.step(number, overflow=number == 3)
        for number in range(4, 6):
            two.step(number)
        got = [one.result(), two.result()]
        stop_casts()
        assert got[0] == alone(first, 1)

        expected = Trainee(second, 2)
        for number in range(6):
            expected.step(number)
        assert got[1] == expected.result()

    @pytest.mark.parametrize("level", ["O1", "O4"])
    @pytest.mark.parametrize("other", ["O0", "O2", "O3", "O5"])
    def test_a_model_without_optimizer_does_not_cast_for_others(self, level: str, other: str) -> None:
        teacher = amp.initialize(make_net(5), opt_level=level, verbosity=0)
        student = Trainee(other, 2)
        for number in range(6):
            student.step(number, overflow=number == 3)
        result = student.result()
        assert teacher(make_batch(0)[0]).dtype is LOW[level]
        stop_casts()
        assert result == alone(other, 2)

    @pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
    @pytest.mark.parametrize("other", ["O1", "O4"])
    def test_a_model_without_optimizer_is_not_cast_by_others(self, level: str, other: str) -> None:
        x = make_batch(0)[0]
        teacher = amp.initialize(make_net(5), opt_level=level, verbosity=0).eval()
        expected = teacher(x)
        student = Trainee(other, 2)
        student.step(0)
        assert torch.equal(teacher(x), expected)

    def test_the_casts_outside_models_are_those_of_the_latest_run_that_lives(self) -> None:
        one = Trainee("O1", 1)
        two = Trainee("O4", 2)
        three = Trainee("O2", 3)
        assert product() is torch.bfloat16
        four = Trainee("O1", 4)
        assert product() is torch.float16
        del four
        assert product() is torch.bfloat16
        del two
        assert product() is torch.float16
        assert amp._amp_state.handle.is_active()
        del one
        assert product() is torch.float32
        three.step(0)

    def test_a_forward_pass_that_raises_ends_the_casts_of_its_model(self) -> None:
        one, two = Trainee("O1", 1), Trainee("O4", 2)
        with pytest.raises(RuntimeError):
            one.net(torch.ones(1, 99))
        assert product() is torch.bfloat16
        two.step(0)

    def test_a_pickled_model_whose_run_has_ended_computes_under_the_casts_of_the_thread(self) -> None:
        one, two = Trainee("O1", 1), Trainee("O4", 2)
        pickled = pickle.dumps(one.net)
        del one
        gc.collect()
        assert pickle.loads(pickled)(make_batch(0)[0]).dtype is torch.bfloat16
        two.step(0)

    @pytest.mark.parametrize("level", LEVELS)
    def test_gan_in_two_calls(self, level: str) -> None:
        """A block may name optimizers of several calls; it uses the scalers of the first optimizer's call."""
        one, two = Trainee(level, 1, loss_scale=64.0), Trainee(level, 2, loss_scale=16.0)
        x, y = make_batch(0)
        with amp.scale_loss(
            mse_loss(one.net(x), y) + mse_loss(two.net(x), y), [one.optimizer, two.optimizer]
        ) as scaled:
            scaled.backward()
        reference = [make_net(1), make_net(2)]
        (mse_loss(reference[0](x), y) + mse_loss(reference[1](x), y)).backward()
        tolerance = 1e-6 if level == "O0" else 3e-2
        for trainee, net in zip((one, two), reference, strict=True):
            for ours, theirs in zip(amp.master_params(trainee.optimizer), net.parameters(), strict=True):
                assert torch.allclose(ours.grad.float(), theirs.grad, atol=tolerance)
            before = values(trainee.net)
            trainee.optimizer.step()
            assert values(trainee.net) != before

    def test_an_overflow_in_a_block_of_two_calls_skips_both(self) -> None:
        one, two = Trainee("O2", 1, num_losses=3), Trainee("O5", 2)
        x, y = make_batch(0)
        before = values(one.net, one.optimizer, two.net, two.optimizer)
        with amp.scale_loss(
            mse_loss(one.net(x), y) + mse_loss(two.net(x), y), [one.optimizer, two.optimizer], loss_id=2
        ) as scaled:
            scaled.backward()
            next(two.net.parameters()).grad[0, 0] = float("inf")
        for trainee in (one, two):
            trainee.optimizer.step()
            result = amp.last_step(trainee.optimizer)
            assert not result.stepped()
            assert float(result.scale) == 128.0
        assert values(one.net, one.optimizer, two.net, two.optimizer) == before
        assert [scaler.loss_scale() for scaler in one.scalers] == [256.0, 256.0, 128.0]

    @pytest.mark.parametrize("level", ["O1", "O4"])
    def test_the_same_model_again_with_another_optimizer(self, level: str) -> None:
        """The second stage of a fine-tuning; apex allowed this at O1."""
        trainee = Trainee(level, 1)
        for number in range(3):
            trainee.step(number)
        weights = {name: value.clone() for name, value in trainee.net.state_dict().items()}

        def second_stage(net: nn.Module) -> list[Any]:
            trainee.net, trainee.optimizer = net, OPTIMIZERS["adamw"](net.parameters())
            amp.initialize(net, trainee.optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0)
            for number in range(3, 6):
                trainee.step(number, overflow=number == 4)
            return values(net, trainee.optimizer)

        again = second_stage(trainee.net)
        fresh = make_net(1)
        fresh.load_state_dict(weights)
        assert again == second_stage(fresh)

    def test_a_disabled_call_does_not_switch_others_off(self) -> None:
        one = Trainee("O2", 1)
        net = make_net(2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, optimizer, enabled=False)
        loss = net(make_batch(0)[0]).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
        amp.initialize(one.net, one.optimizer, enabled=False)
        for number in range(6):
            one.step(number, overflow=number == 3)
        assert one.result() == alone("O2", 1)

    def test_state_dict_covers_every_run(self) -> None:
        one, two = Trainee("O2", 1, num_losses=2), Trainee("O1", 2)
        one.step(0)
        one.step(1, overflow=True)
        two.step(0)
        state = amp.state_dict()
        assert state == {
            "loss_scaler0": {"loss_scale": 256.0, "unskipped": 1},
            "loss_scaler1": {"loss_scale": 128.0, "unskipped": 0},
            "loss_scaler2": {"loss_scale": 256.0, "unskipped": 0},
        }
        for trainee in (one, two):
            trainee.step(2, overflow=True)
        amp.load_state_dict(state)
        assert amp.state_dict() == state

    @pytest.mark.parametrize("earlier_is_alive", [True, False])
    def test_a_state_saved_beside_an_earlier_run_restores_the_later_one(self, earlier_is_alive: bool) -> None:
        """The folds of a cross-validation; the second fold is resumed in a new process."""
        folds = [Trainee("O2", 1), Trainee("O2", 2)]
        for number, fold in enumerate(folds):
            fold.step(number, overflow=number == 0)
        amp.initialize(make_net(), opt_level="O2", verbosity=0)  # another model, which is not trained
        state = amp.state_dict()
        if not earlier_is_alive:
            folds.clear()
            gc.collect()
        resumed = Trainee("O2", 2)
        amp.load_state_dict(state)
        assert resumed.scalers[0].state_dict() == {"loss_scale": 256.0, "unskipped": 1}


class TestEnd:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("model_has_it", [True, False])
    def test_a_run_ends_with_its_optimizer(self, level: str, model_has_it: bool) -> None:
        """Also where the model refers to the optimizer, as in Lightning."""
        trainee = Trainee(level)
        for number in range(3):
            trainee.step(number, overflow=number == 1)
        if model_has_it:
            trainee.net.optimizer = trainee.optimizer  # type: ignore[assignment]
        run = amp._amp_state.run_of(trainee.optimizer)
        assert run is not None
        alive = [weakref.ref(one) for one in (run, run.parts.pairs, trainee.net, trainee.optimizer)]
        del run, trainee
        gc.collect()
        assert [one() for one in alive] == [None] * 4
        assert amp._amp_state.runs() == []

    @pytest.mark.parametrize("level", ["O1", "O4"])
    @pytest.mark.parametrize("trained", [True, False])
    def test_casts_end_with_the_model(self, level: str, trained: bool) -> None:
        if trained:
            run: Any = Trainee(level)
            run.step(0)
        else:
            run = amp.initialize(make_net(), opt_level=level, verbosity=0)
            run(make_batch(0)[0])
        assert product() is LOW[level]
        del run
        gc.collect()
        assert product() is torch.float32
        assert torch._C._len_torch_function_stack() == 0
        assert amp._amp_state.handle is None

    def test_casts_stay_while_one_of_several_models_lives(self) -> None:
        nets = [make_net(0), make_net(1)]
        amp.initialize(nets, opt_level="O1", verbosity=0)
        first = nets.pop()
        with amp.disable_casts():
            del nets
            gc.collect()
            assert product() is torch.float32
        assert product() is torch.float16
        del first
        gc.collect()
        assert product() is torch.float32

    def test_casts_that_the_script_switched_off_stay_off_when_a_model_is_deleted(self) -> None:
        one, two = Trainee("O1", 1), Trainee("O4", 2)
        stop_casts()
        del two
        gc.collect()
        assert product() is torch.float32
        x, y = make_batch(100)
        out = one.net(x)
        assert out.dtype is torch.float16
        # Nothing casts outside of the model any more, and the loss of torch 2.11 has no gradient for two dtypes.
        with amp.scale_loss(mse_loss(out.float(), y), one.optimizer) as scaled:
            scaled.backward()
        one.optimizer.step()
        assert amp.last_step(one.optimizer).stepped()

    @pytest.mark.parametrize("level", ["O1", "O4"])
    def test_a_new_run_in_the_place_of_the_old(self, level: str) -> None:
        """A notebook assigns ``model, optimizer = ...`` again and again under the same names."""
        for _ in range(3):
            trainee = Trainee(level)
            trainee.step(0)
            assert torch._C._len_torch_function_stack() == 1
        expected = trainee.result()
        del trainee
        gc.collect()
        fresh = Trainee(level)
        fresh.step(0)
        assert fresh.result() == expected


def _two_layers(level: str | None, *, together: bool = True) -> tuple[list[nn.Module], list[torch.optim.SGD]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    calls = [(layers, optimizers)] if together else zip(layers, optimizers, strict=True)
    for models, own in calls if level else ():
        amp.initialize(models, own, opt_level=level, verbosity=0, loss_scale="dynamic")
    return layers, optimizers


def _scaled_backward(loss: Tensor, optimizer: torch.optim.SGD, level: str | None) -> None:
    if level is None:
        loss.backward()
        return
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("together", [True, False])
def test_a_loss_listed_for_one_optimizer_reaches_another_then_both_step(level: str, together: bool) -> None:
    after: list[list[Tensor]] = []
    x = torch.linspace(-1, 1, 18).view(6, 3)
    for run in (level, None):
        layers, optimizers = _two_layers(run, together=together)
        for _ in range(3):
            _scaled_backward(layers[1](layers[0](x)).float().square().mean(), optimizers[1], run)
            _scaled_backward(layers[0](x).float().mean(), optimizers[0], run)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        after.append([p.detach().float() for layer in layers for p in layer.parameters()])
    torch.testing.assert_close(*after, rtol=0, atol=0.003)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("together", [True, False])
def test_an_overflow_in_what_a_loss_reaches_besides(
    level: str, together: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer with the infinite gradient skips, the other steps, and the scale of the loss falls, in that skip."""
    layers, optimizers = _two_layers(level, together=together)
    runs = amp._amp_state.runs()
    runs[0].verbosity = 1
    before = [layer.state_dict()["bias"].clone() for layer in layers]
    scales = [run.scalers[0].loss_scale() for run in runs]
    layers[0].bias.register_hook(lambda grad: grad * float("inf"))
    loss = layers[1](layers[0](torch.ones(2, 3))).float().mean() / 8
    _scaled_backward(loss, optimizers[1], level)
    optimizers[1].step()
    assert [run.scalers[0].loss_scale() for run in runs] == scales
    optimizers[0].step()
    assert [amp.last_step(optimizer).stepped() for optimizer in optimizers] == [False, True]
    moved = [not torch.equal(one.state_dict()["bias"], old) for one, old in zip(layers, before, strict=True)]
    assert moved == [False, True]
    assert [run.scalers[0].loss_scale() for run in runs] == [*scales[:-1], scales[-1] / 2]
    assert f"to {scales[-1] / 2}" in capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", [0, 1])
def test_an_overflow_in_both_networks_of_a_run_halves_the_scale_once(level: str, first: int) -> None:
    """As in a GAN, whose generator's loss reaches the discriminator, which the same call prepared."""
    layers, optimizers = _two_layers(level)
    (scaler,) = amp._amp_state.runs()[-1].scalers
    before = scaler.loss_scale()
    loss = layers[1](layers[0](torch.ones(2, 3))).float().mean() * 1e35
    _scaled_backward(loss, optimizers[1], level)
    optimizers[first].step()
    optimizers[1 - first].step()
    assert scaler.loss_scale() == before / 2
