"""The rules of ``migrate``, one by one: what a line becomes, and which lines stay, with the reason given."""

from __future__ import annotations

import ast
from textwrap import dedent, indent

import pytest

pytest.importorskip("libcst")

from halfpeak.amp import __all__ as names_of_amp
from halfpeak.migrate import Target, rewrite


def becomes(text: str, to: Target = "amp") -> str:
    """Return the new text; assert that no findings are left."""
    result = rewrite(dedent(text).encode(), to)
    assert result.findings == ()
    ast.parse(result.source)
    return result.source.decode()


def left(text: str, to: Target = "halfpeak") -> list[tuple[int, str]]:
    """Return lines and reasons of the findings; assert that the text has not changed."""
    result = rewrite(dedent(text).encode(), to)
    assert result.source.decode() == dedent(text)
    return [(finding.line, finding.reason) for finding in result.findings]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from apex import amp", "from halfpeak import amp"),
        ("from apex import amp as apex_amp", "from halfpeak import amp as apex_amp"),
        ("import apex.amp as amp", "import halfpeak.amp as amp"),
        (
            "from apex.amp import scale_loss as s, master_params",
            "from halfpeak.amp import scale_loss as s, master_params",
        ),
        ("from apex.amp.frontend import initialize", "from halfpeak.amp import initialize"),
        ("from apex.amp._amp_state import _amp_state", "from halfpeak.amp import _amp_state"),
        ("from apex.amp.scaler import LossScaler", "from halfpeak.amp.scaler import LossScaler"),
        (
            "from apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb",
            "from halfpeak.amp.optimizers import FusedMixedPrecisionLamb",
        ),
        ("from apex.optimizers import FusedAdam", "from halfpeak.amp.optimizers import FusedAdam"),
        (
            "from apex.contrib.optimizers import FP16_Optimizer",
            "from halfpeak.amp.optimizers.contrib import FP16_Optimizer",
        ),
        (
            "from apex.contrib.optimizers.fused_adam import FusedAdam",
            "from halfpeak.amp.optimizers.contrib import FusedAdam",
        ),
        (
            "from apex.optimizers.fused_lamb import FusedLAMB",
            "from halfpeak.amp.optimizers import FusedLAMB",
        ),
        (
            "from amp_C import multi_tensor_sgd",
            "from halfpeak.amp.multi_tensor import multi_tensor_sgd",
        ),
        (
            "import apex_C\nflat = apex_C.flatten(grads)",
            "import torch\nflat = torch._utils._flatten_dense_tensors(grads)",
        ),
        ("from apex.fp16_utils import FP16_Optimizer", "from halfpeak.amp.fp16_utils import FP16_Optimizer"),
        ("from apex.parallel.LARC import LARC", "from halfpeak.amp.larc import LARC"),
        ("from apex import amp, optimizers", "from halfpeak import amp\nfrom halfpeak.amp import optimizers"),
        ("from apex.parallel import ReduceOp", "from torch.distributed import ReduceOp"),
        ("import os; from apex import amp; import sys", "import os; from halfpeak import amp; import sys"),
        ("if x: from apex import amp", "if x: from halfpeak import amp"),
        ("from torch.cuda.amp import GradScaler", "from torch.amp import GradScaler"),
        ("from torch.cuda.amp.grad_scaler import GradScaler", "from torch.amp import GradScaler"),
        ("import torch.cuda.amp", "import torch"),
        (
            "import torch.cuda.amp as tca\nwith tca.autocast(): pass",
            'import torch.amp as tca\nwith tca.autocast("cuda"): pass',
        ),
        ("from mmcv.runner import auto_fp16", "from halfpeak.runner import auto_fp16"),
        (
            "from mmcv.runner.hooks.optimizer import OptimizerHook",
            "from halfpeak.runner import OptimizerHook",
        ),
        (
            "from mmcv.runner import force_fp32\nfrom mmcv.parallel import MMDistributedDataParallel, MMDataParallel",
            "from halfpeak.runner import force_fp32\nfrom halfpeak.runner import MMDistributedDataParallel, MMDataParallel",
        ),
    ],
)
def test_imports(old: str, new: str) -> None:
    assert becomes(old + "\n") == new + "\n"


