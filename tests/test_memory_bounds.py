"""Four thousand requests through the loop, all sources on: what is held after them is what was held after a thousand."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from reader_rag.draft import ChunkPool, Corpus, NgramTable, make_drafter
from reader_rag.loop import Loop
from reader_rag.memory import ScopeMemory
from reader_rag.prefixes import PrefixCache
from reader_rag.request import Request
from reader_rag.settings import SOURCES, Sampling
from reader_rag.stats import Stats
from reader_rag.stream import Delta
from reader_rag.verify.arena import Arena
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.sampling import Sampler

VOCABULARY = 300
CHUNK = 4


class NoModel:
    """Answers like a `FixedForward` of four rows, with random logits, and keeps KV of the right size in the arenas."""

    exact, rows, width, chunk = True, 4, 4, CHUNK
    device = torch.device("cpu")
    chain_limit = FixedForward.chain_limit

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def new_arena(self) -> Arena:
        return Arena(1, 16)

    def reserve(self, arena: Arena, tokens: int) -> None:
        arena.reserve(tokens)

    def bytes_for(self, tokens: int) -> int:
        return tokens * 64

    def prefill(self, arena: Arena, tokens: Sequence[int], start: int, *, want_logits: bool) -> None:
        arena.reserve(start + len(tokens))
        arena.write(0, start, *[torch.zeros(1, 1, len(tokens), 8)] * 2)

    def decode(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        outputs = []
        for job in jobs:
            logits = torch.zeros(len(job.tokens), VOCABULARY)
            for row in range(len(job.tokens)):
                logits[row, self._rng.randrange(VOCABULARY)] = 9.0
            outputs.append(logits)
        return outputs


class Numbers:
    """Tokens as text: stands in for `TextStream`."""

    calls: tuple[Any, ...] = ()
    broken: tuple[str, ...] = ()

    def push(self, tokens: Sequence[int]) -> Delta:
        return Delta(" ".join(map(str, tokens)), False, len(tokens))

    def finish(self) -> str:
        return ""


def test_four_thousand_requests_leave_no_more_behind_than_a_thousand() -> None:
    caps = {"pool": 60_000, "ngrams": 80_000, "answers": 50_000, "prefixes": 3_500}
    memory = ScopeMemory(ChunkPool(caps["pool"]), NgramTable(caps["ngrams"]), ChunkPool(caps["answers"]))
    prefixes = PrefixCache(caps["prefixes"], CHUNK)
    loop = Loop(NoModel(), eos=frozenset(), prefixes=prefixes)  # type: ignore[arg-type]
    rng = random.Random(1)
    corpus = Corpus.build([[rng.randrange(VOCABULARY) for _ in range(400)]])

    def serve(number: int) -> None:
        prompt = [rng.randrange(VOCABULARY) for _ in range(5)]
        memory.pool.add(f"chunk-{number}", [prompt])
        drafter = make_drafter(
            SOURCES,
            chunk_tokens=[prompt],
            pool=memory.pool,
            ngrams=memory.ngrams,
            answers=memory.answers,
            corpus=corpus,
        )
        request = Request(
            tokens=prompt,
            prompt_tokens=len(prompt),
            budget=2,
            sampler=Sampler(Sampling(), 0),
            drafter=drafter,
            text=Numbers(),  # type: ignore[arg-type]
            stats=Stats(),
            chunks=(),
            started=time.perf_counter(),
            wants_evidence=False,
        )
        loop.submit(request)
        while (step := loop.take(request)).answer is None:
            pass
        assert len(step.answer.tokens) == 2
        assert drafter.dropped() == {}
        memory.learn_answer([*prompt[:5], *step.answer.tokens])

    def held() -> SimpleNamespace:
        gc.collect()
        assert memory.pool.nbytes <= caps["pool"]
        assert memory.ngrams.nbytes <= caps["ngrams"]
        assert memory.answers.nbytes <= caps["answers"]
        assert prefixes.bytes() <= caps["prefixes"]
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        return SimpleNamespace(
            objects=len(gc.get_objects()),
            kv=sum(tensor.nbytes for tensor in tensors),
            known=(len(memory.pool), len(memory.answers), len(memory.ngrams), len(prefixes)),
        )

    for number in range(1_000):
        serve(number)
    early = held()
    for number in range(1_000, 4_000):
        serve(number)
    late = held()
    assert all(map(int.__ge__, early.known, (10, 10, 50, 3))), "every cap has long been reached"
    # Estimates are one thing; nothing may be held beside what they count.
    assert len(memory.answers.index.sequences) == len(memory.answers)
    assert sum(map(len, memory.ngrams._turns)) == len(memory.ngrams)
    assert late.objects <= early.objects + 1_000, "an object kept per request would be three thousand"
    assert late.kv <= early.kv + caps["prefixes"]
    assert loop.running == 0
