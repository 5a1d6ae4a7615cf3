"""Reports on runs, made from results: histories, pictures and advice."""
