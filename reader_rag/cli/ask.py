"""`reader-rag ask`: one question to a store, the answer streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from reader_rag.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from reader_rag.reader import Reader
    from reader_rag.settings import Sampling
    from reader_rag.stats import Answer
    from reader_rag.store.chunk import Chunk, Hit

PROMPT = "{context}\n\nAnswer the question with the text above.\nQuestion: {question}"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ask",
        help="ask a store a question",
        description="Retrieve chunks from a store and answer with a local model. The answer is streamed to stdout; "
        "sources and statistics go to stderr.",
    )
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--store", required=True, metavar="DIR", help="a store made by `reader-rag index`")
    parser.add_argument(
        "--k", type=int, default=4, metavar="N", help="chunks that enter the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-k",
        type=int,
        default=16,
        metavar="N",
        help="chunks that drafts are taken from, at least k (default: %(default)s)",
    )
    parser.add_argument("--plain", action="store_true", help="no drafting: the same text, slower")
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of the answer's text"
    )
    parser.set_defaults(run=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device, --width: what `Reader.load` takes."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="M", help="a hub id, a folder or a .gguf file (default: the demo model)"
    )
    group.add_argument("--dtype", default="auto", metavar="D", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:0 or mps")
    group.add_argument("--width", type=int, metavar="W", help="tokens per pass (default: measured)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """--max-tokens, --temperature, --top-p, --seed: the common part of `Sampling`."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most probable token (the default)",
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: %(default)s)")
    group.add_argument("--seed", type=int, metavar="N", help="makes a sampled answer repeatable")


def sampling_from(args: argparse.Namespace) -> Sampling:
    """The options of `add_sampling_options`; raises SettingsError for a value out of range."""
    from reader_rag.settings import Sampling

    return Sampling(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )


def reader_from(args: argparse.Namespace, **options: Any) -> Reader:
    """The Reader that `add_model_options` name, loaded with progress on stderr."""
    from reader_rag.reader import Reader

    return Reader.shared(
        args.model, dtype=args.dtype, device=args.device, width=args.width, progress=True, **options
    )


def rag_prompt(question: str, chunks: Sequence[Chunk]) -> str:
    """The text that the model is asked: the chunks, then the question."""
    return PROMPT.format(context="\n\n".join(chunk.text for chunk in chunks), question=question)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked without the model, then load it and answer."""
    if not args.question.strip():
        raise PromptError("the question is empty; ask something")
    from reader_rag.prompt import refuse_surrogates

    refuse_surrogates(args.question, "the question")
    if args.k < 1 or args.draft_k < 1:
        name, value = ("--k", args.k) if args.k < 1 else ("--draft-k", args.draft_k)
        raise SettingsError(f"{name} is {value}; ask for at least 1 chunk")
    sampling = sampling_from(args)

    from reader_rag.settings import Drafting
    from reader_rag.store import Store

    with Store.open(args.store, create=False) as store:
        hits = store.search(args.question, k=max(args.k, args.draft_k))
    if not hits:
        raise SettingsError(
            f"the store in {args.store} is empty; fill it with `reader-rag index PATH --store DIR`"
        )
    reader = reader_from(args)
    steps = reader.stream(
        rag_prompt(args.question, [hit.chunk for hit in hits[: args.k]]),
        sampling=sampling,
        chunks=[hit.chunk for hit in hits],
        drafting=Drafting(sources=()) if args.plain else None,
    )
    answer = _show(steps, hits, quiet=args.json)
    if args.json:
        print(json.dumps(_document(args.question, answer, hits[: args.k], reader), ensure_ascii=False))
    else:
        _summary(answer, hits, reader)
    return 0


def _show(steps: Any, hits: Sequence[Hit], quiet: bool) -> Answer:
    """Print the text as it comes (spans highlighted on a terminal) and give the finished answer."""
    from reader_rag.cli.show import Highlighter

    highlighter = Highlighter([hit.chunk for hit in hits], sys.stdout)
    coloured = not quiet and highlighter.coloured
    answer: Answer | None = None
    with closing(steps):
        for step in steps:
            answer = step.answer
            if coloured:
                highlighter.push(step.text)
            elif not quiet:
                print(step.text, end="", flush=True)
    if coloured:
        highlighter.finish()
    if not quiet:
        print(flush=True)
    assert answer is not None, "a Reader's last step carries the answer"
    return answer


def _summary(answer: Answer, hits: Sequence[Hit], reader: Reader) -> None:
    stats = answer.stats
    copied = {span.chunk_id for span in answer.spans}
    for number, hit in enumerate(hits, 1):
        if hit.chunk.id in copied:
            print(f"  [{number}] {describe(hit.chunk)}", file=sys.stderr)
    mode = f"drafting {stats.mode}" if stats.reason is None else f"no drafting: {stats.reason}"
    print(
        f"  {reader.name}, {stats.tokens} tokens in {stats.passes} passes ({stats.tokens_per_pass:.2f} per pass), "
        f"{stats.tokens_per_s:.1f} tokens/s, first token after {stats.ttft_s:.2f} s; {mode}",
        file=sys.stderr,
    )


def describe(chunk: Chunk) -> str:
    """A chunk's origin for people: its path or source, its title, else its id."""
    parts = [str(chunk.metadata[key]) for key in ("path", "source", "title") if chunk.metadata.get(key)]
    return ", ".join(parts) or f"chunk {chunk.id}"


def _document(question: str, answer: Answer, hits: Sequence[Hit], reader: Reader) -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "chunks": [
            {"id": hit.chunk.id, "score": round(hit.score, 4), "metadata": dict(hit.chunk.metadata)}
            for hit in hits
        ],
        "spans": [span.to_dict() for span in answer.spans],
        "model": reader.name,
        "dtype": str(reader.dtype).removeprefix("torch."),
        "device": str(reader.device),
        "stats": answer.stats.to_dict(),
    }
