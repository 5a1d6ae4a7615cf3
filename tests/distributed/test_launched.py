"""If another rank has died or hangs, the error of any backend becomes ``RankLostError``."""

from __future__ import annotations

import pytest

from halfpeak import HalfpeakError
from halfpeak.core.errors import RankLostError
from halfpeak.distributed.launched import joined

ALONE = {
    "WORLD_SIZE": "1",
    "RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RUN_ID": "test",
}


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        (
            "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:59153",
            True,
        ),
        ("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms", True),
        ("Application timeout caused pair closure", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_a_lost_rank_is_one_error(said: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught, joined():
        raise RuntimeError(said)
    assert isinstance(caught.value, RankLostError) is isinstance(caught.value, HalfpeakError) is is_lost
    assert ("Start all of them again, from the last checkpoint" in str(caught.value)) is is_lost
