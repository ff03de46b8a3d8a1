"""What each face adds to a 100-token answer: over a Reader that answers at once, and over the demo model.

    PYTHONPATH=.:integrations python tests/face_overhead.py [--rounds N] [--json]

A Reader that answers at once shows the face alone, and one token per step is the dearest case for it: drafting brings several tokens in
a step. Over the model everything forgets between two answers, so that all of them do the same work; differences there are within
the noise of the machine, so let it be quiet. N is the number of rounds over the model; 0 leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from langchain_reader_rag import ChatReader
from langchain_reader_rag import ReaderLLM as LangChainLLM
from llama_index.llms.reader_rag import ReaderLLM as LlamaIndexLLM
from reader_rag import Answer, Drafting, Reader, Sampling, Stats, Step

TOKENS = 100
ROUNDS = 15
QUESTION = "Why does the else clause of a loop run?"


class InstantReader:
    """A Reader's public face whose model takes no time."""

    name, dtype, device, width, rows, context_length, mode = "instant", "float32", "cpu", 16, 1, 4096, "exact"
    has_chat_template = True
    tokenizer = SimpleNamespace(chat_template=None, added_tokens_decoder={})

    def stream(self, prompt: Any, **options: Any) -> Iterator[Step]:
        return self._steps()

    def submit(self, prompt: Any, **options: Any) -> InstantTicket:
        return InstantTicket(self._steps())

    def _steps(self) -> Iterator[Step]:
        for number in range(TOKENS - 1):
            yield Step((number,), "word ")
        stats = Stats(prompt_tokens=9, tokens=TOKENS, passes=TOKENS)
        answer = Answer("word " * TOKENS, tuple(range(TOKENS)), "length", 9, stats)
        yield Step((TOKENS - 1,), "word ", "length", answer)


class InstantTicket:
    """What `submit` gives."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def cancel(self) -> None:
        """There is nothing to stop."""


def faces(reader: Any) -> dict[str, Callable[[], Any]]:
    """Every way to get a whole answer from `reader`, by the name it goes by in the documentation."""
    chat, text = ChatReader(reader=reader, max_tokens=TOKENS), LangChainLLM(reader=reader, max_tokens=TOKENS)
    llm = LlamaIndexLLM(reader=reader, max_tokens=TOKENS)

    async def consume(stream: Any) -> None:
        async for _ in stream:
            pass

    async def awaited(method: Any) -> None:
        await consume(await method(QUESTION))

    return {
        "LangChain ChatReader.invoke": lambda: chat.invoke(QUESTION),
        "LangChain ChatReader.stream": lambda: list(chat.stream(QUESTION)),
        "LangChain ChatReader.astream": lambda: asyncio.run(consume(chat.astream(QUESTION))),
        "LangChain ReaderLLM.invoke": lambda: text.invoke(QUESTION),
        "LangChain ReaderLLM.stream": lambda: list(text.stream(QUESTION)),
        "LlamaIndex ReaderLLM.complete": lambda: llm.complete(QUESTION),
        "LlamaIndex ReaderLLM.stream_complete": lambda: list(llm.stream_complete(QUESTION)),
        "LlamaIndex ReaderLLM.astream_complete": lambda: asyncio.run(awaited(llm.astream_complete)),
    }


def measure(reader: Any, rounds: int, forget: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Seconds of "bare" steps and of each face: medians of rounds in which all take turns."""
    sampling = Sampling(max_tokens=TOKENS)
    ways = {"bare": lambda: list(reader.stream(QUESTION, sampling=sampling)), **faces(reader)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            forget()
            began = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up


def added_ms() -> dict[str, float]:
    """Milliseconds that each face adds to the bare steps of a Reader that answers at once."""
    seconds = measure(InstantReader(), ROUNDS)
    return {name: round(1000 * (s - seconds["bare"]), 3) for name, s in seconds.items() if name != "bare"}


def main() -> None:
    """A table on stderr; with --json one document on stdout."""
    parser = argparse.ArgumentParser(description="What each face adds to a 100-token answer.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds over the demo model")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args()
    result: dict[str, Any] = {"tokens": TOKENS, "added_ms": added_ms()}
    if args.rounds > 0:
        reader = Reader.load(drafting=Drafting(persist=False))
        seconds = measure(reader, args.rounds, reader.forget)
        tokens = len(reader.generate(QUESTION, sampling=Sampling(max_tokens=TOKENS)).tokens)
        result |= {"model": reader.name, "model_tokens": tokens, "bare_s": round(seconds.pop("bare"), 4)}
        result["measured_share"] = {name: round(s / result["bare_s"] - 1, 4) for name, s in seconds.items()}
        result["added_share"] = {
            name: round(ms / 1000 / result["bare_s"], 5) for name, ms in result["added_ms"].items()
        }
        print(f"{reader.name}: {tokens} tokens in {result['bare_s']:.2f} s", file=sys.stderr)
    print(f"{'':40}{'adds':>10}{'of the answer':>15}{'measured':>10}", file=sys.stderr)
    for name, ms in result["added_ms"].items():
        shares = [result[key][name] for key in ("added_share", "measured_share") if key in result]
        widths = (15, 10)
        columns = "".join(f"{share:{width}.2%}" for share, width in zip(shares, widths, strict=False))
        print(f"{name:40}{ms:7.2f} ms{columns}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
