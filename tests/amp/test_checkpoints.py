"""amp.state_dict, and apex's recipe of three state dicts: a resumed run continues bit for bit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from halfpeak import amp
from halfpeak.core.errors import StateError
from support.nets import LEVELS, OPTIMIZERS, PURE, STORED, make_batch, make_net


def setup(level: str = "O2", seed: int = 0, kind: str = "sgd", **options: Any) -> tuple[Any, Any]:
    net = make_net(seed)
    optimizer = OPTIMIZERS[kind](net.parameters())
    options.setdefault("max_loss_scale", 256.0)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)


def train(net: nn.Module, optimizer: Any, steps: range, loss_ids: tuple[int, ...] = (0,)) -> list[Any]:
    """Train, with an overflow in the third of every five steps; return the losses and the scaler states."""
    history: list[Any] = []
    for step in steps:
        optimizer.zero_grad()
        for loss_id in loss_ids:
            x, y = make_batch(10 * step + loss_id)
            loss = mse_loss(net(x), y)
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
                if step % 5 == 2:
                    next(net.parameters()).grad[0, 0] = float("nan")
            history.append(loss.item())
        optimizer.step()
        history.append([amp._amp_state.loss_scalers[i].state_dict() for i in loss_ids])
    return history


class TestStateDict:
    def test_format(self) -> None:
        setup(num_losses=2)
        state = amp.state_dict()
        assert type(state) is OrderedDict
        assert state == {
            "loss_scaler0": {"loss_scale": 256.0, "unskipped": 0},
            "loss_scaler1": {"loss_scale": 256.0, "unskipped": 0},
        }
        assert type(state["loss_scaler0"]["loss_scale"]) is float
        assert type(state["loss_scaler0"]["unskipped"]) is int

    def test_destination(self) -> None:
        setup()
        destination = {"mine": 1}
        assert amp.state_dict(destination) is destination
        assert list(destination) == ["mine", "loss_scaler0"]

    def test_before_initialize_and_disabled(self) -> None:
        """apex raised ``AttributeError``."""
        assert amp.state_dict() == {}
        amp.initialize(make_net(), enabled=False)
        assert amp.state_dict() == {}

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("scale", ["dynamic", 4.0])
    def test_is_the_identity(self, level: str, scale: float | str) -> None:
        net, optimizer = setup(level, num_losses=2, loss_scale=scale)
        train(net, optimizer, range(4), (0, 1))
        state = amp.state_dict()
        kept = copy.deepcopy(state)
        for scaler in amp._amp_state.loss_scalers:
            scaler._unskipped = 77
            if scale == "dynamic":
                scaler._loss_scale = 2.0
        amp.load_state_dict(state)
        assert amp.state_dict() == kept
        assert state == kept


class TestLoadStateDict:
    def test_another_number_of_scalers_is_said_and_what_fits_is_loaded(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        setup(num_losses=2)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}})
        printed = capsys.readouterr().out
        assert "1" in printed
        assert "2" in printed
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 5}
        assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 256.0, "unskipped": 0}

    def test_what_is_left_over_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup()
        amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)})
        printed = capsys.readouterr().out
        assert "Skipping loss_scaler[1]" in printed
        assert "num_losses=1" in printed
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}

    def test_the_scaler_of_a_checkpoint_is_the_students_also_after_a_teacher_was_initialised(self) -> None:
        student, optimizer = setup()
        teacher = amp.initialize(make_net(1), opt_level="O2", verbosity=0)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}})
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}}
        loss = student(torch.ones(2, 6)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            assert torch.equal(scaled, loss * 8)
            scaled.backward()
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 6
        del teacher

    def test_entries_go_by_their_order(self) -> None:
        setup()
        amp.load_state_dict({"loss_scaler7": {"loss_scale": 4.0, "unskipped": 1}})
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}

    @pytest.mark.parametrize(
        "state",
        [
            {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "model": {}},
            {"loss_scaler0": {"loss_scale": 4.0}},
            {"loss_scaler0": 4.0},
            {"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 1}},
            {"loss_scaler0": {"loss_scale": 4.0, "unskipped": -1}},
            {
                "loss_scaler0": {"loss_scale": 4.0, "unskipped": 1},
                "loss_scaler1": {"loss_scale": 0.0, "unskipped": 1},
            },
        ],
    )
    def test_a_bad_state_loads_nothing(self, state: dict[str, Any]) -> None:
        setup(num_losses=2)
        before, kept = amp.state_dict(), copy.deepcopy(state)
        with pytest.raises(StateError) as caught:
            amp.load_state_dict(state)
        assert isinstance(caught.value, RuntimeError)
        assert amp.state_dict() == before
        assert repr(state) == repr(kept)

    def test_a_bad_entry_is_named(self) -> None:
        setup(num_losses=2)
        good = {"loss_scale": 4.0, "unskipped": 1}
        with pytest.raises(StateError, match="loss_scaler1"):
            amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": {"loss_scale": 4.0}})

    def test_what_else_an_entry_holds_is_left_alone(self) -> None:
        setup()
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1, "of a fork": 2}})
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 1}

    def test_unexpected_keys_are_listed_in_double_quotes(self) -> None:
        setup()
        with pytest.raises(RuntimeError, match='"model", "optimizer"'):
            amp.load_state_dict({"model": {}, "optimizer": {}})

    def test_a_static_scale_keeps_what_was_configured(self) -> None:
        setup("O2", loss_scale=32.0)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 9}})
        assert amp._amp_state.loss_scalers[0].loss_scale() == 32.0


def save(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    )


class TestRecipe:
    """``{"model", "optimizer", "amp"}``, as apex documents it."""

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("initialize_first", [True, False])
    @pytest.mark.parametrize("losses", [1, 2])
    def test_restoring(self, level: str, initialize_first: bool, losses: int) -> None:
        """A second model loads the checkpoint of step five; both train five more steps with equal weights."""
        ids = tuple(range(losses))
        net, optimizer = setup(level, num_losses=losses)
        train(net, optimizer, range(5), ids)
        checkpoint = save(net, optimizer)
        second = make_net(1)
        other = OPTIMIZERS["sgd"](second.parameters())

        def restore() -> None:
            second.load_state_dict(checkpoint["model"])
            other.load_state_dict(checkpoint["optimizer"])

        if not initialize_first:
            restore()
        amp.initialize(second, other, opt_level=level, num_losses=losses, verbosity=0, max_loss_scale=256.0)
        if initialize_first:
            restore()
        both = amp.state_dict()
        assert len(both) == 2 * losses
        amp.load_state_dict(both | checkpoint["amp"])
        for step in range(5, 10):
            train(net, optimizer, range(step, step + 1), ids)
            train(second, other, range(step, step + 1), ids)
            ours, theirs = net.state_dict(), second.state_dict()
            for name, value in ours.items():
                assert value.dtype is (torch.int64 if name.endswith("tracked") else torch.float32)
                assert torch.equal(value, theirs[name]), name
        states = list(amp.state_dict().values())
        assert states[:losses] == states[losses:]

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_checkpoint_of_another_level_loads(self, level: str) -> None:
        net, optimizer = setup("O0")
        train(net, optimizer, range(3))
        checkpoint = save(net, optimizer)
        expected = checkpoint["model"]
        net, optimizer = setup(level, seed=1)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for name, value in net.state_dict().items():
            wanted = expected[name]
            if level in PURE and wanted.is_floating_point():
                wanted = wanted.to(STORED[level]).float()
            assert torch.equal(value, wanted)
        moved = [optimizer.state[p]["momentum_buffer"].dtype for p in amp.master_params(optimizer)]
        assert moved == [p.dtype for p in amp.master_params(optimizer)]
