"""Ranks of ``test_sharded.py``: each runs every scenario and saves its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import halfpeak
from distributed.launching import Refusals
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedAdagrad, FusedAdamW, FusedLAMB, FusedSGD
from halfpeak.fused.flat import buffers
from support.states import same

LEVELS = ("O0", "O1", "O2", "O4", "O5")
LAYOUTS = ("shards", "replicas", "tensor parallel", "offload", "checkpointed", "kept")
LOW = ("low", "low, offload")
"""The layouts whose shards have the dtype of the level."""
KEPT = ("blocks.0", "head")
"""The modules that stay float32 in the layout ``kept``."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "FusedAdamW": partial(FusedAdamW, lr=1e-2),
    "FusedAdamW in place": partial(FusedAdamW, lr=1e-2),
    "FusedAdamW bfloat16": partial(FusedAdamW, lr=1e-2, moments=torch.bfloat16),
    "FusedAdamW 8 bits": partial(FusedAdamW, lr=1e-2, master="remainder8", moments="int8"),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "FusedSGD": partial(FusedSGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "FusedAdagrad": partial(FusedAdagrad, lr=1e-2),
}
REFERENCE = {
    "FusedAdamW": "AdamW",
    "FusedAdamW in place": "AdamW",
    "FusedSGD": "SGD",
    "FusedAdagrad": "Adagrad",
}
"""torch's optimizer of the same rule, which the run in one process uses."""

INTERRUPTED = tuple(product(("O0", "O2"), ("abort", "exception", "zero_grad")))
ADVERSARIAL = tuple(product(("O0", "O2"), ("01", "10")))
"""Level, and the order of the losses of generator and critic."""
STEPS = 6
BATCH = 16


class Block(nn.Module):
    """A residual block; ``recomputed`` recomputes it in the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.full((width,), 0.25))
        self.recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            return checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.shift


class Net(nn.Module):
    """Has sizes that do not divide evenly, so that ranks hold shards of different lengths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def net(layout: str = "shards") -> Net:
    torch.manual_seed(0)
    return Net(16 if layout == "float8" else 6)


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))


def sharded(level: str, layout: str) -> tuple[nn.Module, Any]:
    """The model on its mesh, and the number of parts of a batch."""
    ranks, model = dist.get_world_size(), net(layout)
    if layout == "replicas":
        return fully_shard(model, level, mesh=replicas()), ranks
    if layout == "tensor parallel":
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)  # type: ignore[arg-type]
        return fully_shard(model, level, mesh=mesh["data"]), 1
    for block in model.blocks:
        block.recomputed = layout == "checkpointed"
    keep_fp32 = KEPT if layout == "kept" else ()
    return fully_shard(
        model, level, offload="offload" in layout, keep_fp32=keep_fp32, low_shards=layout in LOW
    ), ranks


def replicas() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copy", "part"))


def train(
    model: nn.Module,
    level: str,
    layout: str,
    every: int,
    poisoned: bool,
    optimizer_name: str,
    *,
    part: int,
    parts: int,
    wrapped: bool,
) -> dict[str, Any]:
    """Train on one part of each batch. If ``poisoned``, the loss of part 0 is inf in the second step."""
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scale = halfpeak.ScaleConfig(init=1024.0)
    keep_fp32 = KEPT if layout == "kept" else ()
    float8 = "rowwise" if layout == "float8" else None
    engine = halfpeak.prepare(
        model, optimizer, level, accumulate=every, clip=0.5, scale=scale, keep_fp32=keep_fp32, float8=float8
    )
    outcomes: list[bool] = []
    norms: list[float] = []
    for step in range(STEPS * every):
        with engine.forward(model if wrapped else None):
            loss = model(batch(step).chunk(parts)[part]).float().square().mean()
        engine.backward(loss * float("inf") if poisoned and part == 0 and step == every else loss)
        result = engine.step()
        if result.boundary:
            outcomes.append(result.stepped())
            assert result.grad_norm is not None
            norms.append(float(result.grad_norm))
    return {
        "values": {name: full(value) for name, value in model.state_dict().items()},
        "counters": [int(engine.num_steps), int(engine.num_skipped), engine.micro_step],
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "masters": len(engine.pairs),
        "scale": engine.read_scale(),
        "outcomes": outcomes,
        "norms": norms,
    }


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def one_process(level: str, layout: str, every: int, poisoned: bool, optimizer: str) -> dict[str, Any]:
    """The same training on whole batches in one process."""
    optimizer = REFERENCE.get(optimizer, optimizer)
    return train(net(layout), level, layout, every, poisoned, optimizer, part=0, parts=1, wrapped=False)


