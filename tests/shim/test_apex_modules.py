"""``apex.normalization``, ``apex.multi_tensor_apply`` with ``amp_C``, ``apex.fp16_utils``, and apex's other modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak.amp import fp16_utils as native_utils
from halfpeak.amp import multi_tensor

pytestmark = pytest.mark.usefixtures("apex_installed")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = normed if weight is None else normed * weight.double()
    return normed if bias is None else normed + bias.double()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


CLASSES = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
LOW = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_norms_are_right_and_return_the_dtype_that_apex_does(
    name: str, given: torch.dtype, stored: torch.dtype
) -> None:
    from apex import normalization

    module: Any = getattr(normalization, name)(8)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.to(stored)
    x = torch.randn(5, 8).to(given).requires_grad_()
    y = module(x)
    assert y.dtype == (stored if name.startswith("Mixed") else given)
    bias = getattr(module, "bias", None)
    is_rms = "RMS" in name
    wanted = rms_norm(x, module.weight, 1e-5) if is_rms else layer_norm(x, module.weight, bias, 1e-5)
    error = LOW[y.dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=error, atol=error)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == given
    assert {p.grad.dtype for p in module.parameters()} == {stored}


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_have_the_names_of_apex(name: str) -> None:
    from apex import normalization
    from apex.normalization import fused_layer_norm

    module = getattr(normalization, name)((3, 4), eps=1e-3, memory_efficient=True)
    names = {"weight"} if "RMS" in name else {"weight", "bias"}
    assert set(module.state_dict()) == names
    assert (tuple(module.normalized_shape), module.eps) == ((3, 4), 1e-3)
    assert getattr(fused_layer_norm, name) is getattr(normalization, name)
    if name.startswith("Mixed"):
        with pytest.raises(RuntimeError, match="needs elementwise_affine=True"):
            getattr(normalization, name)(4, elementwise_affine=False)
    else:
        bare = getattr(normalization, name)(4, elementwise_affine=False)
        x = torch.randn(2, 4)
        wanted = rms_norm(x, None, 1e-5) if "RMS" in name else layer_norm(x, None, None, 1e-5)
        torch.testing.assert_close(bare(x).double(), wanted, rtol=1e-5, atol=1e-5)


def test_functions() -> None:
    from apex.normalization import fused_layer_norm as f

    x, weight, bias = torch.randn(2, 4).half(), torch.randn(4), torch.randn(4)
    layer, rms = layer_norm(x, weight, bias, 1e-6), rms_norm(x, weight, 1e-6)
    results = [
        (f.fused_layer_norm_affine(x, weight, bias, (4,)), layer, torch.float16),
        (f.mixed_dtype_fused_layer_norm_affine(x, weight, bias, (4,)), layer, torch.float32),
        (f.fused_layer_norm(x, 4), layer_norm(x, None, None, 1e-6), torch.float16),
        (f.fused_rms_norm_affine(x, weight, (4,)), rms, torch.float16),
        (f.mixed_dtype_fused_rms_norm_affine(x, weight, (4,)), rms, torch.float32),
        (f.fused_rms_norm(x, (4,)), rms_norm(x, None, 1e-6), torch.float16),
        (f.FusedLayerNormAffineFunction.apply(x, weight, bias, (4,), 1e-6), layer, torch.float16),
        (f.FusedLayerNormFunction.apply(x, (4,), 1e-6), layer_norm(x, None, None, 1e-6), torch.float16),
        (f.FusedRMSNormAffineFunction.apply(x, weight, (4,), 1e-6), rms, torch.float16),
        (f.FusedRMSNormFunction.apply(x, (4,), 1e-6), rms_norm(x, None, 1e-6), torch.float16),
        (f.manual_rms_norm(x, (4,), weight, 1e-6), rms, torch.float32),
        (f.manual_rms_norm(x, (4,), weight.half(), 1e-6), rms, torch.float16),
    ]
    for found, wanted, dtype in results:
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("norms", "kept"), [("batchnorm", torch.float16), ("all", torch.float32)])
def test_fused_norms_at_o2(norms: str, kept: torch.dtype) -> None:
    from apex import amp
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    model = nn.Sequential(nn.Linear(4, 8), FusedLayerNorm(8), FusedRMSNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, norms=norms)
    assert [model[i].weight.dtype for i in range(4)] == [torch.float16, kept, kept, torch.float16]
    assert model(torch.randn(3, 4)).dtype == torch.float32


def test_amp_c_has_no_steps() -> None:
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    assert multi_tensor_applier.available
    with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_adam; docs/compat/apex\.md lists"):
        amp_C.multi_tensor_adam  # noqa: B018


def test_the_older_optimizers_are_the_newer_ones() -> None:
    from apex import fp16_utils, optimizers
    from apex.contrib import optimizers as older
    from apex.contrib.optimizers.fused_adam import FusedAdam

    assert FusedAdam is older.FusedAdam is optimizers.FusedAdam
    assert older.FusedLAMB is optimizers.FusedLAMB
    assert older.FusedSGD is optimizers.FusedSGD
    assert older.FP16_Optimizer is fp16_utils.FP16_Optimizer


def test_operations_on_lists_and_fp16_utils_are_those_of_halfpeak() -> None:
    import amp_C
    import apex_C
    from apex import fp16_utils

    assert all(getattr(amp_C, name) is getattr(multi_tensor, name) for name in amp_C.__all__)
    assert all(getattr(fp16_utils, name) is getattr(native_utils, name) for name in fp16_utils.__all__)
    x = [torch.full((3,), 4.0)]
    flat = apex_C.flatten(x + x)
    assert torch.equal(apex_C.unflatten(flat, x + x)[1], x[0])


def test_the_warning_of_25_04_is_there_to_be_filtered() -> None:
    import apex

    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="gone"):
        apex.deprecated_warning("gone")
