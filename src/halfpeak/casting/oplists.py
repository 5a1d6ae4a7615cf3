"""Which torch operations run low, in float32, in the widest dtype of their inputs, or not at all: data only.

The lists are apex's (25.04, with ``bmm`` and its kin low, as on CUDA 9.1 and later). Operations that apex does not list
follow torch's CUDA autocast list, if they are in it. The lists are the same on every device and for both low dtypes: a run
on a laptop shows what happens on the accelerator, and O4 is O1 with another dtype. (apex's ROCm fork leaves ``prelu`` and
``bmm`` out of its bfloat16 list; halfpeak does not, because bfloat16 has float32's range.)

Names are those under which torch dispatches a call to ``__torch_function__``. Operators are dispatched as methods
(``x - y`` is ``Tensor.sub``, ``x += y`` is ``Tensor.add_``), so the rule of an operator also holds for the method. A name
that the installed torch lacks is skipped.
"""

from __future__ import annotations

from typing import Final

Rows = tuple[tuple[str, str], ...]
"""Pairs of an owner (a module or class, as a dotted path) and names in it, separated by spaces."""

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
_PRODUCTS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm prelu"
_POINTWISE_FP32 = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan"
_FP32 = f"{_POINTWISE_FP32} pow cumprod cumsum dist norm prod std sum var renorm"
_PROMOTE = "addcdiv addcmul atan2 cross dot"
_ARITHMETIC = (
    "add sub mul div subtract multiply divide true_divide eq ge gt le lt ne greater greater_equal less "
    "less_equal not_equal"
)

LOW: Final[Rows] = (
    # apex's list
    ("torch.nn.functional", f"{_CONVOLUTIONS} linear prelu"),
    ("torch", f"{_CONVOLUTIONS} {_PRODUCTS}"),
    ("torch.Tensor", f"{_PRODUCTS} __matmul__ __rmatmul__"),
    # recurrent networks: every weight is cast by itself, so no layout is assumed
    ("torch", "rnn_tanh rnn_relu gru lstm rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell"),
    # torch's list
    ("torch", "convolution einsum chain_matmul"),
    ("torch.nn.functional", "scaled_dot_product_attention"),
    ("torch.linalg", "multi_dot vecdot matmul"),
)
"""Floating arguments are cast to the low dtype; weights are cast once and cached."""

FLOAT32: Final[Rows] = (
    # apex's list
    (
        "torch.nn.functional",
        "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
        "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
        "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
        "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss",
    ),
    ("torch", _FP32),
    ("torch.Tensor", f"{_FP32} __pow__ __rpow__"),
    # torch's list
    ("torch.nn.functional", "huber_loss rms_norm pairwise_distance pdist"),
    (
        "torch",
        "log1p softmax log_softmax logsumexp layer_norm native_layer_norm rms_norm group_norm cosine_similarity cdist "
        "pdist pairwise_distance frobenius_norm nuclear_norm poisson_nll_loss cosine_embedding_loss ctc_loss "
        "hinge_embedding_loss kl_div margin_ranking_loss triplet_margin_loss binary_cross_entropy_with_logits",
    ),
    ("torch.Tensor", "log1p softmax log_softmax logsumexp"),
    ("torch.linalg", "norm vector_norm matrix_norm"),
    # other names of the same operations
    ("torch", "arccos arcsin"),
    ("torch.Tensor", "arccos arcsin"),
    ("torch.special", "erfinv expm1 log1p softmax log_softmax logsumexp"),
)
"""Floating arguments are cast to float32."""

UPCAST: Final[Rows] = (
    # apex's list
    ("torch.Tensor", "cpu"),
    # no kernels for bfloat16, and for float16 only on accelerators, for sizes that are powers of two
    ("torch", "stft"),
    ("torch.Tensor", "stft"),
    (
        "torch.fft",
        "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 hfft2 ihfft2 fftn ifftn rfftn irfftn hfftn ihfftn",
    ),
)
"""Low arguments are cast to float32; wider ones are left as they are."""

