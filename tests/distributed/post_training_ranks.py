"""Ranks of ``test_examples.py``: gather the weights of the policy of ``examples/native/post_training.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfpeak
from distributed.sharded_ranks import full
from halfpeak.distributed import fully_shard
from laws.source import ROOT


class NewMemory(TorchDispatchMode):
    """The dtypes of the tensors that operations return in memory that they have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch dispatches again with the operations inside the DTensor
        known = set(map(_memory_of, filter(_has_memory, tree_leaves((args, kwargs)))))
        found = func(*args, **(kwargs or {}))
        fresh = (leaf for leaf in tree_leaves(found) if _has_memory(leaf) and _memory_of(leaf) not in known)
        self.dtypes |= {str(leaf.dtype) for leaf in fresh}
        return found


def _has_memory(leaf: Any) -> bool:
    return type(leaf) in (Tensor, Parameter) and leaf.numel() > 0


def _memory_of(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(
        "example", ROOT / "examples" / "native" / "post_training.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    policy = fully_shard(example.Policy(16), "O2")
    halfpeak.prepare(policy, torch.optim.AdamW(policy.parameters()), "O2")
    with NewMemory() as memory:
        whole = dict(example.whole_weights(policy, torch.float16))
    rounded = {name: full(value).half() for name, value in policy.named_parameters()}
    return {"gathered": {"whole": whole, "rounded": rounded, "dtypes": sorted(memory.dtypes)}}
