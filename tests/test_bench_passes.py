"""`bench passes` on the tiny model: whose milliseconds they are, and lengths that cannot be measured."""

from __future__ import annotations

import json

import pytest

from reader_rag.bench.passes import passes, report
from reader_rag.cli import main
from reader_rag.load import load_model


def test_a_pass_is_the_sum_of_its_parts(tiny_model, tmp_path):
    loaded = load_model(tiny_model, dtype="float32")
    result = passes(
        loaded, rows=2, width=4, contexts=(40, 300, 1 << 20), max_tokens=12, profile=True, cache_dir=tmp_path
    )
    assert [share["context"] for share in result["contexts"]] == [40, 300]
    assert result["left_out"] == [1 << 20]
    for share in (*result["contexts"], result["one_row"]):
        assert 1 <= share["passes"] <= 12
        parts = share["model_ms"] + share["draft_ms"] + share["bookkeeping_ms"]
        assert parts == pytest.approx(share["pass_ms"], abs=0.01)
        assert 0 < share["bookkeeping_share"] < 1
    assert result["plain"]["reader_tokens_per_s"] > 0
    named = {entry["function"].split()[-1] for entry in result["profile"]}
    assert "top_evidence" in named or "_commit" in named
    assert "linear" not in " ".join(named)  # the model's own work is not in it
    assert "2 rows, 300 tokens" in report(result)


def test_the_command_prints_one_json_line(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "reader_rag.load.load_model", lambda *_, **__: load_model(tiny_model, dtype="float32")
    )
    assert main(["bench", "passes", "--rows", "1", "--width", "2", "--contexts", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["contexts"][0]["context"] == 30


@pytest.mark.parametrize("lengths", ["", "long", "512,-1", "1"])
def test_lengths_that_mean_nothing_are_refused(lengths, capsys):
    assert main(["bench", "passes", "--contexts", lengths]) != 0
    assert "--contexts" in capsys.readouterr().err
