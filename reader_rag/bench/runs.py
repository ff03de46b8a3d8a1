"""Systems over recordings: what each knows before a request, and one tally per recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reader_rag.bench.engine_replay import Tally, replay
from reader_rag.bench.recording import Recording
from reader_rag.bench.systems import System, learn
from reader_rag.errors import SettingsError

Maker = Callable[[], System]


@dataclass(frozen=True, slots=True)
class Learning:
    """What a system knows when a request comes.

    carry    one system serves all requests in order and keeps what it learns; otherwise each meets a new one, its tables empty
    folds    it has learned from all recordings but those of the request's fold, and carries on within the fold
    lessons  it has learned from these first, and carries on
    """

    carry: bool = False
    folds: int | None = None
    lessons: tuple[Recording, ...] = ()

    @property
    def words(self) -> str:
        if self.folds:
            return f"learned from the other recordings, {self.folds} folds"
        if self.lessons:
            return f"learned from {len(self.lessons)} other recordings, then carried on"
        return "carried from request to request" if self.carry else "cold: every request with empty tables"


COLD = Learning()


def tallies_of(
    recordings: Sequence[Recording],
    make: Maker,
    width: int,
    *,
    learning: Learning = COLD,
    any_path: bool = False,
    progress: Any = None,
) -> list[Tally]:
    """One tally per recording, in order; `progress.update()` is called after each.

    Raises SettingsError for folds that cannot be made, or a lesson whose prompt is also a test.
    """
    if learning.folds is not None:
        return _over_folds(recordings, make, width, learning.folds, any_path, progress)
    prompts = {recording.prompt for recording in recordings}
    for lesson in learning.lessons:
        if lesson.prompt in prompts:
            raise SettingsError(
                f"{lesson.name} is learned from and tested on; pass a folder of other prompts, or folds"
            )
    if not (learning.carry or learning.lessons):
        return [
            tally
            for recording in recordings
            for tally in _serve([recording], make(), width, any_path, progress)
        ]
    system = make()
    learn(system, learning.lessons)
    return _serve(recordings, system, width, any_path, progress)


def _over_folds(
    recordings: Sequence[Recording], make: Maker, width: int, folds: int, any_path: bool, progress: Any
) -> list[Tally]:
    if not 2 <= folds <= len(recordings):
        raise SettingsError(
            f"{folds} folds of {len(recordings)} recordings; use 2 or more, at most one per recording"
        )
    tallies: dict[int, Tally] = {}
    for fold in range(folds):
        system = make()
        learn(system, [r for number, r in enumerate(recordings) if number % folds != fold])
        mine = range(fold, len(recordings), folds)
        done = _serve([recordings[number] for number in mine], system, width, any_path, progress)
        tallies.update(zip(mine, done, strict=True))
    return [tallies[number] for number in range(len(recordings))]


def _serve(
    recordings: Sequence[Recording], system: System, width: int, any_path: bool, progress: Any
) -> list[Tally]:
    tallies = []
    for recording in recordings:
        drafter = system.open(recording.prompt, recording.chunks)
        tallies.append(replay(recording, drafter, width, any_path=any_path))
        system.close(recording.prompt, recording.output)
        if progress is not None:
            progress.update()
    return tallies
