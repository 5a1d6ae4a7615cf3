"""Codecs of weights and moments: remainders of 16 bits decode exactly, other formats to within one step."""

from __future__ import annotations

import pytest
import torch

from fused.reference import give, gradients_for, parameters_of
from halfpeak.core.errors import ConfigError, ParameterError, StateError
from halfpeak.fused import FusedAdamW
from halfpeak.fused.backends.choose import BackendName
from halfpeak.fused.backends.inductor import CHUNK
from halfpeak.fused.state_dtypes.codecs import (
    BLOCK_SIZE,
    Bfloat16,
    Codec,
    Int8Block,
    Remainder,
    UInt8SqrtBlock,
    hash_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Importing torch's compiler raises it."""

SEED = torch.tensor(3.0)


def every_upper_half() -> torch.Tensor:
    """Float32 values of every upper 16 bits, with lower 16 bits at which rounding could go wrong."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (upper[:, None] | lower).view(-1).view(torch.float32)


def test_every_float32_comes_back_from_its_remainder() -> None:
    value = every_upper_half()
    low, rest = Remainder().encode(value, SEED)
    back = Remainder().decode((low, rest))
    number = ~value.isnan()
    assert torch.equal(back[number].view(torch.int32), value[number].view(torch.int32))
    assert back[~number].isnan().all()
    assert low[~number].isnan().all()


def test_the_low_weight_is_the_nearest_and_between_two_the_one_farther_from_zero() -> None:
    value = every_upper_half()
    value = value[value.isfinite()]
    low = Remainder().encode(value, SEED)[0]
    tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(low[~tie], value[~tie].bfloat16())
    assert bool((low[tie].float().abs() > value[tie].abs()).all())


def test_a_weight_written_without_a_trace_is_worth_what_was_written_to_less_than_a_rounding() -> None:
    rest = Remainder().encode(torch.randn(10_000), SEED)[1]
    for number in (0.0, -0.0, 1.0, -2.5):
        low = torch.full((10_000,), number, dtype=torch.bfloat16)
        value = Remainder().decode((low, rest))
        assert value.isfinite().all()
        assert float((value - number).abs().max()) <= 2.0**-8 * abs(number) + 1e-38


def test_eight_bits_keep_24_bits_of_a_weight_and_round_fairly() -> None:
    value = torch.randn(200_000) * torch.logspace(-20, 20, 200_000)
    back = Remainder(8).decode(Remainder(8).encode(value, SEED))
    assert bool(((back - value).abs() <= 2.0**-15 * value.abs()).all())
    assert torch.equal(Remainder(8).decode(Remainder(8).encode(back, SEED + 1)), back)
    near = 1 + torch.rand(200_000)
    mean = float((Remainder(8).decode(Remainder(8).encode(near, SEED)) - near).double().mean())
    assert abs(mean) < 2.0**-22


@pytest.mark.parametrize("codec", [Int8Block(), UInt8SqrtBlock()])
@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000])
def test_eight_bits_are_within_a_step_of_the_largest_neighbour(codec: Codec, length: int) -> None:
    value = torch.randn(length) if isinstance(codec, Int8Block) else torch.rand(length)
    parts = codec.encode(value, SEED)
    assert [part.shape for part in parts] == [(length,), (-(-length // BLOCK_SIZE),)]
    assert [part.dtype for part in parts] == [part.dtype for part in codec.storage]
    for start in range(0, length, BLOCK_SIZE):
        own = value[start : start + BLOCK_SIZE]
        back = codec.decode(parts)[start : start + BLOCK_SIZE]
        if isinstance(codec, Int8Block):
            bound = own.abs().max() / 253
        else:
            own, back, bound = own.sqrt(), back.sqrt(), own.max().sqrt() / 254
        assert float((back - own).abs().max()) <= float(bound)


def test_zeros_stay_zeros_and_what_is_above_zero_stays_above() -> None:
    zero = torch.zeros(BLOCK_SIZE)
    for codec in (Int8Block(), UInt8SqrtBlock(), Bfloat16(), Bfloat16(stochastic=True), Remainder(8)):
        assert not codec.decode(codec.encode(zero, SEED)).any()
    mixed = torch.tensor([1.0, 1e-20, 1e-30, 0.0])
    assert (UInt8SqrtBlock().decode(UInt8SqrtBlock().encode(mixed, SEED)) > 0).tolist() == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("codec", [Bfloat16(stochastic=True), UInt8SqrtBlock()])
def test_a_second_moment_falls_when_gradients_do(codec: Codec) -> None:
    """Rounding to nearest would keep the moment unchanged, because a thousandth is less than half a step."""
    value = torch.cat([torch.ones(4 * BLOCK_SIZE), torch.full((4 * BLOCK_SIZE,), 0.3)])
    # One large value in each block keeps the scale of the block constant.
    value[::BLOCK_SIZE] = 1.0
    parts = codec.encode(value, SEED)
    for step in range(1, 1501):
        new = codec.decode(parts) * 0.999
        new[::BLOCK_SIZE] = 1.0
        parts = codec.encode(new, torch.tensor(float(step)))
    falling = torch.ones(8 * BLOCK_SIZE, dtype=torch.bool)
    falling[::BLOCK_SIZE] = False
    back = codec.decode(parts)
    for start in (value[1], value[-1]):
        expected = float(start) * 0.999**1500
        assert float(back[falling & (value == start)].mean()) == pytest.approx(expected, rel=0.15)


def test_chance_is_fair_and_the_same_in_every_run() -> None:
    bits = torch.randn(100_000).view(torch.int32)
    drawn = hash_bits(bits, SEED)
    assert torch.equal(drawn, hash_bits(bits, SEED))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 2**16
    assert float(drawn.double().mean()) == pytest.approx(2**15, rel=0.01)
    counts = torch.histc(drawn.float(), 16, 0, 2**16)
    assert float((counts / 6250 - 1).abs().max()) < 0.1
    fixed = torch.stack([hash_bits(bits[:1], torch.tensor(float(step))) for step in range(4000)])
    assert float(fixed.double().mean()) == pytest.approx(2**15, rel=0.05)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("moments", [torch.bfloat16, "int8"])
def test_the_backends_agree_with_the_rule_between_decoding_and_encoding(
    backend: BackendName, moments: object
) -> None:
    torch.manual_seed(0)
    parameters = parameters_of()
    optimizer = FusedAdamW(parameters, lr=0.01, backend=backend, moments=moments)  # pyright: ignore[reportArgumentType]
    plain = FusedAdamW(parameters_of(), lr=0.01)
    for step in range(3):
        give(parameters, gradients_for(parameters))
        before = {p: decoded(optimizer, p) for p in parameters if p.numel() and p in optimizer.state}
        wanted = {}
        for p in parameters:
            if p.numel():
                slots = before.get(p) or [torch.zeros_like(p), torch.zeros_like(p)]
                rule = plain.rule(plain.param_groups[0])
                constants = [torch.tensor(x) for x in rule.constants(optimizer.param_groups[0], step + 1.0)]
                assert p.grad is not None
                wanted[p] = rule(p.detach(), p.grad, slots, constants)
        optimizer.step()
        for p, (weight, first, second) in wanted.items():
            torch.testing.assert_close(p.detach(), weight, rtol=1e-6, atol=1e-7)
            near(optimizer, p, "exp_avg", first)
            near(optimizer, p, "exp_avg_sq", second)


def decoded(optimizer: FusedAdamW, p: torch.Tensor) -> list[torch.Tensor]:
    row, (first, second) = optimizer.state[p], codecs_of(optimizer)
    out: list[torch.Tensor] = []
    for name, codec in (("exp_avg", first), ("exp_avg_sq", second)):
        parts = [row[name + part.name] for part in codec.storage]
        value = codec.decode((in_memory_order(parts[0]), *parts[1:]))
        out.append(value.as_strided(parts[0].shape, parts[0].stride()).clone())
    return out


def codecs_of(optimizer: FusedAdamW) -> tuple[Codec, Codec]:
    rule = optimizer.rule(optimizer.param_groups[0])
    return rule.codecs  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).clone()


def near(optimizer: FusedAdamW, p: torch.Tensor, name: str, wanted: torch.Tensor) -> None:
    value = decoded(optimizer, p)[name == "exp_avg_sq"]
    if name == "exp_avg_sq":
        value, wanted = value.sqrt(), wanted.sqrt()
    assert float((value - wanted).abs().max()) <= float(wanted.abs().max()) / 120


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_parameters_longer_than_a_chunk(backend: BackendName) -> None:
    torch.manual_seed(0)
    start = torch.randn(CHUNK + 2 * BLOCK_SIZE + 3)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    whole = FusedAdamW([weights[0]], lr=0.01, backend=backend)
    small = FusedAdamW([weights[1]], lr=0.01, backend=backend, moments="int8")
    for _ in range(3):
        gradient = torch.randn(len(start))
        give(weights, [gradient, gradient])
        whole.step()
        small.step()
    assert float((weights[0] - weights[1]).detach().abs().max()) < 0.02
    assert float((weights[0] - weights[1]).detach().abs().mean()) < 0.0005


def test_float32_weights_have_no_remainder() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
    plain, kept = FusedAdamW([weights[0]], lr=0.01), FusedAdamW([weights[1]], lr=0.01, master="remainder")
    for _ in range(3):
        gradient = torch.randn(70)
        give(weights, [gradient, gradient])
        plain.step()
        kept.step()
    assert torch.equal(weights[0], weights[1])
    assert kept.state_dict()["state"][0].keys() == plain.state_dict()["state"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master": "float16"}, "'remainder8'"),
        ({"moments": "int4"}, "'int8'"),
        ({"moments": torch.float16}, "'int8'"),
    ],
)
def test_an_unknown_form_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FusedAdamW([torch.nn.Parameter(torch.ones(1))], **arguments)  # pyright: ignore[reportArgumentType]


def test_float16_weights_have_no_remainder() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    for master in ("remainder", "remainder8"):
        with pytest.raises(
            ParameterError, match=rf"master='{master}' needs bfloat16 weights.*use level 'O5'"
        ):
            FusedAdamW([weight], master=master)


def test_a_state_with_8_bit_moments_is_refused_where_moments_are_whole() -> None:
    weights = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
    small, whole = FusedAdamW([weights[0]], moments="int8"), FusedAdamW([weights[1]])
    give(weights, [torch.ones(70)] * 2)
    small.step()
    with pytest.raises(StateError, match=r"'exp_avg.*' of parameter 0 was saved with 8-bit.*moments='int8'"):
        whole.load_state_dict(small.state_dict())


@pytest.mark.parametrize("is_stepped", [False, True], ids=["before the first step", "after a step"])
def test_memory_that_returns_to_its_address_has_no_remainder(is_stepped: bool) -> None:
    memory = bytearray(2 * 64)

    def at_one_address(value: float) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.bfloat16).fill_(value)

    weight = torch.nn.Parameter(at_one_address(0.0))
    optimizer = FusedAdamW([weight], lr=0.0, weight_decay=0.0, master="remainder")
    if is_stepped:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    weight.data = at_one_address(1.0)
    remainders = optimizer.remainders
    assert remainders is not None
    remainders.set_value(weight, torch.full((64,), 1.001))
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 1.001))
    weight.data = torch.zeros_like(weight)
    weight.data = at_one_address(0.5)
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 0.5))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 0.5))
