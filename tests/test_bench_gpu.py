"""The accelerator check, end to end on a small random model: the same script, the same code, another shape."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoConfig

from reader_rag.bench import gpu
from reader_rag.load import load_model


@pytest.fixture
def rows_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    passage = "A span stands verbatim in the answer and in a chunk of the store that was searched."
    rows = [
        {
            "id": f"{i}",
            "set": "t",
            "question": f"What is a span ({i})?",
            "passages": [{"id": "p", "text": passage}],
            "responses": {"model": f"It is this: {passage} Number {i}."},
        }
        for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def few_tokens(tiny_model, monkeypatch):
    """The tokenizer of the tests' own tiny model: an output matrix of 600 rows takes a moment, one of 49,152 most of the run."""
    shape = copy.deepcopy(gpu.SHAPES["tiny"])
    shape.vocab_size = AutoConfig.from_pretrained(tiny_model).vocab_size
    monkeypatch.setitem(gpu.SHAPES, "tiny", shape)
    monkeypatch.setattr(gpu, "load_model", lambda model, **options: load_model(tiny_model, **options))


def test_the_script_runs_end_to_end_and_its_last_line_is_json(rows_file, few_tokens, capsys):
    arguments = ["--data", str(rows_file), "--tiny", "--rows", "1,2", "--limit", "2", "--width", "8"]
    assert gpu.main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["exact"] == {rows: {"single": True, "batched": True} for rows in ("1", "2")}
    assert result["mode"] == "exact"
    for check in result["graphs"].values():
        assert (check["equal"], check["reason"], check["used"]) == (True, None, False)
        assert check["replays"] >= 3
        assert check["not_used"] == "CUDA graphs need a CUDA device"
    assert all(result["pass_ms_unrecorded"][rows] > 0 for rows in ("1", "2"))
    assert all(result["pass_ms"][rows] > result["floor_ms"][rows] > 0 for rows in ("1", "2"))
    assert all(
        result["replay"][rows]["tokens_per_pass"] > 1.5 for rows in ("1", "2")
    )  # it copies its passage


def test_a_told_answer_is_the_answer_whatever_the_weights_say():
    told = gpu.Told(3, [7, 8])
    for length, token in ((3, 7), (4, 8)):
        scores = told(torch.zeros(1, length, dtype=torch.long), torch.randn(1, 20))
        assert scores.argmax() == token


def test_a_replay_that_differs_fails_the_check(rows_file, demo_folder, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "why_not_recorded", lambda *args: "a replayed pass differs")
    arguments = ["--data", str(rows_file), "--tiny", "--rows", "1", "--limit", "1", "--width", "4"]
    assert gpu.main(arguments) == 1
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["graphs"]["1"]["reason"] == "a replayed pass differs"


def test_without_a_device_it_says_how_to_run(rows_file, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--data", str(rows_file)]) == 2
    assert "--tiny" in capsys.readouterr().err
