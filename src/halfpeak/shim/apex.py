"""The table of ``install("apex")``: the modules of apex 25.04, where their names come from, and what is absent.

The table includes the extra names of apex's ROCm fork. It is Python rather than TOML because rows share messages and
lists of names, no parser is needed, and every wheel contains it like any other module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halfpeak.shim.apex_impl.initialize import set_up
from halfpeak.shim.spec import Shim

_CASTS: Final = (
    "bfloat16_function float_function half_function init promote_function register_bfloat16_function "
    "register_float_function register_half_function register_promote_function"
)
_FP16_UTILS: Final = (
    "BN_convert_float FP16Model clip_grad_norm convert_module convert_network master_params_to_model_params "
    "model_grads_to_master_grads network_to_half prep_param_lists to_python_float tofp16"
)
_NORMS: Final = "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"
_NORM_FUNCTIONS: Final = (
    "fused_layer_norm fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine manual_rms_norm "
    "mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine FusedLayerNormAffineFunction "
    "FusedLayerNormFunction FusedRMSNormAffineFunction FusedRMSNormFunction"
)
_OPTIMIZERS: Final[Mapping[str, str]] = {
    "fused_adagrad": "FusedAdagrad",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLAMB",
    "fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "fused_novograd": "FusedNovoGrad",
    "fused_sgd": "FusedSGD",
}
_CONTRIB: Final[Mapping[str, tuple[str, str]]] = {
    "fp16_optimizer": ("halfpeak.amp.fp16_utils", "FP16_Optimizer"),
    "fused_adam": ("halfpeak.amp.optimizers", "FusedAdam"),
    "fused_lamb": ("halfpeak.amp.optimizers", "FusedLAMB"),
    "fused_sgd": ("halfpeak.amp.optimizers", "FusedSGD"),
}
_OVERRIDES: Final = "MODULE FP16_FUNCS FP32_FUNCS CASTS"

_MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    "apex": {"halfpeak.shim.apex_impl.deprecation": "DeprecatedFeatureWarning deprecated_warning"},
    "apex.amp": {
        ".": "lists",
        "._amp_state": "_amp_state master_params",
        ".amp": _CASTS,
        ".frontend": "initialize load_state_dict state_dict",
        ".handle": "disable_casts scale_loss",
    },
    "apex.amp._amp_state": {
        "halfpeak.amp": "master_params",
        "halfpeak.amp.session": "AmpState _amp_state maybe_print warn_or_err",
    },
    "apex.amp._process_optimizer": {"halfpeak.shim.apex_impl.initialize": "AmpOptimizerState"},
    "apex.amp.amp": {"halfpeak.amp": _CASTS},
    "apex.amp.frontend": {
        "halfpeak.amp": "load_state_dict state_dict",
        "halfpeak.amp.properties": "Properties opt_levels",
        "halfpeak.shim.apex_impl.initialize": "O0 O1 O2 O3 O4 O5 initialize",
    },
    "apex.amp.handle": {
        "halfpeak.amp": "disable_casts scale_loss",
        "halfpeak.amp.ambient": "AmpHandle=Handle NoOpHandle=Handle",
    },
    "apex.amp.lists": {".": "functional_overrides tensor_overrides torch_overrides"},
    **{
        f"apex.amp.lists.{name}": {f"halfpeak.shim.apex_impl.op_lists:{name}": _OVERRIDES}
        for name in ("functional_overrides", "tensor_overrides", "torch_overrides")
    },
    "apex.amp.scaler": {"halfpeak.amp.scaler": "LossScaler"},
    "apex.contrib": {},
    "apex.contrib.optimizers": {f".{module}": name for module, (_, name) in _CONTRIB.items()},
    **{f"apex.contrib.optimizers.{module}": {source: name} for module, (source, name) in _CONTRIB.items()},
    "apex.fp16_utils": {
        ".fp16_optimizer": "FP16_Optimizer",
        ".fp16util": _FP16_UTILS,
        ".loss_scaler": "DynamicLossScaler LossScaler",
    },
    "apex.fp16_utils.fp16_optimizer": {"halfpeak.amp.fp16_utils.fp16_optimizer": "FP16_Optimizer"},
    "apex.fp16_utils.fp16util": {"halfpeak.amp.fp16_utils": _FP16_UTILS},
    "apex.fp16_utils.loss_scaler": {
        "halfpeak.amp.fp16_utils.loss_scaler": "DynamicLossScaler LossScaler",
        "halfpeak.amp.fp16_utils": "to_python_float",
    },
    "apex.multi_tensor_apply": {".multi_tensor_apply": "MultiTensorApply multi_tensor_applier"},
    "apex.multi_tensor_apply.multi_tensor_apply": {
        "halfpeak.amp.multi_tensor": "MultiTensorApply multi_tensor_applier",
    },
    "apex.normalization": {".fused_layer_norm": _NORMS},
    "apex.normalization.fused_layer_norm": {
        "halfpeak.shim.apex_impl.layer_norm": f"{_NORMS} {_NORM_FUNCTIONS}",
    },
    "apex.optimizers": {f".{module}": name for module, name in _OPTIMIZERS.items()},
    **{
        f"apex.optimizers.{module}": {"halfpeak.amp.optimizers": name} for module, name in _OPTIMIZERS.items()
    },
    "apex.parallel": {
        ".LARC": "LARC",
        ".distributed": "DistributedDataParallel ReduceOp Reducer",
        ".sync_batchnorm": "SyncBatchNorm convert_syncbn_model create_syncbn_process_group",
    },
    "apex.parallel.LARC": {"halfpeak.amp.larc": "LARC"},
    "apex.parallel.distributed": {
        "halfpeak.shim.apex_impl.collectives": "Reducer flat_dist_call",
        "halfpeak.shim.apex_impl.ddp": "DistributedDataParallel",
        "torch.distributed": "ReduceOp",
    },
    "apex.parallel.optimized_sync_batchnorm": {"halfpeak.shim.apex_impl.syncbn": "SyncBatchNorm"},
    "apex.parallel.sync_batchnorm": {
        "halfpeak.shim.apex_impl.collectives": "create_syncbn_process_group",
        "halfpeak.shim.apex_impl.syncbn": "SyncBatchNorm convert_syncbn_model",
    },
    "amp_C": {
        "halfpeak.amp.multi_tensor": (
            "multi_tensor_axpby multi_tensor_l2norm multi_tensor_scale multi_tensor_unscale_l2norm "
            "update_scale_hysteresis"
        ),
    },
    "apex_C": {"torch._utils": "flatten=_flatten_dense_tensors unflatten=_unflatten_dense_tensors"},
}

_LINEAR: Final = "use torch.nn.Linear, which torch.compile fuses with what follows"

_ABSENT: Final[Mapping[str, str]] = {
    "apex.amp.opt": "use amp.initialize and amp.scale_loss",
    "apex.RNN": "use torch.nn.LSTM, GRU and RNN, which amp casts",
    "apex.contrib": "its kernels need CUDA; use the functions of torch.nn, which torch.compile fuses",
    "apex.contrib.clip_grad": "use torch.nn.utils.clip_grad_norm_",
    "apex.contrib.multihead_attn": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.optimizers": "use torch.distributed.fsdp.fully_shard for sharded optimizers",
    "apex.contrib.sparsity": "use torch.sparse.to_sparse_semi_structured",
    "apex.contrib.xentropy": "use torch.nn.functional.cross_entropy",
    "apex.fused_dense": _LINEAR,
    "apex.mlp": _LINEAR,
    "apex.optimizers": "use torch.optim, or halfpeak.fused",
    "apex.optimizers.FP16_Optimizer": "import it from apex.fp16_utils",
    "apex.parallel.multiproc": "use torchrun",
    "apex.pyprof": "use torch.profiler",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "use Megatron-Core, which took it over",
}

APEX: Final = Shim(
    modules=_MODULES,
    table=__file__,
    distribution="apex",
    version="0.1+halfpeak",  # every release of apex has version 0.1
    absent=_ABSENT,
    setup=set_up,
    page="docs/compat/apex.md",
)
