"""Which kernels a step launches, and that other numbers and sizes compile nothing again. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from support.triton import NEEDS_TRITON

PROGRAM = textwrap.dedent(
    """
    import sys
    import warnings

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    warnings.simplefilter("error", UserWarning)


    class Absent:
        "A driver of a GPU that is not there: enough to compile for it by way of a launch."

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0


    launched, compiled = [], set()


    def launch(kernel, grid):
        def run(*args, **options):
            launched.append(kernel.__name__.removesuffix("_kernel"))
            kernel.warmup(*args, grid=grid, **options)
            compiled.update((kernel.__name__, key) for known in kernel.device_caches.values() for key in known[0])
        return run


    driver.set_active(Absent())
    JITFunction.__getitem__ = launch

    import halfpeak.fused.base
    from halfpeak.core.schedule import ScaleConfig
    from halfpeak.fused import FusedAdamW, FusedLAMB, FusedNovoGrad
    from halfpeak.fused.decision import StepInputs
    from halfpeak.fused.backends.triton import TritonBackend
    from support.triton import decision_inputs

    halfpeak.fused.base.choose = lambda *_: TritonBackend(torch.device("cpu"))
    halfpeak.fused.base.still_fits = lambda *_: True
    SIZES = (5, 1030, 16, 1, 2048, 1024, 3073)


    def step(make, sizes, lr, scale, interval):
        weights = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in sizes]
        optimizer = make(weights, lr=lr, backend="triton")
        gradients = [torch.zeros_like(weight) for weight in weights]
        inputs = StepInputs(gradients, weights, torch.tensor(scale))
        optimizer.measure(inputs)
        launched.clear()
        config = ScaleConfig(interval=interval)
        for change in (1, 10):
            optimizer.param_groups[0]["lr"] *= change
            decision = optimizer.decide(inputs, decision_inputs("cpu", config, config.start("cpu"), max_norm=scale * change))
            optimizer.set_step_inputs(inputs._replace(multiplier=decision.multiplier))
            optimizer.found_inf = decision.found_inf
            optimizer.step()
            optimizer.set_step_inputs(None)


    def compact(*args, **options):
        return FusedAdamW(*args, master="remainder8", moments="int8", **options)


    for make, wanted in (
        (FusedAdamW, ["measure", "control", "update"]),
        (compact, ["measure", "control", "update"]),
        (FusedNovoGrad, ["measure", "control", "norm", "update"]),
        (FusedLAMB, ["measure", "control", "update", "lamb_trust", "update"]),
    ):
        step(make, SIZES, 0.1, 0.5, 2000)
        assert launched == 2 * wanted, launched
        before = set(compiled)
        step(make, SIZES[:1], 1.0, 1.0, 1)
        step(make, 16 * SIZES[:1], 0.0, 0.25, 16)
        step(make, (16, *SIZES), 1e-5, 2.0**-16, 17)
        assert compiled == before, compiled - before
    print("launched")
    """
)


@NEEDS_TRITON
def test_no_number_compiles_anew_and_steps_take_as_few_launches_as_the_page_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.endswith("launched\n"), done.stderr
