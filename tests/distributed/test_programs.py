"""Random programs of calls on two ranks (gloo): bit for bit those of a loop by hand over the same wrappers."""

from __future__ import annotations

from distributed.launching import Seen, launched

ddp = launched("distributed.program_ranks")
shards = launched("distributed.shard_program_ranks")


def check(ranks: Seen) -> None:
    wrong = {number: texts for number, texts in ranks.items() if any(texts)}
    assert not wrong, "\n\n".join(f"{number}\n{max(texts, key=len)}" for number, texts in wrong.items())


def test_programs_under_ddp(ddp: Seen) -> None:
    check(ddp)


def test_programs_over_shards(shards: Seen) -> None:
    check(shards)
