"""Stop strings: the result does not depend on how the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.stops import StopMatcher

letters = st.text("ab€", max_size=24)
stop_lists = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stop string whose end comes first; of several that end there the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@given(st.lists(letters, max_size=6), stop_lists)
def test_any_chunking_gives_what_find_gives(pieces: list[str], stops: list[str]) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@given(letters, st.text("ab€", min_size=1, max_size=5))
def test_one_stop_string_cuts_where_find_finds_it(text: str, stop: str) -> None:
    position = text.find(stop)
    assert run([stop], list(text)) == ((text, None) if position < 0 else (text[:position], stop))


@given(st.lists(letters, max_size=6), stop_lists)
def test_nothing_is_shown_that_turns_out_to_be_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, fed = StopMatcher(stops), "", ""
    final, _ = expected(stops, "".join(pieces))
    for piece in pieces:
        fed += piece
        text, stop = matcher.feed(piece)
        shown += text
        assert final.startswith(shown)
        assert stop is not None or len(fed) - len(shown) < max(len(stop) for stop in stops)
        if stop is not None:
            break


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("anything") == ("anything", None)
