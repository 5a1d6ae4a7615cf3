"""The order of a step, preparing models and optimizers for it, and its state."""
