"""Rules that copy what followed an earlier occurrence of the tail: prompt lookup, suffix automata, suffix trees, a datastore."""

from __future__ import annotations

from collections.abc import Sequence

from reader_rag.bench.rules.automaton import SuffixAutomaton
from reader_rag.bench.rules.occurrences import EDGE, Occurrences, counted_tree
from reader_rag.bench.rules.rule import Best, Proposal, Rule


class PromptLookup:
    """transformers' prompt lookup: the first earlier place of the last two tokens, else of the last one; copy what follows."""

    name = "prompt_lookup"

    def __init__(self, most: int = 10, longest: int = 2) -> None:
        self._most, self._longest = most, longest
        self.begin()

    def begin(self) -> None:
        self._known = Occurrences()

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        self._known.extend(tokens)

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        proposal = Proposal(limit)
        known = self._known.tokens
        tail = [*known[-self._longest :], *pending]
        for _, places in self._known.matches(tail, self._longest):
            start = places[0] + 1
            proposal.add_path(-1, known[start : start + self._most])
            break
        return proposal


class SuffixCopy:
    """SAM-Decoding (2411.10666): the longest suffix that stands earlier in this request or in a static text, copied on as one chain.

    The static text (earlier answers) is followed when its match is longer by more than `bias` tokens. Below `threshold` matched
    tokens the `fallback` rule drafts instead: the paper's switch between retrieval and an auxiliary drafter.
    """

    def __init__(
        self, name: str = "sam", *, fallback: Rule | None = None, threshold: int = 1, bias: int = 0
    ) -> None:
        self.name = name
        self._fallback, self._threshold, self._bias = fallback, threshold, bias
        self._static = SuffixAutomaton()
        self._documents = 0
        self.begin()

    def begin(self) -> None:
        self._own = SuffixAutomaton()
        self._state = (0, 0)  # the match in the static text
        self._output: list[int] = []
        if self._fallback:
            self._fallback.begin()

    def end(self) -> None:
        self._documents += 1
        for token in (
            *self._output,
            -self._documents,
        ):  # every edge is a token of its own: no match runs over it
            self._static.extend(token)
        if self._fallback:
            self._fallback.end()

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        for token in tokens:
            self._own.extend(token)
            self._state = self._static.step(*self._state, token)
        if not prompt:
            self._output.extend(tokens)
        if self._fallback:
            self._fallback.observe(tokens, best, prompt)

    def observe_branch(self, context: Sequence[int], best: Best) -> None:
        if self._fallback:
            self._fallback.observe_branch(context, best)

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        own, static = self._own.repeated(), self._state
        for token in pending:
            own, static = self._own.step(*own, token), self._static.step(*static, token)
        from_static = static[1] > own[1] + self._bias
        text, (state, matched) = (self._static, static) if from_static else (self._own, own)
        if self._fallback and matched < self._threshold:
            return self._fallback.propose(pending, limit)
        proposal = Proposal(limit)
        if matched >= self._threshold:
            copied = list(text.follow(state, limit))
            edge = next((i for i, token in enumerate(copied) if token < 0), len(copied))
            proposal.add_path(-1, copied[:edge])
        return proposal


class SuffixTrees:
    """SuffixDecoding (2411.04975): a tree of this request and one of earlier answers; for every matched length the most probable
    continuations, at most `factor` nodes for each matched token; the speculation with the largest expected length wins.

    The paper's factors are 1 to 4; without a cap the rule did better on our recordings, where a wrong draft costs nothing but room.
    """

    name = "suffix_decoding"

    def __init__(self, *, factor: float = 64.0, longest: int = 64, least_share: float = 0.0) -> None:
        self._factor, self._longest, self._least_share = factor, longest, least_share
        self._answers = Occurrences()
        self.begin()

    def begin(self) -> None:
        self._own = Occurrences()
        self._output: list[int] = []

    def end(self) -> None:
        self._answers.separate()
        self._answers.extend(self._output)

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        self._own.extend(tokens)
        if not prompt:
            self._output.extend(tokens)

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        tail = [*self._own.tokens[-self._longest :], *pending]
        chosen, highest = Proposal(limit), 0.0
        for text in (self._own, self._answers):
            for length, places in text.matches(tail, self._longest):
                nodes = min(limit, int(self._factor * length))
                proposal, score = counted_tree(
                    text, places, nodes, depth=nodes, least_share=self._least_share
                )
                if score > highest:
                    chosen, highest = proposal, score
        return chosen


class Datastore:
    """REST (2311.08252): the longest suffix (16 tokens down) found in a datastore; its continuations counted, the best nodes kept.

    The paper stops at 2 tokens; going down to 1 did better on our recordings.

    The datastore holds documents. This request's own prompt belongs to it, as a user's retrieved chunks belong to the index.
    """

    name = "rest"

    def __init__(
        self, documents: Occurrences, *, longest: int = 16, shortest: int = 1, depth: int = 16
    ) -> None:
        self._documents = documents
        self._longest, self._shortest, self._depth = longest, shortest, depth
        self.begin()

    def begin(self) -> None:
        self._prompt = Occurrences()
        self._tail: list[int] = []

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        if prompt:
            self._prompt.extend([*tokens, EDGE])
        self._tail = [*self._tail, *tokens][-self._longest :]

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        tail = [*self._tail, *pending]
        longest, found = 0, Proposal(limit)
        for text in (self._prompt, self._documents):
            for length, places in text.matches(tail, self._longest, self._shortest)[:1]:
                if length > longest:
                    longest = length
                    found, _ = counted_tree(text, places, limit, depth=self._depth)
        return found
