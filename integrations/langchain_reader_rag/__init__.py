"""LangChain faces of reader_rag: the same answers as the model alone gives, several times faster.

`ChatReader` and `ReaderLLM` are a chat model and a text model, `ReaderRetriever` searches a `Store` and hands
the chunks to the drafter, `watch` does that for every other retriever. All of them share one loaded `Reader`.
"""

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "langchain_core":
        raise
    from reader_rag.errors import MissingExtraError

    raise MissingExtraError(
        'langchain_reader_rag needs langchain-core: pip install "reader-rag[langchain]"'
    ) from error

from langchain_reader_rag.chat_models import ChatReader
from langchain_reader_rag.llms import ReaderLLM
from langchain_reader_rag.retrievers import ReaderRetriever
from langchain_reader_rag.vectorstores import ReaderVectorStore
from langchain_reader_rag.watch import Watch, watch

__all__ = ["ChatReader", "ReaderLLM", "ReaderRetriever", "ReaderVectorStore", "Watch", "watch"]
