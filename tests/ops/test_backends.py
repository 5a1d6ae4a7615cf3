"""Every backend compared with ``ops/reference.py``: dtypes, shapes, layouts and places of non-finite values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfpeak.ops import foreach, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
LOW = (torch.float16, torch.bfloat16)

SHAPES: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0),
    "empty matrix": lambda: torch.randn(3, 0),
    "one": lambda: torch.randn(1),
    "odd": lambda: torch.randn(3, 5, 7),
    "large": lambda: torch.randn(20_011),
    "transposed": lambda: torch.randn(6, 5).t(),
    "strided": lambda: torch.randn(9, 8)[::2, 1::3],
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "view into": lambda: torch.randn(40)[7:20],
}

PLACES = ["none", "first", "middle", "last"]


def build(shape: str, dtype: torch.dtype, place: str = "none", bad: float = torch.inf) -> Tensor:
    """Make a tensor of the named shape and layout with ``bad`` at one place."""
    source = SHAPES[shape]()
    tensor = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(source)
    if place != "none" and tensor.numel():
        index = {"first": 0, "middle": tensor.numel() // 2, "last": tensor.numel() - 1}[place]
        tensor[tuple(torch.unravel_index(torch.tensor(index), tensor.shape))] = bad
    return tensor


def sparse(dtype: torch.dtype, *, coalesced: bool = False, bad: float | None = None) -> Tensor:
    """Make a row-sparse gradient like that of an embedding, with row 1 twice unless it is coalesced."""
    rows = torch.tensor([[1, 4, 1]])
    values = torch.tensor([[0.5, -3.0], [7.0, 0.25], [2.0, 0.5 if bad is None else bad]]).to(dtype)
    tensor = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor.resolve_conj()


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether dtype, layout, shape and values are equal; nan equals nan."""
    if (actual.dtype, actual.layout, actual.shape) != (expected.dtype, expected.layout, expected.shape):
        return False
    return torch.equal(torch.nan_to_num(dense(actual), 12345.0), torch.nan_to_num(dense(expected), 12345.0))


Verb = Callable[[ModuleType, list[Tensor], Tensor], list[Tensor]]