@pytest.mark.parametrize("name", sorted(names_of_amp))
def test_every_name_of_amp_is_known(name: str) -> None:
    assert becomes(f"from apex.amp import {name}\n") == f"from halfpeak.amp import {name}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.cuda.amp.autocast()", 'torch.autocast("cuda")'),
        ("torch.cuda.amp.autocast(False)", 'torch.autocast("cuda", enabled=False)'),
        ("torch.cuda.amp.autocast(**options)", 'torch.autocast("cuda", **options)'),
        (
            "torch.cpu.amp.autocast(True, torch.half, False)",
            'torch.autocast("cpu", enabled=True, dtype=torch.half, cache_enabled=False)',
        ),
        ("torch.cuda.amp.GradScaler(*a, **k)", 'torch.amp.GradScaler("cuda", *a, **k)'),
        ("torch.cuda.amp.custom_fwd(f)", 'torch.amp.custom_fwd(f, device_type="cuda")'),
        ("isinstance(s, (int, torch.cuda.amp.GradScaler))", "isinstance(s, (int, torch.amp.GradScaler))"),
        (
            "torch.cuda.amp.autocast(\n    enabled=True,  # on\n)",
            'torch.autocast(\n    "cuda", enabled=True,  # on\n)',
        ),
    ],
)
def test_calls_of_torch(old: str, new: str) -> None:
    assert becomes(f"import torch\n{old}\n") == f"import torch\n{new}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DistributedDataParallel(m)", "DistributedDataParallel(m, broadcast_buffers=False)"),
        (
            "DistributedDataParallel(m, delay_allreduce=True)",
            "DistributedDataParallel(m, broadcast_buffers=False)",
        ),
        (
            "DistributedDataParallel(\n    m,\n    message_size=1,\n)",
            "DistributedDataParallel(\n    m, broadcast_buffers=False,\n)",
        ),
        ("isinstance(m, DistributedDataParallel)", "isinstance(m, DistributedDataParallel)"),
        ("SyncBatchNorm(3, channel_last=False)", "SyncBatchNorm(3)"),
        ("convert_syncbn_model(m)", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)"),
        ("map(convert_syncbn_model, ms)", "map(torch.nn.SyncBatchNorm.convert_sync_batchnorm, ms)"),
    ],
)
def test_calls_of_apex_parallel(old: str, new: str) -> None:
    head = "import torch\nfrom apex.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model\n"
    assert becomes(head + old + "\n").splitlines()[-len(new.splitlines()) :] == new.splitlines()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FusedRMSNorm(4)", "FusedRMSNorm(4, eps=1e-5)"),
        ("FusedRMSNorm(4, 1e-6)", "FusedRMSNorm(4, 1e-6)"),
        ("FusedRMSNorm(4, eps=e, memory_efficient=True)", "FusedRMSNorm(4, eps=e)"),
        ("FusedLayerNorm(4, 1e-6, True)", "FusedLayerNorm(4, 1e-6, True)"),
        ("FusedLayerNorm", "FusedLayerNorm"),
    ],
)
def test_calls_of_apex_normalization(old: str, new: str) -> None:
    head = "from apex.normalization import FusedLayerNorm, FusedRMSNorm\n"
    assert becomes(head + old + "\n").splitlines()[-1] == new


def test_comments_formatting_line_ends_tabs_and_the_mark_of_utf8_stay() -> None:
    old = "\ufeff# coding: utf-8\r\nif 1 :\r\n\tfrom apex import (  amp ,  # mixed\r\n\t)\r\n"
    old += "\tx = {'a' :1}  # größe\r\n\t\r\n\x0c\r\n"
    assert rewrite(old.encode(), "amp").source.decode() == old.replace("apex", "halfpeak")
    latin = "# -*- coding: latin-1 -*-\nfrom apex import amp  # größe\n".encode("latin-1")
    assert rewrite(latin, "amp").source == latin.replace(b"apex", b"halfpeak")


def test_comments_of_a_line_that_goes_move_to_the_next() -> None:
    old = """\
        import torch
        # for the scale
        from apex import amp  # apex

        x = 1
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
        for x in data:
            optimizer.zero_grad()
            loss = model(x)
            with amp.scale_loss(loss, optimizer) as s:
                s.backward()
            optimizer.step()
        """
    new = """\
        import torch
        # for the scale
        # apex

        x = 1
        for x in data:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
        """
    assert becomes(old, "torch") == dedent(new)


