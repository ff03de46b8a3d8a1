from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation import logits_process as hf

from reader_rag.errors import ReaderError, SettingsError
from reader_rag.settings import Sampling
from reader_rag.verify import sampling
from reader_rag.verify.sampling import SHORTLIST, Sampler, pass_evidence, top_evidence, uniform

EOS = frozenset({0})


def logits_of(seed: int, size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def spread(sampler: Sampler, scores: torch.Tensor) -> torch.Tensor:
    """Probabilities [V] of what the warpers leave."""
    ids, kept = sampler.warp(scores)
    probs = torch.zeros(len(scores))
    probs[ids] = kept.softmax(-1)
    return probs


# Against transformers


@given(
    seed=st.integers(0, 10_000),
    prefix=st.lists(st.integers(0, 39), min_size=1, max_size=30),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    ngram=st.sampled_from([0, 1, 2, 3]),
    bias=st.sampled_from([None, {3: 4.0, 7: -5.5}]),
)
@settings(max_examples=60, deadline=None)
def test_greedy_processors_equal_those_of_transformers(
    seed: int, prefix: list[int], repetition: float, ngram: int, bias: dict[int, float] | None
) -> None:
    logits = logits_of(seed, 40)
    chain = LogitsProcessorList()
    if bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()}))
    if repetition != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(repetition))
    if ngram:
        chain.append(hf.NoRepeatNGramLogitsProcessor(ngram))
    expected = chain(torch.tensor([prefix]), logits[None].clone())[0]
    sampler = Sampler(
        Sampling(repetition_penalty=repetition, no_repeat_ngram_size=ngram, logit_bias=bias),
        0,
        EOS,
        prompt_tokens=1,
    )
    untouched = logits.clone()
    assert torch.equal(sampler.process(logits, prefix), expected)
    assert torch.equal(logits, untouched)
    assert sampler.choose(logits, prefix, len(prefix)) == int(expected.argmax())
    assert sampler.choose(logits, torch.tensor(prefix), len(prefix)) == int(expected.argmax())


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
@settings(max_examples=80, deadline=None)
def test_warpers_equal_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = logits_of(seed, 64)
    chain = LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        chain.append(hf.MinPLogitsWarper(min_p))
    expected = chain(None, scores[None].clone())[0].softmax(-1)
    sampler = Sampler(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), 0)
    actual = spread(sampler, scores)
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected)


def test_the_order_is_that_of_transformers_generate() -> None:
    config = GenerationConfig(
        do_sample=True,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        sequence_bias={(3,): 2.0},
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
    )

    class Generating(GenerationMixin):  # type: ignore[misc]
        config = type("Config", (), {"is_encoder_decoder": False})()

    def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (torch.arange(scores.shape[-1]) == input_ids[0, -1]) * 5.0

    chain = Generating()._get_logits_processor(
        config, input_ids_seq_length=4, logits_processor=LogitsProcessorList([favour])
    )
    prefix = [1, 2, 9, 1, 2, 9, 3]
    sampler = Sampler(
        Sampling(
            repetition_penalty=1.3,
            no_repeat_ngram_size=2,
            logit_bias={3: 2.0},
            temperature=0.7,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            processors=(favour,),
        ),
        0,
    )
    for seed in range(20):
        logits = logits_of(seed, 50)
        expected = chain(torch.tensor([prefix]), logits[None].clone())[0].softmax(-1)
        torch.testing.assert_close(spread(sampler, sampler.process(logits, prefix)), expected)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_top_p_of_a_large_vocabulary_needs_no_full_sort(scale: float) -> None:
    scores = logits_of(1, 8 * SHORTLIST, scale)
    expected = hf.TopPLogitsWarper(0.9)(None, scores[None].clone())[0].softmax(-1)
    actual = spread(Sampler(Sampling(temperature=1.0, top_p=0.9), 0), scores)
    # float32 sums in another order may move the border by a token of probability 1e-4
    assert int(((actual > 0) != (expected > 0)).sum()) <= 2
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


# By hand


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0])
    assert Sampler(Sampling(), 0).choose(logits, [0], 1) == 1
    assert Sampler(Sampling(), 0).choose(logits.bfloat16(), [0], 1) == 1


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    logits = torch.zeros(6)
    prefix = [1, 1, 2, 3, 3, 3, 4]  # prompt 1 1 2, answer 3 3 3 4
    presence = Sampler(Sampling(presence_penalty=0.5), 0, prompt_tokens=3).process(logits, prefix)
    assert presence.tolist() == [0, 0, 0, -0.5, -0.5, 0]
    frequency = Sampler(Sampling(frequency_penalty=0.25), 0, prompt_tokens=3).process(logits, prefix)
    assert frequency.tolist() == [0, 0, 0, -0.75, -0.25, 0]
    both = Sampler(Sampling(presence_penalty=-1, frequency_penalty=0.5), 0, prompt_tokens=3).process(
        logits, prefix
    )
    assert both.tolist() == [0, 0, 0, -0.5, 0.5, 0]
    nothing_yet = Sampler(Sampling(presence_penalty=1), 0, prompt_tokens=7).process(
        logits, torch.tensor(prefix)
    )
    assert nothing_yet.tolist() == [0] * 6


def test_bias_can_ban_and_force() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert Sampler(Sampling(logit_bias={0: float("-inf")}), 0).choose(logits, [0], 1) == 1
    assert Sampler(Sampling(logit_bias={2: 100}), 0).choose(logits, [0], 1) == 2
    with pytest.raises(SettingsError, match=r"token 3.*has 3"):
        Sampler(Sampling(logit_bias={3: 1.0}), 0).choose(logits, [0], 1)


