"""`reader-rag index --warm`: the model reads the store's chunks, and later commands find what it expects there."""

import json
from pathlib import Path

import pytest

from reader_rag.cli import main
from reader_rag.draft import NgramTable


def test_warming_leaves_statistics_behind(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.md").write_text("A with statement closes the file when its block is left.")
    arguments = ["index", str(tmp_path / "a.md"), "--store", str(tmp_path / "store"), "--json"]
    assert main(arguments) == 0
    assert "warmed_tokens" not in json.loads(capsys.readouterr().out)
    assert not list((tmp_path / "cache").rglob("ngrams/*.npz"))
    arguments += ["--warm", "--model", str(tiny_model), "--dtype", "float32", "--width", "8"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warmed_tokens"] > 10
    assert "has read 1 chunks" in err
    (file,) = (tmp_path / "cache").rglob("ngrams/*.npz")
    assert len(NgramTable.load(file, file.name.partition("-")[0])) > 0
