"""In which dtype operations compute: chosen per operation (O1, O4) or per module (O0, O2, O3, O5)."""
