"""Losslessness on real weights and real documents: a bounded part in every run, all of it with `make exact`.

`make exact` also takes questions of a JSON-lines file: READER_RAG_DATA=FILE make exact.
"""

from __future__ import annotations

import os
import random
from pydoc_data.topics import topics
from typing import Any

import pytest
from slow_path import generated

from reader_rag import Chunk, Drafting, Reader, Sampling
from reader_rag.draft.source import Evidence

OFF = Drafting(sources=())
TOPICS = (
    *(
        "for",
        "try",
        "import",
        "with",
        "class",
        "lambda",
        "global",
        "assert",
        "yield",
        "del",
        "raise",
        "while",
    ),
    *(
        "if",
        "return",
        "break",
        "pass",
        "function",
        "calls",
        "slicings",
        "comparisons",
        "booleans",
        "exceptions",
    ),
)
WIDTH = 16


class Liar:
    """Proposes what it likes, surely: random ids, one id over and over, end tokens, control tokens."""

    name = "liar"

    def __init__(self, vocabulary: int, control: list[int]) -> None:
        self._lies = [
            {7: 1.0},
            dict.fromkeys(control, 1.0 / len(control)),
            {(vocabulary * 5) // 7: 0.6, 11: 0.4},
        ]

    def observe(self, tokens: Any, rows: Any, prompt: bool) -> None: ...

    def observe_branch(self, context: Any, row: Any) -> None: ...

    def root(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def predict(self, state: int) -> list[Evidence]:
        return [Evidence(0.9, 1, self._lies[state % len(self._lies)], [])]


def prompts(count: int) -> list[tuple[Any, list[Chunk]]]:
    """Questions on Python's own reference, and from READER_RAG_DATA if that is set."""
    asked: list[tuple[Any, list[Chunk]]] = []
    for topic in TOPICS:
        chunk = Chunk.from_text(topics[topic][:600])
        asked.append(
            (f"{chunk.text}\n\nExplain this section in your own words, quoting where it helps.", [chunk])
        )
    if file := os.environ.get("READER_RAG_DATA"):
        from reader_rag.bench.rows import read_rows

        rows = [row for row in read_rows(file) if sum(len(m["content"]) for m in row.messages) < 1000]
        asked[len(asked) // 2 :] = [
            (list(row.messages), list(row.chunks)) for row in rows[:: max(len(rows) // 14, 1)][:14]
        ]
    return asked[:count]


def check(reader: Reader, prompt: Any, chunks: list[Chunk], sampling: Sampling) -> tuple[int, ...]:
    """The same tokens without drafts, with all sources, and with an adversarial source among them."""
    plain = reader.generate(prompt, sampling=sampling, chunks=chunks, drafting=OFF)
    drafted = reader.generate(prompt, sampling=sampling, chunks=chunks)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert drafted.stats.dropped_sources == {}
    assert drafted.stats.passes <= plain.stats.passes
    return plain.tokens


def check_adversary(reader: Reader, prompt: Any, sampling: Sampling, tokens: tuple[int, ...]) -> None:
    liar = Liar(reader.model.config.vocab_size, [*sorted(reader.eos), 1])
    answer = reader.generate(prompt, sampling=sampling, drafting=Drafting(sources=(liar, "context")))
    assert answer.tokens == tokens
    assert answer.stats.drafted_by_source.get("liar", 0) > 0


def test_the_demo_model_in_float32_is_exact_and_equals_generate(demo_reader):
    prompt, chunks = prompts(1)[0]
    sampling = Sampling(max_tokens=20)
    tokens = check(demo_reader, prompt, chunks, sampling)
    assert tokens == generated(demo_reader, prompt, 20)
    check_adversary(demo_reader, prompt, sampling, tokens)


def test_the_demo_model_in_bfloat16_is_exact_greedy_and_seeded(demo_folder, tmp_path):
    reader = Reader.load(demo_folder, dtype="bfloat16", device="cpu", width=4, cache_dir=tmp_path)
    assert reader.mode == "exact", reader.mode_reason
    prompt, chunks = prompts(2)[1]
    check(reader, prompt, chunks, Sampling(max_tokens=12))
    check(reader, prompt, chunks, Sampling(max_tokens=12, temperature=0.8, seed=1))


@pytest.mark.exact
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_twenty_prompts_greedy_and_with_three_seeds(demo_folder, tmp_path, dtype):
    reader = Reader.load(demo_folder, dtype=dtype, device="cpu", width=WIDTH, cache_dir=tmp_path)
    assert reader.mode == "exact", reader.mode_reason
    for number, (prompt, chunks) in enumerate(prompts(20)):
        greedy = Sampling(max_tokens=20)
        tokens = check(reader, prompt, chunks, greedy)
        check_adversary(reader, prompt, greedy, tokens)
        if dtype == "float32":
            assert tokens == generated(reader, prompt, 20), f"prompt {number}"
        for seed in (1, 2, 3):
            check(reader, prompt, chunks, Sampling(max_tokens=20, temperature=0.8, seed=seed))
        print(f"{dtype}: prompt {number + 1} of 20 equal", flush=True)


@pytest.mark.exact
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forty_requests_in_four_rows_equal_their_solo_runs(demo_folder, tmp_path, dtype):
    """Lengths from one token to near the context limit, seeds and stops, arriving while others run."""
    reader = Reader.load(
        demo_folder, dtype=dtype, device="cpu", width=8, rows=4, context=1024, cache_dir=tmp_path
    )
    assert (reader.mode, reader.rows) == ("exact", 4), reader.mode_reason
    rng = random.Random(5)
    text = reader.encode(" ".join(topics[topic] for topic in TOPICS))
    requests = []
    for length in (1, 2, 1010, 600, *(rng.randrange(20, 260) for _ in range(36))):
        start = rng.randrange(len(text) - length)
        sampling = Sampling(
            max_tokens=rng.choice((1, 6, 16)),
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.randrange(99),
            stop=rng.choice(((), (".",), ("\n\n",))),
        )
        requests.append((text[start : start + length], sampling))
    alone = []
    for prompt, sampling in requests:
        reader.forget()  # neither prefixes nor statistics of the others
        alone.append(reader.generate(prompt, sampling=sampling, drafting=OFF))
    reader.forget()
    order = list(range(len(requests)))
    rng.shuffle(order)
    tickets = {}
    while len(tickets) < len(order) or not all(ticket.done for ticket in tickets.values()):
        if len(tickets) < len(order) and (not tickets or rng.random() < 0.3):
            i = order[len(tickets)]
            tickets[i] = reader.submit(requests[i][0], sampling=requests[i][1])
        elif waiting := [ticket for ticket in tickets.values() if not ticket.done]:
            next(iter(rng.choice(waiting)))
    for i, ticket in tickets.items():
        answer = ticket.result()
        assert answer.tokens == alone[i].tokens, f"request {i}"
        assert (answer.text, answer.finish_reason) == (alone[i].text, alone[i].finish_reason)
