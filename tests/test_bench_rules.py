"""Each peer's selection rule on cases worked out by hand."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from reader_rag.bench.rules.automaton import SuffixAutomaton
from reader_rag.bench.rules.installed import InstalledSuffixTrees
from reader_rag.bench.rules.occurrences import Occurrences, counted_tree
from reader_rag.bench.rules.recency import LatestCandidates, LatestFollowers, TrigramSearch
from reader_rag.bench.rules.rule import Proposal, Rule, RuleDrafter, lay_out
from reader_rag.bench.rules.suffixes import Datastore, PromptLookup, SuffixCopy, SuffixTrees
from reader_rag.bench.systems import PEERS, peer_makers


def told(rule: Rule, prompt: Sequence[int], best: Sequence[Sequence[int]] | None = None) -> Rule:
    rule.begin()
    rule.observe(prompt, best or [()] * len(prompt), True)
    return rule


def served(rule: Rule, *answers: Sequence[int]) -> Rule:
    """A rule that has served requests with these answers."""
    for answer in answers:
        rule.begin()
        rule.observe(answer, [()] * len(answer), False)
        rule.end()
    return rule


def tree(proposal: Proposal) -> list[tuple[int, int]]:
    return list(zip(proposal.parents, proposal.tokens, strict=True))


def test_prompt_lookup_copies_after_the_first_place_of_the_last_two_tokens() -> None:
    rule = told(PromptLookup(3), [1, 2, 3, 4, 5, 6, 1, 2, 7, 8, 1, 2])
    assert rule.propose((), 15).tokens == [3, 4, 5]
    assert rule.propose((7,), 15).tokens == [8, 1, 2], "2 7 after what is pending"
    assert rule.propose((5,), 15).tokens == [6, 1, 2], "2 5 is nowhere, 5 alone is"
    assert rule.propose((9,), 15).tokens == []
    assert rule.propose((), 2).tokens == [3, 4]


def test_an_automaton_finds_the_longest_repeated_suffix_and_its_first_place() -> None:
    rng = random.Random(3)
    automaton, tokens = SuffixAutomaton(), []
    for _ in range(300):
        tokens.append(rng.randrange(3))
        automaton.extend(tokens[-1])
        state, length = automaton.repeated()
        naive = next(
            n for n in range(len(tokens) - 1, -1, -1) if first_place(tokens, tokens[len(tokens) - n :])
        )
        assert length == naive
        if length:
            place = first_place(tokens, tokens[-length:])
            assert list(automaton.follow(state, 2)) == tokens[place : place + 2]


def first_place(tokens: list[int], tail: list[int]) -> int:
    """Where the text goes on after the first earlier place of `tail`; any place for no tail; 0 for none."""
    for start in range(len(tokens) - len(tail)):
        if tokens[start : start + len(tail)] == tail:
            return start + len(tail) or 1
    return 0


def test_the_suffix_copy_prefers_the_longer_match_and_honours_its_bias() -> None:
    def rule(bias: int) -> Rule:
        return told(served(SuffixCopy(bias=bias), [1, 2, 3, 9, 9]), [3, 4, 5, 1, 2, 3])

    assert rule(0).propose((), 15).tokens == [9, 9], "1 2 3 stands in an earlier answer"
    assert rule(2).propose((), 2).tokens == [4, 5], "three tokens are not more than two above one"
    assert rule(0).propose((4,), 3).tokens == [5, 1, 2], "after what is pending the own text matches longer"


def test_a_suffix_copy_stops_where_an_answer_ends() -> None:
    rule = told(served(SuffixCopy(), [1, 2, 3], [7, 8]), [5, 1, 2])
    assert rule.propose((), 15).tokens == [3]


def test_below_its_threshold_a_suffix_copy_asks_the_other_rule() -> None:
    rule = SuffixCopy("switch", fallback=LatestCandidates(), threshold=3)
    told(rule, [1, 2, 3, 4, 9, 2, 3], [(), (), (), (), (), (), (6, 8)])
    # Two tokens match, three are asked for: the model's candidates after 2 are followed, not the copied 4.
    rule.observe_branch([3], [7, 5])
    assert rule.propose((), 2).tokens == [7, 5]
    told(rule, [1, 2, 3, 4, 9, 1, 2, 3])
    assert rule.propose((), 2).tokens == [4, 9]


def test_suffix_trees_take_the_speculation_with_the_largest_expected_length() -> None:
    # 5 goes on with 1 twice and with 2 once.
    rule = told(SuffixTrees(), [5, 1, 8, 5, 1, 9, 5, 2, 7, 5])
    assert tree(rule.propose((), 2)) == [(-1, 1), (-1, 2)]
    # A tree of earlier answers that is sure of three tokens beats one that expects 2/3 + 1/3 of the first.
    rule = served(SuffixTrees(), [5, 3, 4, 6])
    told(rule, [5, 1, 8, 5, 1, 9, 5, 2, 7, 5])
    assert rule.propose((), 3).tokens == [3, 4, 6]


def test_suffix_trees_draft_more_after_a_longer_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for matched in (1, 2, 3):
        rule = told(SuffixTrees(factor=1), [*text, 90, *text[:matched]])
        assert len(rule.propose((), 15).tokens) == matched


def test_counted_trees_hold_the_most_frequent_paths_within_documents() -> None:
    texts = Occurrences([[1, 2, 3], [1, 2, 4], [1, 5], [2, 9]])
    (match,) = texts.matches([7, 1], 16)
    assert match == (1, [0, 4, 8])
    proposal, score = counted_tree(texts, match[1], 3, depth=9)
    assert tree(proposal) == [(-1, 2), (-1, 5), (0, 4)], "of equals the shallower, then the later"
    assert score == pytest.approx(2 / 3 + 1 / 3 + 1 / 3)
    assert tree(counted_tree(texts, match[1], 9, depth=1)[0]) == [(-1, 2), (-1, 5)]
    assert tree(counted_tree(texts, match[1], 9, depth=9, least_share=0.5)[0]) == [(-1, 2), (0, 4), (0, 3)]


def test_matches_of_every_length_are_those_found_by_looking() -> None:
    rng = random.Random(5)
    documents = [[rng.randrange(3) for _ in range(40)] for _ in range(4)]
    texts = Occurrences(documents)
    for _ in range(50):
        tail = [rng.randrange(3) for _ in range(6)]
        found = dict(texts.matches(tail, 6))
        assert list(found) == sorted(found, reverse=True)
        for length in range(1, 7):
            naive = [
                p
                for p in range(length - 1, len(texts.tokens) - 1)
                if texts.tokens[p - length + 1 : p + 1] == tail[-length:]
            ]
            if length in found:
                assert found[length] == naive
            else:  # nothing, or a longer match stands at all the same places
                assert not naive or any(len(found[more]) == len(naive) for more in found if more > length)


def test_a_datastore_answers_the_longest_match_by_counts() -> None:
    rule = told(
        Datastore(Occurrences([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [3, 6]]), shortest=2), [8, 1, 2]
    )
    rule.observe([3], [()], False)
    assert tree(rule.propose((), 3)) == [(-1, 5), (-1, 4)]
    told(rule, [7, 3])
    assert rule.propose((), 3).tokens == [], "one matched token is too few here"


def test_latest_candidates_make_a_static_tree_of_ranks() -> None:
    rule = LatestCandidates(ranks=(0.5, 0.3), depth=2)
    told(rule, [1, 2, 1], [(), (2, 3), (1, 4)])
    rule.observe_branch([9, 2], [5, 6])  # the latest replace the older ones
    rule.observe_branch([9, 5], [7, 8])
    # After 1 come 2 (.5) and 3 (.3); after 2 come 5 (.25) and 6 (.15); deeper than two is not drafted.
    assert tree(rule.propose((), 15)) == [(-1, 2), (-1, 3), (0, 5), (0, 6)]
    assert tree(rule.propose((), 3)) == [(-1, 2), (-1, 3), (0, 5)]
    assert rule.propose((2,), 15).tokens == [5, 6, 7, 8]
    rule.begin()
    rule.observe([1], [()], True)
    assert rule.propose((), 1).tokens == [2], "the table outlives its request"


def test_latest_followers_lead_and_the_oldest_leave() -> None:
    rule = LatestFollowers(leader=1, follower=2, followers=2, leaders=3)
    told(rule, [1, 2, 3, 1, 4, 5, 1, 6, 7, 1])
    # After 1: 6 7, then 4 5; 2 3 has left.
    assert tree(rule.propose((), 4)) == [(-1, 6), (0, 7), (-1, 4), (2, 5)]
    told(rule, [20, 21, 22, 23, 24, 25])
    assert rule.propose((1,), 9).tokens == [], "three later leaders have pushed 1 out"


def test_latest_followers_are_asked_again_level_by_level() -> None:
    rule = told(LatestFollowers(leader=1, follower=1), [1, 2, 3, 4, 1])
    assert tree(rule.propose((), 4)) == [(-1, 2), (0, 3), (1, 4), (2, 1)]


def test_the_trigram_search_follows_likely_paths_and_backs_off() -> None:
    rule = told(TrigramSearch(), [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2])
    # 3 followed twice, 4 once; 3 and then 1 led on to 2 each time.
    first = tree(rule.propose((), 3))
    assert first == [(-1, 3), (0, 1), (1, 2)]
    assert (-1, 4) in tree(rule.propose((), 9))
    assert rule.propose((9,), 3).tokens == []
    assert rule.propose((9, 2), 1).tokens == [3], "9 2 is new: 2 alone answers"
    assert tree(rule.propose((), 3)) == first, "no chance is involved"


def test_a_rule_drafter_leads_with_what_is_pending_and_lays_the_preferred_path_out_first() -> None:
    drafter = RuleDrafter(LatestCandidates(ranks=(0.5, 0.3), depth=3))
    drafter.observe_prompt([1, 2], np.array([[2, 3], [4, 5]]), np.array([[0.5, 0.3]] * 2))
    drafter.observe([4], [[4, 5]], [[0.5, 0.3]])
    drafter.observe_branch([4], [1], [0.9])
    draft = drafter.draft([7, 2], 6, 6)
    assert draft.tokens == [7, 2, 4, 1, 2, 5]
    assert draft.parents == [-1, 0, 1, 2, 3, 1]
    assert draft.chain == 5
    assert drafter.draft([7, 2], 6, 2).chain == 2
    assert drafter.draft([7, 2], 1, 1).tokens == [7]
    assert drafter.draft([], 0, 0).tokens == []


def test_the_layout_keeps_every_node_under_its_parent() -> None:
    draft = lay_out([5, 6, 7, 8], [-1, -1, 1, 0], 9)
    assert (draft.tokens, draft.parents, draft.chain) == ([5, 8, 6, 7], [-1, 0, -1, 2], 2)


def test_every_peer_serves_requests_within_its_width_and_drafts_alike_twice() -> None:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(9) for _ in range(40)) for _ in range(3)]
    outputs = [[rng.randrange(9) for _ in range(20)] for _ in prompts]

    def run(name: str) -> list[object]:
        system = peer_makers(8, prompts)[name]()
        drafts: list[object] = []
        for prompt, output in zip(prompts, outputs, strict=True):
            drafter = system.open(prompt)
            drafter.observe_prompt(prompt, None, None)
            for token in output:
                draft = drafter.draft([], 7, 7)
                assert len(draft.tokens) <= 7
                assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens)
                drafts.append((draft.tokens, draft.parents))
                drafter.observe([token], [[token, 1]], [[0.5, 0.2]])
            system.close(prompt, tuple(output))
        return drafts

    for name in PEERS:
        drafts = run(name)
        assert drafts == run(name)
        assert any(tokens for tokens, _ in drafts) == (name != "plain")  # type: ignore[misc]


def test_the_installed_suffix_trees_are_asked_for_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class SuffixDecodingCache:
        def __init__(self, max_tree_depth: int) -> None:
            calls.append(("new", max_tree_depth))

        def start_request(self, request: int, prompt: list[int]) -> None:
            calls.append(("start", request, prompt))

        def add_active_response(self, request: int, tokens: list[int]) -> None:
            calls.append(("add", request, tokens))

        def stop_request(self, request: int) -> None:
            calls.append(("stop", request))

        def speculate(self, request: int, context: list[int], **options: object) -> SimpleNamespace:
            calls.append(("speculate", context, options["max_spec_tokens"], options["use_tree_spec"]))
            return SimpleNamespace(token_ids=[4, 5, 6], parents=[-1, 0, -1])

    module = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rule = told(InstalledSuffixTrees(), [1, 2])
    rule.observe([3], [()], False)
    assert tree(rule.propose((9,), 5)) == [(-1, 4), (0, 5), (-1, 6)]
    assert rule.propose((), 0).tokens == []
    rule.end()
    assert calls == [
        ("new", 64),
        ("start", 1, [1, 2]),
        ("add", 1, [3]),
        ("speculate", [1, 2, 3, 9], 5, True),
        ("stop", 1),
    ]
