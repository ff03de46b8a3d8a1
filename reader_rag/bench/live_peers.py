"""The peers bench with a real model: transformers' own decoding, and every rule through our engine, in turns in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reader_rag.bench.peers import Result, choose_makers, summary
from reader_rag.bench.rows import Row, read_rows
from reader_rag.bench.speed import generate_run, setting
from reader_rag.bench.systems import READER, ReaderSystem, System, peer_makers
from reader_rag.prompt import chunk_encodings
from reader_rag.reader import Reader
from reader_rag.settings import Sampling

GENERATE, LOOKUP = "generate", "transformers_prompt_lookup"


def compare_live(
    reader: Reader,
    file: str | Path,
    *,
    sets: Sequence[str] = (),
    limit: int | None = None,
    max_tokens: int = 128,
    names: Sequence[str] = (),
    carry: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Every system answers every row, the order turning from row to row. `carry`: systems keep what they learn between rows.

    Two rows of the table are transformers' own: `generate`, and its prompt lookup at its usual 10 tokens.
    """
    rows = [row for only in sets or (None,) for row in read_rows(file, only=only, limit=limit)]
    prompts = [tuple(reader.encode_prompt(row.messages)) for row in rows]
    makers = choose_makers(peer_makers(reader.width, prompts), names)
    makers[READER] = lambda: ReaderSystem.like(reader)
    systems = {name: make() for name, make in makers.items()}
    order = [GENERATE, LOOKUP, *makers]
    results: dict[str, list[Result]] = {name: [] for name in order}
    texts: list[dict[str, tuple[int, ...]]] = []
    reader.generate(prompts[0], sampling=Sampling(max_tokens=4))  # first passes allocate and warm caches
    with tqdm(total=len(rows) * len(order), desc="answers", disable=None if progress else True) as bar:
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            turn = number % len(order)
            texts.append({})
            for name in order[turn:] + order[:turn]:
                bar.set_postfix_str(name)
                if name in makers:
                    if not carry:
                        systems[name] = makers[name]()
                    tokens, result = _through_engine(reader, systems[name], row, prompt, max_tokens)
                else:
                    tokens, result = _through_generate(reader, prompt, max_tokens, lookup=name == LOOKUP)
                texts[-1][name] = tokens
                results[name].append(result)
                bar.update()
    plain = "plain" if "plain" in makers else READER
    return {
        "learning": "carried from request to request" if carry else "cold: every request with empty tables",
        "any_path": False,
        **summary(results, [row.set for row in rows]),
        "identical_to_plain": sum(len({given[name] for name in makers}) == 1 for given in texts),
        "identical_to_generate": sum(given[plain] == given[GENERATE] for given in texts),
        **setting(reader),
    }


def _through_engine(
    reader: Reader, system: System, row: Row, prompt: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], Result]:
    chunks = [tuple(way) for chunk in row.chunks for way in chunk_encodings(reader.tokenizer, chunk.text)]
    drafter: Any = system.open(prompt, chunks)  # the methods of Drafter are all that the engine asks for
    answer = reader.generate(
        prompt, sampling=Sampling(max_tokens=max_tokens), chunks=row.chunks, drafter=drafter
    )
    system.close(prompt, answer.tokens)
    stats = answer.stats
    return answer.tokens, Result(stats.tokens, stats.passes, stats.decode_s)


def _through_generate(
    reader: Reader, prompt: tuple[int, ...], max_tokens: int, *, lookup: bool
) -> tuple[tuple[int, ...], Result]:
    with _counted(reader.model) as passes:
        run = generate_run(reader, prompt, max_tokens, lookup=lookup)
    return run.tokens, Result(len(run.tokens), passes[0], run.decode_s)


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Counts the forward passes of a model; the prefill is the first, as it gives the first token."""
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    handle = model.register_forward_hook(count)
    try:
        yield passes
    finally:
        handle.remove()
