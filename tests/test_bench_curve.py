"""Learning from earlier requests: what is carried from one to the next, and the curve of tokens per pass over requests seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import ANSWER, Spy, answers_file, recording, soft

from reader_rag.bench.curve import counts_up_to, curve
from reader_rag.bench.engine_replay import feed
from reader_rag.bench.recording import Recording
from reader_rag.bench.rules.suffixes import SuffixCopy
from reader_rag.bench.runs import Learning, tallies_of
from reader_rag.bench.systems import ReaderSystem, RuleSystem, learn
from reader_rag.cli import main
from reader_rag.errors import SettingsError


def lessons(count: int) -> list[Recording]:
    """Requests whose answers are all the same, though nothing in their prompts says so."""
    return [recording([50 + n], range(10, 30), name=f"rag-{n:03d}") for n in range(count)]


def test_carried_learned_and_cold_requests_know_what_they_should() -> None:
    tests = lessons(4)
    make = lambda: RuleSystem(SuffixCopy())  # noqa: E731
    passes = lambda learning: [t.passes for t in tallies_of(tests, make, 16, learning=learning)]  # noqa: E731
    cold, carried = passes(Learning()), passes(Learning(carry=True))
    assert cold == [20] * 4
    assert carried[0] == 20
    assert max(carried[1:]) < 5
    assert max(passes(Learning(folds=2))) < 5
    others = [recording([90], range(10, 30), name="other-0")]
    assert max(passes(Learning(lessons=tuple(others)))) < 5
    with pytest.raises(SettingsError, match="rag-001 is learned from and tested on"):
        passes(Learning(lessons=(tests[1],)))
    with pytest.raises(SettingsError, match="5 folds of 4 recordings"):
        passes(Learning(folds=5))


def test_a_copy_of_a_system_learns_for_itself() -> None:
    system = ReaderSystem(("ngrams",))
    one = soft(recording([1, 2, 3], [4, 5, 6, 7] * 6))
    learn(system, [one])
    known = len(system.memory.ngrams)
    twin = system.copy()
    assert len(twin.memory.ngrams) == known > 0
    feed(soft(recording([60, 61], [62, 63, 64] * 4)), twin.open((60, 61)))
    assert len(twin.memory.ngrams) > known == len(system.memory.ngrams)
    twin.close((60, 61), (62, 63, 64))
    assert (len(twin.memory.answers), len(system.memory.answers)) == (2, 1)
    system.close((70,), (71, 72, 73))
    system.close((80,), (81, 82, 83))
    assert (len(twin.memory.answers), len(system.memory.answers)) == (2, 3)


def test_the_curve_starts_cold_and_rises_where_requests_are_alike() -> None:
    alike = [soft(recording([40 + n], range(1, 30, 2), name=f"rag-{n:03d}")) for n in range(9)]
    result = curve(alike, lambda: ReaderSystem(("context", "ngrams")), width=8, tests=2, progress=False)
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5, 7]
    rates = [point["tokens_per_pass"] for point in result["points"]]
    assert rates[-1] > rates[0]
    assert counts_up_to(30) == [0, 1, 2, 5, 10, 20, 30]
    with pytest.raises(SettingsError, match="leave some to learn from"):
        curve(alike, ReaderSystem, width=8, tests=9, progress=False)


def test_a_conversation_is_tested_or_learned_from_as_a_whole() -> None:
    alike = [soft(recording([40 + n], range(1, 30, 2), name=f"rag-{n:03d}")) for n in range(12)]
    homes = [str(n // 4) for n in range(12)]
    log: list[list[tuple[int, ...]]] = []
    result = curve(alike, lambda: Spy(log), width=8, tests=4, conversations=homes, progress=False)
    assert result["tests"] == 4
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5, 8], "the other two conversations"
    with pytest.raises(SettingsError, match="every conversation would be tested"):
        curve(alike, ReaderSystem, width=8, tests=4, conversations=["one"] * 12, progress=False)


def test_the_curve_of_a_files_answers_takes_references_where_nobody_answered(
    tmp_path: Path, tiny_model: Path, capsys: Any
) -> None:
    data = answers_file(tmp_path)
    row = {
        "id": "r",
        "set": "x/reference",
        "question": "What is a chunk?",
        "reference": ANSWER,
        "responses": {},
    }
    more = data.with_name("more.jsonl")
    more.write_text(json.dumps(row) + "\n")
    files = ["--data", str(data), str(more)]
    assert main(["bench", "curve", *files, "--model", str(tiny_model), "--tests", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Two conversations of four answers, and the reference: the middle one of the three is tested.
    assert result["tests"] == 4
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5]
