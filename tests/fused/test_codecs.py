"""Codecs of weights and moments: remainders of 16 bits decode exactly, other formats to within one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused.reference import give, gradients_for, parameters_of
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.fused import FusedAdamW
from halfpeak.fused.backends.choose import BackendName
from halfpeak.fused.backends.inductor import CHUNK
from halfpeak.fused.state_dtypes.codecs import (
    BLOCK_SIZES,
    Bfloat16,
    Codec,
    Identity,
    Int8Block,
    Remainder,
    UInt8SqrtBlock,
    hash_bits,
)
from halfpeak.fused.state_dtypes.quantized_rule import MasterFormat, QuantizedRule
from support.states import same
from support.triton import everything

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Importing torch's compiler raises it."""

SEED = torch.tensor(3.0)
BLOCK_SIZE = BLOCK_SIZES[0]


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


@pytest.mark.parametrize("bits", [16, 8])
def test_every_float16_is_its_own_value_without_a_remainder(bits: int) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    low, rest = Remainder(bits, torch.float16).encode(every.float(), SEED)
    number = ~every.isnan()
    back = Remainder(bits, torch.float16).decode((low, rest))
    assert same([low[number].view(torch.int16)], [every[number].view(torch.int16)])
    assert same([back[number].view(torch.int32)], [every[number].float().view(torch.int32)])
    assert not rest.to(torch.int32).any()
    assert low[~number].isnan().all()
    assert back[~number].isnan().all()


def from_binades(first: int, last: int) -> torch.Tensor:
    """Float32 values of both signs from 2**first to 2**last: every upper mantissa, and all ways to round the rest."""
    upper = torch.arange((first + 127) << 10, (last + 127) << 10, dtype=torch.int32) << 13
    lower = torch.tensor([0, 1, 0x7FF, 0x800, 0xFFF, 0x1000, 0x1001, 0x1FFF], dtype=torch.int32)
    value = (upper[:, None] | lower).view(-1).view(torch.float32)
    return torch.cat([value, -value])


def test_a_float16_weight_is_a_cast_and_its_remainder_exact_from_2_to_the_minus_16_to_65520() -> None:
    codec, value = Remainder(low=torch.float16), from_binades(-16, 16)
    inside = value[value.abs() < 65520]
    low, rest = codec.encode(inside, SEED)
    assert same([low], [inside.half()])
    assert same([codec.decode((low, rest))], [inside])
    small = from_binades(-60, -16)
    assert float((codec.decode(codec.encode(small, SEED)) - small).abs().max()) <= 2.0**-40


@pytest.mark.parametrize(("bits", "end"), [(16, 65519.99609375), (8, 65519.75)])
def test_beyond_65504_a_float16_weight_stays_finite(bits: int, end: float) -> None:
    beyond = torch.tensor([65519.9, 65520.0, 1e6, 3e38, float("inf"), float("nan")])
    codec = Remainder(bits, torch.float16)
    parts = codec.encode(torch.cat([beyond, -beyond]), torch.tensor(1.0))
    low, value = parts[0].float().view(2, -1), codec.decode(parts).view(2, -1)
    assert torch.equal(low[:, :4], torch.tensor([[65504.0], [-65504.0]]).expand(2, 4))
    assert torch.equal(value[:, 1:4], torch.tensor([[end], [-end]]).expand(2, 3))
    assert value[:, 4].tolist() == [float("inf"), -float("inf")]
    assert value[:, 5].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_weight_written_without_a_trace_is_worth_what_was_written_to_less_than_a_rounding(
    bits: int, dtype: torch.dtype
) -> None:
    codec = Remainder(bits, dtype)
    rest = codec.encode(torch.randn(10_000), SEED)[1]
    for number in (0.0, -0.0, 1.0, -2.5):
        low = torch.full((10_000,), number, dtype=dtype)
        value = codec.decode((low, rest))
        assert value.isfinite().all()
        smallest = 1e-38 if dtype is torch.bfloat16 else 2.0**-25
        assert float((value - number).abs().max()) <= torch.finfo(dtype).eps * abs(number) + smallest