def test_o4_becomes_autocast_without_a_scaler() -> None:
    old = """\
        import torch
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer, opt_level="O4")
        for x in data:
            optimizer.zero_grad()
            loss = model(x).mean()
            with amp.scale_loss(loss, optimizer) as s:
                s.backward(retain_graph=True)
            optimizer.step()
        """
    new = """\
        import torch
        for x in data:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).mean()
            loss.backward(retain_graph=True)
            optimizer.step()
        """
    assert becomes(old, "torch") == dedent(new)


def test_an_optimizer_that_is_made_in_the_call_is_made_once() -> None:
    old = LOOP.replace(
        "(model, optimizer, opt", "(model, Adam(apex.parallel.convert_syncbn_model(model)), opt"
    )
    new = """\
        model, optimizer = model, Adam(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
        engine = halfpeak.prepare(model, optimizer, "O2")
        """
    assert dedent(new) in becomes(old.replace("from apex", "import apex\nfrom apex"), "halfpeak")


def test_a_name_that_is_taken_is_not_taken_again() -> None:
    old = LOOP.replace("import torch\n", "import torch\nengine = 'V8'\n")
    assert 'amp_engine = halfpeak.prepare(model, optimizer, "O2")' in becomes(old, "halfpeak")


LOOP = """\
import torch
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
for x in data:
    optimizer.zero_grad()
    loss = model(x).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


def test_a_function_with_further_arguments_gets_the_engine() -> None:
    loop = LOOP[LOOP.index("for x") :]
    old = f"""\
