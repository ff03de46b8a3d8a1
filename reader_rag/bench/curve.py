"""How drafting gets better with use: tokens per pass on fixed prompts after more and more other requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from reader_rag.bench.engine_replay import replay, total
from reader_rag.bench.recording import Recording
from reader_rag.bench.systems import ReaderSystem, learn
from reader_rag.errors import SettingsError

SEED = 0


def curve(
    recordings: Sequence[Recording],
    make: Callable[[], ReaderSystem],
    *,
    width: int,
    tests: int = 20,
    conversations: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """About `tests` recordings, evenly spread, are replayed after 0, 1, 2, 5, 10, 20, 50, ... of the others were seen.

    `conversations`, one name per recording, are tested or learned from as a whole; without them each recording is its own.
    The others come in a seeded random order and have other prompts; what a test teaches is forgotten again.
    Raises SettingsError when nothing would be left to learn from.
    """
    if not 1 <= tests < len(recordings):
        raise SettingsError(
            f"{tests} test recordings of {len(recordings)}; use 1 or more and leave some to learn from"
        )
    homes = list(conversations) or [str(number) for number in range(len(recordings))]
    tested, others = _split(recordings, homes, tests)
    if not others:
        raise SettingsError(
            "every conversation would be tested; use fewer tests and leave some to learn from"
        )
    random.Random(SEED).shuffle(others)
    system = make()
    points: list[dict[str, Any]] = []
    seen = 0
    steps = counts_up_to(len(others))
    with tqdm(total=len(steps) * len(tested), desc="replays", disable=None if progress else True) as bar:
        for count in steps:
            learn(system, others[seen:count])
            seen = count
            tallies = []
            for recording in tested:
                drafter = system.copy().open(recording.prompt, recording.chunks)
                tallies.append(replay(recording, drafter, width))
                bar.update()
            points.append(
                {
                    "seen": count,
                    "tokens_learned": sum(len(r.prompt) + len(r.output) for r in others[:count]),
                    "tokens_per_pass": round(total(tallies).tokens_per_pass, 4),
                }
            )
    return {"width": width, "tests": len(tested), "points": points}


def _split(
    recordings: Sequence[Recording], homes: Sequence[str], tests: int
) -> tuple[list[Recording], list[Recording]]:
    """Every k-th conversation, and the rest: sets lie one after the other, so each gives its share."""
    units = list(dict.fromkeys(homes))
    count = max(round(tests * len(units) / len(recordings)), 1)
    chosen = {units[round((number + 0.5) * len(units) / count - 0.5)] for number in range(count)}
    tested = [recording for recording, home in zip(recordings, homes, strict=True) if home in chosen]
    prompts = {recording.prompt for recording in tested}
    others = [recording for recording in recordings if recording.prompt not in prompts]
    return tested, others


def counts_up_to(most: int) -> list[int]:
    """0, 1, 2, 5, 10, 20, 50, ... and `most`."""
    counts, decade = [0], 1
    while decade <= most:
        counts += [step * decade for step in (1, 2, 5) if step * decade < most]
        decade *= 10
    return [*counts, most] if most else counts


def report(result: dict[str, Any]) -> str:
    """The curve as a table for people."""
    lines = [
        f"{result['tests']} test answers, width {result['width']}",
        f"{'seen':>6}{'tokens':>10}{'tokens/pass':>13}",
    ]
    lines += [
        f"{point['seen']:6}{point['tokens_learned']:10}{point['tokens_per_pass']:13.3f}"
        for point in result["points"]
    ]
    return "\n".join(lines)
