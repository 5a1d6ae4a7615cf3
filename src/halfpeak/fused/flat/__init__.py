"""Flat buffers: small parameters and their optimizer states share memory, so that one kernel serves many of them."""
