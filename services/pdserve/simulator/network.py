"""What carries KV between workers: one network each, which takes one thing at a time in each direction."""

from __future__ import annotations

from collections import defaultdict


class Network:
    """Books of when each end is free, and for how long it was busy. Times are in seconds."""

    def __init__(self, bytes_per_second: float, latency: float) -> None:
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self.sent_seconds: defaultdict[str, float] = defaultdict(float)  # by worker
        self.received_seconds: defaultdict[str, float] = defaultdict(float)
        self.sent_bytes: defaultdict[tuple[str, str], float] = defaultdict(float)  # by sender and receiver
        self._sends_until: dict[str, float] = {}
        self._receives_until: dict[str, float] = {}

    @property
    def bytes(self) -> float:
        """All that was moved."""
        return sum(self.sent_bytes.values())

    def seconds(self, size: float) -> float:
        """What `size` bytes occupy both ends for."""
        return size / self.bytes_per_second

    def free_at(self, sender: str, receiver: str) -> float:
        """From when on the two could begin."""
        return max(self._sends_until.get(sender, 0.0), self._receives_until.get(receiver, 0.0))

    def send(self, sender: str, receiver: str, size: float, earliest: float) -> float:
        """Move `size` bytes, from `earliest` on or when both ends are free. Returns when they are through, without the
        latency."""
        seconds = self.seconds(size)
        through = max(earliest, self.free_at(sender, receiver)) + seconds
        self._sends_until[sender] = self._receives_until[receiver] = through
        self.sent_seconds[sender] += seconds
        self.received_seconds[receiver] += seconds
        self.sent_bytes[sender, receiver] += size
        return through
