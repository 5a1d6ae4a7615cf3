"""The training loops: BaseRunner, its subclasses by epochs and by iterations, and the data that they iterate over."""
