"""No face of a framework costs what a user would notice."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")


def test_a_face_adds_little_to_a_hundred_tokens() -> None:
    from face_overhead import InstantReader, added_ms, faces

    added = added_ms()
    assert set(added) == set(faces(InstantReader()))
    # A model of seven tokens a second takes 14 s for these, a fast one of 100 takes 1 s: 30 ms are 3 % of that.
    # The event loop's own hand-overs, one thread switch per token, are part of the figure for async streams.
    limits = {name: 100.0 if ".astream" in name else 30.0 for name in added}
    assert {name: ms for name, ms in added.items() if ms > limits[name]} == {}
