"""The fitted table: how often each source was right at each level, on recorded answers; where every request begins."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FORMAT = 1
SHIPPED = Path(__file__).with_name("priors.json")

Counts = tuple[float, float]
"""Parameters (a, b) of a Beta distribution: its mean a / (a + b) is the trust, its sum the sightings it is worth."""


@dataclass(frozen=True, slots=True)
class Priors:
    """Beta priors by (source name, level). `made_by` is the command that fitted them."""

    counts: Mapping[tuple[str, int], Counts]
    made_by: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON, one level a line, so that two fits can be compared by eye."""
        sources: dict[str, dict[str, list[float]]] = {}
        for (name, level), (a, b) in sorted(self.counts.items()):
            sources.setdefault(name, {})[str(level)] = [round(a, 3), round(b, 3)]
        blocks = ",\n".join(
            f"  {json.dumps(name)}: {{\n"
            + ",\n".join(f"   {json.dumps(level)}: {json.dumps(pair)}" for level, pair in levels.items())
            + "\n  }"
            for name, levels in sources.items()
        )
        head = f' "format": {FORMAT},\n "made_by": {json.dumps(self.made_by)}'
        Path(path).write_text(f'{{\n{head},\n "reliability": {{\n{blocks}\n }}\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Priors":
        """Reads what `save` wrote. Raises ValueError, naming the file, for another version or a damaged table."""
        mend = "write a new one with `reader-rag bench fit --data FILE --out FILE`"
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no fitted table ({error!r}): {mend}") from None
        if version != FORMAT:
            raise ValueError(
                f"the fitted table {path} has format {version!r}, this version reads {FORMAT}: {mend}"
            )
        try:
            counts = {
                (str(name), int(level)): _counts(pair)
                for name, levels in data["reliability"].items()
                for level, pair in levels.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the fitted table {path} is damaged ({error!r}): {mend}") from None
        return cls(counts, str(data.get("made_by", "")))


def _counts(pair: Any) -> Counts:
    a, b = map(float, pair)
    if not (0.0 < a < 1e9 and 0.0 < b < 1e9):
        raise ValueError(f"{pair} are no counts")
    return a, b


@cache
def shipped() -> Priors:
    """The table that comes with the package."""
    return Priors.load(SHIPPED)
