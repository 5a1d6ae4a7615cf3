"""Values and pure transitions: no device, no distributed, no files."""
