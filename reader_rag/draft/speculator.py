"""The `speculator` source: a smaller model of the same vocabulary guesses ahead. The only module here that knows torch.

speculator = Speculator.load("Qwen/Qwen2.5-Coder-0.5B-Instruct", reader.tokenizer.get_vocab(), cost_ratio=0.4)
reader.generate(prompt, drafting=Drafting(sources=(*SOURCES, speculator)))
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from reader_rag.draft.source import Evidence, Row
from reader_rag.draft.tree import Draft
from reader_rag.errors import LoadError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

DEPTH = 4  # tokens guessed one after the other
BRANCHES = 3  # candidates drawn after each of them, where drafts are sampled
TOP = 8  # continuations kept after each of them
TRUST = (0.0, 0.75, 0.70, 0.65, 0.60)  # by depth
CHUNK = 256  # tokens of the prompt read at once
MOST_BRANCHES = 64

Path = tuple[int, ...]
"""The tokens after the committed sequence."""


class Proposal(Protocol):
    """Next tokens that were drawn after one path, and what they were drawn from."""

    @property
    def candidates(self) -> tuple[int, ...]: ...

    @property
    def probs(self) -> NDArray[np.float64]: ...


class Propose(Protocol):
    """Draws candidates from a draft model's logits."""

    def __call__(self, logits: torch.Tensor, prefix: Sequence[int], turn: int, count: int) -> Proposal:
        """`count` candidates for what follows `prefix`. No two draws of a request have the same length of prefix and `turn`."""


