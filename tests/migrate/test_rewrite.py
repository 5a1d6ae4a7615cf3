"""The rules of ``migrate``, one by one: what a line becomes, and which lines stay, with the reason given."""

from __future__ import annotations

import ast
from importlib import import_module
from textwrap import dedent

import pytest

pytest.importorskip("libcst")

from halfpeak.amp import __all__ as names_of_amp
from halfpeak.migrate import Target, rewrite
from halfpeak.shim.mmcv import MMCV


def becomes(text: str, to: Target = "halfpeak") -> str:
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
        ("import apex.amp", "import halfpeak.amp"),
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
            "from halfpeak.amp.fp16_utils import FP16_Optimizer",
        ),
        (
            "from apex.contrib.optimizers.fused_adam import FusedAdam",
            "from halfpeak.amp.optimizers import FusedAdam",
        ),
        (
            "from apex.optimizers.fused_lamb import FusedLAMB",
            "from halfpeak.amp.optimizers import FusedLAMB",
        ),
        (
            "from amp_C import multi_tensor_scale",
            "from halfpeak.amp.multi_tensor import multi_tensor_scale",
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
        (
            "if x: from apex import amp, optimizers",
            "if x: from halfpeak import amp; from halfpeak.amp import optimizers",
        ),
        ("from torch.cuda.amp import GradScaler", "from halfpeak import GradScaler"),
        ("from torch.cuda.amp.grad_scaler import GradScaler", "from halfpeak import GradScaler"),
        ("from torch.cuda.amp import autocast", "from torch.amp import autocast"),
        ("import torch.cuda.amp", "import torch"),
        ("import torch\nimport torch.cuda.amp  # mixed\nx = 1", "import torch\n# mixed\nx = 1"),
        ("import torch\nimport torch.cuda.amp; x = 1", "import torch\nimport torch; x = 1"),
        ("import torch\nif x:\n    import torch.cuda.amp", "import torch\nif x:\n    import torch"),
        (
            "import torch.cuda.amp as tca\nwith tca.autocast(): pass",
            'import torch.amp as tca\nwith tca.autocast("cuda"): pass',
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
        (
            "torch.cuda.amp.custom_fwd(torch.cuda.amp.autocast()(f),)",
            'torch.amp.custom_fwd(torch.autocast("cuda")(f), device_type="cuda",)',
        ),
        ("isinstance(s, (int, torch.cuda.amp.GradScaler))", "isinstance(s, (int, torch.amp.GradScaler))"),
        (
            "torch.cuda.amp.autocast(\n    enabled=True,  # on\n)",
            'torch.autocast(\n    "cuda", enabled=True,  # on\n)',
        ),
    ],
)
def test_calls_of_torch(old: str, new: str) -> None:
    assert becomes(f"import torch\n{old}\n", "torch") == f"import torch\n{new}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DistributedDataParallel(m)", "DistributedDataParallel(m, broadcast_buffers=False)"),
        (
            "DistributedDataParallel(m, delay_allreduce=True)",
            "DistributedDataParallel(m, broadcast_buffers=False)",
        ),
        (
            "DistributedDataParallel(delay_allreduce=True, message_size=1, module=m, prof=False)",
            "DistributedDataParallel(module=m, broadcast_buffers=False)",
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from mmcv.runner import auto_fp16", "from halfpeak.runner import auto_fp16"),
        ("from mmcv.runner import load_checkpoint", "from halfpeak.runner import load_checkpoint"),
        (
            "from mmcv.runner.hooks.optimizer import OptimizerHook",
            "from halfpeak.runner import OptimizerHook",
        ),
        (
            "from mmcv.runner import _load_checkpoint",
            "from halfpeak.runner.checkpoint import load_file as _load_checkpoint",
        ),
        (
            "from mmcv.runner import force_fp32\nfrom mmcv.parallel import MMDistributedDataParallel, MMDataParallel",
            "from halfpeak.runner import force_fp32\nfrom halfpeak.runner import MMDistributedDataParallel, MMDataParallel",
        ),
        ("from mmcv.utils import get_logger", "from halfpeak.runner.utilities import get_logger"),
        (
            "import mmcv\nmmcv.mkdir_or_exist('a')",
            "import halfpeak.runner.utilities\nhalfpeak.runner.utilities.mkdir_or_exist('a')",
        ),
        (
            "from mmcv.runner import hooks\nclass Own(hooks.Hook): pass",
            "import halfpeak.runner\nclass Own(halfpeak.runner.Hook): pass",
        ),
    ],
)
def test_names_of_mmcv(old: str, new: str) -> None:
    assert becomes(old + "\n") == new + "\n"


def test_a_name_of_mmcv_becomes_what_the_shim_gives_for_it() -> None:
    """``halfpeak run --shim mmcv`` and ``halfpeak migrate`` give the same objects."""
    for module in MMCV.modules:
        for name, make in dict(MMCV.row(module)).items():
            if name != "__version__" and f"{module}.{name}" not in MMCV.modules:
                _, new, _, found, *_ = becomes(f"from {module} import {name}\n").split()
                assert getattr(import_module(new), found) is make(), f"{module}.{name}"


@pytest.mark.parametrize(
    ("text", "line", "write"),
    [
        ("from mmcv.cnn import ConvModule\nConvModule(3, 4, 1)\nConvModule(3, 4, 1)\n", 1, "mmcv 2"),
        ("from mmcv.utils import Config\n", 1, "mmengine"),
        ("from mmcv.parallel import collate\n", 1, "torch.utils.data.default_collate"),
        ("from mmcv.runner import no_such_name\n", 1, "docs/compat/mmcv.md"),
        ("import mmcv.ops\nmmcv.ops.nms(boxes)\n", 1, "mmcv 2"),
        ("import mmcv\ncfg = mmcv.Config.fromfile(path)\n", 2, "mmengine"),
        ("import mmcv\n", 1, "remove the import"),
        ("from mmcv.runner import *\n", 1, "import each name"),
    ],
)
def test_names_of_mmcv_that_halfpeak_has_not_are_left(text: str, line: int, write: str) -> None:
    (finding,) = rewrite(text.encode(), "halfpeak").findings
    assert left(text) == [(line, finding.reason)]
    assert write in finding.write


