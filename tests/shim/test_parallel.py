"""``apex.parallel`` on two gloo ranks, against one process with the whole batch, and without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from distributed.launching import Seen, launched
from shim.parallel_ranks import PARTS, batch

two = launched("shim.parallel_ranks")


REDUCED = {"average": 3.0, "sum": 6.0, "predivided": 3.0, "predivided sum": 1.5, "in float32": 3.0}
"""Gradients of 2 and 4 on the two ranks, reduced."""


@pytest.mark.parametrize("name", REDUCED)
def test_gradients_are_reduced_as_asked(name: str, two: Seen) -> None:
    for rank, seen in enumerate(two[name]):
        assert torch.equal(seen["weight"], torch.zeros(1, 3)), "rank 0's weights"
        assert torch.equal(seen["local"], torch.full((1, 3), 1.0 + rank)), "no_sync"
        assert torch.equal(seen["reduced"], torch.full((1, 3), REDUCED[name]))
        assert seen["keys"] == ["module.weight"]


def test_delayed_reduction_takes_models_that_leave_parameters_out(two: Seen) -> None:
    for seen in two["unused"]:
        assert [grad.tolist() for grad in seen["grads"]] == [[[1.5, 1.5]], [[1.5, 1.5]]]


def test_reduction_can_be_switched_off_and_on(two: Seen) -> None:
    assert [float(seen["local"]) for seen in two["switched"]] == [1.0, 2.0]
    assert [float(seen["reduced"]) for seen in two["switched"]] == [3.0, 3.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_skip_together_and_stay_equal(level: str, two: Seen) -> None:
    first, second = two[level]
    assert first["skipped"] == second["skipped"] == [False, True, False, False]
    for a, b in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


NORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "norm 0": (0, {}),
    "norm 2": (2, {"momentum": 0.3, "eps": 1e-3}),
    "norm cumulative": (1, {"momentum": None}),
    "norm plain": (1, {"affine": False}),
    "norm relu": (2, {"fuse_relu": True}),
}


def plain_norm(dims: int, options: dict[str, Any]) -> dict[str, Any]:
    """One BatchNorm over the whole batch."""
    x, weight, z = batch(dims)
    relu = options.pop("fuse_relu", False)
    layer = (nn.BatchNorm2d if dims == 2 else nn.BatchNorm1d)(3, **options)
    x = x.requires_grad_()
    layer(x.detach() * 2)
    out = layer(x)
    out = (out + z).relu() if relu else out
    (out * weight).sum().backward()
    layer.eval()
    return {
        "out": out.detach(),
        "input": x.grad,
        "parameters": [p.grad for p in layer.parameters()],
        "state": list(layer.state_dict().values()),
        "eval": (layer(x)).detach(),
    }


@pytest.mark.parametrize("name", NORMS)
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(name: str, two: Seen) -> None:
    dims, options = NORMS[name]
    expected = plain_norm(dims, dict(options))
    seen = two[name]
    for key in ("out", "input"):
        torch.testing.assert_close(torch.cat([one[key] for one in seen]), expected[key], rtol=1e-4, atol=1e-4)
    for one in seen:
        torch.testing.assert_close(one["parameters"], expected["parameters"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(one["state"], expected["state"], rtol=1e-4, atol=1e-4)
    assert seen[0]["out"].shape[0] == PARTS[0]
    if not options.get("fuse_relu"):
        whole = torch.cat([one["eval"] for one in seen])
        torch.testing.assert_close(whole, expected["eval"], rtol=1e-4, atol=1e-3)


def test_reducing_by_hand(two: Seen) -> None:
    for rank, seen in enumerate(two["by hand"]):
        assert [p.flatten().tolist() for p in seen["parameters"]] == [[5.0, 5.0], [5.0]]
        assert [g.flatten().tolist() for g in seen["grads"]] == [[1.5, 1.5], [1.0]]
        assert [g.tolist() for g in seen["averaged"]] == [[0.5, 0.5], [0.5]]
        assert seen["averaged"][1].dtype is torch.float16
        assert [t.tolist() for t in seen["sent"]] == [[[1.0, 1.0], [1.0, 1.0]], [1]]
        assert seen["groups"] == [None, [rank], [0, 1]]
        assert "group_size=3 must divide the 2 ranks; write one of [1, 2]" in seen["refusal"]


class TestOneProcess:
    pytestmark = pytest.mark.usefixtures("apex_installed")

    def test_ddp_wants_a_process_group(self) -> None:
        from apex.parallel import DistributedDataParallel

        with pytest.raises(ValueError, match="process group"):
            DistributedDataParallel(nn.Linear(1, 1))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shared_param": True}, "leave it out"),
            ({"gradient_average_split_factor": 2.0}, "write gradient_predivide_factor"),
            ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor"),
            (
                {"delay_allreduce": True, "allreduce_trigger_params": []},
                "delay_allreduce=True exclude each other",
            ),
        ],
    )
    def test_arguments_that_apex_refused(self, options: dict[str, Any], message: str) -> None:
        from apex.parallel import DistributedDataParallel

        with pytest.raises(halfpeak.ConfigError, match=message):
            DistributedDataParallel(nn.Linear(1, 1), **options)

    def test_reducer_wants_tensors(self) -> None:
        from apex.parallel import Reducer

        with pytest.raises(halfpeak.ConfigError, match=r"Reducer\(model\)"):
            Reducer([1, 2])  # type: ignore[list-item]

    def test_conversion_keeps_everything(self) -> None:
        from apex.parallel import SyncBatchNorm, convert_syncbn_model

        model = nn.ModuleDict(
            {
                "body": nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2)),
                "head": nn.BatchNorm1d(5, affine=False, track_running_stats=False),
                "other": nn.InstanceNorm2d(3, affine=True),
            }
        ).eval()
        parameters, state = dict(model.named_parameters()), model.state_dict()
        converted = convert_syncbn_model(model)
        assert converted is model
        norm, head = model["body"][1], model["head"]
        assert (type(norm), type(head), type(model["other"])) == (
            SyncBatchNorm,
            SyncBatchNorm,
            nn.InstanceNorm2d,
        )
        assert (norm.eps, norm.momentum, norm.training) == (1e-3, 0.2, False)
        assert (head.weight, head.running_mean) == (None, None)
        assert all(parameters[name] is p for name, p in converted.named_parameters())
        assert state.keys() == converted.state_dict().keys()
        alone = convert_syncbn_model(nn.BatchNorm1d(2))
        assert type(alone) is SyncBatchNorm

    def test_it_runs_as_batch_norm(self) -> None:
        from apex.parallel import SyncBatchNorm

        layer, plain = SyncBatchNorm(3, fuse_relu=True), nn.BatchNorm2d(3)
        x, z = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
        assert torch.equal(layer(x, z), (plain(x) + z).relu())
        assert torch.equal(layer.eval()(x), plain.eval()(x).relu())

    def test_channels_last(self) -> None:
        from apex.parallel import SyncBatchNorm, convert_syncbn_model

        layer, plain = SyncBatchNorm(3, channel_last=True), nn.BatchNorm2d(3)
        x: Tensor = torch.randn(2, 4, 4, 3)
        assert torch.equal(layer(x), plain(x.movedim(-1, 1)).movedim(1, -1))
        model: Any = convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3)), channel_last=True)
        assert model[0].channel_last

    @pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
    def test_levels_take_it_for_a_norm(self, level: str) -> None:
        from apex import amp
        from apex.parallel import SyncBatchNorm

        model: Any = nn.Sequential(nn.Linear(4, 3), SyncBatchNorm(3))
        model, _ = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
        )
        expected = torch.float16 if level == "O3" else torch.float32
        assert {p.dtype for p in model[1].parameters()} == {expected}
        assert model(torch.randn(4, 4)).float().isfinite().all()
