"""The speed bench: rows are read or refused by line, and its figures come from real runs."""

from __future__ import annotations

import json

import pytest

from reader_rag.bench.rows import read_rows
from reader_rag.bench.speed import SYSTEMS, report, speed
from reader_rag.cli import main
from reader_rag.errors import SettingsError

ROWS = [
    {
        "id": "1",
        "set": "x/rag",
        "question": "How does a text go on?",
        "passages": [{"id": "p", "title": "t", "text": "It goes on."}],
    },
    {
        "id": "2",
        "set": "x/qa",
        "question": "And then?",
        "messages": [{"role": "user", "content": "And then?"}],
        "passages": [],
    },
]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    return file


def test_rows_keep_their_conversation_and_put_passages_into_the_question(data):
    one, two = read_rows(data)
    assert one.messages[-1]["content"].endswith("Question: How does a text go on?")
    assert "It goes on." in one.messages[-1]["content"]
    assert [chunk.text for chunk in one.chunks] == ["It goes on."]
    assert two.messages == ({"role": "user", "content": "And then?"},)
    assert [row.id for row in read_rows(data, only="qa")] == ["2"]
    assert [row.id for row in read_rows(data, limit=1)] == ["1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows"),
        ("[1, 2]", "it is no JSON object"),
        ("not json", r"rows\.jsonl:1 is not a question row"),
        (json.dumps({"question": "  "}), "its question is empty"),
        (
            json.dumps({"question": "?", "passages": [{"id": 1}]}),
            r":1 is not a question row \(it has no 'text'\); write it",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, text, says):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_rows(file)


def test_missing_files_unknown_sets_and_empty_limits_are_refused(data, tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(SettingsError, match="its sets are: x/qa, x/rag"):
        read_rows(data, only="summarization")
    with pytest.raises(SettingsError, match="at least 1 question"):
        read_rows(data, limit=0)
    assert main(["bench", "speed", "--data", str(data), "--max-tokens", "0"]) == 2


def test_speed_runs_every_system_and_its_totals_are_those_of_the_runs(reader, data):
    result = speed(reader, data, max_tokens=12, progress=False)
    assert result["rows"] == result["identical"] == result["identical_to_generate"] == 2
    assert 1.0 <= result["tokens_per_pass"] <= reader.width
    for system in SYSTEMS:
        assert result[f"{system}_tokens_per_s"] > 0
        assert result["answer_s"][system] > result["ttft_s"][system] > 0
    assert result["speedup_vs_generate"] == pytest.approx(
        result["reader_tokens_per_s"] / result["generate_tokens_per_s"], rel=0.01
    )
    assert 0 < result["draft_share"] < 1
    text = report(result)
    assert "texts equal to plain 2/2" in text
    assert json.loads(json.dumps(result)) == result


def test_the_command_prints_one_json_document_last(tiny_model, data, capsys):
    command = ["bench", "speed", "--data", str(data), "--model", str(tiny_model), "--dtype", "float32"]
    assert main([*command, "--width", "8", "--max-tokens", "6", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert {
        "rows",
        "tokens_per_pass",
        "speedup_vs_generate",
        "speedup_vs_prompt_lookup",
        "identical",
        "draft_share",
    } <= set(result)
    assert result["width"] == 8
    assert "tokens per pass" in err
