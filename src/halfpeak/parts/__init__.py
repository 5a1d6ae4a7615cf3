"""Objects that each own one piece of a step's state."""
