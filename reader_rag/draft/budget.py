"""What a pass of throughput mode drafts: the nodes that bring most tokens per second, over all rows at once.

A node's path probability is what it is expected to add to the accepted tokens. Taken in falling order over all rows (TETRIS'
selection, arXiv 2502.15197), the best n nodes of a pass are the first n, and n is where the expected tokens per second
(rows + sum of their probabilities) / t(rows + n) are largest; 0 is an allowed answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reader_rag.draft.tree import Draft


def spend(drafts: Sequence[Draft], seconds: Callable[[int], float]) -> list[Draft]:
    """Cuts the drafts of a pass's rows to what pays; `seconds` of a pass by its tokens (each row has one beside its draft)."""
    # A child is never more probable than its parent; of equals the parent comes first, as its index is smaller.
    nodes = sorted(
        ((prob, row, node) for row, draft in enumerate(drafts) for node, prob in enumerate(draft.probs)),
        key=lambda item: (-item[0], item[2], item[1]),
    )
    rows = len(drafts)
    best, expected = 0, float(rows)
    most = expected / seconds(rows)
    for count, (prob, _, _) in enumerate(nodes, 1):
        expected += prob
        rate = expected / seconds(rows + count)
        if rate > most:
            best, most = count, rate
    kept: list[list[int]] = [[] for _ in drafts]
    for _, row, node in nodes[:best]:
        kept[row].append(node)
    return [take(draft, sorted(chosen)) for draft, chosen in zip(drafts, kept, strict=True)]


def take(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft of `nodes` alone: ascending indices, with every node its parent."""
    if len(nodes) == len(draft.tokens):
        return draft
    place = {-1: -1} | {node: slot for slot, node in enumerate(nodes)}
    return Draft(
        tokens=[draft.tokens[node] for node in nodes],
        parents=[place[draft.parents[node]] for node in nodes],
        probs=[draft.probs[node] for node in nodes],
        origins=[draft.origins[node] for node in nodes],
        chain=sum(node < draft.chain for node in nodes),
    )
