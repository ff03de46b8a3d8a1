"""LlamaIndex's metadata filters, as what a Store asks of each chunk."""

from collections.abc import Callable, Collection

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters

from llama_index.llms.reader_rag.nodes import REF_DOC_ID
from reader_rag import Chunk
from reader_rag.errors import SettingsError
from reader_rag.store.where import condition

Where = Callable[[Chunk], bool]

_REF_DOC_NAMES = ("ref_doc_id", "doc_id", "document_id")  # as LlamaIndex's stores call it beside the metadata


def where_of(
    filters: MetadataFilters | None = None,
    node_ids: Collection[str] | None = None,
    doc_ids: Collection[str] | None = None,
) -> Where | None:
    """What all of these ask of a chunk; None if nothing. SettingsError for a filter that cannot be asked."""
    rules: list[Where] = []
    if filters is not None and filters.filters:
        rules.append(_joined(filters))
    if node_ids is not None:
        nodes = frozenset(node_ids)
        rules.append(lambda chunk: chunk.id in nodes)
    if doc_ids is not None:
        documents = frozenset(doc_ids)
        rules.append(lambda chunk: chunk.metadata.get(REF_DOC_ID) in documents)
    return (lambda chunk: all(rule(chunk) for rule in rules)) if rules else None


def _joined(filters: MetadataFilters) -> Where:
    parts = [_joined(part) if isinstance(part, MetadataFilters) else _one(part) for part in filters.filters]
    match filters.condition or FilterCondition.AND:
        case FilterCondition.AND:
            return lambda chunk: all(part(chunk) for part in parts)
        case FilterCondition.OR:
            return lambda chunk: any(part(chunk) for part in parts)
        case FilterCondition.NOT:
            return lambda chunk: not any(part(chunk) for part in parts)
    raise SettingsError(f"filters cannot be joined by {filters.condition!r}: use and, or, not")


def _one(given: MetadataFilter) -> Where:
    holds = condition(given.operator.value, given.value)
    if given.key in _REF_DOC_NAMES:
        return lambda chunk: holds(chunk.metadata.get(given.key, chunk.metadata.get(REF_DOC_ID)))
    return lambda chunk: holds(chunk.metadata.get(given.key))
