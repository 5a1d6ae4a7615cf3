"""The ways in which the kernels of a step are run."""
