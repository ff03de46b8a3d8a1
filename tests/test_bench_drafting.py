"""`bench drafting`: the work of a pass in its parts, on made-up text and on recordings, the same passes each time."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from reader_rag.bench.drafting import PARTS, Stopwatch, drafting, report
from reader_rag.bench.recording import save_recording
from reader_rag.bench.synthetic import CONTROL, PROBS, requests, with_expectations
from reader_rag.cli import main

SHORT = requests(1, 6, chunks=2, chunk=40, answer=30)


def timed(**options):
    return drafting(
        SHORT, **({"contexts": (100, 400), "width": 8, "passes": 12, "progress": False} | options)
    )


def test_a_pass_is_the_sum_of_its_parts_and_every_length_is_timed():
    result = timed()
    assert [one["context"] for one in result["contexts"]] == [100, 400]
    for one in result["contexts"]:
        assert one["passes"] == 12
        assert one["pass_us"] == pytest.approx(sum(one[f"{part}_us"] for part in PARTS), abs=1)
        assert all(one[f"{part}_us"] > 0 for part in PARTS)
        assert 1.0 <= one["tokens_per_pass"] <= 8.0
        assert 0 < one["nodes_per_pass"] <= 7
    assert "400" in report(result)


def test_the_same_seed_makes_the_same_passes():
    counts = ("tokens_per_pass", "nodes_per_pass", "requests")
    first, second = timed()["contexts"], timed()["contexts"]
    assert [[one[name] for name in counts] for one in first] == [
        [one[name] for name in counts] for one in second
    ]


def test_what_runs_within_a_part_is_not_counted_there():
    watch = Stopwatch()

    def work(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    inner = watch.timed("inner", work)

    def both() -> None:
        work(0.01)
        inner(0.03)

    watch.timed("outer", both)()
    assert watch.us["inner"] >= 30_000
    assert 10_000 <= watch.us["outer"] < 30_000


def test_made_up_answers_copy_from_their_chunks_and_what_came_was_expected():
    (one, *_), expected = with_expectations(SHORT, 1)
    assert min(one.prompt) >= CONTROL
    copied = [
        any(one.output[i : i + 3] == chunk[j : j + 3] for chunk in one.chunks for j in range(len(chunk)))
        for i in range(len(one.output) - 2)
    ]
    assert sum(copied) > len(copied) / 4
    text = (*one.prompt, *one.output)
    assert one.top_ids is not None
    assert one.top_probs is not None
    for place, came in enumerate(text[1:]):
        row = one.top_ids[place].tolist()
        assert came in row[:2]
        assert len(set(row)) == len(row) == len(PROBS)
    assert one.top_probs[0].tolist() == pytest.approx(PROBS)
    ids, probs = expected.after(text[0])
    assert text[1] in ids
    assert probs == list(PROBS)


def test_the_command_takes_recordings_and_prints_one_json_line(tmp_path, monkeypatch, capsys):
    for one in with_expectations(SHORT, 1)[0]:
        save_recording(tmp_path, one)

    class Tokenizer:
        eos_token_id = 0
        all_special_ids = (0,)

        def __len__(self) -> int:
            return 1 << 20

    monkeypatch.setattr("reader_rag.bench.tokenizer.load_tokenizer", lambda *_: Tokenizer())
    monkeypatch.setattr("reader_rag.prompt.control_ids", lambda _: frozenset({0}))
    command = ["bench", "drafting", "--recordings", str(tmp_path), "--contexts", "90", "--passes", "5"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["text"] == "recorded"
    assert [one["passes"] for one in result["contexts"]] == [5]


@pytest.mark.parametrize(
    ("option", "value"), [("--contexts", "1"), ("--contexts", "long"), ("--passes", "0"), ("--width", "0")]
)
def test_what_cannot_be_timed_is_refused(option, value, capsys):
    assert main(["bench", "drafting", option, value]) == 2
    assert option.strip("-") in capsys.readouterr().err


def test_one_recording_is_refused_as_nothing_was_learned_before():
    with pytest.raises(ValueError, match="two recorded answers"):
        drafting(SHORT[:1], contexts=(50,), passes=1, progress=False)


def test_recorded_rows_are_kept_as_they_were():
    rows = np.zeros((150, 8), np.int32)
    one = with_expectations(SHORT[:1], 1)[0][0]
    kept = type(one)("a-1", "a", one.prompt, one.output, True, (), rows, rows.astype(np.float32))
    assert with_expectations([kept], 1)[0][0] is kept
