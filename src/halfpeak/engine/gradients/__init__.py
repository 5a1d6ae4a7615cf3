"""Where the gradients of an optimizer are, and how they get there."""