def several(rank: int, level: str, layout: str, every: int, poisoned: bool, optimizer: str) -> dict[str, Any]:
    model, parts = sharded(level, layout)
    in_place = 1 if optimizer.endswith("in place") else buffers.MIN_STANDALONE
    with patch.object(buffers, "MIN_STANDALONE", in_place):
        return train(
            model, level, layout, every, poisoned, optimizer, part=rank % parts, parts=parts, wrapped=True
        )


def cases() -> Iterator[tuple[str, str, int, bool, str]]:
    """Level, layout, passes per step, whether a loss is inf, optimizer."""
    yield from product(LEVELS, ("shards",), (1,), (False,), ("FusedAdamW",))
    yield from product(LEVELS, ("shards",), (3,), (True,), ("AdamW",))
    yield from product(("O2", "O5"), LAYOUTS[1:], (3,), (True,), ("AdamW",))
    fused = [name for name in OPTIMIZERS if name.startswith("Fused")]
    yield from product(("O2",), ("shards",), (3,), (True,), fused)
    yield from product(("O2", "O5"), LOW[:1], (1, 3), (True,), ("FusedAdamW 8 bits",))
    yield ("O5", "low, offload", 3, True, "FusedAdamW 8 bits")
    yield ("O5", "float8", 3, True, "AdamW")
    yield from product(("O5",), ("replicas", "tensor parallel", "offload"), (1,), (True,), ("FusedAdamW",))


def windowed(rank: int, level: str, how: str | None) -> list[Tensor]:
    """Train a window of three passes, after one that ended by ``abort()`` or ``zero_grad()``, or an exception in backward."""
    model, parts = sharded(level, "shards")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level, accumulate=3)

    def backward(step: int) -> None:
        with engine.forward(model):
            loss = model(batch(step).chunk(parts)[rank]).float().square().mean()
        engine.backward(loss)

    def run(step: int) -> None:
        backward(step)
        engine.step()

    def fail(*_: Any) -> None:
        raise ArithmeticError("on every rank")

    if how == "zero_grad":
        backward(7)
        optimizer.zero_grad()
    elif how is not None:
        run(7)
    if how == "abort":
        run(8)
        engine.abort()
    elif how == "exception":
        handle = model.blocks[0].register_full_backward_hook(fail)  # type: ignore[index,union-attr]
        with suppress(ArithmeticError):
            run(8)
        handle.remove()
    for step in range(3):
        run(step)
    return [full(p) for p in model.parameters()]


def interrupted(rank: int, level: str, how: str) -> dict[str, Any]:
    return {"interrupted": windowed(rank, level, how), "calm": windowed(rank, level, None)}


def adversarial(rank: int, level: str, order: str, *, late: bool = False) -> dict[str, list[Tensor]]:
    """Two networks in windows of two passes; the generator's loss reaches the critic, which may be frozen for it.

    Args:
        late: replicas reduce the sum of a window, and the first pass is reduced over the shards alone.
    """
    trained: dict[str, list[Tensor]] = {}
    for how in ("trainable", "frozen", "two engines"):
        mesh = replicas() if late else None
        networks = [fully_shard(nn.Sequential(net(), nn.Linear(3, 5)), level, mesh=mesh) for _ in range(2)]
        generator, critic = networks
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in networks]
        if how == "two engines":
            engines = [
                halfpeak.prepare(*one, level, accumulate=2) for one in zip(networks, optimizers, strict=True)
            ]
        else:
            engines = 2 * [halfpeak.prepare(networks, optimizers, level, accumulate=2)]
        for step in range(6):
            x = batch(step).chunk(dist.get_world_size())[rank]
            for network in networks if late else ():
                network.set_requires_all_reduce(step % 2 == 1)  # type: ignore[operator]
            for number in map(int, order):
                if number == 0 and how != "trainable":
                    critic.requires_grad_(False)
                whole = [None if late else network for network in networks]
                with engines[0].forward(whole[0]), engines[1].forward(whole[1]):
                    loss = critic(generator(x) if number == 0 else x).float().square().mean()
                engines[number].backward(loss, optimizers=optimizers[number])
                critic.requires_grad_(True)
            for engine in dict.fromkeys(engines):
                engine.step()
        trained[how] = [full(p) for network in networks for p in network.parameters()]
    return trained


def adapted(rank: int) -> list[Tensor]:
    """Train a layer added to a frozen sharded model; its hook averages the sum of a window, as transformers does."""
    model, parts = sharded("O1", "shards")
    model.requires_grad_(False)
    added = nn.Linear(3, 3)
    model.head = nn.Sequential(model.head, added)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(added.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, "O1", accumulate=2, scale=halfpeak.ScaleConfig(init=1024.0))

    def average(parameter: Tensor) -> None:
        if engine.micro_step % 2 == 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= parts

    for parameter in added.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
        with engine.forward():
            loss = model(batch(step).chunk(parts)[rank]).float().square().mean()
        engine.backward(loss)
        engine.step()
    return [full(parameter) for parameter in added.parameters()]


