"""Random programs on two ranks (gloo) are those of plain torch's DistributedDataParallel and FSDP2, bit for bit."""

from __future__ import annotations

import pytest

from distributed.launching import Seen, launched
from distributed.plain_ranks import NUM_PROGRAMS

ranks = launched("distributed.plain_ranks")


@pytest.mark.parametrize("kind", NUM_PROGRAMS)
def test_programs_are_those_of_plain_torch(ranks: Seen, kind: str) -> None:
    wrong = {name: texts for name, texts in ranks.items() if name.startswith(kind) and any(texts)}
    assert not wrong, "\n\n".join(f"{name}\n{max(texts, key=len)}" for name, texts in wrong.items())
