"""Replay: it counts the passes that the engine runs, sees nothing early, and keeps a conversation's answers apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reader_rag.bench.curve import counts_up_to, curve
from reader_rag.bench.engine_replay import feed, replay
from reader_rag.bench.leave_out import shares, tallies_without_own
from reader_rag.bench.record import record
from reader_rag.bench.recording import Recording, load_recordings, save_recording
from reader_rag.bench.replay import replay_answers, replay_recordings, report
from reader_rag.bench.rules.rule import NoDrafts, RuleDrafter
from reader_rag.bench.rules.suffixes import SuffixCopy, SuffixTrees
from reader_rag.bench.runs import Learning, tallies_of
from reader_rag.bench.systems import ReaderSystem, RuleSystem, learn
from reader_rag.cli import main
from reader_rag.draft import Draft, make_drafter
from reader_rag.errors import SettingsError
from reader_rag.settings import Drafting, Sampling

QUESTION = "for name, value in sorted(table.items()):\n    print(name, value)\nfor name, value in"


def recording(
    prompt: Sequence[int], output: Sequence[int], *, name: str = "rag-000", **options: Any
) -> Recording:
    return Recording(name, "rag", tuple(prompt), tuple(output), **options)


def soft(one: Recording) -> Recording:
    """With the model's expectations: the true next token, half the time behind a wrong one."""
    known = [*one.prompt, *one.output]
    rows = [[token, 99] if token % 2 else [99, token] for token in known[1:]]
    probs = np.tile(np.array([0.6, 0.3], np.float32), (len(rows), 1))
    return Recording(
        one.name, one.set, one.prompt, one.output, one.whole, (), np.array(rows, np.int32), probs
    )


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


ANSWER = "A chunk is a retrieved piece of text; a span stands verbatim in the answer and in a chunk."


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two conversations of two turns; the last answer of the second is the first one's again."""
    lines = []
    for talk in "ab":
        for turn in (1, 2):
            copied = (talk, turn) in {("a", 1), ("b", 2)}
            text = ANSWER if copied else f"The reader looks up {talk} {turn} naïve sorted values."
            lines.append(
                {
                    "id": f"{talk}<::>{turn}",
                    "set": "x/talk",
                    "question": f"What is {talk}{turn}?",
                    "passages": [{"id": "p", "title": "", "text": "It goes on for a while."}],
                    "responses": {"big": text, "human": "The model verifies it in one pass."},
                }
            )
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


class Spy(ReaderSystem):
    """Notes what it had learned from at every request that was only tested: one that is learned from is closed, too."""

    def __init__(self, log: list[list[tuple[int, ...]]], learned: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(("context",))
        self.log, self.learned = log, list(learned)

    def open(self, prompt: tuple[int, ...], chunks: Sequence[tuple[int, ...]] = ()) -> Any:
        self.log.append(list(self.learned))
        return super().open(prompt, chunks)

    def close(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
        self.log.pop()
        self.learned.append(output)

    def copy(self) -> ReaderSystem:
        return Spy(self.log, self.learned)


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


def lessons(count: int) -> list[Recording]:
    """Requests whose answers are all the same, though nothing in their prompts says so."""
    return [recording([50 + n], range(10, 30), name=f"rag-{n:03d}") for n in range(count)]


def test_carried_learned_and_cold_requests_know_what_they_should() -> None:
    tests = lessons(4)
    make = lambda: RuleSystem(SuffixCopy())  # noqa: E731
    passes = lambda learning: [t.passes for t in tallies_of(tests, make, 16, learning=learning)]  # noqa: E731
    cold, carried = passes(Learning()), passes(Learning(carry=True))
    assert cold == [20] * 4
    assert carried[0] == 20
    assert max(carried[1:]) < 5
    assert max(passes(Learning(folds=2))) < 5
    others = [recording([90], range(10, 30), name="other-0")]
    assert max(passes(Learning(lessons=tuple(others)))) < 5
    with pytest.raises(SettingsError, match="rag-001 is learned from and tested on"):
        passes(Learning(lessons=(tests[1],)))
    with pytest.raises(SettingsError, match="5 folds of 4 recordings"):
        passes(Learning(folds=5))


def test_a_copy_of_a_system_learns_for_itself() -> None:
    system = ReaderSystem(("ngrams",))
    one = soft(recording([1, 2, 3], [4, 5, 6, 7] * 6))
    learn(system, [one])
    known = len(system.memory.ngrams)
    twin = system.copy()
    assert len(twin.memory.ngrams) == known > 0
    feed(soft(recording([60, 61], [62, 63, 64] * 4)), twin.open((60, 61)))
    assert len(twin.memory.ngrams) > known == len(system.memory.ngrams)
    twin.close((60, 61), (62, 63, 64))
    assert (len(twin.memory.answers), len(system.memory.answers)) == (2, 1)
    system.close((70,), (71, 72, 73))
    system.close((80,), (81, 82, 83))
    assert (len(twin.memory.answers), len(system.memory.answers)) == (2, 3)


def test_the_curve_starts_cold_and_rises_where_requests_are_alike() -> None:
    alike = [soft(recording([40 + n], range(1, 30, 2), name=f"rag-{n:03d}")) for n in range(9)]
    result = curve(alike, lambda: ReaderSystem(("context", "ngrams")), width=8, tests=2, progress=False)
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5, 7]
    rates = [point["tokens_per_pass"] for point in result["points"]]
    assert rates[-1] > rates[0]
    assert counts_up_to(30) == [0, 1, 2, 5, 10, 20, 30]
    with pytest.raises(SettingsError, match="leave some to learn from"):
        curve(alike, ReaderSystem, width=8, tests=9, progress=False)


def test_a_conversation_is_tested_or_learned_from_as_a_whole() -> None:
    alike = [soft(recording([40 + n], range(1, 30, 2), name=f"rag-{n:03d}")) for n in range(12)]
    homes = [str(n // 4) for n in range(12)]
    log: list[list[tuple[int, ...]]] = []
    result = curve(alike, lambda: Spy(log), width=8, tests=4, conversations=homes, progress=False)
    assert result["tests"] == 4
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5, 8], "the other two conversations"
    with pytest.raises(SettingsError, match="every conversation would be tested"):
        curve(alike, ReaderSystem, width=8, tests=4, conversations=["one"] * 12, progress=False)


def test_the_curve_of_a_files_answers_takes_references_where_nobody_answered(
    data: Path, tiny_model: Path, capsys: Any
) -> None:
    row = {
        "id": "r",
        "set": "x/reference",
        "question": "What is a chunk?",
        "reference": ANSWER,
        "responses": {},
    }
    more = data.with_name("more.jsonl")
    more.write_text(json.dumps(row) + "\n")
    files = ["--data", str(data), str(more)]
    assert main(["bench", "curve", *files, "--model", str(tiny_model), "--tests", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Two conversations of four answers, and the reference: the middle one of the three is tested.
    assert result["tests"] == 4
    assert [point["seen"] for point in result["points"]] == [0, 1, 2, 5]
