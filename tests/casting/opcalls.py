"""Arguments for one call of every function in the op lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfpeak.casting.oplists import Rows
from halfpeak.casting.torch_functions import functions

Make = Callable[..., Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def named(rows: Rows) -> list[tuple[str, Any]]:
    """Every function of ``rows`` that the installed torch has, with its path."""
    return [
        (f"{path}.{name}", function)
        for path, names in rows
        for name in names.split()
        for function in functions(((path, name),))
    ]


def arguments(path: str, *dtypes: torch.dtype) -> Call:
    """Arguments for the function at ``path``: the first tensor made has the first dtype, the others the last."""
    name = path.rsplit(".", 1)[1]
    name = ALIASES.get(name.strip("_"), name.strip("_"))
    generator = torch.Generator().manual_seed(0)
    made = iter(range(1000))

    def make(*shape: int) -> Tensor:
        values = torch.rand(shape, generator=generator) * 0.8 + 0.1
        return values.to(dtypes[0] if next(made) == 0 else dtypes[-1])

    for group, build in CALLS.items():
        if name in group.split():
            built = build(make)
            return (
                built
                if isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], dict)
                else (built, {})
            )
    raise LookupError(f"no sample call for {path}")


ALIASES = {
    "arccos": "acos", "arcsin": "asin", "arctan2": "atan2", "multiply": "mul", "divide": "div", "true_divide": "div",
    "subtract": "sub", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "truediv": "div", "rtruediv": "div", "rdiv": "div", "rmul": "mul", "radd": "add", "rsub": "sub", "rmatmul": "matmul",
    "iadd": "add", "isub": "sub", "imul": "mul", "idiv": "div", "itruediv": "div", "ipow": "pow", "rpow": "pow",
}  # fmt: skip


def weights_of_rnn(make: Make, gates: int) -> list[Tensor]:
    return [make(4 * gates, 4), make(4 * gates, 4), make(4 * gates), make(4 * gates)]


def rnn(gates: int, states: int) -> Callable[[Make], tuple[Any, ...]]:
    def build(make: Make) -> tuple[Any, ...]:
        x = make(5, 2, 4)
        hidden = make(1, 2, 4) if states == 1 else (make(1, 2, 4), make(1, 2, 4))
        return x, hidden, weights_of_rnn(make, gates), True, 1, 0.0, True, False, False

    return build


def cell(gates: int, states: int) -> Callable[[Make], tuple[Any, ...]]:
    def build(make: Make) -> tuple[Any, ...]:
        x = make(2, 4)
        hidden = make(2, 4) if states == 1 else (make(2, 4), make(2, 4))
        return x, hidden, *weights_of_rnn(make, gates)

    return build


def labels(*values: int) -> Tensor:
    return torch.tensor(values)


def signs(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int64)


CALLS: dict[str, Callable[[Make], Any]] = {
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan sum prod std var cpu gelu softplus "
    "norm nuclear_norm vector_norm matrix_norm": lambda t: (t(3, 3),),
    "cumprod cumsum softmax log_softmax softmin logsumexp": lambda t: (t(3, 3), 0),
    "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 hfft2 ihfft2 fftn ifftn rfftn irfftn hfftn "
    "ihfftn": lambda t: (t(3, 3),),
    "stft": lambda t: ((t(16),), {"n_fft": 6, "window": torch.ones(6), "return_complex": True}),
    "frobenius_norm": lambda t: (t(3, 3), (0, 1)),
    "renorm": lambda t: (t(3, 3), 2, 0, 1.0),
    "pow dist add sub rsub mul div eq ge gt le lt ne equal atan2": lambda t: (t(3, 3), t(3, 3)),
    "matmul mm cdist": lambda t: (t(3, 3), t(3, 3)),
    "mv": lambda t: (t(3, 3), t(3)),
    "dot vdot inner vecdot": lambda t: (t(3), t(3)),
    "cross": lambda t: (t(2, 3), t(2, 3)),
    "addcdiv addcmul": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "addmm": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "addmv": lambda t: (t(3), t(3, 3), t(3)),
    "addr": lambda t: (t(3, 3), t(3), t(3)),
    "addbmm": lambda t: (t(3, 3), t(2, 3, 3), t(2, 3, 3)),
    "baddbmm": lambda t: (t(2, 3, 3), t(2, 3, 3), t(2, 3, 3)),
    "bmm": lambda t: (t(2, 3, 3), t(2, 3, 3)),
    "prelu": lambda t: (t(2, 3), t(3)),
    "linear": lambda t: (t(2, 3), t(4, 3), t(4)),
    "bilinear": lambda t: (t(2, 3), t(2, 3), t(4, 3, 3), t(4)),
    "conv1d conv_transpose1d": lambda t: ((t(1, 2, 5), t(2, 2, 3)), {"bias": t(2)}),
    "conv2d conv_transpose2d": lambda t: ((t(1, 2, 5, 5), t(2, 2, 3, 3)), {"bias": t(2)}),
    "conv3d conv_transpose3d": lambda t: ((t(1, 2, 5, 5, 5), t(2, 2, 3, 3, 3)), {"bias": t(2)}),
    "conv_tbc": lambda t: (t(5, 1, 2), t(3, 2, 2), t(2)),
    "convolution": lambda t: (t(1, 2, 5), t(2, 2, 3), None, [1], [0], [1], False, [0], 1),
    "einsum": lambda t: ("ij,jk->ik", t(3, 3), t(3, 3)),
    "chain_matmul": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "multi_dot": lambda t: ([t(3, 3), t(3, 3), t(3, 3)],),
    "scaled_dot_product_attention": lambda t: (
        (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4)),
        {"attn_mask": t(3, 3)},
    ),
    "rnn_tanh rnn_relu": rnn(1, 1),
    "gru": rnn(3, 1),
    "lstm": rnn(4, 2),
    "rnn_tanh_cell rnn_relu_cell": cell(1, 1),
    "gru_cell": cell(3, 1),
    "lstm_cell": cell(4, 2),
    "interpolate": lambda t: ((t(1, 2, 4, 4),), {"scale_factor": 2}),
    "grid_sample": lambda t: ((t(1, 2, 4, 4), t(1, 3, 3, 2)), {"align_corners": False}),
    "grid_sampler grid_sampler_2d": lambda t: (t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": lambda t: (t(1, 2, 4, 4, 4), t(1, 3, 3, 3, 3), 0, 0, False),
    "layer_norm rms_norm": lambda t: (t(2, 4), [4], t(4)),
    "native_layer_norm": lambda t: (t(2, 4), [4], t(4), t(4), 1e-5),
    "group_norm": lambda t: (t(2, 4, 3), 2, t(4)),
    "local_response_norm": lambda t: (t(2, 4, 3), 2),
    "normalize": lambda t: (t(2, 4),),
    "cosine_similarity pairwise_distance": lambda t: (t(2, 4), t(2, 4)),
    "pdist": lambda t: (t(3, 4),),
    "l1_loss mse_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits": lambda t: (t(2, 3), t(2, 3)),
    "cosine_embedding_loss": lambda t: (t(2, 3), t(2, 3), signs(2)),
    "margin_ranking_loss": lambda t: (t(2), t(2), signs(2)),
    "cross_entropy nll_loss": lambda t: (t(2, 3), labels(0, 2)),
    "poisson_nll_loss": lambda t: (t(2, 3), t(2, 3), True, False, 1e-8, 1),
    "hinge_embedding_loss soft_margin_loss": lambda t: (t(2), signs(2)),
    "multilabel_margin_loss": lambda t: (t(1, 3), labels(0, -1, 1)[None]),
    "multilabel_soft_margin_loss": lambda t: (t(1, 3), t(1, 3)),
    "multi_margin_loss": lambda t: (t(2, 3), labels(0, 2)),
    "triplet_margin_loss triplet_margin_with_distance_loss": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "ctc_loss": lambda t: (t(5, 1, 3).log(), labels(1, 2)[None], labels(5), labels(2)),
    "gaussian_nll_loss": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "tensordot": lambda t: (t(3, 3), t(3, 3)),
    "scatter_add": lambda t: (t(3), 0, labels(0, 1, 2), t(3)),
    "index_put": lambda t: (t(3), (labels(0, 1),), t(2)),
    "gumbel_softmax": lambda t: (t(2, 3),),
    "lp_pool1d": lambda t: (t(1, 2, 6), 2.0, 2),
    "lp_pool2d": lambda t: (t(1, 2, 6, 6), 2.0, 2),
    "lp_pool3d": lambda t: (t(1, 2, 6, 6, 6), 2.0, 2),
    "linear_cross_entropy": lambda t: (t(2, 3), t(4, 3), labels(0, 2)),
}
"""For the function names in a key: builds the positional arguments, or a pair of positional and keyword arguments."""
