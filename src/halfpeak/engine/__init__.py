"""The training step, the preparation of models and optimizers for it, and its state."""
