"""LlamaIndex nodes to chunks and back."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from reader_rag import Chunk
from reader_rag.errors import SettingsError

REF_DOC_ID = "_ref_doc_id"
_REST = (
    "_node_content"  # JSON of what a node is beside id, text and metadata: relations, templates, its class
)


def chunks_from(documents: object) -> tuple[Chunk, ...]:
    """Chunks to draft from, out of nodes, scored nodes, chunks, strings, or one of these.

    A node gives its bare text under its own id and, where metadata changes it, also the text that
    synthesizers put in the prompt.

    Raises:
        SettingsError: a document is none of these.
    """
    if documents is None:
        return ()
    if isinstance(documents, str | Chunk | BaseNode | NodeWithScore | Mapping):
        documents = (documents,)
    if not isinstance(documents, Iterable):
        raise SettingsError(
            f"documents= got a {type(documents).__name__}: pass a list of nodes, chunks or strings"
        )
    return tuple(chunk for document in documents for chunk in _chunks_of(document))


def chunk_from(node: BaseNode) -> Chunk:
    """The node as a chunk for a store, from which `node_from` makes the same node; its embedding is left out."""
    rest = node.model_dump(mode="json", exclude={"embedding", "text", "text_resource"})
    metadata = rest.pop("metadata", {})
    kept = {_REST: json.dumps({**rest, "class_name": node.class_name()}), REF_DOC_ID: node.ref_doc_id}
    return Chunk(node.node_id, node.get_content(metadata_mode=MetadataMode.NONE), {**metadata, **kept})


def node_from(chunk: Chunk) -> BaseNode:
    """The chunk as a node with the same id, text and metadata; the very node if it was one."""
    if _REST in chunk.metadata:
        metadata = {key: value for key, value in chunk.metadata.items() if key not in (_REST, REF_DOC_ID)}
        rest = json.loads(chunk.metadata[_REST])
        content = {
            "_node_content": json.dumps({**rest, "metadata": metadata}),
            "_node_type": rest["class_name"],
        }
        return metadata_dict_to_node(content, text=chunk.text)
    # A store notes where a chunk starts in its file: an offset helps the program, not the model.
    offsets = [key for key in ("start",) if isinstance(chunk.metadata.get(key), int)]
    return TextNode(
        id_=chunk.id,
        text=chunk.text,
        metadata=dict(chunk.metadata),
        excluded_llm_metadata_keys=offsets,
        excluded_embed_metadata_keys=offsets,
    )


def _chunks_of(document: Any) -> list[Chunk]:
    if isinstance(document, Chunk):
        return [document]
    if isinstance(document, str):
        return [Chunk.from_text(document)] if document else []
    if isinstance(document, Mapping) and isinstance(document.get("text"), str):
        return _chunks_of(document["text"])
    node = document.node if isinstance(document, NodeWithScore) else document
    if not isinstance(node, BaseNode):
        raise SettingsError(
            f"cannot draft from a {type(document).__name__}: "
            "documents are LlamaIndex nodes, reader_rag chunks or strings"
        )
    bare = node.get_content(metadata_mode=MetadataMode.NONE)
    prompted = node.get_content(metadata_mode=MetadataMode.LLM)
    chunks = [Chunk(node.node_id, bare, node.metadata)] if bare else []
    if prompted and prompted != bare:
        chunks.append(Chunk.from_text(prompted, {"node_id": node.node_id}))
    return chunks
