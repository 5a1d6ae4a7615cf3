"""timm's own ApexScaler, unchanged, on ``from apex import amp`` of the shim."""

from __future__ import annotations

import json

import pytest

from support.forks import python

SCRIPT = """
import importlib.util, json, sys
from importlib import metadata
from types import ModuleType

import torch
from torch import nn

import halfpeak
import halfpeak.shim

halfpeak.shim.install()
from apex import amp
from integrations.plain_loop import adamw, batches, plain_run
from support.nets import make_net

for package in ("timm", "timm.utils"):  # importing timm itself needs torchvision, and these files torch alone
    sys.modules[package] = ModuleType(package)
for name in ("timm.utils.agc", "timm.utils.clip_grad", "timm.utils.cuda"):
    path = next(f.locate() for f in metadata.files("timm") if str(f) == name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
cuda = sys.modules["timm.utils.cuda"]
assert cuda.has_apex and cuda.amp is amp

def different(level):
    net = make_net()
    model, optimizer = amp.initialize(net, adamw(net.parameters()), opt_level=level, verbosity=0, norms="all")
    loss_scaler = cuda.ApexScaler()

    def train(part):
        for x, y in part:
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss_scaler(loss, optimizer, clip_grad=0.01, parameters=model.parameters())
            optimizer.zero_grad()

    train(batches()[:5])
    saved = loss_scaler.state_dict()
    loss_scaler.load_state_dict(saved)
    train(batches()[5:])
    clip = lambda parameters: nn.utils.clip_grad_norm_(list(parameters), 0.01)
    found = {name: value.float() for name, value in net.state_dict().items()}
    scale = saved["loss_scaler0"]["loss_scale"]
    amp._amp_state.handle and amp._amp_state.handle._deactivate()
    expected, _ = plain_run(level, clip=clip, scale=halfpeak.ScaleConfig())
    return [scale, [name for name in expected if not torch.equal(found[name], expected[name])]]

print(json.dumps([different(level) for level in ("O1", "O2")]))
"""


def test_the_run_is_the_engines_bit_for_bit() -> None:
    done = python("-c", SCRIPT)
    if "PackageNotFoundError" in done.stderr:
        pytest.skip("timm is not installed")
    assert done.returncode == 0, done.stderr
    for scale, different in json.loads(done.stdout.splitlines()[-1]):
        assert different == []
        assert scale < 2.0**16
