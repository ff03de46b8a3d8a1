"""Replay: it counts the passes that the engine runs, sees nothing early, and keeps a conversation's answers apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_fakes import ANSWER, Spy, answers_file, recording, soft

from reader_rag.bench.engine_replay import replay
from reader_rag.bench.leave_out import shares, tallies_without_own
from reader_rag.bench.record import record
from reader_rag.bench.recording import Recording, load_recordings, save_recording
from reader_rag.bench.replay import replay_answers, replay_recordings, report
from reader_rag.bench.rules.rule import NoDrafts, RuleDrafter
from reader_rag.bench.rules.suffixes import SuffixTrees
from reader_rag.bench.systems import ReaderSystem
from reader_rag.cli import main
from reader_rag.draft import Draft, make_drafter
from reader_rag.errors import SettingsError
from reader_rag.settings import Drafting, Sampling

QUESTION = "for name, value in sorted(table.items()):\n    print(name, value)\nfor name, value in"


class Fixed:
    """Drafts the same tree at every pass and keeps what it was told."""

    source_names = ("fixed",)

    def __init__(self, tokens: list[int], parents: list[int], chain: int) -> None:
        self.tree = Draft(tokens, parents, [1.0] * len(tokens), [0] * len(tokens), chain)
        self.seen: list[int] = []
        self.rows: list[Any] = []
        self.branches: list[tuple[tuple[int, ...], list[int]]] = []
        self.asked: list[tuple[list[int], tuple[int, ...], int]] = []

    def observe_prompt(self, tokens: Sequence[int], top_ids: Any, top_probs: Any) -> None:
        self.seen += tokens
        self.rows += [] if top_ids is None else top_ids.tolist()

    def observe(self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> None:
        self.seen += tokens
        self.rows += top_ids

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None:
        self.branches.append((tuple(context), top_ids))

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft:
        self.asked.append((list(self.seen), tuple(pending), limit))
        return self.tree if len(self.tree.tokens) <= limit and not pending else Draft([], [], [], [], 0)

    def dropped(self) -> dict[str, str]:
        return {}


class HardOnly:
    """READER's drafter without soft evidence, as recorded answers have none."""

    def __init__(self, chunks: Sequence[Sequence[int]] = ()) -> None:
        self._drafter = make_drafter(("context", "chunks"), chunk_tokens=chunks)
        self.source_names = self._drafter.source_names

    def observe_prompt(self, tokens: Sequence[int], top_ids: Any, top_probs: Any) -> None:
        self._drafter.observe_prompt(tokens, None, None)

    def observe(self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> None:
        self._drafter.observe(tokens, [[] for _ in tokens], [[] for _ in tokens])

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None:
        pass

    def observe_branches(self, contexts: Any, top_ids: Any, top_probs: Any) -> None:
        pass

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft:
        return self._drafter.draft(pending, limit, chain_limit)

    def dropped(self) -> dict[str, str]:
        return self._drafter.dropped()


def taught_trees(answers: Sequence[Sequence[int]]) -> RuleDrafter:
    rule = SuffixTrees()
    for answer in answers:
        rule.begin()
        rule.observe(answer, [()] * len(answer), False)
        rule.end()
    return RuleDrafter(rule)


@pytest.mark.parametrize("make", [HardOnly, taught_trees], ids=["reader", "suffix trees"])
def test_a_replay_counts_the_passes_of_a_real_run(reader: Any, make: Any) -> None:
    prompt = reader.encode_prompt(QUESTION)
    answer = reader.generate(prompt, sampling=Sampling(max_tokens=60), drafting=Drafting(sources=())).tokens
    # Half-true drafts: two copies of the answer go wrong at other places, so that main chains break off and side branches hold.
    wrong = [[t + 1 if n % step == 4 else t for n, t in enumerate(answer)] for step in (5, 7)]
    run = reader.generate(prompt, sampling=Sampling(max_tokens=60), drafter=make(wrong))
    tally = replay(
        recording(prompt, run.tokens, whole=run.finish_reason == "stop"), make(wrong), reader.width
    )
    stats = run.stats
    assert run.tokens == answer
    assert (tally.tokens, tally.passes) == (stats.tokens, stats.passes)
    assert (tally.drafted, tally.accepted) == (stats.drafted, stats.accepted)
    assert dict(tally.accepted_by_source) == stats.accepted_by_source
    assert 1.5 * stats.passes < stats.tokens, "drafts came true, or this shows nothing"


def test_a_drafter_never_sees_what_its_pass_has_not_given() -> None:
    one = soft(recording([1, 2, 3], [4, 5, 6, 7, 8]))
    drafter = Fixed([4], [-1], 1)
    replay(one, drafter, 4)
    done = 0
    for seen, _, _ in drafter.asked:
        assert seen == [1, 2, 3, *one.output[:done]]
        done += 2 if done == 0 else 1  # the drafted 4 is true once
    assert drafter.seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafter.rows == one.top_ids.tolist(), "every row once, in order"


def test_what_a_side_branch_found_leads_the_next_draft_and_is_learned_from() -> None:
    one = soft(recording([1], [5, 6, 7, 8, 9, 9]))
    drafter = Fixed([4, 5, 6], [-1, -1, 1], 1)  # main chain 4, side branch 5 6
    tally = replay(one, drafter, 4)
    # Pass 1 gives 5 and finds 6 7; pass 2 has no draft but for what Fixed leaves out, and gives 6.
    assert [asked[1] for asked in drafter.asked[:2]] == [(), (6, 7)]
    assert drafter.branches[:2] == [((5,), [99, 6]), ((5, 6), [7, 99])]
    assert tally.passes == 6
    any_path = replay(one, Fixed([4, 5, 6], [-1, -1, 1], 1), 4, any_path=True)
    assert any_path.passes == 4, "5 6 7 in one pass"
    assert any_path.accepted == 2


def test_an_answer_that_was_cut_is_not_drafted_beyond_its_budget() -> None:
    cut, ended = (recording([1], [2, 3, 4], whole=whole) for whole in (False, True))
    budgets = {}
    for one in (cut, ended):
        drafter = Fixed([], [], 0)
        replay(one, drafter, 8)
        budgets[one.whole] = [limit for *_, limit in drafter.asked]
    assert budgets == {False: [2, 1, 0], True: [7, 7, 7]}


def test_plain_decoding_is_one_token_a_pass() -> None:
    assert replay(recording([1], [2, 3, 4]), RuleDrafter(NoDrafts()), 16).tokens_per_pass == 1.0


def test_recordings_come_back_as_they_were_and_bad_files_are_named(tmp_path: Path) -> None:
    one = soft(recording([1, 2], [3, 4], whole=False))
    one = Recording(
        "rag-001", "rag", one.prompt, one.output, False, ((7, 8), (9,)), one.top_ids, one.top_probs
    )
    save_recording(tmp_path, one)
    save_recording(tmp_path, recording([1], [2], name="qa-000"))
    (back,) = load_recordings(tmp_path, sets=["rag"])
    assert (back.name, back.set, back.prompt, back.output) == ("rag-001", "rag", (1, 2), (3, 4))
    assert back.chunks == ((7, 8), (9,))
    assert not back.whole
    np.testing.assert_array_equal(back.top_ids, one.top_ids)
    np.testing.assert_allclose(back.top_probs, one.top_probs, atol=1e-3)
    assert [r.name for r in load_recordings(tmp_path)] == ["qa-000", "rag-001"]
    with pytest.raises(SettingsError, match="no set 'x'; its sets are: qa, rag"):
        load_recordings(tmp_path, sets=["x"])
    with pytest.raises(SettingsError, match="at least 1 recording"):
        load_recordings(tmp_path, limit=0)
    with pytest.raises(SettingsError, match="has no recordings"):
        load_recordings(tmp_path / "nowhere")
    np.savez(tmp_path / "bad-000.npz", prompt=np.array([1]), output=np.array([], int))
    with pytest.raises(SettingsError, match=r"bad-000\.npz is not a recording"):
        load_recordings(tmp_path)


def test_a_file_that_does_not_say_whether_it_is_whole_is_asked_for_its_end(tmp_path: Path) -> None:
    for name, last in (("a-0", 2), ("b-0", 9)):
        np.savez(tmp_path / f"{name}.npz", prompt=np.array([1]), output=np.array([5, last]))
    assert [r.whole for r in load_recordings(tmp_path, ends=[2])] == [True, False]


def test_recording_a_run_keeps_its_tokens_and_every_row_of_evidence(
    reader: Any, data: Path, tmp_path: Path
) -> None:
    assert record(reader, data, tmp_path / "out", max_tokens=12, progress=False) == 4
    assert record(reader, data, tmp_path / "out", max_tokens=12, progress=False) == 0, "what is there is kept"
    found = load_recordings(tmp_path / "out")
    assert [one.name for one in found] == ["talk-000", "talk-001", "talk-002", "talk-003"]
    for one in found:
        assert len(one.top_ids) == len(one.prompt) + len(one.output) - 1
        # Greedy: what followed is what was likeliest, from the last prompt token on.
        np.testing.assert_array_equal(one.top_ids[len(one.prompt) - 1 :, 0], one.output)
        assert one.chunks
    result = replay_recordings(found, ReaderSystem, width=8, progress=False)
    assert result["rows"] == 4
    assert result["tokens_per_pass"] >= 1.0


def test_a_speculator_that_is_the_model_itself_guesses_right(
    reader: Any, data: Path, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    record(reader, data, tmp_path, max_tokens=12, limit=1, progress=False)
    command = ["bench", "replay", "--recordings", str(tmp_path), "--model", str(tiny_model), "--width", "8"]
    assert main([*command, "--sources", "", "--speculator", str(tiny_model), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tokens_per_pass"] > 1.4  # nothing else drafts
    assert set(result["by_source"]) == {"speculator"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return answers_file(tmp_path)


def test_nothing_is_learned_from_the_same_conversation_or_from_near_duplicates(
    data: Path, demo_tokenizer: Any
) -> None:
    log: list[list[tuple[int, ...]]] = []
    result = replay_answers(
        data, demo_tokenizer, lambda: Spy(log), responses="big", warm=True, progress=False
    )
    encode = lambda text: tuple(demo_tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    plain = {
        key: encode(f"The reader looks up {key[0]} {key[1]} naïve sorted values.") for key in ("a2", "b1")
    }
    same = encode(ANSWER)
    warm, strict = log[:4], log[4:]
    assert sorted(map(sorted, warm)) == sorted(
        [sorted([plain["b1"], same])] * 2 + [sorted([same, plain["a2"]])] * 2
    )
    assert strict == [[plain["b1"]], [plain["a2"]]], (
        "the two copies only: the other turns have nothing to leave out"
    )
    assert {"warm", "warm_without_near_duplicates"} <= set(result)
    assert result["rows"] == result["warm"]["answers"] == 4
    assert "warm_without_near_duplicates" in report(result)


@pytest.mark.parametrize("talks", [1, 2, 5, 8])
def test_every_answer_is_tested_once_after_all_answers_of_other_conversations(talks: int) -> None:
    log: list[list[tuple[int, ...]]] = []
    tests = [recording([50 + n], [n, 60, 61], name=f"talk-{n:03d}") for n in range(2 * talks)]
    homes = [str(n % talks) for n in range(2 * talks)]
    tallies = tallies_without_own(tests, homes, lambda: Spy(log), 4)
    assert [tally.tokens for tally in tallies] == [3] * (2 * talks)
    known = sorted(sorted(answer[0] for answer in learned) for learned in log)
    assert known == sorted(
        [n for n in range(2 * talks) if n % talks != talk] for talk in list(range(talks)) * 2
    )


def test_near_duplicates_are_told_by_their_8_grams() -> None:
    grams = lambda tokens: frozenset(zip(*(tokens[i:] for i in range(8)), strict=False))  # noqa: E731
    text = list(range(20))
    assert shares(grams(text), grams(text)) == 1.0
    assert shares(grams(text), grams([*range(13), *range(50, 57)])) == pytest.approx(6 / 13)
    assert shares(grams(text), grams(range(30, 50))) == 0.0


def test_the_command_reports_rows_sets_sources_and_prompt_lookup(
    data: Path, tiny_model: Path, capsys: Any
) -> None:
    command = ["bench", "replay", "--data", str(data), "--model", str(tiny_model), "--json"]
    assert main([*command, "--sources", "context,chunks", "--warm"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["rows"] == 8
    assert set(result["by_responses"]) == {"big", "human"}
    assert set(result["by_set"]) == {"x/talk"}
    assert {"tokens_per_pass", "nodes_per_pass", "us_per_pass", "prompt_lookup_tokens_per_pass"} <= set(
        result
    )
    assert set(result["by_source"]) <= {"context", "chunks"}
    assert "tokens/pass" in err
    for wrong, says in (
        (["--responses", "nobody"], "its names are: big, human"),
        (["--sources", "magic"], "choose from"),
        (["--width", "0"], "1 to 256"),
        (["--folds", "2"], "go with --recordings"),
    ):
        assert main([*command, *wrong]) == 2
        assert says in capsys.readouterr().err
