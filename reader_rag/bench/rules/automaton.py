"""A suffix automaton that grows token by token: the longest suffix seen before, in constant time a token."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """All substrings of the tokens so far. A state holds substrings that end at the same places.

    length[s]: its longest substring; link[s]: the state of the longest suffix that ends at more places; first[s]: the first of
    its places (index of the last token).
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length, self.link, self.first = [0], [-1], [-1]
        self._next: list[dict[int, int]] = [{}]
        self.last = 0

    def extend(self, token: int) -> None:
        state = self._new(self.length[self.last] + 1, {}, len(self.tokens))
        self.tokens.append(token)
        before = self.last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = state
            before = self.link[before]
        self.link[state] = self._suffix(before, token) if before >= 0 else 0
        self.last = state

    def _suffix(self, before: int, token: int) -> int:
        """The state of `before`'s longest substring with `token` after it; split off where a longer one shared its state."""
        shared = self._next[before][token]
        if self.length[shared] == self.length[before] + 1:
            return shared
        clone = self._new(self.length[before] + 1, dict(self._next[shared]), self.first[shared])
        self.link[clone], self.link[shared] = self.link[shared], clone
        while before >= 0 and self._next[before].get(token) == shared:
            self._next[before][token] = clone
            before = self.link[before]
        return clone

    def _new(self, length: int, following: dict[int, int], first: int) -> int:
        self.length.append(length)
        self.link.append(-1)
        self.first.append(first)
        self._next.append(following)
        return len(self.length) - 1

    def repeated(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the tokens that stood there before."""
        state = self.link[self.last]
        return (state, self.length[state]) if state > 0 else (0, 0)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest match after one more token of another text, from the match (state, matched) before it."""
        while state > 0 and token not in self._next[state]:
            state = self.link[state]
            matched = self.length[state]
        if token in self._next[state]:
            return self._next[state][token], matched + 1
        return 0, 0

    def follow(self, state: int, count: int) -> Sequence[int]:
        """At most `count` tokens after the first place of a state."""
        start = self.first[state] + 1
        return self.tokens[start : start + count]
