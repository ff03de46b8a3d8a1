"""READER beside the rules of published drafters: same engine, same prompts, same width; differences paired by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reader_rag.bench.recording import Recording
from reader_rag.bench.runs import COLD, Learning, Maker, tallies_of
from reader_rag.bench.systems import READER, peer_makers
from reader_rag.errors import SettingsError

RESAMPLES = 10_000
SEED = 0

Interval = list[float]


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt by one system; seconds of decoding where a model ran."""

    tokens: int
    passes: int
    seconds: float | None = None


def compare_recordings(
    recordings: Sequence[Recording],
    make_reader: Maker,
    *,
    width: int,
    names: Sequence[str] = (),
    learning: Learning = COLD,
    any_path: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Every system over the same recordings, with no model: exact counts of passes, no seconds."""
    makers = choose_makers(peer_makers(width, [r.prompt for r in recordings]), names)
    makers[READER] = make_reader
    results: dict[str, list[Result]] = {}
    with tqdm(total=len(recordings) * len(makers), desc="replays", disable=None if progress else True) as bar:
        for name, make in makers.items():
            bar.set_postfix_str(name)
            done = tallies_of(recordings, make, width, learning=learning, any_path=any_path, progress=bar)
            results[name] = [Result(tally.tokens, tally.passes) for tally in done]
    sets = [recording.set for recording in recordings]
    return {"width": width, "learning": learning.words, "any_path": any_path, **summary(results, sets)}


def choose_makers(makers: Mapping[str, Maker], names: Sequence[str]) -> dict[str, Maker]:
    """The peers of the given names, all where none is given. Raises SettingsError for an unknown one."""
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise SettingsError(f"unknown peer {unknown[0]!r}: choose from {', '.join(makers)}")
    return {name: make for name, make in makers.items() if not names or name in names}


def summary(results: Mapping[str, Sequence[Result]], sets: Sequence[str]) -> dict[str, Any]:
    """Pooled figures of every system with 95 % intervals over prompts, of all prompts and of each set."""
    whole = _figures(results)
    groups = sorted(set(sets))
    if len(groups) > 1:
        whole["by_set"] = {
            group: _figures(
                {
                    name: [result for result, home in zip(done, sets, strict=True) if home == group]
                    for name, done in results.items()
                }
            )
            for group in groups
        }
    return whole


def _figures(results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    count = len(next(iter(results.values())))
    rows = np.random.default_rng(SEED).integers(0, count, (RESAMPLES, count))
    tokens = {name: np.array([r.tokens for r in done], float) for name, done in results.items()}
    passes = {name: np.array([r.passes for r in done], float) for name, done in results.items()}
    seconds = {name: _seconds(done) for name, done in results.items()}
    base = _rate(tokens, seconds, "generate")

    def entry(name: str) -> dict[str, Any]:
        rate = _rate(tokens, seconds, name)
        return {
            "tokens_per_pass": round(float(tokens[name].sum() / passes[name].sum()), 4),
            "tokens_per_s": None if rate is None else round(rate, 3),
            "speedup_vs_generate": None if rate is None or base is None else round(rate / base, 3),
            "speedup_ci95": _speedup_interval(tokens, seconds, name, rows),
            "ci95": interval(tokens[name][rows].sum(1) / passes[name][rows].sum(1)),
        }

    ours = tokens[READER][rows].sum(1) / passes[READER][rows].sum(1)
    own = tokens[READER].sum() / passes[READER].sum()
    peers = [name for name in results if name != READER]
    return {
        "rows": count,
        "peers": {name: entry(name) for name in peers},
        "reader": entry(READER),
        "paired_difference": {
            name: {
                "mean": round(float(own - tokens[name].sum() / passes[name].sum()), 4),
                "ci95": interval(ours - tokens[name][rows].sum(1) / passes[name][rows].sum(1)),
            }
            for name in peers
        },
    }


def interval(samples: NDArray[np.float64]) -> Interval:
    """The middle 95 % of bootstrap samples."""
    low, high = np.percentile(samples, [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]


Arrays = Mapping[str, NDArray[np.float64]]


def _seconds(done: Sequence[Result]) -> NDArray[np.float64] | None:
    known = [result.seconds for result in done if result.seconds is not None]
    return np.array(known, float) if len(known) == len(done) else None


def _rate(tokens: Arrays, seconds: Mapping[str, NDArray[np.float64] | None], name: str) -> float | None:
    spent = seconds.get(name)
    return None if spent is None or not spent.sum() else float(tokens[name].sum() / spent.sum())


def _speedup_interval(
    tokens: Arrays,
    seconds: Mapping[str, NDArray[np.float64] | None],
    name: str,
    rows: NDArray[np.int64],
) -> Interval | None:
    mine, base = seconds.get(name), seconds.get("generate")
    if mine is None or base is None:
        return None
    rate = tokens[name][rows].sum(1) / mine[rows].sum(1)
    return interval(rate * base[rows].sum(1) / tokens["generate"][rows].sum(1))


def report(result: dict[str, Any]) -> str:
    """The result as tables for people."""
    lines = [f"width {result['width']}, {result['learning']}{', any path' if result['any_path'] else ''}"]
    groups = [("all", result), *result.get("by_set", {}).items()]
    for title, figures in groups:
        lines.append(f"{title}: {figures['rows']} prompts")
        lines.append(
            f"{'':28}{'tokens/pass':>12}{'95 %':>16}{'READER more by':>16}{'95 %':>18}{'x generate':>12}"
        )
        for name, entry in [*figures["peers"].items(), (READER, figures["reader"])]:
            difference = figures["paired_difference"].get(name)
            lines.append(
                f"{name:28}{entry['tokens_per_pass']:12.3f}{_span(entry['ci95']):>16}"
                + (f"{difference['mean']:16.3f}{_span(difference['ci95']):>18}" if difference else " " * 34)
                + (f"{entry['speedup_vs_generate']:12.2f}" if entry["speedup_vs_generate"] else "")
            )
    return "\n".join(lines)


def _span(pair: Interval) -> str:
    return f"{pair[0]:.2f} to {pair[1]:.2f}"