def test_names_of_mmcv_that_halfpeak_has_not_stay_beside_those_it_has() -> None:
    result = rewrite(b"from mmcv.runner import auto_fp16, no_such_name, force_fp32\n", "halfpeak")
    assert result.source.decode().splitlines() == [
        "from mmcv.runner import no_such_name",
        "from halfpeak.runner import auto_fp16, force_fp32",
    ]
    assert [finding.code for finding in result.findings] == ["mmcv.runner.no_such_name"]


def test_comments_formatting_line_ends_tabs_and_the_mark_of_utf8_stay() -> None:
    old = "\ufeff# coding: utf-8\r\nif 1 :\r\n\tfrom apex import (  amp ,  # mixed\r\n\t)\r\n"
    old += "\tx = {'a' :1}  # größe\r\n\t\r\n\x0c\r\n"
    assert rewrite(old.encode(), "halfpeak").source.decode() == old.replace("apex", "halfpeak")
    latin = "# -*- coding: latin-1 -*-\nfrom apex import amp  # größe\n".encode("latin-1")
    assert rewrite(latin, "halfpeak").source == latin.replace(b"apex", b"halfpeak")


def test_comments_between_names_that_part_go_above_them() -> None:
    old = """\
        def f():
            from apex import (
                amp,  # mixed precision
                optimizers,
            )  # apex
        """
    new = """\
        def f():
            # mixed precision
            from halfpeak import amp
            from halfpeak.amp import optimizers  # apex
        """
    assert becomes(old) == dedent(new)


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
        ("from apex.parallel import create_syncbn_process_group as c\nc(4)\n", 1, "made by torch"),
        ("from apex.parallel import SyncBatchNorm\nSyncBatchNorm(3, fuse_relu=True)\n", 2, "fuse_relu"),
        ("from apex.normalization import MixedFusedLayerNorm as N\nN(3)\n", 1, "different dtypes"),
        ("from apex.normalization import FusedRMSNorm as N\nN(*shape)\n", 2, "unpacked"),
        (
            "from apex.normalization import FusedLayerNorm as N\nN(3, 1e-5, True, True)\n",
            2,
            "other arguments",
        ),
        ("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss\n", 1, "no counterpart"),
        ("from apex.amp import *\n", 1, "does not say which"),
        ("import apex\n", 1, "nothing in this file uses it"),
        (
            "def has():\n    try:\n        import apex\n    except ImportError: pass\n",
            3,
            "asks whether it is installed",
        ),
        ("import importlib.util as u\nu.find_spec('apex')\n", 2, "checks for an installed apex"),
        ("from importlib.metadata import version\nversion('apex')\n", 2, "checks for an installed apex"),
        ("import importlib\nimportlib.import_module('mmcv.ops')\n", 2, "checks for an installed mmcv"),
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
    found = left(text)
    assert any(at == line and reason in why for at, why in found), found


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("from apex import amp\namp.initialize(model)\namp.state_dict()\n", 1, "torch.amp has other calls"),
        ("from apex import amp\n", 1, "torch.amp has other calls"),
        ("import apex\napex.amp.initialize(model)\n", 2, "torch.amp has other calls"),
        ("from apex.optimizers import FusedAdam\n", 1, "the defaults of torch's optimizer differ"),
        ("from mmcv.runner import auto_fp16\n", 1, "torch has no counterpart"),
        ("from apex.fp16_utils import *\n", 1, "it does not say which names it imports"),
    ],
)
def test_what_only_halfpeak_has_is_left_to_torch(text: str, line: int, reason: str) -> None:
    assert left(text, "torch") == [(line, reason)]


def test_one_use_that_stays_keeps_the_name_for_all() -> None:
    text = "from torch.cuda.amp import autocast\nwith autocast(): pass\nf = autocast\n"
    assert [line for line, _ in left(text)] == [3]


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
    assert left(text) == [(5, "it may be torch.cuda.amp.autocast or torch.npu.amp.autocast")]


@pytest.mark.parametrize(
    "text",
    [
        # What every module has is looked up in the new one.
        "from apex import amp\nif 'load_state_dict' in amp.__dict__ and amp.__path__:\n    pass\n",
        # A shadowed name is another name.
        "from apex import amp\n\n\ndef gain(amp):\n    return amp.initialize(1)\n",
        # A guarded import leaves None behind.
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nif amp is not None:\n    amp.state_dict()\n",
    ],
)
def test_only_the_import_changes(text: str) -> None:
    assert becomes(text) == text.replace("apex", "halfpeak")


def test_a_star_is_kept_where_the_names_are_the_same() -> None:
    old = "from apex.fp16_utils import *\nmodel = network_to_half(model)\n"
    assert becomes(old) == old.replace("apex", "halfpeak.amp")


def test_other_code_is_not_even_parsed() -> None:
    assert rewrite(b"example = this is not python", "halfpeak").source == b"example = this is not python"


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


def test_an_entry_that_is_none_asks_for_nothing() -> None:
    assert left("fp16 = None\noptimizer_config = dict()\n") == []


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
    result = rewrite(text.encode(), "halfpeak")
    assert result.unreadable
    assert result.source == text.encode()
    assert len(result.findings) == 1
