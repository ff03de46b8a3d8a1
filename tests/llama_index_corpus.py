"""What the LlamaIndex tests with a real model share: six texts, a store's embedder, and a model told what to say."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("llama_index.core")

from llama_index.core import Settings

from llama_index.llms.reader_rag import ReaderLLM

if TYPE_CHECKING:
    from reader_rag import Reader

QUESTION = "what does else after a loop mean"
TEXTS = (
    "The else clause of a loop runs when the loop ends without break.",
    "A break statement ends the nearest loop and skips its else clause.",
    "The try statement runs its finally clause whatever happens.",
    "A class statement makes a new class object.",
    "The with statement enters a context and leaves it at the end.",
    "An import statement binds a module to a name.",
)


class WordEmbedder:
    """Hashed bags of words: texts with common words are near each other."""

    name = "words"
    dim = 64

    def encode_query(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        vectors = np.full((len(texts), self.dim), 1e-6, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, zlib.crc32(word.strip(".,").encode()) % self.dim] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    encode_document = encode_query


def as_default(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> ReaderLLM:
    """A face over `reader` as LlamaIndex's default, with the reader's own tokenizer for all counts, until the test ends."""
    llm = ReaderLLM(reader=reader, max_tokens=12)
    for name in ("_llm", "_tokenizer", "_callback_manager"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    Settings.llm, Settings.tokenizer = llm, reader.encode
    return llm


class Says:
    """A logits processor under which a ChatML model answers `turns`, one for each turn of its conversation.

    It depends on the token ids alone, as a processor must: an answer is what stands after the last header.
    """

    def __init__(self, reader: Reader, *turns: str) -> None:
        encode = reader.tokenizer.encode
        self.header = encode("<|im_start|>assistant\n", add_special_tokens=False)
        [end] = encode("<|im_end|>", add_special_tokens=False)
        self.turns = [[*encode(turn, add_special_tokens=False), end] for turn in turns]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, length = input_ids[0].tolist(), len(self.header)
        starts = [i for i in range(length, len(ids) + 1) if ids[i - length : i] == self.header]
        answer = self.turns[min(len(starts), len(self.turns)) - 1]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, answer[min(len(ids) - starts[-1], len(answer) - 1)]] = 0.0
        return forced
