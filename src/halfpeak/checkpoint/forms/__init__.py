"""The forms of checkpoints: who wrote one, what its parts are, and how they look in the form of another library."""
