"""The speculator: its guesses are its model's own, its KV follows the target, and it runs only where that pays."""

from pathlib import Path
from typing import Any

import pytest

from reader_rag.draft import make_drafter
from reader_rag.draft.speculator import Payoff, Speculator, SpeculatorSource, check_vocabulary
from reader_rag.errors import LoadError, SettingsError
from reader_rag.settings import SOURCES, Drafting
from tests.conftest import build_tiny_model


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


class Always(Payoff):
    def decide(self) -> bool:
        return True


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """The model's own greedy continuation, all of it computed anew for every token."""
    import torch

    tokens = list(tokens)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def test_guesses_are_the_models_own_and_its_cache_follows_the_target(model: Any) -> None:
    source = SpeculatorSource(model, Always(0.1), depth=3)
    read: list[int] = []
    run = source._pass

    def counted(tokens: list[int]) -> Any:
        read.append(len(tokens))
        return run(tokens)

    source._pass = counted  # type: ignore[method-assign]
    drafter = make_drafter(["speculator"], extra_sources=[source])
    committed = [5, 80, 9, 200, 31]
    drafter.observe_prompt(committed, None, None)
    for taken in ([greedy(model, committed, 1)[0], 77], [12, 13, 14], [3]):
        draft = drafter.draft([], 3, 3)
        assert draft.tokens[0] == greedy(model, committed, 1)[0]
        rows = source._rows or {}
        assert len(rows) == 3
        assert max(rows, key=len) == tuple(greedy(model, committed, 2))
        drafter.observe(taken, [[t] for t in taken], [[0.9]] * len(taken))
        committed += taken
    assert drafter.dropped() == {}
    assert read[0] == 5
    assert max(read[1:]) <= 4, "only new tokens are read"


def test_retrieval_goes_on_where_the_chain_ends(model: Any) -> None:
    chain = greedy(model, [5, 80, 9], 1)
    drafter = make_drafter(
        ["speculator", "chunks"],
        chunk_tokens=[[9, chain[0], 300, 301, 302]],
        extra_sources=[SpeculatorSource(model, Always(0.1), depth=1)],
    )
    drafter.observe_prompt([5, 80, 9], None, None)
    tokens = drafter.draft([], 12, 12).tokens
    assert {chain[0], 300, 301} <= set(tokens)


def test_each_request_gets_a_source_of_its_own(model: Any) -> None:
    shared = Speculator(model, cost_ratio=0.2)
    one, two = (make_drafter(["speculator"], extra_sources=[shared]) for _ in range(2))
    one.observe_prompt([1, 2, 3], None, None)
    two.observe_prompt([200, 201], None, None)
    assert one.draft([], 1, 1).tokens == greedy(model, [1, 2, 3], 1)
    assert two.draft([], 1, 1).tokens == greedy(model, [200, 201], 1)
    assert Drafting(sources=(*SOURCES, shared)).sources[-1] is shared


def test_it_stops_where_it_does_not_pay_and_looks_again_later() -> None:
    payoff = Payoff(cost=1.0)
    ways = []
    for _ in range(40):
        runs = payoff.decide()
        ways.append(runs)
        payoff.learn(3 if runs else 2)  # half again as many tokens for twice the time
    assert ways[:6] == [True] * 3 + [False] * 3
    assert ways[6:].count(True) == 2
    cheap = Payoff(cost=0.1)
    for _ in range(20):
        cheap.learn(3 if cheap.decide() else 2)
    assert [cheap.decide() for _ in range(1)] == [True]


def test_another_vocabulary_is_an_error_that_names_the_token(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(tiny_model).get_vocab()
    check_vocabulary("same", own, {**own, "more": 10_000})
    with pytest.raises(ValueError, match=r"speculator small has another vocabulary.*same family"):
        check_vocabulary("small", own, {token: number + 1 for token, number in own.items()})
    loaded = Speculator.load(str(tiny_model), own, cost_ratio=0.3)
    assert loaded.for_request().name == "speculator"
    with pytest.raises(ValueError, match="another vocabulary"):
        Speculator.load(str(build_tiny_model(tmp_path / "other")), {"a": 0}, cost_ratio=0.3)


def test_a_speculator_that_is_not_there_is_an_error_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot load the speculator .*nowhere.*give a folder on this disk"):
        Speculator.load(str(tmp_path / "nowhere"), {"a": 0}, cost_ratio=0.3)


def test_settings_that_cannot_be_meant(model: Any) -> None:
    with pytest.raises(ValueError, match="cost_ratio is 0"):
        Speculator(model, cost_ratio=0)
    with pytest.raises(ValueError, match="depth is 0"):
        Speculator(model, cost_ratio=0.1, depth=0)
    with pytest.raises(SettingsError, match=r"reader_rag\.draft\.speculator"):
        Drafting(sources=("speculator",))
