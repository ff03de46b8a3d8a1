"""The answers source, what a scope learns from its answers, and that all sources stay within their bytes."""

from pathlib import Path

import pytest

from reader_rag.draft import ChunkPool, NgramTable, Priors, make_drafter
from reader_rag.memory import Memory, ScopeMemory
from reader_rag.settings import Drafting


def draft_after(prompt: list[int], memory: ScopeMemory) -> list[int]:
    drafter = make_drafter(["answers"], answers=memory.answers)
    drafter.observe_prompt(prompt, None, None)
    return drafter.draft([], 3, 3).tokens


def test_an_answer_serves_the_next_request_of_its_scope_and_no_other(tmp_path: Path) -> None:
    memory = Memory("model", tmp_path, Drafting(persist=False))
    memory.of("a").learn_answer([1, 2, 3, 4, 5])
    assert draft_after([9, 2, 3], memory.of("a")) == [4, 5]
    assert draft_after([9, 2, 3], memory.of("b")) == []
    memory.forget()
    assert draft_after([9, 2, 3], memory.of("a")) == []


def test_an_answer_that_comes_again_is_kept_once_and_as_the_latest() -> None:
    memory = ScopeMemory(ChunkPool(), NgramTable())
    for answer in ([1, 2, 3, 4], [5, 6, 7], (1, 2, 3, 4)):
        memory.learn_answer(answer)
    assert len(memory.answers) == 2
    memory.answers.limit = memory.answers.nbytes
    memory.learn_answer([8, 9, 10])
    assert draft_after([1, 2], memory) == [3, 4]
    assert draft_after([5, 6], memory) == [], "the longest unused went first"


def test_an_origin_names_the_answer_and_the_place() -> None:
    memory = ScopeMemory(ChunkPool(), NgramTable())
    memory.learn_answer([1, 2, 3, 4])
    memory.learn_answer([5, 6, 7, 8])
    drafter = make_drafter(["answers", "context"], answers=memory.answers, priors=Priors({}))
    drafter.observe_prompt([9, 30, 31, 5, 6], None, None)
    draft = drafter.draft([], 20, 20)
    copied = {draft.tokens[node]: drafter.origin(draft, node) for node in range(len(draft.tokens))}
    assert copied[7] == (0, 1, 2)
    assert copied[8] == (0, 1, 3)
    habit = next(n for n, token in enumerate(draft.tokens) if token == 30 and draft.parents[n] == -1)
    assert drafter.origin(draft, habit) == (1, None, None), "a habit is not copied from a place"
    drafter.observe([7], [[7]], [[0.9]])
    with pytest.raises(ValueError, match="latest draft"):
        drafter.origin(draft, 0)
