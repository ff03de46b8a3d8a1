"""`bench batch` on the tiny model: equal texts in every system, sensible figures, one JSON line."""

from __future__ import annotations

import json

import pytest

from reader_rag.bench.batch import batch, report
from reader_rag.cli import main
from reader_rag.load import load_model


@pytest.fixture
def rows_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [
        {
            "id": str(i),
            "set": "t/rag",
            "question": f"Question {i}: how does text {'go ' * i}on?",
            "passages": [],
        }
        for i in range(5)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize("exact", [True, False])
def test_all_systems_give_the_same_texts_in_float32(tiny_model, rows_file, tmp_path, exact):
    loaded = load_model(tiny_model, dtype="float32", device="cpu")
    result = batch(
        loaded, rows_file, rows=3, width=4, max_tokens=12, exact=exact, cache_dir=tmp_path, progress=False
    )
    assert result["requests"] == result["identical"] == result["identical_to_generate"] == 5
    assert result["mode"] == ("exact" if exact else "throughput")
    assert 0 < result["p50_s"] <= result["p95_s"]
    assert result["speedup_vs_generate_batch"] == pytest.approx(
        result["reader_tokens_per_s"] / result["generate_batch_tokens_per_s"], rel=1e-2
    )
    assert "texts equal to one at a time 5/5" in report(result)


def test_the_command_prints_one_json_line(tiny_model, rows_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    arguments = ["--data", str(rows_file), "--model", str(tiny_model), "--rows", "2", "--width", "4"]
    code = main(
        ["bench", "batch", *arguments, "--max-tokens", "6", "--dtype", "float32", "--limit", "3", "--json"]
    )
    out = capsys.readouterr().out
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    keys = {
        "rows",
        "requests",
        "reader_tokens_per_s",
        "generate_batch_tokens_per_s",
        "one_at_a_time_tokens_per_s",
        "speedup_vs_generate_batch",
        "identical",
        "p50_s",
        "p95_s",
    }
    assert keys <= set(result)
    assert result["requests"] == result["identical"] == 3
