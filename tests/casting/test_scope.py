"""Scopes of casts: nested, left in any order, below other modes, per thread and process; torch is unchanged after."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from halfpeak.casting.casts import DeviceCasts, OpCasts, casts_on, disable_casts
from support.nets import product

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def snapshot() -> dict[str, Any]:
    """The attributes and modes of torch that a scope of casts could leave changed."""
    places = (
        torch,
        torch.Tensor,
        torch.nn.functional,
        torch._C._nn,
        torch.nn.modules.rnn,
        torch.autograd,
        torch.linalg,
    )
    names = {
        (place.__name__, name): id(value)
        for place in places
        for name, value in vars(place).items()
        if not name.startswith("__")
    }
    devices = ("cpu", "cuda", "ipu", "xpu", "mps")
    return {
        **{str(key): value for key, value in names.items()},
        "modes": list(_get_current_function_mode_stack()),
        "autocast": [torch.is_autocast_enabled(device) for device in devices],
        "any autocast": torch._C._is_any_autocast_enabled(),
        "hooks": len(torch.nn.modules.module._global_forward_pre_hooks),
    }


@pytest.fixture(autouse=True)
def torch_as_found() -> Iterator[None]:
    before = snapshot()
    yield
    assert snapshot() == before


class Recorder(TorchFunctionMode):
    """A torch function mode of user code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_torch_is_not_touched_while_a_scope_is_open() -> None:
    before = snapshot()
    with OpCasts(HALF):
        inside = snapshot()
    changed = {key for key in before if before[key] != inside[key]}
    assert changed == {"modes", "autocast", "any autocast"}
    assert torch.is_autocast_enabled("cpu") is False


def test_the_innermost_decides_and_leaving_restores() -> None:
    half, bfloat = OpCasts(HALF), OpCasts(BFLOAT)
    with half:
        with bfloat:
            assert product() is BFLOAT
            with half:
                assert product() is HALF
                with disable_casts():
                    assert product() is FLOAT
                    with disable_casts():
                        assert product() is FLOAT
                    assert product() is FLOAT
                    with bfloat:
                        assert product() is BFLOAT
                    assert product() is FLOAT
                assert product() is HALF
            assert product() is BFLOAT
        assert product() is HALF
    assert product() is FLOAT


def test_an_error_in_an_operation_leaves_things_as_before() -> None:
    with OpCasts(HALF):
        before = snapshot()
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        with pytest.raises(IndexError):
            torch.nn.functional.gumbel_softmax(torch.ones(2), dim=5)
        assert snapshot() == before
        assert product() is HALF


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("middle", ["casts", "disable", "recorder"])
def test_scopes_can_be_left_in_any_order(order: tuple[int, ...], middle: str) -> None:
    contexts: list[Any] = [
        OpCasts(HALF),
        {"casts": OpCasts(BFLOAT), "disable": disable_casts(), "recorder": Recorder()}[middle],
        OpCasts(HALF),
    ]
    if middle == "recorder" and order.index(2) > order.index(1):
        order = (2, *(number for number in order if number != 2))  # a plain mode pops the top of the stack
    for context in contexts:
        context.__enter__()
    for number in order:
        contexts[number].__exit__(None, None, None)
    assert product() is FLOAT
    assert not _get_current_function_mode_stack()


def test_in_a_block_with_other_casts_only_these_apply() -> None:
    x = torch.ones(2, 2)
    with OpCasts(HALF):
        with casts_on(None):
            assert product() is FLOAT
        with casts_on(DeviceCasts("cpu", BFLOAT)):
            assert (x @ x).softmax(0).dtype is BFLOAT  # float32 by the lists of OpCasts
        assert product() is HALF


def test_other_threads_are_untouched() -> None:
    found: list[Any] = []
    casts = OpCasts(HALF)

    def work() -> None:
        found.append(product())
        with casts:
            found.append(product())
        with disable_casts():
            found.append(product())
        found.append(snapshot()["autocast"])

    with casts:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert product() is HALF
    assert found == [FLOAT, HALF, FLOAT, [False] * 5]


def test_install_and_uninstall_are_idempotent_and_complete() -> None:
    casts, before = OpCasts(HALF), snapshot()
    casts.uninstall()
    casts.install()
    casts.install()
    assert product() is HALF
    with disable_casts():
        assert product() is FLOAT
    casts.uninstall()
    assert snapshot() == before
    casts.uninstall()
    assert snapshot() == before


def test_modes_entered_before_an_installation_can_be_left_after() -> None:
    casts, recorder = OpCasts(HALF), Recorder()
    with recorder:
        with OpCasts(BFLOAT):
            casts.install()
            assert product() is BFLOAT  # the inner scope still decides
        assert product() is HALF
        assert recorder.calls > 0
    assert product() is HALF
    with recorder:
        calls = recorder.calls
        assert product() is HALF
        assert recorder.calls > calls
        casts.uninstall()
        assert product() is FLOAT
    assert product() is FLOAT


@pytest.mark.parametrize("first", ["device", "casts"])
@pytest.mark.parametrize("leave", ["device", "casts"])
def test_the_default_device_works_beside_an_installation(first: str, leave: str) -> None:
    casts = OpCasts(HALF)
    device = {"device": lambda: torch.set_default_device("meta"), "casts": casts.install}
    undo = {"device": lambda: torch.set_default_device(None), "casts": casts.uninstall}
    second = "casts" if first == "device" else "device"
    device[first]()
    device[second]()
    x = torch.ones(2, 2)
    assert ((x @ x).dtype, x.device.type) == (HALF, "meta")
    with torch.device("cpu"):
        assert product() is HALF
    undo[leave]()
    x = torch.ones(2, 2)
    assert ((x @ x).dtype, x.device.type) == ((HALF, "cpu") if leave == "device" else (FLOAT, "meta"))
    undo["casts" if leave == "device" else "device"]()


def test_the_latest_installation_decides() -> None:
    half, bfloat = OpCasts(HALF), OpCasts(BFLOAT)
    half.install()
    bfloat.install()
    assert product() is BFLOAT
    bfloat.uninstall()
    assert product() is HALF
    half.uninstall()
    half.install()
    bfloat.install()
    half.uninstall()
    assert product() is BFLOAT
    bfloat.uninstall()
    assert product() is FLOAT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_does_not_cast() -> None:
    casts = OpCasts(HALF)
    casts.install()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if product() is FLOAT else 1)
        _, status = os.waitpid(child, 0)
        assert product() is HALF
    finally:
        casts.uninstall()
    assert os.waitstatus_to_exitcode(status) == 0


def test_autocast_and_scopes_do_not_disturb_each_other() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", BFLOAT):
        with OpCasts(HALF):
            assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype is BFLOAT
    with OpCasts(HALF), ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", BFLOAT))
        assert torch.is_autocast_enabled("cpu")
    assert product() is FLOAT


def test_a_recurrent_net_refuses_mixed_dtypes_again_afterwards() -> None:
    net, x, casts = nn.LSTM(2, 2), torch.ones(1, 1, 2).half(), OpCasts(HALF)
    with casts:
        net(x)
    casts.install()
    net(x)
    casts.uninstall()
    with pytest.raises(ValueError, match="dtype"):
        net(x)
