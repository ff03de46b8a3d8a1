"""Progress bars on stderr, silent unless a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Progress = bool | Literal["always"]


@contextmanager
def progress_bar(
    progress: Progress, total: int, description: str, unit: str
) -> Iterator[Callable[[int], object]]:
    """Give a function that advances the bar by n of `total`.

    True shows the bar if stderr is a terminal, "always" shows it in any case, False never.
    """
    watched = sys.stderr is not None and (progress == "always" or (progress and sys.stderr.isatty()))
    if not watched or not total:
        yield lambda n: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=description, unit=unit, file=sys.stderr) as bar:
        yield bar.update
