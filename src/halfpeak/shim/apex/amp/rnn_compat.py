"""``apex.amp.rnn_compat``."""


def has_old_rnns() -> bool:
    """Whether torch is older than 0.5. It is not."""
    return False
