"""Text that repeats itself as RAG does, and what a model might have expected of it: for benches of code, where no model is at hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from reader_rag.bench.recording import Recording, Tokens

VOCABULARY = 49_152
CONTROL = 17  # ids below are control tokens, as in the demo model's vocabulary
PROBS = (0.55, 0.18, 0.09, 0.06, 0.04, 0.035, 0.03, 0.01)  # of a position's eight likeliest tokens
FOLLOWERS = 5  # likely next tokens of one token
WORD = 0.7  # a text follows its language with this probability, and says any other word otherwise
COPY = 0.12  # a copy from a chunk begins at a token of the answer with this probability
COPIED = (3, 40)  # tokens of such a copy
SECOND = 4  # every so many positions the token that came is only the second likeliest

Row = tuple[list[int], list[float]]


class Language:
    """A language of words by rank (Zipf's law), each with a few likely followers, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._followers: dict[int, list[int]] = {}

    def word(self, rng: random.Random) -> int:
        """Any word: the r-th most frequent with a probability of about 1 / r."""
        return CONTROL + int((VOCABULARY - CONTROL) ** rng.random()) - 1

    def followers(self, token: int) -> list[int]:
        """What is likely after a word, the likeliest first."""
        found = self._followers.get(token)
        if found is None:
            rng = random.Random(self._seed << 32 | token)
            found = self._followers[token] = [self.word(rng) for _ in range(FOLLOWERS)]
        return found

    def write(self, rng: random.Random, length: int) -> list[int]:
        """A text of so many words."""
        text = [self.word(rng)]
        while len(text) < length:
            likely = rng.random() < WORD
            text.append(
                self.followers(text[-1])[int(FOLLOWERS * rng.random() ** 2)] if likely else self.word(rng)
            )
        return text


def requests(
    seed: int, count: int, *, chunks: int = 4, chunk: int = 180, answer: int = 128
) -> list[Recording]:
    """Questions with their chunks in the prompt, and answers that say half of it in the chunks' own words."""
    rng, language = random.Random(seed), Language(seed)
    return [_request(rng, language, number, chunks, chunk, answer) for number in range(count)]


def _request(
    rng: random.Random, language: Language, number: int, chunks: int, chunk: int, answer: int
) -> Recording:
    found = [language.write(rng, chunk) for _ in range(chunks)]
    output = language.write(rng, 1)
    while len(output) < answer:
        if rng.random() < COPY:
            source = rng.choice(found)
            start = rng.randrange(len(source))
            output += source[start : start + rng.randint(*COPIED)]
        else:
            output.append(language.write(rng, 2)[-1])
    question = language.write(rng, 24)
    prompt = [token for text in (*found, question) for token in text]
    return Recording(
        f"synthetic-{number:03}",
        "synthetic",
        tuple(prompt),
        tuple(output[:answer]),
        chunks=tuple(map(tuple, found)),
    )


class Expectations:
    """A stand-in for the model's predictions: what these texts say most often after a token, and other words."""

    def __init__(self, texts: Iterable[Sequence[int]], seed: int) -> None:
        self._seed = seed
        self._counts: dict[int, Counter[int]] = {}
        for text in texts:
            for token, following in pairwise(text):
                self._counts.setdefault(token, Counter())[following] += 1
        self._words = sorted(self._counts) or [CONTROL]
        self._after: dict[int, list[int]] = {}

    def after(self, token: int) -> Row:
        """The likeliest tokens after `token`, eight of them, and their probabilities."""
        return self._likely(token), list(PROBS)

    def along(self, text: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        """Row i is the prediction after text[i]; what came stands in it, first or second."""
        ids = []
        for place, token in enumerate(text):
            row = self._likely(token)
            if place + 1 < len(text):
                came = text[place + 1]
                row = [came, *(other for other in row if other != came)][: len(PROBS)]
                if place % SECOND == 0:
                    row[0], row[1] = row[1], row[0]
            ids.append(row)
        return ids, [list(PROBS)] * len(ids)

    def _likely(self, token: int) -> list[int]:
        row = self._after.get(token)
        if row is None:
            rng = random.Random(self._seed << 32 | token)
            counted = self._counts.get(token, Counter()).most_common(len(PROBS))
            distinct = dict.fromkeys(following for following, _ in counted)
            other = self._words[0]
            while len(distinct) < len(PROBS):
                distinct[other] = None
                other = rng.choice(self._words) if len(self._words) > len(PROBS) else other + 1
            row = self._after[token] = list(distinct)
        return row


def with_expectations(recordings: Sequence[Recording], seed: int) -> tuple[list[Recording], Expectations]:
    """The recordings, with rows where none were recorded; and what to expect after a token that was not taken."""
    known = Expectations([(*one.prompt, *one.output) for one in recordings], seed)
    return [one if one.soft else _filled(one, known) for one in recordings], known


def _filled(one: Recording, known: Expectations) -> Recording:
    ids, probs = known.along((*one.prompt, *one.output))
    return Recording(
        one.name,
        one.set,
        one.prompt,
        one.output,
        one.whole,
        one.chunks,
        np.array(ids, np.int32),
        np.array(probs, np.float32),
    )


def pieces(text: Tokens, length: int = 200) -> tuple[Tokens, ...]:
    """A text in chunks."""
    return tuple(text[start : start + length] for start in range(0, len(text), length))
