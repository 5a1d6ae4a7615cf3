"""Engine.compile: forward, loss, backward and step as one graph, with the bits of the same step run by Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak.engine.graphs import compile as compile_module
from halfpeak.fused import FusedAdamW
from support.states import differences

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch's fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused": lambda p: FusedAdamW(p, lr=0.01),
    "remainder": lambda p: FusedAdamW(p, lr=0.01, master="remainder"),
}

SCALE = halfpeak.ScaleConfig(init=2.0**10, interval=4)
RECOVERS = halfpeak.ScaleConfig(init=2.0**10, recovers=True)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        not hasattr(torch._dynamo.config, "trace_autograd_ops"),
        reason="this compiler traces no backward pass",
    ),
]


class Run:
    """A net with batch norms and its engine."""

    def __init__(self, make: Make = OPTIMIZERS["fused"], *, trained: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        first = nn.Linear(8, 8)
        self.weight = first.weight
        self.net = nn.Sequential(
            first, nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)
        )
        self.optimizer = make(
            p for i, part in enumerate(self.net) if trained or i != 4 for p in part.parameters()
        )
        asked: dict[str, Any] = {"clip": 1.0, **options}
        self.engine = halfpeak.prepare(self.net, self.optimizer, **asked)

    def step(self, x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, halfpeak.StepResult]:
        with self.engine.forward():
            loss = F.cross_entropy(self.net(x).float() * 2.0, y) * factor
        self.engine.backward(loss)
        # A graph cannot return which gradients were not finite.
        return loss, self.engine.step()._replace(grads=None)

    def compiled(self, backend: str = "aot_eager") -> Callable[..., tuple[Tensor, halfpeak.StepResult]]:
        return self.engine.compile(self.step, backend=backend)


def batches(count: int = 8) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The fourth overflows."""
    generator = torch.Generator().manual_seed(1)
    xs, ys = (
        torch.randn(count, 4, 8, generator=generator),
        torch.randint(2, (count, 4), generator=generator),
    )
    factors = torch.ones(count)
    factors[3:4] = float("inf")
    return list(zip(xs, ys, factors, strict=True))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"level": "O0"}),
    ("fused", {"level": "O1", "scale": SCALE}),
    ("fused", {"level": "O2", "scale": SCALE}),
    ("torch's fused", {"level": "O2", "scale": SCALE, "accumulate": 2}),
    ("sgd", {"level": "O2", "scale": RECOVERS}),
    ("sgd", {"level": "O3", "clip": None}),
    ("fused", {"level": "O4", "accumulate": 3, "clip": None}),
    ("fused", {"level": "O4", "op_lists": "torch", "clip": halfpeak.ClipValue(value=0.1)}),
    ("remainder", {"level": "O5"}),
]


@pytest.mark.parametrize(("optimizer", "options"), VARIANTS, ids=str)
def test_one_graph_and_every_bit_whatever_happens_to_scale_rate_and_found_inf(
    optimizer: str, options: dict[str, Any]
) -> None:
    python, whole = (Run(OPTIMIZERS[optimizer], **options) for _ in range(2))
    train = whole.compiled()
    graphs: list[int] = []
    for number, batch in enumerate(batches()):
        for run in (python, whole):
            run.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        assert not differences(python.step(*batch), train(*batch))
        graphs.append(counters["stats"]["unique_graphs"])
    assert not differences(python.engine.state_dict(), whole.engine.state_dict())
    assert int(whole.engine.num_skipped) >= 1
    if options.get("scale") is RECOVERS:
        assert whole.engine.read_scale() == RECOVERS.init  # a nonfinite loss does not lower it
    assert not counters["graph_break"]
    # One graph for passes inside a window, one for passes that end it.
    assert graphs[-1] == min(2, options.get("accumulate", 1))
    assert set(graphs[2:]) == {graphs[-1]}


def test_steps_run_by_python_may_come_in_between_and_weights_may_be_written() -> None:
    python, whole = Run(level="O2", scale=SCALE), Run(level="O2", scale=SCALE)
    train = whole.compiled()
    for number, batch in enumerate(batches()):
        for run in (python, whole):
            if number == 2:
                with torch.no_grad():
                    run.weight.mul_(0.5)
        assert not differences(python.step(*batch), (whole.step if number in (1, 5) else train)(*batch))
    assert not differences(python.engine.state_dict(), whole.engine.state_dict())