from apex import amp
def train(model, optimizer, *rest):
{indent(loop, "    ")}
def main(model, optimizer):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    train(model, optimizer, 1, 2)
"""
    new = becomes(old, "halfpeak")
    assert "def train(model, optimizer, *rest, engine):" in new
    assert "train(model, optimizer, 1, 2, engine=engine)" in new


def test_the_plain_loop() -> None:
    new = """\
        import torch
        import halfpeak
        engine = halfpeak.prepare(model, optimizer, "O2")
        for x in data:
            optimizer.zero_grad()
            with engine.forward():
                loss = model(x).mean()
            engine.backward(loss)
            engine.step()
        """
    assert becomes(LOOP, "halfpeak") == dedent(new)


@pytest.mark.parametrize(
    ("after", "keeps"),
    [
        ("    print([p.grad.norm() for p in model.parameters()])\n", True),
        ("    print(sizes(model))\n", True),
        ("    print(torch.autograd.grad(y, x))\n", False),
        ("\n\ndef other(p):\n    return p.grad, sizes(p)\n", False),
    ],
)
def test_gradients_that_are_read_after_the_step_are_kept(after: str, keeps: bool) -> None:
    text = f"{LOOP}{after}".replace("for x", "def sizes(m): return [p.grad.norm() for p in m]\nfor x")
    code = rewrite(text.encode(), "halfpeak").source.decode()
    assert ("engine.step(keep_gradients=True)" in code, "engine.step()" in code) == (keeps, not keeps)


def test_halfpeak_amp_is_rewritten_like_apex() -> None:
    assert becomes(LOOP.replace("apex", "halfpeak"), "halfpeak") == becomes(LOOP, "halfpeak")


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("    optimizer.zero_grad()\n", "", 5, "gradients add up"),
        ("    optimizer.step()", "    if x: optimizer.step()", 9, "not in the same block as the backward pass"),
        ("    optimizer.step()", "    r = optimizer.step()", 9, "its result is used"),
        ("    optimizer.step()", "    optimizer.step(closure)", 9, "closure"),
        ("    optimizer.step()", "    pass", 9, "no step follows"),
        ("    optimizer.step()", "    if loss > 9:\n        continue\n    optimizer.step()", 10, "may skip the step"),
        ("        scaled.backward()", "        scaled.backward()\n        log(scaled)", 7, "more than scaled.backward()"),
        ("    optimizer.step()", "    print(scaled); optimizer.step()", 7, "used outside"),
        ("loss, optimizer)", "loss, other)", 7, "another name than in amp.initialize"),
        ("loss, optimizer)", "loss, optimizer, delay_unscale=True)", 7, "delay_unscale"),
        ("loss, optimizer)", "loss, optimizer, 0, model, True)", 7, "delay_unscale"),
        ("scaled.backward()", "scaled.backward(ones)", 7, "other arguments than retain_graph"),
        ("model, optimizer = amp", "if fp16:\n    model, optimizer = amp", 4, "under a condition"),
        ("opt_level=", "enabled=fp16, opt_level=", 3, "prepare has no argument enabled"),
        ("opt_level=", "**options, opt_level=", 3, "arguments are unpacked"),
        ("model, optimizer = amp", "pair = amp", 3, "not unpacked"),
        ("(model, optimizer, opt_level", "(model, opt_level", 3, "without an optimizer"),
        ("for x in data:", "amp.register_half_function(torch, 'einsum')\nfor x in data:", 4, "not part of a training loop"),
        ("for x in data:", "print(amp)\nfor x in data:", 4, "not part of a training loop"),
        ("for x in data:", "again = amp.initialize(model, optimizer)\nfor x in data:", 4, "more than once"),
    ],
)  # fmt: skip
def test_a_loop_that_is_not_certain_stays_on_amp(old: str, new: str, line: int, reason: str) -> None:
    text = LOOP.replace(old, new)
    assert text != LOOP
    result = rewrite(text.encode(), "halfpeak")
    assert result.source.decode() == text.replace("apex", "halfpeak")
    (finding,) = result.findings
    assert finding.line == line
    assert reason in finding.reason
    assert finding.write


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ('"O2"', "cannot express O2"),
        ('"O3"', "cannot express O3"),
        ("args.level", "not known before the program runs"),
        ('"O1", loss_scale=128.0', "no equivalent of loss_scale=128.0"),
        ('"O1", num_losses=2', "no equivalent of num_losses=2"),
    ],
)
def test_what_torch_cannot_express_is_left(level: str, reason: str) -> None:
    ((line, given),) = left(LOOP.replace('"O2"', level), "torch")
    assert line == 3
    assert reason in given


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("import torch\nf = torch.cuda.amp.autocast\n", 2, "not called here"),
        ("from torch.cuda.amp import autocast\nrun(autocast)\n", 2, "not called here"),
        ("from torch.cuda.amp import GradScaler\nclass S(GradScaler): pass\n", 2, "not called here"),
        ("import torch\ntorch.cuda.amp.autocast(*a)\n", 2, "unpacked"),
        ("import torch\ntorch.cuda.amp.common.amp_definitely_not_available()\n", 2, "no such name"),
        ("from apex.parallel import DistributedDataParallel as DDP\nDDP(m, 1000)\n", 2, "not torch's"),
        (
            "from apex.parallel import DistributedDataParallel as DDP\nDDP(m, gradient_average=False)\n",
            2,
            "gradient_average",
        ),
        ("from apex.parallel import create_syncbn_process_group as c\nc(4)\n", 2, "made by torch"),
        ("from apex.parallel import SyncBatchNorm\nSyncBatchNorm(3, fuse_relu=True)\n", 2, "fuse_relu"),
        ("from apex.normalization import MixedFusedLayerNorm as N\nN(3)\n", 2, "different dtypes"),
        ("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss\n", 1, "no counterpart"),
        ("from apex.amp import *\n", 1, "does not say which"),
        ("import apex\n", 1, "checks for an installed apex"),
        ("def has():\n    try:\n        import apex\n    except ImportError: pass\n", 3, "checks for"),
        ("import importlib.util as u\nu.find_spec('apex')\n", 2, "checks for an installed apex"),
        ("from importlib.metadata import version\nversion('apex')\n", 2, "checks for an installed apex"),
        ("import apex\nprint(apex)\n", 2, "no replacement for this name"),
        ("import apex_C\napex_C.nothere()\n", 2, "no counterpart"),
        (
            "if a:\n    from apex import amp\nelse:\n    from torch.cuda import amp\namp.state_dict()\n",
            5,
            "apex.amp or torch.cuda.amp",
        ),
    ],
)
def test_what_has_no_certain_counterpart_is_left(text: str, line: int, reason: str) -> None:
    found = left(text, "amp")
    assert any(at == line and reason in why for at, why in found), found


def test_an_unused_import_stays_where_torch_has_nothing_like_it() -> None:
    assert left("from apex import amp\n", "torch") == [(1, "torch has no counterpart")]


def test_one_use_that_stays_keeps_the_name_for_all() -> None:
    text = "from torch.cuda.amp import autocast\nwith autocast(): pass\nf = autocast\n"
    assert [line for line, _ in left(text, "amp")] == [3]


def test_a_name_that_falls_back_to_the_old_one_is_left() -> None:
    """Left, because such code works with every torch."""
    text = """\
        try:
            from torch.amp import GradScaler
        except ImportError:
            from torch.cuda.amp import GradScaler
        scaler = GradScaler()
        """
    assert left(text, "torch") == []


def test_a_name_with_two_origins_is_left_in_each_use() -> None:
    text = """\
        if on_npu:
            from torch.npu.amp import autocast
        else:
            from torch.cuda.amp import autocast
        with autocast():
            pass
        """
    assert left(text, "torch") == [(5, "it may be torch.cuda.amp.autocast or torch.npu.amp.autocast")]


def test_what_every_module_has_is_looked_up_in_the_new_one() -> None:
    text = "from apex import amp\nif 'load_state_dict' in amp.__dict__ and amp.__path__:\n    pass\n"
    assert becomes(text) == text.replace("apex", "halfpeak")


def test_a_shadowed_name_is_another_name() -> None:
    text = "from apex import amp\n\n\ndef gain(amp):\n    return amp.initialize(1)\n"
    assert becomes(text) == text.replace("apex", "halfpeak")


def test_a_guarded_import_that_leaves_none_behind() -> None:
    text = "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nif amp is not None:\n    amp.state_dict()\n"
    assert becomes(text) == text.replace("apex", "halfpeak")


def test_other_code_is_not_even_parsed() -> None:
    assert rewrite(b"example = this is not python", "amp").source == b"example = this is not python"


def test_mmcv_without_fp16_is_left_to_mmcv() -> None:
    assert left("from mmcv.runner import load_checkpoint, get_dist_info\n", "amp") == []


def test_names_of_mmcv_that_halfpeak_has_not_stay_beside_those_it_has() -> None:
    text = "from mmcv.runner import auto_fp16, no_such_name, force_fp32\n"
    result = rewrite(text.encode(), "amp")
    assert result.source.decode().splitlines() == [
        "from mmcv.runner import no_such_name",
        "from halfpeak.runner import auto_fp16, force_fp32",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp16 = dict(loss_scale=512.)\n_base_ = ['a.py']\n", "another file"),
        ("fp16 = dict(loss_scale=512.)\noptimizer_config = dict(type='MyHook')\n", "names a hook already"),
        ("fp16 = get()\noptimizer_config = dict()\n", "not a plain dict"),
        ("optim_wrapper = dict(type='ApexOptimWrapper')\n", "needs apex.amp"),
        ("optim_wrapper = {'type': 'ApexOptimWrapper'}\n", "needs apex.amp"),
    ],
)
def test_configs_that_stay(text: str, reason: str) -> None:
    ((_, why),) = left(text)
    assert reason in why


def test_an_empty_optimizer_config_is_filled() -> None:
    text = "optimizer_config = dict()\nfp16 = dict(loss_scale='dynamic')\n"
    assert becomes(text) == "optimizer_config = dict(type='Fp16OptimizerHook', loss_scale='dynamic')\n"


def test_fp16_in_other_code_is_no_config() -> None:
    assert left("fp16 = dict(loss_scale=1)\n") == []
    script = "optimizer_config = dict()\nfp16 = dict(loss_scale=1)\nHook(**optimizer_config, **fp16)\n"
    assert (becomes(script), left(script)) == (script, [])


@pytest.mark.parametrize(
    "text",
    [
        "from apex import amp\nprint 'python 2'\n",
        "from apex import amp\nif:\n",
        "# coding: klingon\nimport apex\n",
    ],
)
def test_what_cannot_be_read_is_said_and_left(text: str) -> None:
    result = rewrite(text.encode(), "amp")
    assert result.unreadable
    assert result.source == text.encode()
    assert len(result.findings) == 1


def test_what_clips_gradients_of_the_model_clips_those_of_the_masters() -> None:
    clip = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    old = LOOP.replace("    optimizer.step()", f"{clip}    optimizer.step()")
    assert old.count(clip) == 1
    assert clip.replace("model.parameters", "engine.main_params") in becomes(old, "halfpeak")


def test_a_star_is_kept_where_the_names_are_the_same() -> None:
    old = "from apex.fp16_utils import *\nmodel = network_to_half(model)\n"
    assert becomes(old, "amp") == old.replace("apex", "halfpeak.amp")
    left = rewrite(old.encode(), "torch")
    assert (left.source, left.findings[0].reason) == (old.encode(), "it does not say which names it imports")
