"""Throughput mode: passes of any shape, token-identical in float32, with side branches accepted."""

from __future__ import annotations

import pytest

from reader_rag import Drafting, Reader, Sampling
from tests.request_mix import OFF, prompts_of, samplings_of, solo
from tests.slow_path import generated


@pytest.fixture(scope="module")
def exact_reader(tiny_model, tmp_path_factory):
    return Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def free_reader(tiny_model, tmp_path_factory):
    return Reader.load(
        tiny_model, dtype="float32", rows=4, exact=False, cache_dir=tmp_path_factory.mktemp("free")
    )


@pytest.mark.parametrize("seed", range(4))
def test_throughput_mode_is_token_identical_in_float32(free_reader, exact_reader, seed):
    prompts, samplings = prompts_of(seed, 8), samplings_of(seed, 8)
    wanted = [solo(exact_reader, p, s) for p, s in zip(prompts, samplings, strict=True)]
    answers = free_reader.generate_batch(prompts, sampling=samplings)
    assert [(a.tokens, a.text, a.finish_reason) for a in answers] == wanted
    assert answers[0].stats.mode == "throughput"


def test_throughput_mode_accepts_side_branches_and_moves_their_keys(free_reader):
    """A source whose main chain is always wrong and whose side branch is right: only side branches can be accepted."""
    from reader_rag.draft.source import Evidence

    question, sampling = (
        "How does a text go on?",
        Sampling(max_tokens=40, logit_bias={2: -100.0}),
    )
    plain = free_reader.generate(question, sampling=sampling, drafting=OFF)
    free_reader._loop._seconds, kept = (lambda tokens: 1.0), free_reader._loop._seconds

    class Sideways:
        name = "sideways"

        def __init__(self):
            self.done = 0

        def observe(self, tokens, rows, prompt):
            self.done += 0 if prompt else len(tokens)

        def observe_branch(self, context, row):
            pass

        def root(self):
            return self.done

        def advance(self, state, token):
            return state + 1 if state is not None and token == self.next_of(state) else None

        def next_of(self, state):
            return plain.tokens[state] if state < len(plain.tokens) else 0

        def predict(self, state):
            if state is None:
                return []
            right = self.next_of(state)
            return [Evidence(0.99, 1, {(right + 7) % 500 + 3: 0.5, right: 0.45}, [])]

    try:
        drafted = free_reader.generate(question, sampling=sampling, drafting=Drafting(sources=(Sideways(),)))
    finally:
        free_reader._loop._seconds = kept
    assert drafted.tokens == plain.tokens == generated(free_reader, question, 40, suppress_tokens=[2])
    assert drafted.stats.accepted > 20
    assert drafted.stats.passes < 15


def test_throughput_mode_drafts_nothing_when_nothing_pays(free_reader):
    free_reader._loop._seconds, kept = (lambda tokens: float(tokens)), free_reader._loop._seconds
    try:
        answer = free_reader.generate("How does a text go on?", sampling=Sampling(max_tokens=20))
    finally:
        free_reader._loop._seconds = kept
    assert answer.stats.drafted == 0
    assert answer.stats.passes == answer.stats.tokens