def unscale(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    backend.unscale_(grads, torch.tensor(1 / 3), found_inf)
    return grads


def unscaled(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    wide = [torch.float32 if grad.dtype in LOW else grad.dtype for grad in grads]
    return [
        *backend.unscaled(grads, wide, torch.tensor(1 / 3), found_inf),
        *backend.unscaled(grads, [grad.dtype for grad in grads], torch.tensor(1 / 3), found_inf),
    ]


def unscaled_to_other_dtypes(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    real = [grad for grad in grads if not grad.is_complex()]
    return [
        fresh
        for dtype in DTYPES[:4]
        for fresh in backend.unscaled(real, [dtype] * len(real), torch.tensor(1 / 3), found_inf)
    ]


def accumulate(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    into = [
        torch.ones_like(dense(grad), dtype=torch.float32 if grad.dtype in LOW else grad.dtype)
        for grad in grads
    ]
    backend.accumulate_(into, grads, torch.tensor(1 / 3), found_inf)
    return into


def accumulate_low(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    into = [torch.ones_like(dense(grad)) for grad in grads]
    backend.accumulate_(into, grads, torch.tensor(1 / 3), found_inf)
    return into


def check(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    backend.check_(grads, found_inf)
    return grads


def scale(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    backend.scale_(grads, torch.tensor(0.3))
    return grads


def clamp(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    backend.clamp_(grads, 0.4)
    return grads


def copy_cast(backend: ModuleType, grads: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    sources = [grad for grad in grads if not (grad.is_sparse or grad.is_complex())]
    into = [torch.empty_like(grad, dtype=dtype) for grad in sources for dtype in DTYPES[:4]]
    backend.copy_cast_(into, [grad for grad in sources for _ in DTYPES[:4]])
    return into


VERBS: list[Verb] = [
    unscale,
    unscaled,
    unscaled_to_other_dtypes,
    accumulate,
    accumulate_low,
    check,
    scale,
    clamp,
    copy_cast,
]


def agree(verb: Verb, make: Callable[[], list[Tensor]]) -> Tensor:
    """Assert that both backends give equal tensors and an equal found_inf on equal lists; return found_inf."""
    torch.manual_seed(1)
    ours, our_flag = make(), torch.zeros(())
    torch.manual_seed(1)
    theirs, their_flag = make(), torch.zeros(())
    result, expected = verb(foreach, ours, our_flag), verb(reference, theirs, their_flag)
    assert len(result) == len(expected)
    assert all(same(actual, wanted) for actual, wanted in zip(result, expected, strict=True))
    assert all(same(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert torch.equal(our_flag, their_flag)
    return our_flag


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dtype_by_shape_by_place(shape: str, verb: Verb) -> None:
    for dtype, place, bad in itertools.product(DTYPES, PLACES, (torch.inf, -torch.inf, torch.nan)):
        flag = agree(verb, lambda dtype=dtype, place=place, bad=bad: [build(shape, dtype, place, bad)])
        is_bad = place != "none" and build(shape, dtype).numel() > 0
        if verb in (unscale, unscaled, accumulate, accumulate_low, check):
            assert flag == is_bad


@pytest.mark.parametrize("verb", VERBS)
def test_mixed_list(verb: Verb) -> None:
    agree(verb, lambda: [build(shape, dtype) for shape in SHAPES for dtype in DTYPES])
    for dtype in DTYPES:
        flag = agree(
            verb, lambda dtype=dtype: [build("odd", d, "last" if d is dtype else "none") for d in DTYPES]
        )
        assert (
            flag == (verb in (unscale, unscaled, accumulate, accumulate_low, check))
            or verb is unscaled_to_other_dtypes
        )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_sparse(dtype: torch.dtype, coalesced: bool, verb: Verb) -> None:
    for bad in (None, torch.inf, torch.nan):
        agree(
            verb,
            lambda bad=bad: [
                build("odd", dtype),
                sparse(dtype, coalesced=coalesced, bad=bad),
                build("one", dtype),
            ],
        )


@pytest.mark.parametrize("verb", VERBS)
def test_lazily_conjugated(verb: Verb) -> None:
    agree(verb, lambda: [torch.randn(4, dtype=torch.complex64).conj(), torch.randn(3)])


@pytest.mark.parametrize("verb", VERBS)
def test_empty_list(verb: Verb) -> None:
    assert agree(verb, list) == 0


LENGTHS = [foreach.MIN_CHUNKED, foreach.CHUNK, foreach.CHUNK + 1, 3 * foreach.CHUNK - 5]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("length", LENGTHS)
def test_large_gradients_a_chunk_at_a_time(length: int, dtype: torch.dtype, place: str) -> None:
    def make() -> list[Tensor]:
        grad = torch.randn(length).to(dtype)
        if place != "none":
            grad[{"first": 0, "middle": length // 2, "last": -1}[place]] = torch.inf
        return [grad]

    for verb in (unscaled, accumulate):
        assert agree(verb, make) == (place != "none")
    with torch.device("meta"):  # where new tensors go by default does not matter
        assert foreach.unscaled([torch.ones(length, device="cpu")], [torch.float32], INV, FLAG)[0].is_cpu


INV, FLAG = torch.tensor(0.5), torch.zeros(())
MEMORY: dict[str, tuple[Tensor, Tensor]] = {
    "another order": (torch.zeros(64, 256), torch.ones(256, 64).T),
    "gaps": (torch.zeros(64, 512)[:, ::2], torch.ones(64, 512)[:, ::2]),
    "float64": (torch.zeros(2**14, dtype=torch.float64), torch.ones(2**14, dtype=torch.float64)),
    "channels last": (torch.zeros(2, 2**11, 2, 2), torch.ones(2, 2**11, 2, 2)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_large_gradients_in_any_memory_order(name: str) -> None:
    into, grad = MEMORY[name]
    if name == "channels last":
        into, grad = (tensor.to(memory_format=torch.channels_last) for tensor in (into, grad))
    grad = grad * torch.linspace(1, 2, grad.numel()).view(grad.shape)
    expected = into + grad / 8
    foreach.accumulate_([into], [grad], torch.tensor(0.125), torch.zeros(()))
    assert torch.equal(into, expected)


@pytest.mark.parametrize("length", [4, 2**14])
def test_a_scale_below_one_can_overflow_what_is_written(length: int) -> None:
    for backend in (reference, foreach):
        found_inf = torch.zeros(())
        backend.accumulate_(
            [torch.zeros(length)], [torch.full((length,), 3e38)], torch.tensor(2.0), found_inf
        )
        assert found_inf == 1


@pytest.mark.parametrize("call", ["unscale_into", "accumulate_"])
def test_large_gradients_on_the_host_with_a_flag_elsewhere(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding that was left on the host: the kernels take tensors of one device."""
    kernel, flags = torch._amp_foreach_non_finite_check_and_unscale_, list[str]()

    def noted(grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
        flags.append(found_inf.device.type)
        kernel(grads, found_inf, inv_scale)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", noted)
    into, grad = [torch.zeros(2**14)], [torch.ones(2**14)]
    getattr(foreach, call)(into, grad, torch.ones(()), torch.zeros((), device="meta"))
    assert set(flags) == {"cpu"}
    assert torch.equal(into[0], grad[0])


class Copies(TorchDispatchMode):
    """Counts copies: those of one tensor and those of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("widens", [True, False])
def test_a_list_on_a_device_is_copied_once_per_dtype(widens: bool) -> None:
    low = [torch.ones(3, dtype=dtype, device="meta") for dtype in LOW for _ in range(10)]
    wide = [torch.ones(3, device="meta") for _ in low]
    with Copies() as copies:
        foreach.copy_cast_(*((wide, low) if widens else (low, wide)))
    assert copies.count == 2


NORMS = [1.0, 2.0, 3.0, 0.5, torch.inf]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_all_elements_together(dtype: torch.dtype, norm_type: float) -> None:
    grads = [build(shape, dtype) for shape in SHAPES if shape != "large"]
    everything = torch.cat([grad.reshape(-1) for grad in grads])
    everything = everything.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = torch.linalg.vector_norm(everything, norm_type).float()
    for backend in (reference, foreach):
        norm = backend.global_norm(grads, norm_type)
        assert norm.dtype is torch.float32
        assert norm.shape == ()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_of_mixed_and_sparse_gradients(norm_type: float) -> None:
    grads = [build("odd", dtype) for dtype in DTYPES] + [sparse(dtype) for dtype in DTYPES[:4]]
    summed = [sparse(dtype, coalesced=True).to_dense() for dtype in DTYPES[:4]]
    everything = torch.cat(
        [grad.reshape(-1).to(torch.complex128) for grad in [*grads[: len(DTYPES)], *summed]]
    )
    expected = torch.linalg.vector_norm(everything, norm_type).float()
    for backend in (reference, foreach):
        torch.testing.assert_close(backend.global_norm(grads, norm_type), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", [reference, foreach])
@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_of_nothing_is_zero(backend: ModuleType, norm_type: float) -> None:
    hollow = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.long), torch.zeros(0), (3,), check_invariants=True
    )
    for grads in ([], [torch.zeros(0)], [torch.zeros(3, 0), torch.zeros(0, dtype=torch.float16)], [hollow]):
        norm = backend.global_norm(grads, norm_type)
        assert (norm.item(), norm.shape, norm.dtype) == (0.0, (), torch.float32)


@pytest.mark.parametrize("backend", [reference, foreach])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_bad_gradient_is_bad(dtype: torch.dtype, bad: float, backend: ModuleType) -> None:
    for place, norm_type in itertools.product(PLACES[1:], NORMS):
        assert not backend.global_norm([build("odd", dtype, place, bad)], norm_type).isfinite()


@pytest.mark.parametrize("backend", [reference, foreach])
def test_a_flag_that_is_set_stays_set(backend: ModuleType) -> None:
    grads = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    found_inf = torch.ones(())
    backend.check_(grads, found_inf)
    backend.unscale_(grads, torch.ones(()), found_inf)
    backend.unscaled(grads, [torch.float32] * 2, torch.ones(()), found_inf)
    backend.accumulate_([torch.ones(3)], [torch.ones(3)], torch.ones(()), found_inf)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("backend", [reference, foreach])
def test_duplicates_of_a_sparse_gradient_are_summed_in_float32(backend: ModuleType) -> None:
    rows = torch.tensor([[2, 2]])
    grad = torch.sparse_coo_tensor(rows, torch.tensor([60000.0, 60000.0]).half(), (3,), check_invariants=True)
    found_inf = torch.zeros(())
    (fresh,) = backend.unscaled([grad], [torch.float32], torch.tensor(0.5), found_inf)
    assert fresh.to_dense().tolist() == [0.0, 0.0, 60000.0]
    assert found_inf == 0


@pytest.mark.parametrize("backend", [reference, foreach])
def test_what_is_read_stays_as_it_was(backend: ModuleType) -> None:
    grads = [build("odd", dtype) for dtype in DTYPES]
    before = [grad.clone() for grad in grads]
    inv_scale, found_inf = torch.tensor(0.5), torch.zeros(())
    wide = [torch.float32 if dtype in LOW else dtype for dtype in DTYPES]
    backend.check_(grads, found_inf)
    fresh = backend.unscaled(grads, wide, inv_scale, found_inf)
    backend.accumulate_(fresh, grads, inv_scale, found_inf)
    backend.global_norm(grads)
    assert all(torch.equal(grad, was) for grad, was in zip(grads, before, strict=True))
    assert not any(new.data_ptr() == grad.data_ptr() for new, grad in zip(fresh, grads, strict=True))
    assert inv_scale == 0.5


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("backend", [reference, foreach])
def test_clipping_by_norm_is_a_norm_and_a_factor(
    backend: ModuleType, norm_type: float, max_norm: float
) -> None:
    grads = [build("odd", dtype) for dtype in DTYPES] + [sparse(torch.float32)]
    expected = [grad.clone() for grad in grads]
    norm = backend.clip_norm_(grads, max_norm, norm_type)
    assert torch.equal(norm, backend.global_norm(expected, norm_type))
    backend.scale_(expected, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    assert all(torch.equal(dense(grad), dense(other)) for grad, other in zip(grads, expected, strict=True))
