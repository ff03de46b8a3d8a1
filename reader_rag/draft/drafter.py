"""Drafter: what one request proposes to the verifier, and what it learns from the verdicts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.answers import AnswerSource
from reader_rag.draft.chunks import ChunkSource
from reader_rag.draft.context import ContextSource
from reader_rag.draft.corpus import Corpus, CorpusSource
from reader_rag.draft.guard import GuardedSource
from reader_rag.draft.mixture import Mixture, Node
from reader_rag.draft.ngrams import NgramSource, NgramTable
from reader_rag.draft.pool import ChunkPool
from reader_rag.draft.priors import Priors
from reader_rag.draft.source import Array, Row, SharedSource, Source
from reader_rag.draft.tree import Draft, Origin, Tree, grow

LEAST_OF_LAST = 0.15  # of the least path probability of one draft, below which the next leaves nodes out
LEAST_PROB = 0.03  # predictions below this are not kept as soft evidence


class Drafter:
    """The drafts of one request, from all its sources at once. Knows token ids only.

    `forbidden` tokens (control tokens) are never drafted, whatever a source says, nor ids of `vocabulary` and above.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        forbidden: frozenset[int] = frozenset(),
        vocabulary: int = 1 << 31,
        priors: Priors | None = None,
    ) -> None:
        self.source_names: tuple[str, ...] = tuple(source.name for source in sources)
        self._guarded = [GuardedSource(source) for source in sources]
        self._mixture = Mixture(self._guarded, forbidden, vocabulary, priors)
        self._root: Node | None = None  # what the latest draft grew from, until its verdict
        self._tree: Tree[Node] | None = None  # the latest draft
        self._least = 0.0  # path probability that nodes of the next draft must exceed

    def observe_prompt(
        self,
        tokens: Sequence[int],
        top_ids: NDArray[np.integer[Any]] | None,
        top_probs: NDArray[np.floating[Any]] | None,
    ) -> None:
        """Takes the prompt. Row i of top_ids/top_probs [m <= n, k] is the model's prediction after tokens[i]."""
        rows: list[Row | None] = [None] * len(tokens)
        if top_ids is not None and top_probs is not None:
            # The prediction after the last token belongs to the first token of the output, which comes with its own.
            known = len(tokens) - 1
            given = zip(top_ids[:known].tolist(), top_probs[:known].tolist(), strict=True)
            for position, (ids, probs) in enumerate(given, start=1):
                rows[position] = _row(ids, probs)
        for source in self._mixture.sources:
            source.observe(tokens, rows, True)
        self._forget_draft()

    def observe(self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> None:
        """Takes newly committed tokens; row j is the prediction that tokens[j] was chosen from."""
        self._learn(tokens)
        rows = [_row(ids, probs) for ids, probs in zip(top_ids, top_probs, strict=True)]
        for source in self._mixture.sources:
            source.observe(tokens, rows, False)
        self._forget_draft()

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None:
        """Takes the model's prediction after the committed sequence and `context`, a path that was not committed."""
        self.observe_branches([context], [top_ids], [top_probs])

    def observe_branches(
        self,
        contexts: Sequence[Sequence[int]],
        top_ids: Sequence[Sequence[int]],
        top_probs: Sequence[Sequence[float]],
    ) -> None:
        """`observe_branch` for all nodes of a draft at once: row j is the prediction after contexts[j]."""
        rows = [_row(ids, probs) for ids, probs in zip(top_ids, top_probs, strict=True)]
        for source in self._guarded:
            source.observe_branches(contexts, rows)

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft:
        """Returns what is likely to follow: at most `limit` nodes, at most `chain_limit` of them in the main chain.

        `pending` tokens lead the tree: a side branch of the pass before found them.
        """
        mixture = self._mixture
        self._root = root = mixture.root()
        tree = grow(root, mixture.predict, mixture.advance, limit, chain_limit, pending, self._least)
        # A full tree tells the next one where it may stop looking; one that stayed small, that it should look further.
        full = len(tree.tokens) >= limit > len(pending)
        self._least = LEAST_OF_LAST * min(tree.probs) if full else 0.0
        self._tree = tree
        return Draft(tree.tokens, tree.parents, tree.probs, self._origins(root, tree), tree.chain)

    def origin(self, draft: Draft, node: int) -> Origin:
        """Where the token of a node of the latest draft was copied from. Looked up when asked for: drafting stays quick."""
        source, token, parent = draft.origins[node], draft.tokens[node], draft.parents[node]
        tree = self._tree
        if tree is None or self._root is None or tree.tokens is not draft.tokens:
            raise ValueError(
                "origins are known of the latest draft only, until its verdict: ask before observe()"
            )
        above = self._root if parent < 0 else tree.states[parent]
        place = self._guarded[source].locate(self._mixture.state(above, source), token)
        return Origin(source) if place is None else Origin(source, *place)

    def learned(self) -> dict[tuple[str, int], tuple[float, float]]:
        """(claims upheld, claims) by source and level in this request: what `reader-rag bench fit` gathers."""
        return {
            (name, level): counts
            for name, levels in zip(self.source_names, self._mixture.learned, strict=True)
            for level, counts in levels.items()
        }

    def dropped(self) -> dict[str, str]:
        """The sources that raised in this request, and what."""
        return {source.name: source.error for source in self._guarded if source.error is not None}

    def _learn(self, tokens: Sequence[int]) -> None:
        """Scores what was expected in the latest draft by the tokens that came."""
        state, tree = self._root, self._tree
        if state is None or tree is None:
            return
        node = -1
        for token in tokens:
            self._mixture.learn(state, token)
            node = tree.child(node, token)
            if node < 0:
                break
            state = tree.states[node]

    def _origins(self, root: Node, tree: Tree[Node]) -> list[int]:
        """The source of each node."""
        origin, states = self._mixture.origin, tree.states
        return [
            origin(states[parent] if parent >= 0 else root, token)
            for parent, token in zip(tree.parents, tree.tokens, strict=True)
        ]

    def _forget_draft(self) -> None:
        self._root = self._tree = None


def _row(ids: Sequence[int], probs: Sequence[float]) -> Row:
    return {token: prob for token, prob in zip(ids, probs, strict=True) if prob >= LEAST_PROB}


def make_drafter(
    names: Sequence[str],
    *,
    chunk_tokens: Sequence[Array] = (),
    pool: ChunkPool | None = None,
    ngrams: NgramTable | None = None,
    frozen_ngrams: NgramTable | None = None,
    answers: ChunkPool | None = None,
    corpus: Corpus | None = None,
    extra_sources: Sequence[Source | SharedSource] = (),
    forbidden: frozenset[int] = frozenset(),
    vocabulary: int = 1 << 31,
    priors: Priors | None = None,
) -> Drafter:
    """Builds the Drafter of one request from the names of its sources.

    `chunk_tokens` are the request's own chunks, each tokenization a sequence of its own; `pool`, `ngrams` and `answers`
    are the scope's shared state, `corpus` the store's; `frozen_ngrams` is read beside `ngrams` and never learns. What is
    left out is empty. `extra_sources` serve this request alone, but for those with `for_request()`, which is asked for
    this request's own. `priors` stand in for the fitted table that comes with the package.
    Raises ValueError for a name that no source has.
    """
    builders: dict[str, Callable[[], Source]] = {
        "context": ContextSource,
        "chunks": lambda: ChunkSource(chunk_tokens, pool),
        "ngrams": lambda: NgramSource(NgramTable() if ngrams is None else ngrams, frozen_ngrams),
        "answers": lambda: AnswerSource(answers),
        "corpus": lambda: CorpusSource(Corpus.build(()) if corpus is None else corpus),
    }
    extra = {
        source.name: source.for_request() if isinstance(source, SharedSource) else source
        for source in extra_sources
    }
    known = [*builders, *extra]
    unknown = [name for name in names if name not in known]
    if unknown:
        mend = " (the speculator needs a draft model)" if "speculator" in unknown else ""
        raise ValueError(
            f"unknown source {', '.join(map(repr, unknown))}: choose from {', '.join(known)}{mend}"
        )
    sources = [extra[name] if name in extra else builders[name]() for name in dict.fromkeys(names)]
    return Drafter(sources, forbidden=forbidden, vocabulary=vocabulary, priors=priors)
