"""The memory that frames are received into."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError, NoCapacity
from pdserve.transfer.ring import RingPool

CPU = torch.device("cpu")


@given(st.integers(1, 5000), st.integers(1, 2000), st.integers(1, 64))
def test_shares_are_disjoint_and_whole(ring_bytes: int, frame_bytes: int, unit: int) -> None:
    """However sizes fall, shares do not overlap, halves hold whole units, and what is out comes back."""
    try:
        pool = RingPool(ring_bytes, frame_bytes, unit, CPU)
    except ConfigError:
        assert ring_bytes < 2 * unit or 2 * frame_bytes < unit
        return
    rings = [pool.lease() for _ in range(pool.total)]
    with pytest.raises(NoCapacity):
        pool.lease()
    spans = []
    for ring in rings:
        assert unit <= ring.max_frame and ring.capacity == 2 * ring.max_frame <= 4 * frame_bytes
        first, second = ring.slot(ring.max_frame), ring.slot(ring.max_frame)
        assert ring.slot(1).data_ptr() == first.data_ptr(), "halves take turns"
        spans += [(half.data_ptr(), half.data_ptr() + ring.max_frame) for half in (first, second)]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for ring in rings:
        pool.give_back(ring)
        pool.check_integrity()
    assert len([pool.lease() for _ in rings]) == pool.total
