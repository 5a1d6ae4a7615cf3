"""Storage of optimizer state and weights in fewer bytes than float32: codecs, quantised rules, remainders, loading."""
