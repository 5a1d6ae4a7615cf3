"""``suitable_level`` on devices that the tests simulate, and the error for a missing extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from halfpeak.core.extras import MissingExtraError, needs_extra
from halfpeak.core.suitable import suitable_level


def test_a_cpu_gets_bfloat16() -> None:
    level, reason = suitable_level("cpu")
    assert level == "O5"
    assert "bfloat16" in reason


@pytest.mark.parametrize(("native", "level"), [(True, "O5"), (False, "O2")])
def test_cuda_is_asked_without_emulation(monkeypatch: pytest.MonkeyPatch, native: bool, level: str) -> None:
    asked: list[object] = []

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or native

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        asked.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "device", device)
    advice = suitable_level("cuda:1")
    assert advice.level == level
    assert "bfloat16" in advice.reason
    assert asked == [torch.device("cuda:1")]


@pytest.mark.parametrize(("supported", "level"), [(True, "O5"), (False, "O2")])
def test_other_accelerators_are_asked_by_their_module(
    monkeypatch: pytest.MonkeyPatch, supported: bool, level: str
) -> None:
    module = SimpleNamespace(is_bf16_supported=lambda: supported)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert suitable_level("xpu").level == level


@pytest.mark.parametrize(("dtypes", "level"), [({torch.bfloat16}, "O5"), ({torch.float16}, "O2")])
def test_else_by_their_capability(
    monkeypatch: pytest.MonkeyPatch, dtypes: set[torch.dtype], level: str
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(
        torch.accelerator, "get_device_capability", lambda device: {"supported_dtypes": dtypes}
    )
    assert suitable_level("mps").level == level


def test_a_device_that_cannot_say_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.accelerator, "get_device_capability", refuse)
    assert suitable_level("mps").level == "O2"


def test_a_missing_extra_names_its_command() -> None:
    with pytest.raises(MissingExtraError, match=r"no_such_thing .* pip install no_such_thing"), needs_extra():
        import no_such_thing.inside  # noqa: F401
