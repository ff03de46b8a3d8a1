"""Two turns of a conversation: seconds to the first token of each, and the second turn's text beside that of a fresh prefill."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from tqdm import tqdm

from reader_rag.bench.speed import headline, setting
from reader_rag.errors import SettingsError
from reader_rag.load import Loaded
from reader_rag.reader import Reader
from reader_rag.settings import Drafting, Sampling
from reader_rag.stats import Answer

FIRST, SECOND = "What does the with statement do?", "And what does the try statement do?"
SHORTEST = 256
"""Tokens of the first prompt: with fewer there is little to read, and so nothing to reuse."""


def conversation(
    loaded: Loaded,
    *,
    tokens: int = 2000,
    rounds: int = 3,
    width: int | None = None,
    max_tokens: int = 48,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """`rounds` times: a first turn of `tokens` tokens, a second turn, and the second turn again with everything forgotten; medians."""
    if rounds < 1:
        raise SettingsError(f"rounds is {rounds}; measure at least one")
    reader = Reader(loaded, width=width, drafting=Drafting(persist=False), cache_dir=cache_dir)
    first = first_turn(reader, tokens, max_tokens)
    sampling = Sampling(max_tokens=max_tokens)
    reader.generate("Say hello.", sampling=Sampling(max_tokens=4))  # first passes allocate and warm caches
    runs: list[tuple[Answer, Answer, Answer]] = []
    for _ in tqdm(range(rounds), desc="rounds", disable=None if progress else True):
        reader.forget()
        one = reader.generate(first, sampling=sampling)
        second = [*first, {"role": "assistant", "content": one.text}, {"role": "user", "content": SECOND}]
        two = reader.generate(second, sampling=sampling)
        reader.forget()
        runs.append((one, two, reader.generate(second, sampling=sampling)))
    one_s, two_s, anew_s = (median(run[i].stats.ttft_s for run in runs) for i in range(3))
    one, two, _ = runs[-1]
    return {
        "rounds": rounds,
        "first_prompt_tokens": one.prompt_tokens,
        "second_prompt_tokens": two.prompt_tokens,
        "reused_tokens": two.stats.reused_tokens,
        "first_ttft_s": round(one_s, 4),
        "second_ttft_s": round(two_s, 4),
        "second_anew_ttft_s": round(anew_s, 4),
        "second_to_first": round(two_s / one_s, 4),
        "identical": sum(two.tokens == anew.tokens for _, two, anew in runs),
        "mode": reader.mode,
        **setting(reader),
    }


def first_turn(reader: Reader, tokens: int, max_tokens: int) -> list[dict[str, str]]:
    """A question behind so much of Python's language reference that the prompt has about `tokens` tokens."""
    longest = reader.context_length - 2 * max_tokens - len(reader.encode(SECOND)) - SHORTEST
    if not SHORTEST <= tokens <= longest:
        raise SettingsError(
            f"tokens is {tokens}; this model's first turn may have {SHORTEST} to {longest}, so that the second fits its context"
        )
    room = tokens - len(reader.encode_prompt(FIRST))
    text: list[int] = []
    for topic in sorted(topics, key=lambda name: (name not in ("with", "try"), name)):
        text += reader.encode(topics[topic] + "\n\n")
        if len(text) >= room:
            break
    return [{"role": "user", "content": f"{reader.tokenizer.decode(text[:room])}\n\n{FIRST}"}]


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""

    def line(name: str, prompt: int, read: int, ttft_s: float) -> str:
        return f"{name:24}{prompt:15}{read:8}{ttft_s:11.3f} s"

    first, second = result["first_prompt_tokens"], result["second_prompt_tokens"]
    new = second - result["reused_tokens"]
    return "\n".join(
        [
            headline(result),
            f"{'':24}{'prompt tokens':>15}{'read':>8}{'first token':>13}",
            line("first turn", first, first, result["first_ttft_s"]),
            line("second turn", second, new, result["second_ttft_s"]),
            line("second turn, read anew", second, second, result["second_anew_ttft_s"]),
            f"second to first {result['second_to_first']:.3f}; texts equal to a fresh prefill {result['identical']}/{result['rounds']}",
        ]
    )
