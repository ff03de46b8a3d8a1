"""Requests of all kinds: what the tests of several requests at once are asked."""

from __future__ import annotations

import random

from reader_rag import Drafting, Sampling

OFF = Drafting(sources=())
WORDS = (
    "reader",
    "chunk",
    "span",
    "value",
    "for",
    "name",
    "in",
    "sorted",
    "looks",
    "up",
    "text",
    "goes",
    "on",
    "pass",
)


def prompts_of(seed: int, count: int) -> list[str]:
    """Real-looking prompts from one word to several prefill chunks."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice((1, 5, 40, 120)))) for _ in range(count)]


def samplings_of(seed: int, count: int) -> list[Sampling]:
    rng = random.Random(seed)
    return [
        Sampling(
            max_tokens=rng.choice((1, 3, 12, 24)),
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.randrange(100),
            stop=rng.choice(((), ("e",), ("the",))),
        )
        for _ in range(count)
    ]


def solo(reader, prompt, sampling):
    """The text of a request that has the engine, and empty prefixes, to itself."""
    reader.forget()
    answer = reader.generate(prompt, sampling=sampling, drafting=OFF)
    return answer.tokens, answer.text, answer.finish_reason
