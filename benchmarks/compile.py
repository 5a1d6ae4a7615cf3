"""How long does the first step of a FusedAdamW take, and does anything compile later?

Each figure is the time of a new process's first step, less its second. Any use of ``torch.compile`` imports the
compiler and tests which vector instructions work; this happens first and has a figure of its own. "On disk" is a
process that finds an earlier process's files in the compiler's cache. Then the learning rate, weight decay, loss scale,
clip coefficient and step number change, and kernels compiled after the first two steps are counted: there must be none.
``torch.compile(optimizer.step)`` is measured once, and not for 400 tensors, which would take minutes. Its learning rate
changes only with 10 tensors.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _harness import arguments, chosen, describe, save
from torch import nn

import halfpeak
from halfpeak.fused import FusedAdamW

COUNTS = (10, 100, 400)
SHAPE = (256, 256)
Facts = dict[str, float]


def main() -> None:
    options = arguments(__doc__, rounds=3)
    counts = {f"{count} tensors": count for count in COUNTS}
    for case in chosen(counts, options):
        count = counts[case]
        print(f"\ncompile: {case} on {describe(options)}, {options.rounds} rounds")
        rounds = [in_fresh_processes("fused", count, options.device, times=2) for _ in range(options.rounds)]
        variants = {
            "FusedAdamW, nothing on disk": [first for first, _ in rounds],
            "FusedAdamW, on disk": [second for _, second in rounds],
        }
        if count <= 100:
            variants["torch.compile(AdamW.step)"] = in_fresh_processes(
                "torch", count, options.device, times=1
            )
        save("compile", [row(case, name, facts) for name, facts in variants.items()], options)


def row(case: str, name: str, facts: list[Facts]) -> dict[str, object]:
    seconds = [one["step"] for one in facts]
    found: dict[str, object] = {
        "case": case,
        "variant": name,
        "s": round(statistics.median(seconds), 2),
        "min_s": round(min(seconds), 2),
        "max_s": round(max(seconds), 2),
        "cpu_s": round(statistics.median(one["step_cpu"] for one in facts), 2),
        "start_s": round(statistics.median(one["start"] for one in facts), 2),
        "start_cpu_s": round(statistics.median(one["start_cpu"] for one in facts), 2),
        "kernels": max(int(one["kernels"]) for one in facts),
        "later": max((int(one["later"]) for one in facts if "later" in one), default=""),
        "processes": len(facts),
    }
    print(
        f"  {name:30}{found['s']:>8} s  ({found['min_s']} to {found['max_s']}, cpu {found['cpu_s']})"
        f"  after {found['start_s']} s (cpu {found['start_cpu_s']}) to start the compiler"
        f"  kernels: {found['kernels']}, later: {found['later']}",
        flush=True,
    )
    return found


def in_fresh_processes(what: str, count: int, device: str, *, times: int) -> list[Facts]:
    """Measure in new processes, one after the other. The first finds an empty cache on disk, the next a filled one."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--measure", what, str(count), device]
        done = [subprocess.run(command, env=env, capture_output=True, text=True) for _ in range(times)]
    for one in done:
        if one.returncode:
            raise RuntimeError(one.stderr)
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


def measure(what: str, count: int, device: str) -> None:
    """In a new process: print the time of the first step, and how many kernels later steps compile."""
    torch.set_num_threads(1)
    step, change = (fused_step if what == "fused" else torch_step)(count, device)
    (start, start_cpu), (first, first_cpu), (second, second_cpu) = map(
        _times_of, (lambda: start_compiler(device), step, step)
    )
    kernels = _kernels()
    facts = {
        "start": start,
        "start_cpu": start_cpu,
        "step": first - second,
        "step_cpu": first_cpu - second_cpu,
        "kernels": kernels,
    }
    if what == "fused" or count <= 10:
        change()
        facts["later"] = _kernels() - kernels
    print(json.dumps(facts))


def start_compiler(device: str) -> None:
    """Do what a process does once before it compiles anything."""
    importlib.import_module("torch._inductor.compile_fx")
    if device == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()


def fused_step(count: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    model = nn.ParameterList([nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(count)])
    optimizer = FusedAdamW(model.parameters())
    engine = halfpeak.prepare(
        model, optimizer, halfpeak.LEVELS["O2"].replace(cast_model_type=torch.bfloat16), clip=1.0
    )
    loss = torch.zeros((), device=device)

    def step(size: float = 1.0) -> None:
        with engine.scaled(loss):
            for parameter in model:
                parameter.grad = torch.full_like(parameter, size)
        engine.step()

    def change() -> None:
        for turn in range(5):
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.param_groups[0]["weight_decay"] += 0.1
            engine.scalers[0].set_scale(2.0**turn)
            step(10.0**turn)

    return step, change


def torch_step(count: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    parameters = [nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    step: Any = torch.compile(optimizer.step)

    def change() -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        step()

    return step, change


def _kernels() -> int:
    from torch._inductor import metrics

    return metrics.generated_kernel_count


def _times_of(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall clock, and of processor time including the C++ compiler's."""
    cpu, wall = sum(os.times()[:4]), time.perf_counter()
    call()
    return time.perf_counter() - wall, sum(os.times()[:4]) - cpu


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
