"""Sampled drafts in a Reader: its answers keep the target's distribution, and what the source does where it cannot draw."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reader_rag import Drafting, Reader, Sampling
from reader_rag.draft.speculator import Speculator
from reader_rag.draft.tree import Draft
from reader_rag.draws import Draws
from reader_rag.errors import SettingsError
from reader_rag.verify.sampling import Sampler
from reader_rag.verify.stochastic import RULES
from tests.conftest import build_tiny_model

Path_ = tuple[int, ...]

UNUSED = SimpleNamespace(forward=lambda past_key_values: None)
"""Stands where a model would, for sources that never run it."""


PROMPT = [5, 80, 9]
SEEDS = 200
CHI_SQUARE = 26.1  # 0.1 % of samples of the right law lie above it, at 9 outcomes


@pytest.fixture(scope="module")
def free_reader(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("free")
    reader = Reader.load(tiny_model, dtype="float32", rows=8, exact=False, cache_dir=folder)
    reader._loop._seconds = lambda tokens: 1.0  # all that is drafted pays
    return reader


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same vocabulary, other weights, and less to compute."""
    from transformers import AutoModelForCausalLM

    folder = build_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=5, num_hidden_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def exact_law(model: Any, sampling: Sampling, count: int) -> dict[Path_, float]:
    """The law of the first `count` tokens of plain sampling, by asking the model after every path."""
    law: dict[Path_, float] = {(): 1.0}
    sampler = Sampler(sampling, 0, prompt_tokens=len(PROMPT))
    for _ in range(count):
        longer: dict[Path_, float] = {}
        for path, prob in law.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *path]])).logits[0, -1]
            probs = sampler.distribution(logits, [*PROMPT, *path])
            longer |= {(*path, int(t)): prob * float(probs[t]) for t in np.flatnonzero(probs > 1e-9)}
        law = longer
    return law


def misfit(seen: Counter[Path_], law: dict[Path_, float]) -> float:
    """Chi-square of what was seen against a law."""
    total = sum(seen.values())
    return sum((seen[path] - total * prob) ** 2 / (total * prob) for path, prob in law.items())


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_readers_tokens_have_the_law_of_plain_sampling(
    free_reader: Reader, other_model: Any, name: str
) -> None:
    """Two tokens out of three words, with retrieval beside the sampled drafts."""
    words = {80: 60.0, 300: 60.0, 301: 60.0}
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 2.0, "logit_bias": words}
    answers = free_reader.generate_batch(
        [PROMPT] * SEEDS,
        sampling=[Sampling(seed=seed, draft_rule=name, **options) for seed in range(SEEDS)],
        drafting=Drafting(sources=("context", Speculator(other_model, cost_ratio=0.01, depth=2, branches=2))),
    )
    plain = exact_law(free_reader.model, Sampling(**options), 2)
    model = exact_law(other_model, Sampling(**options), 2)
    assert len(plain) == 9
    seen = Counter(answer.tokens for answer in answers)
    assert misfit(seen, plain) < CHI_SQUARE
    assert misfit(seen, model) > 2 * CHI_SQUARE, (
        "a rule that accepted everything would give the draft model's law"
    )
    accepted = sum(answer.stats.accepted_by_source.get("speculator", 0) for answer in answers)
    assert 0.2 * SEEDS < accepted < SEEDS


def test_drafts_of_the_same_model_are_all_accepted_and_a_seed_repeats(free_reader: Reader) -> None:
    speculator = Speculator(free_reader.model, cost_ratio=0.01, depth=3, branches=2)
    sampling = Sampling(max_tokens=8, temperature=1.5, seed=3, draft_rule="specinfer", logit_bias={2: -100.0})
    answer = free_reader.generate(PROMPT, sampling=sampling, drafting=Drafting(sources=(speculator,)))
    assert answer.stats.passes == 2, "four tokens a pass: three drafted ones and the next"
    assert answer.stats.accepted_by_source == {"speculator": 6}
    again = free_reader.generate(PROMPT, sampling=sampling, drafting=Drafting(sources=(speculator,)))
    assert again.tokens == answer.tokens


