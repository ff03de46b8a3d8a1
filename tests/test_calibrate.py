"""What is measured at load: whether reading the prompt with the output matrix pays."""

from __future__ import annotations

import time

import pytest
import torch

from reader_rag import Drafting, Reader, Sampling
from reader_rag.errors import SettingsError
from reader_rag.verify.calibrate import prompt_evidence_pays


class TimedForward:
    """Passes that take known times: 4 ms a chunk, 20 ms a pass, and `head` seconds more for the chunk's logits."""

    chunk, device = 128, torch.device("cpu")

    def __init__(self, width: int, head: float) -> None:
        self.width, self._head = width, head

    def new_arena(self) -> None:
        return None

    def prefill(self, arena: object, tokens: list[int], start: int, *, want_logits: bool) -> torch.Tensor:
        time.sleep(0.004 + self._head * want_logits)
        return torch.zeros(8, 16)

    def decode(self, jobs: object) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("width", "head", "pays"),
    [
        (16, 0.001, True),  # some 8 ms of 1,000 tokens against 4 passes of 20 ms
        (16, 0.060, False),
        (4, 0.010, False),  # narrow drafts gain one pass
        (1, 0.000, False),
    ],
)
def test_the_prompts_evidence_is_kept_where_it_saves_more_than_it_costs(width, head, pays):
    assert prompt_evidence_pays(TimedForward(width, head)) is pays


def test_the_decision_is_measured_once_and_kept(tiny_model, tmp_path, monkeypatch):
    asked = []

    def measured(forward: object) -> bool:
        asked.append(forward)
        return True

    monkeypatch.setattr("reader_rag.engine.prompt_evidence_pays", measured)
    readers = [Reader.load(tiny_model, width=4, cache_dir=tmp_path) for _ in range(2)]
    assert len(asked) == 1
    assert all(reader.prompt_evidence for reader in readers)


@pytest.mark.parametrize(("wanted", "kept"), [(None, True), (True, True), (False, False)])
def test_a_setting_overrules_the_measurement(tiny_model, tmp_path, monkeypatch, wanted, kept):
    monkeypatch.setattr("reader_rag.engine.prompt_evidence_pays", lambda forward: True)
    reader = Reader.load(tiny_model, width=4, cache_dir=tmp_path)
    reads = []
    prefill = reader._forward.prefill

    def watched(*args, want_logits):
        reads.append(want_logits)
        return prefill(*args, want_logits=want_logits)

    monkeypatch.setattr(reader._forward, "prefill", watched)
    reader.generate(
        list(range(5, 40)), sampling=Sampling(max_tokens=1), drafting=Drafting(prompt_evidence=wanted)
    )
    assert reads == [kept]


def test_what_is_neither_yes_nor_no_is_refused():
    with pytest.raises(SettingsError, match="prompt_evidence is 'auto'; use True, False or None"):
        Drafting(prompt_evidence="auto")
