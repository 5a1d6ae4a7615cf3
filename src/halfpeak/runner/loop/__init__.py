"""The loops: what a runner is, by epochs or by iterations, and the data that they go through."""