def test_processors_see_the_walks_own_prefix() -> None:
    seen: list[Any] = []

    def spy(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids.tolist(), input_ids.dtype, scores.shape, scores.dtype))
        return scores

    Sampler(Sampling(processors=(spy,)), 0).choose(torch.zeros(5, dtype=torch.bfloat16), [4, 2], 2)
    assert seen == [([[4, 2]], torch.long, (1, 5), torch.float32)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_nothing_left_to_choose_is_an_error_with_a_mend(temperature: float, options: dict[str, Any]) -> None:
    ban = {i: float("-inf") for i in range(4)}
    with pytest.raises(ReaderError, match=r"no token is left.*loosen"):
        Sampler(Sampling(temperature=temperature, logit_bias=ban, **options), 0).choose(
            torch.zeros(4), [0], 1
        )
    with pytest.raises(ReaderError, match="no token is left"):
        Sampler(Sampling(temperature=0.8, **options), 0).choose(torch.full((4,), float("nan")), [0], 1)


def test_is_greedy_plain() -> None:
    assert Sampler(Sampling(), 0).is_greedy_plain
    assert Sampler(Sampling(top_k=5, top_p=0.5, min_p=0.1, stop=("x",)), 0).is_greedy_plain
    for options in (
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"no_repeat_ngram_size": 2},
        {"logit_bias": {1: 1.0}},
        {"processors": (lambda ids, scores: scores,)},
    ):
        assert not Sampler(Sampling(**options), 0).is_greedy_plain, options  # type: ignore[arg-type]


# Draws


def test_a_draw_belongs_to_seed_and_position_alone() -> None:
    logits = logits_of(3, 100)
    first, second = (Sampler(Sampling(temperature=1.2), seed=11) for _ in range(2))
    forwards = [first.choose(logits, [0] * p, p) for p in range(1, 60)]
    backwards = [second.choose(logits, [0] * p, p) for p in range(59, 0, -1)][::-1]
    assert forwards == backwards
    assert forwards != [
        Sampler(Sampling(temperature=1.2), seed=12).choose(logits, [0] * p, p) for p in range(1, 60)
    ]
    assert len(set(forwards)) > 5


def test_the_uniform_numbers_are_fixed_for_ever() -> None:
    assert [round(uniform(s, p), 12) for s, p in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 100_000))] == KNOWN
    values = np.array([uniform(5, p) for p in range(4000)])
    assert 0 <= values.min() < 0.002
    assert 0.998 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


KNOWN = [0.011546754286, 0.502379604274, 0.303568034307, 0.616816469481]


def test_draws_follow_the_targets_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    draws = 3000
    sampler = Sampler(Sampling(temperature=0.8), seed=7)
    counts = np.bincount([sampler.choose(logits, [0], p) for p in range(draws)], minlength=6)
    expected = (logits / 0.8).softmax(-1).numpy() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 99.9 % of chi-square with 5 degrees of freedom
    assert np.abs(counts - expected).sum() / 2 / draws < 0.03


def test_a_draw_never_takes_a_banned_token() -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[10, 20]] = torch.tensor([0.0, -40.0])
    sampler = Sampler(Sampling(temperature=1.0), seed=1)
    assert {sampler.choose(logits, [0], p) for p in range(200)} <= {10, 20}


# Evidence


@pytest.mark.parametrize("size", [5, 600, 50_257, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_evidence_equals_softmax_and_topk(size: int, dtype: torch.dtype) -> None:
    logits = torch.stack([logits_of(seed, size, 4.0) for seed in range(20)]).to(dtype)
    logits[4, -3:] = 30.0  # the end of the vocabulary, in a tie
    untouched = logits.clone()
    best, ids, probs = top_evidence(logits, k=8)
    softmax = logits.float().softmax(-1)
    assert torch.equal(logits, untouched)
    assert best == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(probs), softmax.topk(min(8, size)).values)
    torch.testing.assert_close(softmax.gather(1, torch.tensor(ids)), torch.tensor(probs))
    assert all(len(set(row)) == len(row) for row in ids)
    assert ids[4][:3] == [size - 3, size - 2, size - 1]
    assert all(type(i) is int for i in [*best, *ids[0]])


@pytest.mark.parametrize("joined", [False, True])
def test_a_passs_evidence_is_that_of_each_request(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [torch.stack([logits_of(i, 700, 4.0) for i in range(n)]).bfloat16() for n in (3, 1, 150)]
    wanted = [top_evidence(logits) for logits in outputs]
    parts = sampling._parts
    monkeypatch.setattr(sampling, "_parts", lambda logits, **_: parts(logits, joined=joined))
    assert pass_evidence(outputs) == wanted
    assert pass_evidence(outputs[1:2]) == wanted[1:2]


def test_top_evidence_works_under_inference_mode_and_outside() -> None:
    logits = logits_of(0, 700)[None]
    outside = top_evidence(logits)
    with torch.inference_mode():
        assert top_evidence(logits.clone()) == outside
        assert top_evidence(torch.zeros(16, 60_000))[0] == [0] * 16
    assert top_evidence(torch.zeros(16, 60_000))[0] == [0] * 16
    assert top_evidence(logits) == outside


def test_top_evidence_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 49_152, dtype=torch.bfloat16)
    logits[1, [30_000, 7, 45_000]] = 9.0
    best, ids, _ = top_evidence(logits)
    assert best == [0, 7]
    assert ids[1][:3] == [7, 30_000, 45_000]
