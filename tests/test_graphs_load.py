"""Recorded passes when a model is loaded: the check that replays give the same bits, and who decides."""

from __future__ import annotations

import gc

import pytest

from reader_rag import Reader, Sampling, engine
from reader_rag.load import load_model
from reader_rag.verify.graphs import EagerRecorder, RecordedPasses
from reader_rag.verify.selfcheck import why_not_recorded
from tests.tiny_forwards import VOCABULARY, forward_of


@pytest.mark.parametrize(("kind", "rows"), [("llama", 1), ("qwen2", 3), ("two windows", 4)])
def test_the_check_at_load_passes_what_replays_the_same_bits(kind, rows):
    forward = forward_of(kind, rows=rows)
    passes = RecordedPasses(forward, EagerRecorder())
    assert why_not_recorded(forward, passes, VOCABULARY) is None
    assert passes.recordings == (1 if rows == 1 else 2)
    assert forward.recorded is None


class Frozen:
    """Keeps a value of the recorded pass: a model that reads its position from Python, say, in a graph."""

    def __init__(self, passes, name):
        self.passes, self.name = passes, name

    def record(self, step):
        inputs = self.passes._inputs
        ids, positions, inner = (tensor.clone() for tensor in inputs.read())
        kept = {"ids": ids, "positions": positions, "inner": inner}[self.name]

        def replay():
            now = dict(zip(("ids", "positions", "inner"), read(), strict=True)) | {self.name: kept}
            inputs.read = lambda: tuple(now.values())
            step()
            inputs.read = read

        read = inputs.read
        return replay


@pytest.mark.parametrize("name", ["ids", "positions", "inner"])
def test_the_check_at_load_fails_what_was_baked_in(name):
    forward = forward_of(rows=2)
    passes = RecordedPasses(forward, EagerRecorder())
    passes._recorder = Frozen(passes, name)
    assert "differs" in (why_not_recorded(forward, passes, VOCABULARY) or "")


@pytest.fixture
def recording(monkeypatch):
    """Engines on the CPU record, eagerly."""
    monkeypatch.setattr(engine, "recorder_for", lambda device: EagerRecorder())


def texts(reader):
    prompts = ["What is a chunk?", "for name, value in sorted(table.items()):", "naïve " * 60]
    seeded = Sampling(max_tokens=24, temperature=0.7, seed=3, logprobs=2)
    answers = [
        reader.generate(prompts[0], sampling=Sampling(max_tokens=48)),
        *reader.generate_batch(prompts * 2, sampling=seeded),
    ]
    answers.append(reader.generate([5], sampling=Sampling(max_tokens=5)))  # nothing to prefill
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_reader_with_recorded_passes_writes_the_same(tiny_model, tmp_path, recording, rows):
    options = {"dtype": "float32", "device": "cpu", "rows": rows, "width": 8}
    recorded = Reader.load(tiny_model, cache_dir=tmp_path / "a", **options)
    plain = Reader.load(tiny_model, cache_dir=tmp_path / "b", graphs=False, **options)
    assert (recorded.graphs, recorded.graphs_reason) == (True, None)
    assert (plain.graphs, plain.graphs_reason) == (False, "switched off with graphs=False")
    written = texts(plain)
    assert texts(recorded) == written
    assert recorded._forward.recorded.replays > 20
    assert plain._forward.recorded is None
    gc.collect()
    recorded.close()
    assert all(seat.storage is None for seat in recorded._forward.recorded._seats._seats)
    assert texts(recorded) == written  # seats are taken again


def test_a_reader_measures_the_passes_that_will_run(tiny_model, tmp_path, recording, monkeypatch):
    recorded = []
    monkeypatch.setattr(EagerRecorder, "record", lambda self, step: recorded.append(step) or step)
    reader = Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path)
    assert len(recorded) >= len(reader.pass_seconds)
    assert "_recorded" in (tmp_path / "calibration.json").read_text()


def test_what_is_not_recorded_says_why(tiny_model, tmp_path, monkeypatch):
    options = {"dtype": "float32", "device": "cpu", "width": 8, "cache_dir": tmp_path}
    assert Reader.load(tiny_model, **options).graphs_reason == "CUDA graphs need a CUDA device"
    assert "throughput" in Reader.load(tiny_model, exact=False, **options).graphs_reason
    loaded = load_model(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path)
    loaded.model.hf_device_map = {"": "cpu"}  # what accelerate leaves behind on a model spread by device_map
    assert "hooks" in Reader(loaded, width=8, cache_dir=tmp_path).graphs_reason


def test_a_recording_that_fails_at_load_is_said_once_and_the_reader_works(
    tiny_model, tmp_path, monkeypatch, caplog
):
    class Refusing:
        def record(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(engine, "recorder_for", lambda device: Refusing())
    reader = Reader.load(tiny_model, dtype="float32", device="cpu", width=8, cache_dir=tmp_path)
    assert "operation not permitted" in reader.graphs_reason
    assert "runs without CUDA graphs" in caplog.text
    assert reader.generate("What is a chunk?", sampling=Sampling(max_tokens=8)).stats.tokens > 0


def test_doctor_says_whether_graphs_are_used():
    from reader_rag.cli.doctor import as_text, examine

    report = examine(load=False) | {"width": 8, "rows": 1, "mode": "exact"}
    used = as_text(report | {"graphs": True, "graphs_reason": None})
    unused = as_text(report | {"graphs": False, "graphs_reason": "CUDA graphs need a CUDA device"})
    assert "CUDA graphs    used" in used
    assert "CUDA graphs    not used: CUDA graphs need a CUDA device" in unused
