"""What a drafter knows of a file's answers when one conversation is tested: all the others, and nothing of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reader_rag.bench.engine_replay import Tally, replay
from reader_rag.bench.recording import Recording, Tokens
from reader_rag.bench.systems import ReaderSystem, learn

GRAM = 8
DUPLICATE = 0.5
"""An answer that shares more than this of another's 8-grams is its near-duplicate."""

Make = Callable[[], ReaderSystem]


def tallies_without_own(
    recordings: Sequence[Recording],
    conversations: Sequence[str],
    make: Make,
    width: int,
    progress: Any = None,
) -> list[Tally]:
    """Every answer replayed after all answers of other conversations were learned; what a test teaches is lost again.

    The conversations are halved again and again: what knows everything outside a range learns one half to test the other.
    So n conversations cost log2(n) lessons of each, and not n - 1. Learned last is what stands nearest to the test.
    """
    groups: dict[str, list[int]] = {}
    for number, conversation in enumerate(conversations):
        groups.setdefault(conversation, []).append(number)
    tallies: dict[int, Tally] = {}

    def test(inside: Sequence[list[int]], outside: ReaderSystem) -> None:
        if len(inside) == 1:
            for number in inside[0]:
                tallies[number] = _replay(recordings[number], outside.copy(), width)
                if progress is not None:
                    progress.update()
            return
        middle = len(inside) // 2
        first, second = inside[:middle], inside[middle:]
        for tested, taught in ((first, second), (second, first)):
            knows_more = outside.copy()
            learn(knows_more, [recordings[number] for group in taught for number in group])
            test(tested, knows_more)

    if groups:
        test(list(groups.values()), make())
    return [tallies[number] for number in range(len(recordings))]


def tallies_without_duplicates(
    recordings: Sequence[Recording],
    conversations: Sequence[str],
    make: Make,
    width: int,
    others: Sequence[Tally],
    progress: Any = None,
) -> list[Tally]:
    """As above, near-duplicates of the tested answer left out too. `others` are the tallies with them.

    An answer without a near-duplicate in another conversation keeps its tally: nothing would be left out.
    """
    grams = [grams_of(recording.output) for recording in recordings]
    tallies = list(others)
    for number, recording in enumerate(recordings):
        foreign = [far for far, home in enumerate(conversations) if home != conversations[number]]
        allowed = [far for far in foreign if shares(grams[number], grams[far]) <= DUPLICATE]
        if len(allowed) < len(foreign):
            system = make()
            learn(system, [recordings[far] for far in allowed])
            tallies[number] = _replay(recording, system, width)
        if progress is not None:
            progress.update()
    return tallies


def _replay(recording: Recording, system: ReaderSystem, width: int) -> Tally:
    return replay(recording, system.open(recording.prompt, recording.chunks), width)


def grams_of(tokens: Tokens) -> frozenset[Tokens]:
    """The distinct 8-grams; of a shorter text, the text itself."""
    return frozenset(tokens[start : start + GRAM] for start in range(max(len(tokens) - GRAM + 1, 1)))


def shares(grams: frozenset[Tokens], others: frozenset[Tokens]) -> float:
    """The share of the first text's grams that the second has too."""
    return len(grams & others) / len(grams)
