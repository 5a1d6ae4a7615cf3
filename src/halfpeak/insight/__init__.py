"""Reads results: histories, pictures, advice. Never the engine's parts."""
