"""Diagnosis of skipped steps: which skips are reported, and which module made a tensor non-finite."""
