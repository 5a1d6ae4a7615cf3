"""``apex.contrib`` as of 25.04: its optimizers for masters and low gradients."""
