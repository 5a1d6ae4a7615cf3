"""Models that people train: at every level the output is about as close to float32's as under ``torch.autocast``.

Thirty of them; ``make zoo`` has the rest.
"""

from __future__ import annotations

import warnings

import pytest

from zoo import libraries, nets
from zoo.__main__ import LEVELS
from zoo.measure import Member, rows

TRANSFORMERS = {
    # Rounded frequencies are felt late in a text.
    **dict.fromkeys(("llama", "phi3", "granite"), 1024),
    **dict.fromkeys(("gemma2", "qwen3", "gpt2", "gpt_neox", "falcon", "bloom", "mpt", "opt"), 128),
    **dict.fromkeys(("bert", "albert", "deberta-v2", "t5", "bart", "vit", "dinov2"), 128),
}
"""Names, and the length of a text."""

BY_HAND = list(nets.members())


@pytest.mark.parametrize("member", BY_HAND, ids=[member.name for member in BY_HAND])
def test_models_written_by_hand(member: Member) -> None:
    compare(member)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library
        (member,) = (
            m for m in libraries.transformers_members(TRANSFORMERS[name]) if m.name.endswith(f" {name}")
        )
        compare(member)


def compare(member: Member) -> None:
    found = list(rows(member, LEVELS))
    assert found
    assert all(row.passes for row in found), "\n".join(map(str, found))