@pytest.mark.parametrize(
    ("codec", "digits", "reach"),
    [(Remainder(8), 15, (-20, 20)), (Remainder(8, torch.float16), 17, (-4, 3))],
    ids=["bfloat16", "float16"],
)
def test_eight_bits_keep_more_digits_of_a_weight_and_round_fairly(
    codec: Remainder, digits: int, reach: tuple[int, int]
) -> None:
    value = (1 + torch.rand(200_000)) * torch.logspace(*reach, 200_000)
    back = codec.decode(codec.encode(value, SEED))
    assert bool(((back - value).abs() <= 2.0**-digits * value.abs()).all())
    assert torch.equal(codec.decode(codec.encode(back, SEED + 1)), back)
    near = 1 + torch.rand(200_000)
    mean = float((codec.decode(codec.encode(near, SEED)) - near).double().mean())
    assert abs(mean) < 2.0**-22


@pytest.mark.parametrize(
    "codec", [kind(block) for kind in (Int8Block, UInt8SqrtBlock) for block in (128, 16)]
)
@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000])
def test_eight_bits_are_within_a_step_of_the_largest_neighbour(
    codec: Int8Block | UInt8SqrtBlock, length: int
) -> None:
    value = torch.randn(length) if isinstance(codec, Int8Block) else torch.rand(length)
    parts = codec.encode(value, SEED)
    assert [part.shape for part in parts] == [(length,), (-(-length // codec.block),)]
    assert [part.dtype for part in parts] == [part.dtype for part in codec.storage]
    for start in range(0, length, codec.block):
        own = value[start : start + codec.block]
        back = codec.decode(parts)[start : start + codec.block]
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
    row, (first, second) = optimizer.state[p], codecs_of(optimizer, p)
    out: list[torch.Tensor] = []
    for name, codec in (("exp_avg", first), ("exp_avg_sq", second)):
        parts = [row[name + part.name] for part in codec.storage]
        value = codec.decode((in_memory_order(parts[0]), *(part.reshape(-1) for part in parts[1:])))
        out.append(value.as_strided(parts[0].shape, parts[0].stride()).clone())
    return out


def codecs_of(optimizer: FusedAdamW, p: torch.Tensor) -> tuple[Codec, Codec]:
    rule = optimizer.rule(optimizer.param_groups[0]).for_weight(p)
    return rule.codecs if isinstance(rule, QuantizedRule) else (Identity(), Identity())  # type: ignore[return-value]


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
    start = torch.randn(CHUNK // BLOCK_SIZE + 2, BLOCK_SIZE)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    whole = FusedAdamW([weights[0]], lr=0.01, backend=backend)
    small = FusedAdamW([weights[1]], lr=0.01, backend=backend, moments="int8")
    for _ in range(3):
        gradient = torch.randn(start.shape)
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


@pytest.mark.parametrize("master", ["remainder", "remainder8"])
@pytest.mark.parametrize(
    ("saved", "here"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_a_remainder_of_another_dtype_of_weight_is_refused(
    saved: torch.dtype, here: torch.dtype, master: MasterFormat
) -> None:
    def stepped(dtype: torch.dtype) -> FusedAdamW:
        weight = torch.nn.Parameter(torch.full((70,), 0.1, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer = FusedAdamW([weight], master=master, backend="eager")
        optimizer.step()
        return optimizer

    optimizer = stepped(here)
    before = everything(optimizer)
    name = str(saved).removeprefix("torch.")
    with pytest.raises(
        StateError, match=rf"\['remainder'\] is that of a torch.{name} weight.*without master="
    ):
        optimizer.load_state_dict(stepped(saved).state_dict())
    assert same(everything(optimizer), before)
    own = optimizer.state_dict()["state"][0]["remainder"].clone()
    again = stepped(here)
    again.load_state_dict(optimizer.state_dict())
    assert same([again.state_dict()["state"][0]["remainder"]], [own])


LAYOUTS = [(70,), (), (3, 48), (2, 5, 64), (5, 7), (3, 256)]


def saved_in_8_bits(moments: dict[int, list[torch.Tensor]], *, older: bool) -> dict[str, Any]:
    """The state of an optimizer of ``moments="int8"``, or of one whose blocks of 128 went on from row to row."""
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for index, values in moments.items():
        row = rows[index] = {"step": torch.tensor(1.0)}
        for name, codec, value in zip(
            ("exp_avg", "exp_avg_sq"), (Int8Block(), UInt8SqrtBlock()), values, strict=True
        ):
            own = codec if older else codec.for_shape(value.shape)
            codes, *scales = own.encode(value.reshape(-1), SEED)
            row[name] = codes.view(value.shape)
            for scale in scales:
                row[name + "_scale"] = scale if older else scale.view(len(value), -1)
    weights = [torch.nn.Parameter(torch.zeros(values[0].shape)) for values in moments.values()]
    return {**FusedAdamW(weights, moments="int8").state_dict(), "state": rows}


@pytest.mark.parametrize("moments", ["int8", torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("older", [False, True])
def test_8_bit_moments_are_read_by_every_form_also_older_ones_in_blocks_across_rows(
    older: bool, moments: Any
) -> None:
    torch.manual_seed(0)
    values = {i: [torch.randn(shape), torch.rand(shape)] for i, shape in enumerate(LAYOUTS)}
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in LAYOUTS]
    optimizer = FusedAdamW(weights, moments=moments, backend="eager")
    optimizer.load_state_dict(saved_in_8_bits(values, older=older))
    for weight, (first, second) in zip(weights, values.values(), strict=True):
        row, codecs = optimizer.state[weight], codecs_of(optimizer, weight)
        exact = not older or weight.dim() < 2 or weight.shape[1:].numel() % BLOCK_SIZE == 0
        for name, codec, value in zip(("exp_avg", "exp_avg_sq"), codecs, (first, second), strict=True):
            assert (name + "_scale" in row) == (len(codec.storage) > 1)
            found = (
                decoded(optimizer, weight)[name == "exp_avg_sq"]
                if len(codec.storage) > 1
                else row[name].float()
            )
            # Two roundings where blocks of another size were quantised again.
            torch.testing.assert_close(
                found, value, rtol=0.02, atol=float(value.abs().max()) / (120 if exact else 60)
            )
    give(weights, [torch.ones_like(weight) for weight in weights])
    optimizer.step()


def test_a_saved_block_of_a_row_is_loaded_to_the_bit() -> None:
    values = {0: [torch.randn(3, 48), torch.rand(3, 48)], 1: [torch.randn(2, 256), torch.rand(2, 256)]}
    optimizer = FusedAdamW(
        [torch.nn.Parameter(torch.zeros(v[0].shape)) for v in values.values()], moments="int8"
    )
    state = saved_in_8_bits(values, older=False)
    optimizer.load_state_dict(state)
    for index, row in state["state"].items():
        loaded = optimizer.state_dict()["state"][index]
        assert all(same([loaded[name]], [value]) for name, value in row.items())
    # Older blocks of 128 are those of rows of 256.
    older = saved_in_8_bits(values, older=True)
    optimizer.load_state_dict(older)
    row, loaded = older["state"][1], optimizer.state_dict()["state"][1]
    assert all(same([loaded[name].reshape(-1)], [value.reshape(-1)]) for name, value in row.items())


def test_codes_without_their_scales_are_refused() -> None:
    state = saved_in_8_bits({0: [torch.randn(3, 48), torch.rand(3, 48)]}, older=False)
    del state["state"][0]["exp_avg_scale"]
    optimizer = FusedAdamW([torch.nn.Parameter(torch.zeros(3, 48))], moments="int8")
    with pytest.raises(StateError, match=r"\[0\]\['exp_avg'\] is .*no 'exp_avg_scale'"):
        optimizer.load_state_dict(state)
    state = saved_in_8_bits({0: [torch.randn(3, 48), torch.rand(3, 48)]}, older=False)
    state["state"][0]["exp_avg_scale"] = torch.ones(3, 2)
    with pytest.raises(StateError, match=r"\(3, 2\) and should be a tensor of \(3, 3\) or \(2,\)"):
        optimizer.load_state_dict(state)
    assert not optimizer.state


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
