"""Random programs of calls on two ranks (gloo): bit for bit those of a loop by hand that has the batches of both."""

from __future__ import annotations

from distributed.launching import Seen, launched

ranks = launched("distributed.program_ranks")


def test_programs_on_two_ranks(ranks: Seen) -> None:
    wrong = {number: texts for number, texts in ranks.items() if any(texts)}
    assert not wrong, wrong
