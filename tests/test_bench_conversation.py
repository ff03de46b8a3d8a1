"""`bench conversation` on the tiny model: the second turn reuses the first, says the same as read anew, and is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reader_rag.bench.conversation import conversation, first_turn, report
from reader_rag.cli import main
from reader_rag.errors import SettingsError
from reader_rag.load import load_model


def test_a_second_turn_reads_only_what_is_new_and_says_the_same(tiny_model: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_model, dtype="float32", device="cpu")
    result = conversation(
        loaded, tokens=400, rounds=2, width=4, max_tokens=8, cache_dir=tmp_path, progress=False
    )
    assert result["identical"] == result["rounds"] == 2
    assert 380 <= result["first_prompt_tokens"] <= 420
    assert 256 <= result["reused_tokens"] <= result["first_prompt_tokens"]
    assert result["second_to_first"] == pytest.approx(
        result["second_ttft_s"] / result["first_ttft_s"], rel=0.1
    )
    table = report(result)
    assert "second turn, read anew" in table
    assert "texts equal to a fresh prefill 2/2" in table


@pytest.mark.parametrize("tokens", [10, 900])
def test_a_first_turn_that_is_too_short_or_leaves_no_room_is_refused(reader, tokens: int) -> None:
    with pytest.raises(SettingsError, match=r"first turn may have 256 to \d+"):
        first_turn(reader, tokens, 48)


def test_the_command_ends_with_one_line_of_json(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    model = ["--model", str(tiny_model), "--dtype", "float32", "--width", "4"]
    sizes = ["--tokens", "300", "--rounds", "1", "--max-tokens", "4"]
    assert main(["bench", "conversation", *model, *sizes, "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    assert json.loads(out[0])["identical"] == 1