def test_a_speculator_that_fails_costs_drafts_and_not_the_answer(
    free_reader: Reader, other_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    run = other_model.forward

    def fails_later(*args: Any, **options: Any) -> Any:
        if next(calls) >= 4:
            raise RuntimeError("out of memory")
        return run(*args, **options)

    monkeypatch.setattr(other_model, "forward", functools.wraps(run)(fails_later))
    sampling = Sampling(max_tokens=16, temperature=1.0, seed=1, draft_rule="k_seq", logit_bias={2: -100.0})
    sources = (Speculator(other_model, cost_ratio=0.01, depth=3),)
    answer = free_reader.generate(PROMPT, sampling=sampling, drafting=Drafting(sources=sources))
    assert answer.stats.tokens == 16
    assert answer.stats.dropped_sources == {"speculator": "RuntimeError: out of memory"}


def test_all_candidates_enter_a_draft_that_shares_what_it_has() -> None:
    source, sampler = drawing(np.zeros(6), Sampling(temperature=1.0, seed=0, draft_rule="specinfer"))
    source.observe([1, 2], [None, None], True)
    source.root()
    first, second = source.proposals.values()
    assert [len(set(proposal.candidates)) for proposal in (first, second)] == [3, 3]
    retrieved = Draft([first.candidates[1], 4], [-1, 0], [0.5, 0.4], [0, 0], 2)
    grown = source.extend(retrieved, 1, 2)
    assert (grown.tokens[:2], grown.parents[:2], grown.origins[:2]) == (retrieved.tokens, [-1, 0], [0, 0])
    paths = [grown.tokens[node : node + 1] for node, parent in enumerate(grown.parents) if parent == -1]
    assert sorted(paths) == sorted([x] for x in first.candidates)
    tip = grown.tokens.index(first.candidates[0], 2)
    below = [t for t, parent in zip(grown.tokens, grown.parents, strict=True) if parent == tip]
    assert below == list(second.candidates)
    assert grown.origins[2:] == [1] * 5
    assert len(source.extend(retrieved, 1, 1).tokens) == 4, (
        "levels beyond the last token that may come are left out"
    )
    assert source.extend(retrieved, 1, 0).tokens == retrieved.tokens
    source.observe([3], [None], False)
    assert source.proposals == {}, "drawn for one pass only"
    assert sampler.seed == 0


def drawing(logits: np.ndarray, sampling: Sampling, ends: Iterable[int] = ()) -> tuple[Any, Sampler]:
    """A sampled source over a model that always says `logits`, without the model."""
    sampler = Sampler(sampling, int(sampling.seed or 0), frozenset(ends))
    draws = Draws(Speculator(UNUSED, cost_ratio=0.1, depth=2, branches=3), sampler, len(logits) + 2)
    draws.source._logits_after = lambda tokens: torch.tensor(logits)  # type: ignore[method-assign]
    return draws.source, sampler


def test_what_was_drawn_before_a_failure_stays_for_its_pass() -> None:
    """Taking it back would select the draws by what followed from them."""
    source, _ = drawing(np.zeros(6), Sampling(temperature=1.0, seed=0, draft_rule="k_seq"))
    source.observe([1], [None], True)
    says = source._logits_after

    def fails_below(tokens: list[int]) -> torch.Tensor:
        if len(tokens) > 1:
            raise RuntimeError("nothing is left")
        return says(tokens)

    source._logits_after = fails_below
    assert source.root() == ()
    assert list(source.proposals) == [()]
    with pytest.raises(RuntimeError, match="nothing is left"):
        source.root()


def test_nothing_is_drawn_after_an_end() -> None:
    source, _ = drawing(
        np.array([0.0, 60.0, 0.0]), Sampling(temperature=1.0, seed=0, draft_rule="k_seq"), ends={1}
    )
    source.observe([1], [None], True)  # an end token of the prompt ends nothing
    source.root()
    assert list(source.proposals) == [()]
    assert set(source.proposals[()].candidates) == {1}


def test_a_draft_model_with_fewer_rows_than_the_target_is_padded() -> None:
    sampling = Sampling(
        temperature=1.0, seed=0, draft_rule="k_seq", logit_bias={7: 3.0}, repetition_penalty=1.2
    )
    source, _ = drawing(np.zeros(6), sampling)
    source.observe([1, 7], [None, None], True)
    source.root()
    proposal = source.proposals[()]
    assert len(proposal.probs) == 8
    assert proposal.probs[6:].tolist() == [0.0, 0.0]
    assert max(proposal.candidates) < 6


# What cannot be meant


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        (
            {"draft_rule": "typical", "temperature": 1.0},
            "draft_rule is 'typical'; choose from specinfer, k_seq",
        ),
        ({"draft_rule": "k_seq"}, "draft_rule is 'k_seq'; greedy answers draw nothing: set a temperature"),
    ],
)
def test_settings_are_refused_with_the_mend(options: dict[str, Any], mend: str) -> None:
    with pytest.raises(SettingsError, match=mend):
        Sampling(**options)


def test_a_rule_without_its_mode_or_its_speculator_is_refused(
    free_reader: Reader, reader: Reader, other_model: Any
) -> None:
    sampling = Sampling(temperature=0.7, draft_rule="specinfer")
    speculator = Speculator(other_model, cost_ratio=0.1)
    with pytest.raises(
        SettingsError, match="exact mode every draw belongs to its seed: load the model with exact=False"
    ):
        reader.generate(PROMPT, sampling=sampling, drafting=Drafting(sources=(speculator,)))
    with pytest.raises(SettingsError, match=r"put one into Drafting\.sources"):
        free_reader.generate(PROMPT, sampling=sampling)
    with pytest.raises(ValueError, match="branches is 0: draw 1 to 64"):
        Speculator(other_model, cost_ratio=0.1, branches=0)
