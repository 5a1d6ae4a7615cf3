"""The hooks that runners call at the stages of a run."""
