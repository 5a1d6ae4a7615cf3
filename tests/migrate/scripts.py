"""Runs old scripts, and their migrated versions, in this process."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfpeak import amp, runner
from halfpeak.amp import fp16_utils, larc, multi_tensor
from halfpeak.amp.session import _amp_state
from halfpeak.migrate import Rewritten, Target, rewrite

CORPUS = Path(__file__).parent / "corpus"
SCRIPTS = sorted(path.stem for path in CORPUS.glob("*.py"))


def source(name: str) -> bytes:
    return (CORPUS / f"{name}.py").read_bytes()


@cache
def rewritten(name: str, to: Target) -> Rewritten:
    return rewrite(source(name), to)


def run(text: bytes | str, name: str, arguments: Sequence[str] = ()) -> list[Tensor]:
    """Run a script with the old libraries importable under their names; return its losses."""
    if "state_dict" in str(text):
        gc.collect()  # amp.state_dict has the scales of all live runs
    namespace = {"__name__": "__main__", "__file__": name}
    with warnings.catch_warnings(), old_libraries(), argv([name, *arguments]):
        warnings.simplefilter("ignore")  # of torch: CUDA is missing, torch.cuda.amp is deprecated
        exec(compile(text, name, "exec"), namespace)
    losses = [loss.detach().clone() for loss in namespace["losses"]]  # type: ignore[attr-defined]
    namespace.clear()
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    assert losses
    return losses


@contextmanager
def argv(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def old_libraries() -> Iterator[None]:
    """Make the parts of apex and mmcv 1.x that the corpus uses importable: halfpeak's modules, and torch's layers."""
    fake = {
        "apex": {"amp": amp, "fp16_utils": fp16_utils},
        "apex.amp": amp,
        "apex.fp16_utils": fp16_utils,
        "apex.multi_tensor_apply": multi_tensor,
        "amp_C": multi_tensor,
        "apex.parallel": {
            "DistributedDataParallel": nn.parallel.DistributedDataParallel,
            "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
        },
        "apex.parallel.LARC": {"LARC": larc.LARC},
        "apex.normalization": {"FusedLayerNorm": nn.LayerNorm, "FusedRMSNorm": ApexRMSNorm},
        "apex.normalization.fused_layer_norm": {"FusedLayerNorm": nn.LayerNorm},
        "mmcv": {"runner": runner},
        "mmcv.runner": runner,
        "mmcv.runner.fp16_utils": runner,
    }
    made = {
        name: value if isinstance(value, types.ModuleType) else module(name, value)
        for name, value in fake.items()
    }
    made["apex"].parallel = made["apex.parallel"]  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def module(name: str, values: dict[str, Any]) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(values, __path__=[])
    return made


class ApexRMSNorm(nn.RMSNorm):
    """Has apex's default of ``eps``, which differs from torch's."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **kwargs)
