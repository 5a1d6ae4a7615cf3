"""A whole training step as one graph: captured by CUDA, or compiled by torch.compile."""
