"""What a Reader has learned is there for later requests of its scope, and for no others."""

from __future__ import annotations

import pytest

from reader_rag import Chunk, Drafting, Reader, Sampling

OFF = Drafting(sources=())
QUESTION = "The reader looks up how a text goes on. How does a text go on?"
CHUNKS = [Chunk.from_text("The reader looks up how a text goes on, and the model verifies it in one pass.")]


@pytest.fixture(scope="module")
def shared(tiny_model, tmp_path_factory):
    return Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path_factory.mktemp("fp32"))


def test_statistics_persist_per_model_and_scope(tiny_model, tmp_path):
    def passes(reader, scope):
        answer = reader.generate(
            QUESTION, sampling=Sampling(max_tokens=60), drafting=Drafting(sources=("ngrams",)), scope=scope
        )
        return answer.stats.passes

    first = Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path)
    cold = passes(first, "a")
    warm = passes(first, "a")
    assert warm < cold
    assert passes(first, "b") == cold  # another scope reads nothing of it
    first.save()
    second = Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path)
    assert passes(second, "a") <= warm
    third = Reader.load(
        tiny_model, dtype="float32", width=8, cache_dir=tmp_path, drafting=Drafting(persist=False)
    )
    assert passes(third, "a") == cold


def test_offered_chunks_are_drafted_from_in_their_scope_only(shared):
    text = shared.generate(QUESTION, sampling=Sampling(max_tokens=60), drafting=OFF).text
    only = Drafting(sources=("chunks",))

    def accepted(scope):
        stats = shared.generate(QUESTION, sampling=Sampling(max_tokens=60), drafting=only, scope=scope).stats
        return stats.accepted_by_source.get("chunks", 0)

    assert accepted("tenant-1") == 0
    shared.offer([Chunk.from_text(text)], scope="tenant-1")
    assert accepted("tenant-1") > 0
    assert accepted("tenant-2") == 0


def test_earlier_answers_of_a_scope_are_drafted_from_there_and_nowhere_else(tiny_model, tmp_path):
    reader = Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path)
    only, sampling = Drafting(sources=("answers",)), Sampling(max_tokens=40)
    first = reader.generate(QUESTION, sampling=sampling, drafting=only, scope="a")
    assert first.stats.accepted == 0
    again = reader.generate(QUESTION, sampling=sampling, drafting=only, scope="a")
    assert again.tokens == first.tokens
    assert again.stats.accepted_by_source["answers"] > 20
    assert reader.generate(QUESTION, sampling=sampling, drafting=only, scope="b").stats.accepted == 0


def test_an_indexed_corpus_is_drafted_from_in_its_scope(tiny_model, tmp_path):
    reader = Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path)
    only, sampling = Drafting(sources=("corpus",)), Sampling(max_tokens=60)
    plain = reader.generate(QUESTION, sampling=sampling, drafting=OFF)
    assert reader.index([plain.text, "Another chunk."], scope="a") > len(plain.tokens) / 2
    answer = reader.generate(QUESTION, sampling=sampling, drafting=only, scope="a")
    assert answer.tokens == plain.tokens
    assert answer.stats.accepted_by_source["corpus"] > 0
    assert reader.generate(QUESTION, sampling=sampling, drafting=only, scope="b").stats.accepted == 0