class Speculator:
    """A draft model, shared by all requests; each gets a source with KV of its own.

    model       a transformers causal LM with the target's vocabulary
    cost_ratio  seconds of its one-token pass over seconds of a pass of the target: what its guesses must bring in
    depth       tokens guessed one after the other
    branches    candidates drawn after each of them under `Sampling.draft_rule`
    """

    name = "speculator"

    def __init__(
        self, model: Any, *, cost_ratio: float, depth: int = DEPTH, branches: int = BRANCHES
    ) -> None:
        if not cost_ratio > 0.0:
            raise ValueError(
                f"cost_ratio is {cost_ratio}: give seconds of a speculator's pass over the target's"
            )
        if depth < 1:
            raise ValueError(f"depth is {depth}: a speculator guesses at least 1 token")
        if not 1 <= branches <= MOST_BRANCHES:
            raise ValueError(f"branches is {branches}: draw 1 to {MOST_BRANCHES} candidates for a place")
        self._model, self._cost_ratio, self._depth, self._branches = model, cost_ratio, depth, branches

    @classmethod
    def load(
        cls,
        name: str,
        vocabulary: Mapping[str, int],
        *,
        cost_ratio: float,
        depth: int = DEPTH,
        branches: int = BRANCHES,
        dtype: Any = "auto",
        device: Any = None,
    ) -> Speculator:
        """Loads a hub id or folder. `vocabulary` is the target's (`tokenizer.get_vocab()`).

        Raises LoadError for a model that is not there, ValueError for one of another vocabulary.

        dtype and device: as the target's, `reader.dtype` and `reader.device`, is what is fast; left out, the folder's and the CPU.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ImportError(
                "a speculator needs torch and transformers: pip install 'reader-rag'"
            ) from error
        try:
            own = AutoTokenizer.from_pretrained(name).get_vocab()
            check_vocabulary(name, own, vocabulary)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device or "cpu").eval()
        except OSError as error:
            cause = str(error).strip().partition("\n")[0].rstrip(".")
            raise LoadError(
                f"cannot load the speculator {name!r}: {cause}; check the name and the network, or give a folder on this disk"
            ) from error
        return cls(model, cost_ratio=cost_ratio, depth=depth, branches=branches)

    def for_request(self) -> SpeculatorSource:
        """The source of one request."""
        return SpeculatorSource(self._model, Payoff(self._cost_ratio * self._depth), self._depth)

    def for_sampling(self, propose: Propose, ends: frozenset[int] = frozenset()) -> SampledSource:
        """The source of one request whose drafts are drawn by `propose`; nothing is drawn after a token of `ends`."""
        payoff = Payoff(self._cost_ratio * self._depth)
        return SampledSource(self._model, payoff, self._depth, self._branches, propose, ends)


def check_vocabulary(name: str, own: Mapping[str, int], target: Mapping[str, int]) -> None:
    """Raises ValueError unless every token has the same id in both; the target may know more tokens."""
    for token, number in sorted(own.items(), key=lambda item: item[1]):
        if target.get(token) != number:
            raise ValueError(
                f"the speculator {name} has another vocabulary: its token {number} is {token!r}, which is "
                f"{target.get(token, 'unknown')} to the model; use a smaller model of the same family"
            )


class Payoff:
    """Whether guessing pays: tokens per unit of time with it against without, as this request's passes show it.

    A pass with guesses takes 1 + cost times as long as one without. Both ways are tried TRIED times, then the better one
    is kept, and the other one tried again every AGAIN passes: a request may change its subject.
    """

    TRIED = 3
    AGAIN = 16
    MEMORY = 0.8  # share of what was known that a new pass leaves

    def __init__(self, cost: float) -> None:
        self._cost = cost
        self._tokens: dict[bool, float] = {}
        self._seen = {True: 0, False: 0}
        self._passes = 0
        self.runs = True

    def decide(self) -> bool:
        """Whether the next pass should have guesses."""
        for way in (True, False):
            if self._seen[way] < self.TRIED:
                self.runs = way
                return way
        best = self._tokens[True] / (1.0 + self._cost) > self._tokens[False]
        self.runs = best if self._passes % self.AGAIN else not best
        return self.runs

    def learn(self, tokens: int) -> None:
        """Takes the number of tokens that the pass gave."""
        known = self._tokens.get(self.runs, float(tokens))
        self._tokens[self.runs] = self.MEMORY * known + (1.0 - self.MEMORY) * tokens
        self._seen[self.runs] += 1
        self._passes += 1


class SpeculatorSource:
    """Guesses a chain of its likeliest tokens, and after each of them knows its best TOP continuations.

    The mixture weighs them with what was looked up: retrieval goes on where the chain ends and the chain's side tokens
    go on by retrieval (READER's union). Its KV follows the target's sequence: what both have in common stays.
    """

    name = "speculator"

    def __init__(self, model: Any, payoff: Payoff, depth: int = DEPTH) -> None:
        self._model, self._payoff, self._depth = model, payoff, depth
        self._committed: list[int] = []
        self._cached: list[int] = []  # tokens whose keys and values are in the cache
        self._cache: Any = None
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # transformers renamed it
        self._rows: dict[Path, Row] | None = None  # None: not guessed since the last commit

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        if not prompt and self._rows is not None:
            self._payoff.learn(len(tokens))
        self._committed += tokens
        self._rows = None

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """It has a mind of its own."""

    def root(self) -> Path:
        if self._rows is None:
            self._rows = self._guess() if self._committed and self._payoff.decide() else {}
        return ()

    def advance(self, state: Path, token: int) -> Path:
        return (*state, token)

    def predict(self, state: Path) -> list[Evidence]:
        row = (self._rows or {}).get(state)
        if row is None:
            return []
        level = len(state) + 1
        return [Evidence(TRUST[min(level, len(TRUST) - 1)], level, {}, [(1.0, row)])]

    def _guess(self) -> dict[Path, Row]:
        rows: dict[Path, Row] = {}
        path: Path = ()
        row = self._row_after(self._committed)
        while True:
            rows[path] = row
            best = max(row, key=lambda token: (row[token], -token))
            if len(rows) == self._depth:
                return rows
            path = (*path, best)
            row = self._row_after([*self._committed, *path])

    def _row_after(self, tokens: list[int]) -> Row:
        """The best continuations of `tokens`."""
        import torch

        with torch.inference_mode():
            probs, ids = torch.softmax(self._logits_after(tokens).float(), -1).topk(TOP)
        return Row(zip(ids.tolist(), probs.tolist(), strict=True))

    def _logits_after(self, tokens: list[int]) -> torch.Tensor:
        """Logits [vocabulary] of what follows `tokens`, computed from where the cache agrees with them."""
        import torch
        from transformers import DynamicCache

        common = 0
        for ours, cached in zip(tokens, self._cached, strict=False):
            if ours != cached:
                break
            common += 1
        common = min(common, len(tokens) - 1)  # the last token is read again: its logits are what is wanted
        if self._cache is None:
            self._cache = DynamicCache()
        elif common < len(self._cached):
            self._cache.crop(common - len(self._cached))  # a negative length is what is taken off the end
        with torch.inference_mode():
            for start in range(common, len(tokens), CHUNK):
                logits = self._pass(tokens[start : start + CHUNK])
        self._cached = list(tokens)
        return logits

    def _pass(self, tokens: list[int]) -> torch.Tensor:
        """tokens [n] after the cache; the last one's logits [vocabulary]."""
        import torch

        given = torch.tensor([tokens], device=self._model.device)
        logits: torch.Tensor = self._model(given, use_cache=True, **{self._cache_name: self._cache}).logits
        return logits[0, -1]


class SampledSource(SpeculatorSource):
    """Draws its drafts: `branches` candidates after each of `depth` tokens, the first candidate being the next of these tokens.

    It tells the mixture nothing. Its candidates are laid into the draft afterwards, all of them whatever they are: a choice
    among them would change what they are samples of.
    """

    def __init__(
        self,
        model: Any,
        payoff: Payoff,
        depth: int,
        branches: int,
        propose: Propose,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(model, payoff, depth)
        self._branches, self._propose, self._ends = branches, propose, ends
        self._turn = 0
        self._failure: Exception | None = None
        self.proposals: dict[Path, Proposal] = {}
        """What was drawn for the coming pass, by the path that it follows."""

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        self.proposals = {}  # first of all: if something raises, nothing stale is left
        super().observe(tokens, rows, prompt)

    def root(self) -> Path:
        if self._failure is not None:
            raise self._failure
        return super().root()

    def _guess(self) -> dict[Path, Row]:
        self._turn += 1
        self.proposals = {}
        path: Path = ()
        while len(self.proposals) < self._depth and not self._ends.intersection(path):
            prefix = [*self._committed, *path]
            try:
                proposal = self._propose(self._logits_after(prefix), prefix, self._turn, self._branches)
            except Exception as error:
                if not path:
                    raise
                # What was drawn stays for this pass: to take it back for what followed from it would be a choice among draws.
                self._failure = error
                break
            self.proposals[path] = proposal
            path = (*path, proposal.candidates[0])
        return {}

    def extend(self, draft: Draft, origin: int, depth: int) -> Draft:
        """`draft` with the candidates of the first `depth` levels, as nodes of the source `origin`; those it has are shared."""
        places = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
        }
        tokens, parents = list(draft.tokens), list(draft.parents)
        tip = -1
        for proposal in list(self.proposals.values())[: max(depth, 0)]:
            for token in proposal.candidates:
                if places.setdefault((tip, token), len(tokens)) == len(tokens):
                    tokens.append(token)
                    parents.append(tip)
            tip = places[tip, proposal.candidates[0]]
        added = len(tokens) - len(draft.tokens)
        return replace(
            draft,
            tokens=tokens,
            parents=parents,
            probs=[*draft.probs, *[0.0] * added],
            origins=[*draft.origins, *[origin] * added],
        )
