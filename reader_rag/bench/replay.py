"""Drafting measured on recorded answers, with no model: rows with `responses`, or recordings of runs with soft evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reader_rag.bench.engine_replay import Tally, total
from reader_rag.bench.leave_out import tallies_without_duplicates, tallies_without_own
from reader_rag.bench.recording import Recording
from reader_rag.bench.rows import Row, read_rows
from reader_rag.bench.rules.suffixes import PromptLookup
from reader_rag.bench.runs import COLD, Learning, Maker, tallies_of
from reader_rag.bench.systems import ReaderSystem, RuleSystem
from reader_rag.errors import SettingsError
from reader_rag.prompt import chunk_encodings, encode_prompt, encode_text

Answered = tuple[Row, Recording]


def answers_of(
    file: str | Path,
    tokenizer: Any,
    *,
    responses: str | None = None,
    sets: Sequence[str] = (),
    limit: int | None = None,
) -> dict[str, list[Answered]]:
    """Recorded answers by the name of who gave them, as recordings without soft evidence; empty answers are left out.

    Raises SettingsError for a name that no row has, or where no row has any.
    """
    rows = [row for only in sets or (None,) for row in read_rows(file, only=only, limit=limit)]
    names = list(dict.fromkeys(name for row in rows for name, _ in row.responses))
    if not names or (responses is not None and responses not in names):
        known = ", ".join(names) or "none: record some with `reader-rag bench record`"
        raise SettingsError(f"{file} has no responses {responses or ''!r}; its names are: {known}")
    found: dict[str, list[Answered]] = {name: [] for name in names if responses in (None, name)}
    for row in rows:
        prompt = tuple(encode_prompt(tokenizer, row.messages))
        chunks = tuple(tuple(way) for chunk in row.chunks for way in chunk_encodings(tokenizer, chunk.text))
        for name, text in row.responses:
            output = tuple(encode_text(tokenizer, text))
            if name in found and output:
                found[name].append((row, Recording(row.id, row.set, prompt, output, True, chunks)))
    return found


def replay_answers(
    file: str | Path,
    tokenizer: Any,
    make: Callable[[], ReaderSystem],
    *,
    responses: str | None = None,
    width: int = 16,
    sets: Sequence[str] = (),
    limit: int | None = None,
    warm: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Replays a file's recorded answers cold (every table empty); `warm` adds two runs that learned from other conversations.

    An answer never drafts itself, nor does another of its conversation; the second warm run leaves its near-duplicates out too.
    """
    answers = answers_of(file, tokenizer, responses=responses, sets=sets, limit=limit)
    count = sum(len(given) for given in answers.values())
    modes = ["cold", "warm", "warm_without_near_duplicates"] if warm else ["cold"]
    tallies: dict[str, list[tuple[str, str, Tally]]] = {mode: [] for mode in modes}
    baseline: list[tuple[str, str, Tally]] = []
    with tqdm(total=count * len(modes), desc="answers", disable=None if progress else True) as bar:
        for name, given in answers.items():
            recordings = [recording for _, recording in given]
            labels = [(name, row.set) for row, _ in given]
            conversations = [row.conversation for row, _ in given]
            for mode in modes:
                bar.set_postfix_str(f"{name}, {mode}")
                if mode == "cold":
                    done = tallies_of(recordings, make, width, progress=bar)
                elif mode == "warm":
                    done = tallies_without_own(recordings, conversations, make, width, bar)
                else:
                    done = tallies_without_duplicates(recordings, conversations, make, width, done, bar)
                tallies[mode] += [(*label, tally) for label, tally in zip(labels, done, strict=True)]
            looked_up = tallies_of(recordings, lambda: RuleSystem(PromptLookup(width - 1)), width)
            baseline += [(*label, tally) for label, tally in zip(labels, looked_up, strict=True)]
    result = {"rows": count, "width": width, **summary(tallies["cold"], baseline)}
    for mode in modes[1:]:
        result[mode] = summary(tallies[mode], baseline)
    return result


