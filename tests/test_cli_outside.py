"""The command in a world that is not UTF-8, not writable, or not the file that it should be."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from reader_rag.cache import new_folder
from reader_rag.cli import main
from reader_rag.errors import PromptError, SettingsError
from reader_rag.prompt import refuse_surrogates


def ascii_stdout(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    return raw


def test_a_terminal_without_utf8_gets_escapes_and_json_stays_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = ascii_stdout(monkeypatch)
    assert main(["doctor", "--no-load", "--json"]) == 0
    json.loads(raw.getvalue())  # the command itself runs there

    print(json.dumps({"text": "a \u2014 b \U0001f389 \xe9"}, ensure_ascii=False))
    assert json.loads(raw.getvalue().splitlines()[-1]) == {"text": "a \u2014 b \U0001f389 \xe9"}


def test_a_question_of_another_encoding_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ask", "caf\udce9 is", "--store", "nowhere"]) == 2
    assert "half a surrogate pair at character 3" in capsys.readouterr().err


def test_text_that_no_tokenizer_takes_says_how_to_repair_it() -> None:
    refuse_surrogates("caf\xe9 \U0001f389", "the prompt")
    with pytest.raises(PromptError, match="the prompt holds half a surrogate pair at character 0"):
        refuse_surrogates("\ud83d alone", "the prompt")


def test_a_full_disk_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("reader_rag.cli.doctor.run", full)
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err == "reader-rag: error: [Errno 28] No space left on device; free it, or name another place\n"


def test_a_cache_folder_that_cannot_be_made_names_the_two_ways_to_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.raises(SettingsError, match="cache_dir= or READER_RAG_CACHE"),
        new_folder(tmp_path / "file" / "m"),
    ):
        pass
