"""The backends of the fused optimizers: each measures gradients and updates weights with other kernels."""