Labelled = Sequence[tuple[str, str, Tally]]
"""(who answered, set, tally) of every answer."""


def summary(tallies: Labelled, baseline: Labelled) -> dict[str, Any]:
    """Pooled figures (all tokens over all passes), by set, by who answered and by source."""
    whole = _figures([tally for *_, tally in tallies], [tally for *_, tally in baseline])
    whole["by_set"] = _grouped([entry[1] for entry in tallies], tallies, baseline)
    whole["by_responses"] = _grouped([entry[0] for entry in tallies], tallies, baseline)
    pooled = total([tally for *_, tally in tallies])
    whole["by_source"] = {
        source: {"drafted": pooled.drafted_by_source[source], "accepted": pooled.accepted_by_source[source]}
        for source in sorted(pooled.drafted_by_source)
    }
    return whole


def _grouped(labels: Sequence[str], tallies: Labelled, baseline: Labelled) -> dict[str, Any]:
    return {
        name: _figures(
            [tally for label, (*_, tally) in zip(labels, tallies, strict=True) if label == name],
            [tally for label, (*_, tally) in zip(labels, baseline, strict=True) if label == name],
        )
        for name in sorted(set(labels))
    }


def _figures(tallies: Sequence[Tally], baseline: Sequence[Tally]) -> dict[str, Any]:
    pooled = total(tallies)
    passes = max(pooled.passes, 1)
    return {
        "answers": len(tallies),
        "tokens_per_pass": round(pooled.tokens_per_pass, 4),
        "nodes_per_pass": round(pooled.drafted / passes, 2),
        "us_per_pass": round(1e6 * pooled.seconds / passes, 1),
        "prompt_lookup_tokens_per_pass": round(total(baseline).tokens_per_pass, 4),
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    lines = [
        f"{result['rows']} answers, width {result['width']}, no model",
        f"{'':44}{'tokens/pass':>12}{'lookup':>8}{'ratio':>7}{'nodes':>7}{'us/pass':>9}",
    ]
    for mode in ("cold", "warm", "warm_without_near_duplicates"):
        figures = result if mode == "cold" else result.get(mode)
        if figures is None:
            continue
        lines.append(_line(mode, figures))
        groups = [*figures["by_responses"].items(), *figures["by_set"].items()]
        lines += [_line(f"  {name}", part) for name, part in groups if name and len(groups) > 2]
    sources = result["by_source"].items()
    lines.append(
        "accepted of drafted by source, cold: "
        + ", ".join(f"{name} {counts['accepted']}/{counts['drafted']}" for name, counts in sources)
    )
    return "\n".join(lines)


def _line(name: str, figures: dict[str, Any]) -> str:
    ours, lookup = figures["tokens_per_pass"], figures["prompt_lookup_tokens_per_pass"]
    ratio = ours / lookup if lookup else 0.0
    return (
        f"{name:44}{ours:12.3f}{lookup:8.3f}{ratio:7.3f}"
        f"{figures['nodes_per_pass']:7.1f}{figures['us_per_pass']:9.0f}"
    )


def replay_recordings(
    recordings: Sequence[Recording],
    make: Maker,
    *,
    width: int = 16,
    learning: Learning = COLD,
    any_path: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Replays recorded runs, soft evidence and all where it was recorded."""
    with tqdm(total=len(recordings), desc="recordings", disable=None if progress else True) as bar:
        done = tallies_of(recordings, make, width, learning=learning, any_path=any_path, progress=bar)
    looked_up = tallies_of(recordings, lambda: RuleSystem(PromptLookup(width - 1)), width)
    sets = [recording.set for recording in recordings]
    return {
        "rows": len(recordings),
        "width": width,
        "learning": learning.words,
        **summary(
            [("", name, tally) for name, tally in zip(sets, done, strict=True)],
            [("", name, tally) for name, tally in zip(sets, looked_up, strict=True)],
        ),
    }