def low_values(rank: int) -> list[bool]:
    """Whether low shards with remainders take float32 values to the bit, and a write gives them the value written."""
    model, parts = sharded("O5", "low")
    engine = halfpeak.prepare(model, FusedAdamW(model.parameters(), lr=1e-2, master="remainder"), "O5")
    with engine.forward(model):
        loss = model(batch(0).chunk(parts)[rank]).float().square().mean()
    engine.backward(loss)
    engine.step()
    values = {name: value + 1e-5 for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    state, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    loaded = same([full(state[name]) for name in names], [full(values[name]) for name in names])
    with torch.no_grad():
        model.head.weight.mul_(2)
    written = full(model.head.weight).float()
    return [loaded, same([full(model.state_dict()["head.weight"])], [written])]


def loaded_in_memory(rank: int) -> bool:
    """Whether an engine over small shards, whose moments share a buffer, goes on from its own state."""
    model, parts = sharded("O5", "shards")
    engine = halfpeak.prepare(model, FusedAdamW(model.parameters(), lr=1e-2), "O5")
    values: list[list[Tensor]] = []
    for _ in range(2):
        with engine.forward(model):
            loss = model(batch(0).chunk(parts)[rank]).float().square().mean()
        engine.backward(loss)
        engine.step()
        rows = engine.optimizers[0].state.values()
        values.append([full(row[name]) for row in rows for name in ("exp_avg", "exp_avg_sq")])
        engine.load_state_dict(engine.state_dict())
    rows = engine.optimizers[0].state.values()
    return same(values[1], [full(row[name]) for row in rows for name in ("exp_avg", "exp_avg_sq")])


def by_grad_scaler(rank: int) -> list[bool]:
    """Whether each of three steps without casts moved the shards; the loss of rank 0 is inf in the second."""
    model, parts = sharded("O0", "shards")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfpeak.GradScaler("cpu", init_scale=1024.0)
    moved: list[bool] = []
    for number in range(3):
        before = [full(p) for p in model.parameters()]
        loss = model(batch(number).chunk(parts)[rank]).float().square().mean()
        scaler.scale(loss * float("inf") if number == 1 and rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not same(before, map(full, model.parameters())))
    return moved


def buffers_of_shards(rank: int) -> list[list[int]]:
    """For each buffer of a fused step over shards, the number of its members, and of tensors written for them."""
    model, parts = sharded("O5", "shards")
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    engine = halfpeak.prepare(model, optimizer, "O5")
    with engine.forward(model):
        loss = model(batch(0).chunk(parts)[rank]).float().square().mean()
    engine.backward(loss)
    engine.step()
    layout = optimizer._layout
    assert layout is not None
    return [
        [len(slice_.buffer.members), len(slice_.buffer.members) * (1 if slice_.buffer.low is None else 2)]
        for slice_ in layout.last
    ]


def refusals(rank: int) -> dict[str, list[str]]:
    """Errors of calls that would train nothing, or train otherwise than requested."""
    found = Refusals()

    def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **options)

    @found("OrderError: FSDPNet is sharded already")
    def twice() -> None:
        fully_shard(fully_shard(net()))

    @found("OrderError: Net was prepared before it was sharded")
    def prepared_before() -> None:
        model = net()
        halfpeak.prepare(model, adamw(model), "O2")
        fully_shard(model)

    @found("OrderError: the model was sharded after it was prepared")
    def sharded_later() -> None:
        model = net()
        engine = halfpeak.prepare(model, adamw(model), "O4")
        torch_fully_shard(model)
        with engine.forward():
            loss = model(batch(0)).square().mean()
        engine.backward(loss)

    @found("ParameterError: parameter stem.weight is in low precision")
    def low() -> None:
        fully_shard(net().bfloat16(), "O5")

    @found("ConfigError: blocks='Layer' is no part of Net; its modules are Block,")
    def unknown_block() -> None:
        fully_shard(net(), "O5", blocks="Layer")

    @found(
        "ConfigError: low_shards=True is for levels with low-precision weights and masters; write 'O2' or 'O5'"
    )
    def low_shards_of_float32() -> None:
        fully_shard(net(), "O1", low_shards=True)

    @found(
        "ParameterError: AdamW steps shards in torch.bfloat16 and keeps no remainders of them; write Fused"
    )
    def low_shards_alone() -> None:
        model = fully_shard(net(), "O5", low_shards=True)
        halfpeak.prepare(model, adamw(model), "O5")

    @found("ConfigError: mp_policy= is what the level gives")
    def own_policy() -> None:
        fully_shard(net(), "O5", mp_policy=None)

    @found("ParameterError: parameter stem.weight is sharded and gathered in torch.bfloat16")
    def other_level() -> None:
        model = fully_shard(net(), "O5")
        halfpeak.prepare(model, adamw(model), "O2")

    @found("ParameterError: parameter blocks.0.norm.weight is sharded and gathered in torch.bfl")
    def torch_alone() -> None:
        model = net()
        torch_fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        halfpeak.prepare(model, adamw(model), "O5")

    @found("ParameterError: the gradient of parameter 0.weight is reduced over the ranks in torch.bfloat16")
    def reduced_in_low_precision() -> None:
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        torch_fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        halfpeak.prepare(model, adamw(model), "O5")

    @found("nothing")
    def reduced_in_float32() -> None:
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch_fully_shard(model, mp_policy=low)
        halfpeak.prepare(model, adamw(model), "O5")

    @found("ParameterError: parameter head.weight is a DTensor that no fully_shard")
    def tensor_parallel_alone() -> None:
        model = net()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"head": ColwiseParallel()})
        halfpeak.prepare(model, adamw(model), "O2")

    @found(
        "ParameterError: this optimizer needs the norm of each whole parameter, but this parameter is sharded"
    )
    def whole_norms() -> None:
        FusedLAMB(fully_shard(net(), "O2").parameters())

    @found("ParameterError: moments='int8' stores one number for each block of a row, and this parameter is")
    def split_rows() -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        FusedAdamW(parallelize_module(nn.Linear(64, 8), mesh, RowwiseParallel()).parameters(), moments="int8")

    @found("OrderError: a backward pass whose gradients are not reduced over the ranks has reached")
    def unreduced() -> None:
        networks = [fully_shard(nn.Linear(5, 5), "O2") for _ in range(2)]
        one, other = (halfpeak.prepare(each, adamw(each), "O2", accumulate=2) for each in networks)
        with one.forward(networks[0]), other.forward(networks[1]):
            loss = networks[1](networks[0](batch(0))).float().square().mean()
        one.backward(loss)

    def step_alone(model: nn.Module, switch: Callable[[], None], low: str = "O0") -> None:
        engine = halfpeak.prepare(model, adamw(model), low)
        with engine.forward():
            loss = model(batch(0)).float().square().mean()
        switch()
        engine.backward(loss)
        engine.step()

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def unreduced_whole() -> None:
        # Of one group, which is not sharded again before the backward pass.
        model: Any = torch_fully_shard(nn.Linear(5, 6))
        step_alone(model, lambda: model.set_requires_gradient_sync(False))

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def unreduced_blocks() -> None:
        model = net()
        for block in model.blocks:
            torch_fully_shard(block)
        step_alone(model, lambda: [b.set_requires_gradient_sync(False) for b in model.blocks])

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def unreduced_replicas() -> None:
        model: Any = fully_shard(net(), "O2", mesh=replicas())
        step_alone(model, lambda: model.set_requires_all_reduce(False), "O2")

    @found("ParameterError: parameter weight is sharded and gathered in torch.float16, and this level")
    def cast_by_fsdp() -> None:
        model = torch_fully_shard(nn.Linear(5, 6), mp_policy=MixedPrecisionPolicy(torch.float16))
        halfpeak.prepare(model, adamw(model), "O1")

    @found("ParameterError: the gradient of parameter weight is reduced over the ranks in torch.bfloat16")
    def reduced_in_bfloat16() -> None:
        model = torch_fully_shard(
            nn.Linear(5, 6), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        )
        halfpeak.prepare(model, adamw(model), "O4")

    @found("ParameterError: ZeroRedundancyOptimizer steps the parameters by an optimizer")
    def zero_redundancy() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

        model = net()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        halfpeak.prepare(model, optimizer, "O2")

    return dict(found)


def scenarios() -> dict[str, Callable[[int], Any]]:
    """Every scenario by name; each rank runs them in this order."""
    table: dict[str, Callable[[int], Any]] = {
        " ".join(map(str, case)): partial(
            several, level=case[0], layout=case[1], every=case[2], poisoned=case[3], optimizer=case[4]
        )
        for case in cases()
    }
    table["GradScaler"] = by_grad_scaler
    table["adapted"] = adapted
    table["low values"] = low_values
    table["in memory"] = loaded_in_memory
    for level, how in INTERRUPTED:
        table[f"interrupted {level} {how}"] = partial(interrupted, level=level, how=how)
    for level, order in ADVERSARIAL:
        table[f"adversarial {level} {order}"] = partial(adversarial, level=level, order=order)
    table["adversarial O2 late"] = partial(adversarial, level="O2", order="10", late=True)
    table["buffers"] = buffers_of_shards
    table["refusals"] = refusals
    return table


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: run(rank) for name, run in scenarios().items()}
