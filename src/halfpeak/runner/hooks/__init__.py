"""The hooks, one file each."""
