"""reader_rag for LlamaIndex: a local model that answers RAG questions faster, and not one token changes.

`ReaderLLM` is the model, `ReaderRetriever` retrieves from a `reader_rag` store and lets the model draft from
what it found, `watch` does the same for any other retriever with one line.
"""

try:
    # `llama_index` alone proves nothing: it is a namespace that this very package opens too.
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in {"llama_index", "llama_index.core"}:
        raise
    from reader_rag.errors import MissingExtraError

    raise MissingExtraError(
        'llama_index.llms.reader_rag needs LlamaIndex: pip install "reader-rag[llama-index]"'
    ) from error

from llama_index.llms.reader_rag.llm import ReaderLLM
from llama_index.llms.reader_rag.retriever import ReaderRetriever
from llama_index.llms.reader_rag.vector_store import ReaderVectorStore
from llama_index.llms.reader_rag.watch import watch

__all__ = ["ReaderLLM", "ReaderRetriever", "ReaderVectorStore", "watch"]
