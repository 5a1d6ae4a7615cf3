"""What went wrong in a step: which skips are worth a word, and the module that made something not finite."""
