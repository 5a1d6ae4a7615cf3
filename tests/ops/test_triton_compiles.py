"""Every kernel compiles for the GPUs that it is meant for, which takes triton's compiler and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from halfpeak.ops.triton import is_installed

PROGRAM = textwrap.dedent(
    """
    import re
    import sys
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from halfpeak.ops.triton import step
    from halfpeak.ops.triton.control import control_kernel
    from halfpeak.ops.triton.measure import measure_kernel
    from halfpeak.ops.triton.update import update_kernel

    TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
    LISTS = {"members": "*i64", "grads": "*i64", "chunks": "*i32", "full": "i32", "count": "i32", "numbers": "*fp32"}
    STATE = {name: "*i32" for name in ("flags", "clean", "grace", "stuck", "taken", "skipped", "ints")}
    STATE |= {name: "*fp32" for name in ("squares", "factor", "found_inf", "scale", "floats")}
    STATE |= {name: "fp32" for name in ("limit", "growth", "backoff", "floor", "ceiling")}
    STATE |= {"partials": "i32", "interval": "i32", "hysteresis": "i32", "counters": "i32"}
    TYPES = {**LISTS, **STATE, "rows": "*i64", "hyper": "*fp64"}
    FORM = {"COLUMNS": step.COLUMNS, "CHUNK": step.CHUNK}


    def compiled(kernel, **constants):
        signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        wide = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t[0] == "*"}
        source = ASTSource(kernel, signature, places, wide)
        code = compile(source, target=TARGET, options={"num_warps": 4, "enable_fp_fusion": False}).asm["ptx"]
        assert ".local" not in code, "something was spilled into local memory"
        return code


    for grad, align in ((tl.bfloat16, 8), (tl.float16, 8), (tl.float32, 4)):
        code = compiled(measure_kernel, GRAD=grad, ALIGN=align, **FORM)
        assert re.search(r"ld\\.global\\.v4\\.b32", code), "loads of gradients are not 16 bytes wide"
        compiled(measure_kernel, GRAD=grad, ALIGN=1, **FORM)
    for rule, option, other in (
        ("adam", True, False), ("adam", False, True), ("sgd", "", False), ("sgd", "momentum", True),
        ("sgd", "nesterov", False), ("adagrad", False, False), ("adagrad", True, False),
    ):
        for weight, low, grad in ((tl.float32, tl.bfloat16, tl.bfloat16), (tl.float32, None, tl.float32),
                                  (tl.float16, None, tl.float16)):
            code = compiled(update_kernel, WEIGHT=weight, LOW=low, GRAD=grad, RULE=rule, OPTION=option, OTHER=other,
                            ALIGN=4, **FORM)
            if weight == tl.float32:
                assert re.search(r"st\\.global\\.v4\\.b32", code), "stores of weights are not 16 bytes wide"
            assert "fma.rn.f32" not in code or rule != "sgd", "multiply and add are rounded together"
    for rule in ("adam", "sgd", "adagrad"):
        for keeps, dynamic, clean in ((False, False, False), (True, False, True), (True, True, True), (True, True, False)):
            compiled(control_kernel, CLIPS=keeps, KEEPS_BOOKS=keeps, IS_DYNAMIC=dynamic, REFILLS_CLEAN=clean, RULE=rule,
                     HYPER=step.HYPER, BLOCK=2048)
    print("compiled")
    """
)


@pytest.mark.skipif(not is_installed(), reason="needs triton")
@pytest.mark.parametrize("capability", [90])
def test_every_kernel_compiles_with_wide_loads_and_nothing_spilled(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("compiled\n"), done.stderr