def test_what_the_function_reads_of_weights_it_reads_in_order() -> None:
    runs = Run(level="O2", scale=SCALE), Run(level="O2", scale=SCALE)
    averages = [torch.zeros(8, 8), torch.zeros(8, 8)]

    def watched(run: Run, average: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        def step(x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
            before = run.weight.float() * 2
            run.step(x, y, factor)
            with torch.no_grad():
                average.lerp_(run.weight.float(), 0.5)
            return before, run.weight.float() * 2

        return step

    python = watched(runs[0], averages[0])
    train = runs[1].engine.compile(watched(runs[1], averages[1]), backend="aot_eager")
    for batch in batches(5):
        assert not differences([value.detach() for value in python(*batch)], train(*batch))
    assert not differences(*averages)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_that_writes_to_weights_is_refused_and_nothing_has_moved(when: str) -> None:
    run = Run(level="O2", scale=SCALE)

    def step(x: Tensor, y: Tensor, factor: Tensor) -> None:
        if when == "after":
            run.step(x, y, factor)
        with torch.no_grad():
            run.weight.view(-1).clamp_(-0.01, 0.01)
        if when == "before":
            run.step(x, y, factor)

    state = copy.deepcopy(run.engine.state_dict())
    with pytest.raises(RuntimeError, match="writes to weights beside"):
        run.engine.compile(step, backend="aot_eager")(*batches()[0])
    assert not differences(state, run.engine.state_dict())


def test_an_optimizer_of_somebody_elses_is_refused() -> None:
    run = Run(level="O5")
    foreign = OPTIMIZERS["sgd"]([torch.ones(1, requires_grad=True)])

    def step(x: Tensor) -> None:
        run.engine.backward(run.net(x).float().sum())
        run.engine.step(optimizers=[run.optimizer, foreign])

    before = copy.deepcopy(run.engine.state_dict())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="not prepared by this engine"):
        run.engine.compile(step, backend="aot_eager")(batches()[0][0])
    assert not differences(run.engine.state_dict(), before)


def test_two_backward_passes_to_a_step_and_one_without() -> None:
    def twice(run: Run) -> Callable[..., None]:
        def step(x: Tensor, y: Tensor, factor: Tensor) -> None:
            for part in (0, 1):
                with run.engine.forward():
                    loss = F.cross_entropy(run.net(x + part).float(), y) * factor
                run.engine.backward(loss)
            run.engine.step()

        return step

    def only_backward(run: Run) -> Callable[..., None]:
        def step(x: Tensor, y: Tensor, factor: Tensor) -> None:
            with run.engine.forward():
                loss = F.cross_entropy(run.net(x).float(), y) * factor
            run.engine.backward(loss)

        return step

    python, compiled = Run(level="O5"), Run(level="O5")
    train = compiled.engine.compile(twice(compiled), backend="aot_eager")
    take_in = compiled.engine.compile(only_backward(compiled), backend="aot_eager")
    for batch in batches(3):
        twice(python)(*batch)
        train(*batch)
    only_backward(python)(*batches()[0])
    take_in(*batches()[0])
    python.engine.step()
    compiled.engine.step()
    assert not differences(python.engine.state_dict(), compiled.engine.state_dict())


class _Reuses(torch.fx.Interpreter):
    """Runs a graph like a compiler that reuses the memory of gradients after an operator has read them."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        if str(target).startswith("halfpeak.step"):
            for grad in args[5]:
                grad.fill_(float("nan"))
        return out


def reusing(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return _Reuses(graph).run


def thrice(run: Run) -> Callable[..., None]:
    def step(x: Tensor, y: Tensor, factor: Tensor) -> None:
        for part in range(3):
            with run.engine.forward():
                loss = F.cross_entropy(run.net(x + part).float(), y) * factor
            run.engine.backward(loss)
            run.engine.step()

    return step


@pytest.mark.parametrize(
    ("level", "optimizer", "num_losses"),
    [
        ("O0", "sgd", 1),
        ("O0", "fused", 2),
        ("O2", "sgd", 2),
        ("O2", "fused", 1),
        ("O4", "remainder", 2),
        ("O5", "remainder", 1),
    ],
)
def test_a_window_that_stays_open_holds_no_memory_of_the_graph(
    level: str, optimizer: str, num_losses: int
) -> None:
    options: dict[str, Any] = {"level": level, "accumulate": 2, "num_losses": num_losses, "clip": None}
    python, compiled = (Run(OPTIMIZERS[optimizer], **options) for _ in range(2))
    train = compiled.engine.compile(thrice(compiled), backend=reusing)
    for batch in batches(3):
        thrice(python)(*batch)
        train(*batch)
    assert python.engine.is_open
    assert not differences(python.engine.state_dict(), compiled.engine.state_dict())
    assert all(p.isfinite().all() for p in compiled.net.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_skip_puts_statistics_back_to_where_a_window_began_inside_the_graph(backend: str) -> None:
    python, compiled = (Run(level="O5", accumulate=2, clip=None) for _ in range(2))
    first, *_, last = batches(4)
    thrice(python)(*first)
    compiled.engine.compile(thrice(compiled), backend=backend)(*first)
    for run in (python, compiled):
        assert not run.step(*last)[1].stepped()
    assert not differences(python.engine.state_dict(), compiled.engine.state_dict())


Script = tuple[halfpeak.Engine, Callable[[Tensor], Tensor]]


def two_losses_in_turn() -> Script:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in (maker, judge)]
    engine = halfpeak.prepare([maker, judge], optimizers, "O2", num_losses=2, scale=SCALE)
    (of_maker, of_judge) = optimizers

    def step(x: Tensor) -> Tensor:
        with engine.forward():
            fake = maker(x)
            loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean()
        engine.backward(loss, loss_id=0, optimizers=of_judge)
        engine.step(optimizers=of_judge)
        with engine.forward():
            other = F.softplus(-judge(fake)).mean()
        engine.backward(other, loss_id=1, optimizers=of_maker)
        engine.step(optimizers=of_maker)
        return loss + other

    return engine, step


def plain(engine: halfpeak.Engine, loss_of: Callable[[Tensor], Tensor]) -> Script:
    def step(x: Tensor) -> Tensor:
        with engine.forward():
            loss = loss_of(x)
        engine.backward(loss)
        engine.step()
        return loss

    return engine, step


def an_optimizer_that_is_stepped_later() -> Script:
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in nets]
    engine = halfpeak.prepare(nets, optimizers, "O0")

    def step(x: Tensor) -> Tensor:
        loss = nets[1](nets[0](x)).square().mean()
        engine.backward(loss)
        for optimizer in optimizers:
            engine.step(optimizers=optimizer)
        return loss

    return engine, step


def weights_that_share_a_gradient_or_have_none() -> Script:
    net = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(4)])
    net[2].requires_grad_(False)
    engine = halfpeak.prepare(net, OPTIMIZERS["sgd"](net.parameters()), "O5", clip=0.5)
    return plain(engine, lambda x: ((net[0] + net[1]).float() * x).sum())


def a_weight_of_two_optimizers(level: str) -> Script:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [OPTIMIZERS["sgd"](part.parameters()) for part in (net, net[1])]
    engine = halfpeak.prepare(net, optimizers, level, scale=SCALE)
    return plain(engine, lambda x: net(x).float().square().mean())


def a_part_that_is_recomputed() -> Script:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine = halfpeak.prepare(net, OPTIMIZERS["sgd"](net.parameters()), "O1", scale=SCALE)
    return plain(engine, lambda x: checkpoint(net, x, use_reentrant=False).float().square().mean())


SCRIPTS: dict[str, Callable[[], Script]] = {
    "two losses in turn": two_losses_in_turn,
    "an optimizer that is stepped later": an_optimizer_that_is_stepped_later,
    "weights that share a gradient or have none": weights_that_share_a_gradient_or_have_none,
    "a part that is recomputed": a_part_that_is_recomputed,
    "a weight of two optimizers, O1": partial(a_weight_of_two_optimizers, "O1"),
    "a weight of two optimizers, O5": partial(a_weight_of_two_optimizers, "O5"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_other_scripts_are_one_graph_with_every_bit(name: str) -> None:
    engines, steps = [], []
    for _ in range(2):
        torch.manual_seed(0)
        engine, step = SCRIPTS[name]()
        engines.append(engine)
        steps.append(step)
    train = engines[1].compile(steps[1], backend=reusing)
    for number, (x, *_) in enumerate(batches()):
        if number == 6:
            for engine in engines:
                engine.models[0].requires_grad_()
        assert not differences(steps[0](x[:, :4]).detach(), train(x[:, :4]))
        assert counters["stats"]["unique_graphs"] == (1 if number < 6 or "none" not in name else 2)
    assert not differences(engines[0].state_dict(), engines[1].state_dict())
    assert all(p.isfinite().all() for net in engines[1].models for p in net.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_collapsing_scale_is_told_from_within_the_graph(backend: str) -> None:
    """Grad mode is enabled afterwards, which ``process_left_as_found`` checks."""
    run = Run(level="O2", scale=halfpeak.ScaleConfig(init=1.0, floor=1.0, patience=1))
    train = run.engine.compile(run.step, backend=backend)
    x, y, _ = batches()[0]
    train(x, y, torch.tensor(1.0))
    before = copy.deepcopy(run.net.state_dict())
    with pytest.raises(halfpeak.LossScaleCollapse):
        train(x, y, torch.tensor(float("inf")))
    assert not differences(before, run.net.state_dict())


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = halfpeak.Accumulation(every=2, total=5)
    with pytest.raises(halfpeak.ConfigError, match="leave out"):
        Run(level="O2", accumulate=windows).compiled()
    run = Run(level="O2")
    monkeypatch.setattr(compile_module, "is_multi_rank", lambda: True)
    with pytest.raises(halfpeak.ConfigError, match="several ranks"):
        run.compiled()


def test_engines_do_not_count_for_one_another() -> None:
    limit = torch._dynamo.config.recompile_limit
    for count in range(limit + 1):
        net = nn.Linear(2 + count, 1)
        engine = halfpeak.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "O0")

        def step(x: Tensor, net: nn.Module = net, engine: halfpeak.Engine = engine) -> halfpeak.StepResult:
            engine.backward(net(x).sum())
            return engine.step()

        assert engine.compile(step, backend="eager", dynamic=None)(torch.ones(3, 2 + count)).stepped()
    assert counters["stats"]["unique_graphs"] == limit + 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_kernels_may_be_compiled_within_the_first_step() -> None:
    python, whole = (Run(lambda p: FusedAdamW(p, lr=0.01, backend="compiled")) for _ in range(2))
    train = whole.compiled()
    assert not differences(train(*batches()[0]), python.step(*batches()[0]))
    assert not differences(python.engine.state_dict(), whole.engine.state_dict())


def halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def join(run: Run) -> None:
    # So far the graph has computed no gradients of this layer.
    run.net[4].zero_grad()
    run.optimizer.add_param_group({"params": list(run.net[4].parameters())})


O2, O4 = ("O2", "fused"), ("O4", "torch's fused")
CHANGES: dict[str, Callable[[Run], object]] = {
    "gradient hook": lambda run: run.weight.register_hook(lambda grad: grad * 0.5),
    "hook on what was accumulated": lambda run: run.weight.register_post_accumulate_grad_hook(halve),
    "forward hook": lambda run: run.net[0].register_forward_hook(lambda module, args, out: out * 0.5),
    "frozen": lambda run: run.weight.requires_grad_(False),
    "unfrozen": lambda run: run.net[4].requires_grad_(),
    "a group": join,
    "a smaller batch": lambda run: None,
}


@pytest.mark.parametrize(
    ("change", "level", "optimizer"),
    [
        ("gradient hook", *O4),
        ("hook on what was accumulated", *O2),
        ("forward hook", *O2),
        ("frozen", *O2),
        ("unfrozen", *O4),
        ("a group", *O2),
        ("a smaller batch", *O4),
    ],
)
def test_what_changes_between_two_calls_changes_the_next_one(change: str, level: str, optimizer: str) -> None:
    def train(*, compiled: bool) -> Any:
        torch._dynamo.reset()
        run = Run(
            OPTIMIZERS[optimizer], level=level, loss_scale=64.0, accumulate=2, trained=change != "a group"
        )
        if change == "unfrozen":
            run.net[4].requires_grad_(False)
        step = run.compiled() if compiled else run.step
        seen: list[Any] = []
        for i, (x, y, _) in enumerate(batches(6)):
            if i == 3:
                CHANGES[change](run)
            rows = 3 if change == "a smaller batch" and i in (3, 5) else 4
            loss, result = step(x[:rows], y[:rows], torch.ones(()))
            seen += [loss.detach(), result.found_inf]
        return seen, run.net.state_dict(), run.optimizer.state_dict()

    assert not differences(train(compiled=False), train(compiled=True))


def test_backward_hooks_of_modules_are_refused() -> None:
    run = Run()
    step = run.compiled()
    step(*batches(1)[0])
    run.net[0].register_full_backward_hook(lambda module, grads, outputs: grads)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backwards hooks"):
        step(*batches(1)[0])
