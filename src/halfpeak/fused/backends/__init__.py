"""The backends of the fused optimizers: each has its own kernels to measure gradients and to update weights."""
