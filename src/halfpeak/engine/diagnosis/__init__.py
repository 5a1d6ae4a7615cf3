"""What went wrong in a step: which skips are reported, and which module made something not finite."""
