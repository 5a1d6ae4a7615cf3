"""Every Triton kernel compiles for its target GPUs with wide loads and no spilled registers; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from fused.reference import CASES
from support.triton import NEEDS_TRITON

PROGRAM = textwrap.dedent(
    """
    import json
    import re
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    import triton
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from halfpeak.ops.triton import launch
    from halfpeak.ops.triton.add import add_kernel
    from halfpeak.ops.triton.control import control_kernel
    from halfpeak.ops.triton.layerwise import lamb_trust_kernel, norm_kernel
    from halfpeak.ops.triton.measure import measure_kernel
    from halfpeak.ops.triton.update import update_kernel

    TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
    TYPES = {name: "*i64" for name in ("members", "grads", "rows", "table")}
    TYPES |= {name: "*i32" for name in ("chunks", "flags", "clean", "grace", "stuck", "num_steps", "num_skipped", "ints")}
    TYPES |= {name: "*fp32" for name in ("numbers", "squares", "factor", "found_inf", "scale", "floats")}
    TYPES |= {name: "*fp32" for name in ("each", "sums", "rates", "found")}
    TYPES |= {name: "i32" for name in ("full", "count", "first", "partials", "interval", "hysteresis", "counters")}
    TYPES |= {name: "i32" for name in ("after_growth", "after_overflow", "after_failure")}
    TYPES |= {name: "fp32" for name in ("max_norm", "own_max_norm", "growth", "backoff", "floor", "ceiling", "below")}
    TYPES |= {"hyper": "*fp64"}
    FORM = {"COLUMNS": launch.COLUMNS, "CHUNK": launch.CHUNK}
    REGISTERS = 65536
    DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


    def compile_kernel(kernel, programs=4, **constants):
        unknown = set(kernel.arg_names) - TYPES.keys() - constants.keys()
        assert not unknown, f"add the types of {sorted(unknown)}, arguments of {kernel.__name__}, to TYPES of this file"
        signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        # Aligned to 16 bytes is what a launch finds of what is not told to be of no account.
        wide = {
            (parameter.num,): [["tt.divisibility", 16]]
            for parameter in kernel.params
            if signature[parameter.name][0] == "*" and not parameter.do_not_specialize_on_alignment
        }
        source = ASTSource(kernel, signature, places, wide)
        built = compile(source, target=TARGET, options={"num_warps": 4, "enable_fp_fusion": False})
        code = built.asm["ptx"]
        assert ".local" not in code, "something was spilled into local memory"
        # What is told to be rounded to the nearest is, and no number is taken for a zero because it is small.
        assert not re.search(r"div\\.(full|approx)|sqrt\\.approx|(add|sub|mul|fma|div|sqrt)[.a-z]*\\.ftz", code)
        assert "fma.rn.f32" not in code, "multiply and add are rounded together"
        if DUMP.exists():
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(built.asm["cubin"])
                file.flush()
                used = subprocess.run([DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
            registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", used).groups())
            assert programs * 128 * -(-registers // 8) * 8 <= REGISTERS, (kernel.__name__, constants, registers)
        return code


    for grad, align in ((tl.bfloat16, 8), (tl.float16, 8), (tl.float32, 4)):
        for each in ("", "squares", "largest"):
            code = compile_kernel(measure_kernel, launch._READING, GRAD=grad, ALIGN=align, EACH=each, **FORM)
            assert re.search(r"ld\\.global\\.v4\\.b32", code), "loads of gradients are not 16 bytes wide"
        compile_kernel(measure_kernel, launch._READING, GRAD=grad, ALIGN=1, EACH="", **FORM)
    for grad in (tl.bfloat16, tl.float16, tl.float32):
        for adds in (False, True):
            code = compile_kernel(add_kernel, GRAD=grad, ADDS=adds, STEPS=9, CHUNK=launch.CHUNK, ALIGN=4)
            assert re.search(r"st\\.global\\.v4\\.b32", code), "stores of sums are not 16 bytes wide"
            compile_kernel(add_kernel, GRAD=grad, ADDS=adds, STEPS=0, CHUNK=launch.CHUNK, ALIGN=1)
    IDENTITY = {"MASTER": 0, "A": "identity", "B": "identity", "C": "identity", "BLOCK": 128}
    formulas = json.loads(sys.argv[2])
    for rule, option, other in formulas:
        for weight, low, grad in ((tl.float32, tl.bfloat16, tl.bfloat16), (tl.float32, None, tl.float32),
                                  (tl.float16, None, tl.float16)):
            code = compile_kernel(update_kernel, DTYPE=weight, LOWER=low,
                            GRAD=grad, RULE=rule, OPTION=option, OTHER=other, ALIGN=4, **IDENTITY, **FORM)
            if weight == tl.float32:
                assert re.search(r"st\\.global\\.v4\\.b32", code), "stores of weights are not 16 bytes wide"
    BF16, FP16 = (tl.bfloat16, None), (tl.float16, None)
    for master, a, b, (weight, low), block in (
        (16, "identity", "identity", BF16, 128), (8, "identity", "identity", BF16, 128),
        (16, "bf16", "bf16_stochastic", BF16, 128), (8, "int8_block", "uint8_sqrt_block", BF16, 128),
        (16, "identity", "identity", FP16, 128), (8, "int8_block", "uint8_sqrt_block", FP16, 128),
        (0, "int8_block", "uint8_sqrt_block", (tl.float32, tl.bfloat16), 128),
        (0, "int8_block", "uint8_sqrt_block", (tl.float32, tl.bfloat16), 16),
    ):
        coded = a == "int8_block"
        wide, narrow = (
            compile_kernel(update_kernel, DTYPE=weight, LOWER=low, GRAD=low or weight,
                     RULE="adam", OPTION=True, OTHER=coded, ALIGN=align, MASTER=master, A=a, B=b, C=b, BLOCK=block, **FORM)
            for align in (4, 1)
        )
        # But for the last chunk of a parameter, which is read with a mask.
        assert 2 * wide.count("ld.global.b8") == narrow.count("ld.global.b8"), "8 bits are read one by one"
    compile_kernel(lamb_trust_kernel, COLUMNS=launch.COLUMNS, BLOCK=launch._PARTS)
    for largest in (True, False):
        compile_kernel(norm_kernel, LARGEST=largest, COLUMNS=launch.COLUMNS, BLOCK=launch._PARTS)
    for rule in sorted({rule for rule, _, _ in formulas}):
        for judges, keeps, dynamic, clean in ((False, False, False, False), (True, True, False, True), (True, True, True, True),
                                              (True, True, True, False)):
            compile_kernel(control_kernel, 1, JUDGES=judges, CLIPS=keeps, CLIPS_AGAIN=rule == "lamb", DECIDES=keeps,
                     IS_DYNAMIC=dynamic, REFILLS_CLEAN=clean, RECOVERS=dynamic, RULE=rule, BLOCK=2048)
    print("compiled")
    """
)


def formulas() -> set[tuple[str, bool | str, bool | str]]:
    """``rule``, ``option`` and ``other`` of the optimizers in ``CASES``, and of variants that none of ours uses."""
    found: set[tuple[str, bool | str, bool | str]] = {("sgd", "momentum", True), ("adagrad", True, False)}
    for kind, options in CASES.values():
        optimizer = kind([torch.nn.Parameter(torch.ones(1))], **options)
        config = optimizer.rule(optimizer.param_groups[0]).kernel_config()
        assert config is not None, f"{kind.__name__} has no Triton kernel"
        found.add((config.rule, config.option, config.other))
        if config.rule == "lamb":
            found |= {(config.rule, config.option, part) for part in (False, "moments", "weights")}
    return found


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [90])
def test_every_kernel_compiles_with_wide_loads_and_nothing_spilled(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(capability), json.dumps(sorted(formulas(), key=str))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("compiled\n"), done.stderr
