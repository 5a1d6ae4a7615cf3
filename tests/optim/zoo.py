"""Configurations, and models with every kind of parameter that has a rule in ``paramwise_cfg``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SGD = {"type": "SGD", "lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9}

MULTIPLIERS = {
    "bias_lr_mult": 2.0,
    "bias_decay_mult": 0.5,
    "norm_decay_mult": 0.0,
    "dwconv_decay_mult": 0.1,
    "dcn_offset_lr_mult": 0.25,
    "flat_decay_mult": 0.3,
}


def cfg_of(optimizer: dict[str, Any], paramwise: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "OptimWrapper", "optimizer": optimizer, "paramwise_cfg": paramwise}


class Block(nn.Module):
    """A submodule with a parameter of its own, a bias without a module, and two kinds of norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(3, 3)
        self.gn = nn.GroupNorm(3, 3)
        self.ln = nn.LayerNorm(3)


class Zoo(nn.Module):
    """Every kind of parameter that has a rule, in the root module and in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.matrix = nn.Parameter(torch.ones(2, 2))
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.one_channel = nn.Conv2d(1, 4, 3)
        self.conv1d = nn.Conv1d(4, 4, 3, groups=4)
        self.bn = nn.BatchNorm2d(4)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.rms = nn.RMSNorm(4)
        self.embedding = nn.Embedding(3, 2)
        self.block = Block()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))])


class Tied(nn.Module):
    """Shared modules and a shared parameter, within one parent and across two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.block = Block()
        self.tail = nn.Sequential(nn.ReLU(), self.first, self.block.gn)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


class Roots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.bias = nn.Parameter(torch.zeros(2))


def frozen_zoo() -> nn.Module:
    model = Zoo()
    for part in (model.conv, model.bn, model.block.linear):
        part.requires_grad_(False)
    model.scale.requires_grad_(False)
    return model


def frozen_tied() -> nn.Module:
    model = Tied()
    model.first.requires_grad_(False)
    return model


class Deformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dcn = DeformConv2d()
        self.conv_offset = nn.Conv2d(2, 2, 1)  # not inside a DeformConv2d


class DeformConv2d(nn.Module):
    """Stands in for mmcv's class, which needs compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, 1, 1))
        self.bias = nn.Parameter(torch.zeros(2))
        self.conv_offset = nn.Conv2d(2, 2, 1)
        self.gate = nn.Conv2d(2, 2, 1)  # inside a DeformConv2d, but not its offsets
        self.other = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))


class Headed(nn.Module):
    """A model that is no parallel wrapper and has a submodule named ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)