PROMOTE: Final[Rows] = (
    # apex's list. `cat` and `stack`, its other half, need no rule: torch itself gives the widest dtype there
    ("torch", f"{_PROMOTE} bilinear equal"),
    ("torch.Tensor", f"{_PROMOTE} equal __rdiv__ __rtruediv__"),
    # torch's list
    ("torch", "vdot inner tensordot scatter_add index_put grid_sampler grid_sampler_2d grid_sampler_3d"),
    ("torch.Tensor", "vdot inner scatter_add index_put"),
    # other names of the same operations
    ("torch", "rsub arctan2"),
    ("torch.Tensor", "arctan2"),
    ("torch.linalg", "cross"),
)
"""Where low and float32 arguments meet, also 0-dimensional ones, the low ones are cast to float32."""

ARITHMETIC: Final[Rows] = (
    # apex's list, and other names of the same operations
    ("torch", _ARITHMETIC),
    (
        "torch.Tensor",
        f"{_ARITHMETIC} __add__ __div__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rmul__ "
        "__rsub__ __sub__ __truediv__",
    ),
)
"""As :data:`PROMOTE`; torch's own promotion is the same where every tensor has a dimension."""

CAST_TO_SELF: Final[Rows] = (
    # apex's list
    (
        "torch.Tensor",
        "addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_",
    ),
    # apex rebinds the name to a new float32 tensor here; halfpeak writes in place, as the operator promises
    ("torch.Tensor", "__iadd__ __isub__ sub_ __imul__ __idiv__ __itruediv__ __ipow__"),
    # other names of the same operations
    (
        "torch.Tensor",
        "subtract_ multiply_ divide_ true_divide_ arctan2_ greater_ greater_equal_ less_ less_equal_ not_equal_",
    ),
)
"""The tensor written to keeps its dtype and storage; the other floating arguments are cast to its dtype."""

BANNED_IN_PLACE: Final[Rows] = (
    ("torch", " ".join(f"{name}_" for name in _POINTWISE_FP32.split())),
    ("torch.Tensor", " ".join(f"{name}_" for name in f"{_POINTWISE_FP32} pow cumprod cumsum renorm".split())),
)
"""An error on a low tensor, which cannot hold the float32 result."""

BANNED: Final[Rows] = (("torch.nn.functional", "binary_cross_entropy"),)
"""An error if any floating argument is low, because the gradient overflows float16."""

COMPOSITE: Final[Rows] = (
    (
        "torch.nn.functional",
        "multi_head_attention_forward gumbel_softmax gaussian_nll_loss triplet_margin_with_distance_loss lp_pool1d "
        "lp_pool2d lp_pool3d linear_cross_entropy",
    ),
    # backward runs Python code too: recomputed checkpoints, autograd functions, hooks
    ("torch.Tensor", "backward"),
    ("torch.autograd", "backward grad"),
)
"""Functions written in Python that torch dispatches as one call. The rules above apply to the calls that they make."""

CALLS_ARGUMENT: Final[Rows] = (("torch._higher_order_ops.wrap", "tag_activation_checkpoint"),)
"""What :func:`torch.compile` dispatches for ``torch.utils.checkpoint.checkpoint``: it calls its first argument."""

EXPOSES_MEMORY: Final[Rows] = (
    (
        "torch.Tensor",
        "data.__get__ numpy __array__ untyped_storage storage _typed_storage data_ptr __dlpack__ "
        "__cuda_array_interface__.__get__ share_memory_",
    ),
)
"""Calls that expose a tensor's memory, which can then be written without increasing the tensor's version counter."""

UNCOUNTED_WRITES: Final[Rows] = (
    ("torch.Tensor", "data.__set__ set_"),
    ("torch", "_fused_adam_ _fused_adamw_ _fused_adagrad_ _fused_sgd_"),
    ("torch.distributed", "all_reduce broadcast recv reduce scatter"),
)
"""Calls that write tensors without increasing their version counters."""

CALL_AS_FUNCTION: Final[Rows] = (("torch.Tensor", "unflatten"),)
"""Methods whose Python body :func:`torch.compile` cannot trace inside a function mode, because it calls ``super()``."""
