"""Stop strings over streamed text. Pure: how the text is cut into pieces makes no difference to the result."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, and holds back text that may still become part of one.

    Of several that are completed by the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what is safe to show and the stop string that was completed, if one was.

        After a match the shown text ends just before the stop string, and the matcher must not be fed again.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        found = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < (found[0], found[1])):
                found = (start + len(stop), start, stop)
        if found is not None:
            self._held = ""
            return buffer[: found[1]], found[2]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What is held back, once nothing can follow it any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
