"""The LangChain models before their first answer: imports, construction, and one loaded Reader for all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.load import dumpd
from langchain_fakes import FakeReader, faces

from langchain_reader_rag import ChatReader, ReaderLLM
from reader_rag import Drafting, Reader

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}


@pytest.fixture
def fake() -> FakeReader:
    return FakeReader()


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Reader, "shared", refuse)


@faces
def test_constructing_a_face_loads_nothing(face: Any) -> None:
    assert face(model="some/model", temperature=0.5).temperature == 0.5
    assert face().max_tokens == 256


@faces
def test_an_unknown_option_raises_and_names_the_near_one(face: Any) -> None:
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        face(temprature=1.0)


@faces
@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"timeout": 0}])
def test_a_bad_value_raises_at_construction(face: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        face(**bad)


@faces
def test_faces_of_one_model_ask_for_one_shared_reader(face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake = FakeReader()

    def shared(model: Any = None, **options: Any) -> FakeReader:
        asked.append((model, options))
        return fake

    monkeypatch.setattr(Reader, "shared", shared)
    face(model="m", dtype="auto", temperature=0.3).invoke("a")
    face(model="m", max_tokens=9).invoke("a")
    face(model="m", dtype="float32", width=8).invoke("a")
    assert asked == [("m", {}), ("m", {}), ("m", {"dtype": "float32", "width": 8})]


@faces
def test_a_live_reader_takes_no_loading_options(face: Any, fake: FakeReader) -> None:
    with pytest.raises(ValueError, match="model and dtype"):
        face(reader=fake, model="m", dtype="float32")
    with pytest.raises(ValueError, match="model="):
        face(reader="some/model")


def test_what_identifies_a_model_is_known_before_it_is_loaded() -> None:
    llm = ReaderLLM(model="m", width=8)
    assert ChatReader(reader=llm)._identifying_params["model"] == "m"
    assert ChatReader(reader=llm)._identifying_params["width"] == "8"


def test_a_face_shares_the_reader_of_another(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake)
    chat = ChatReader(reader=llm)
    chat.invoke("hello")
    assert chat.load() is llm.load() is fake


@faces
def test_traces_hold_no_engine(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake)
    model.invoke("hello")
    assert "FakeReader" not in repr(model)
    assert len(str(dumpd(model))) < 2000


@faces
def test_what_identifies_a_model_is_what_its_text_depends_on(face: Any, fake: FakeReader) -> None:
    def key(**options: Any) -> Any:
        return face(reader=fake, **options)._identifying_params

    assert key() == key(drafting=Drafting(sources=()), scope="a", timeout=3)
    assert key() != key(temperature=0.5)
    assert key() != key(stop=["x"])
    assert key()["model"] == "fake"
    assert face(model="m")._identifying_params != face(model="m", dtype="bfloat16")._identifying_params


def test_without_langchain_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "try:\n    import langchain_reader_rag\n"
        "except ImportError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], env=PATHS, capture_output=True, text=True, check=True)
    assert 'pip install "reader-rag[langchain]"' in run.stdout


def test_importing_the_faces_does_not_import_torch() -> None:
    code = "import sys, langchain_reader_rag; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], env=PATHS, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
