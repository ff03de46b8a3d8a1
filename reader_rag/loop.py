"""The loop: draft, verify, commit, stream, for all running requests at once.

There is no thread of its own: whoever waits for a step runs the passes, for everyone. Requests wait in order of arrival; each has an
arena, and a pass serves at most R of them. A pass of the long prompts' prefill chunks lies between two decoding passes, never
more than one, so that a long prompt stalls nobody. In exact mode no request can change another's bits (docs/losslessness.md), so
none of this shows in a text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from reader_rag.device import free_bytes
from reader_rag.draft import Draft
from reader_rag.draft.budget import spend
from reader_rag.errors import ReaderError
from reader_rag.prefixes import PrefixCache
from reader_rag.request import Request
from reader_rag.spans import find_spans
from reader_rag.stats import Answer, Step
from reader_rag.verify.accept import ROOT, Verdict, walk, walk_any
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.plain import PlainForward
from reader_rag.verify.sampling import Expected, pass_evidence, top_evidence

log = logging.getLogger("reader_rag")

GIB = 1 << 30
AHEAD = 16
"""Steps that a streamed request may be ahead of its consumer; then others get its turn."""
ROOM = 512
"""Tokens of an answer for which KV is made at once; longer ones grow it in the midst of their passes."""
CANDIDATES = 48
"""Most nodes that throughput mode considers for one row."""


class Loop:
    """Runs requests over the rows of one model. All methods may be called from any thread.

    seconds: of a pass by its tokens, None in exact mode. ended(request): told once when an answer is complete.
    """

    def __init__(
        self,
        forward: FixedForward | PlainForward,
        *,
        eos: frozenset[int],
        prefixes: PrefixCache,
        seconds: Callable[[int], float] | None = None,
        ended: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.forward, self.prefixes = forward, prefixes
        self._eos, self._seconds, self._ended = eos, seconds, ended
        self._turn = threading.Condition()
        self._busy = False  # whether some thread is running a tick
        self._waiting: deque[Request] = deque()
        self._rows: list[Request] = []  # in order of arrival; changed by the thread that runs a tick
        self._free: list[object] = []  # arenas of finished requests

    def submit(self, request: Request) -> None:
        """Puts the request at the end of the queue; it runs while anyone takes steps."""
        with self._turn:
            self._waiting.append(request)

    def take(self, request: Request) -> Step:
        """The request's next step; runs passes until there is one. Raises what went wrong in this request."""
        while True:
            with self._turn:
                while self._busy and not request.steps and request.failure is None:
                    self._turn.wait()
                if request.steps:
                    return request.steps.popleft()
                if request.failure is not None:
                    raise request.failure
                self._busy = True
            try:
                self._tick()
            finally:
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()

    def cancel(self, request: Request) -> None:
        """Stops the request and frees its row, at once or after the pass that is running."""
        with self._turn:
            request.cancelled = True
            if not self._busy:
                self._drop_cancelled()

    def clear(self) -> None:
        """Frees the KV that no running request holds."""
        with self._turn:
            self._free.clear()
            self.prefixes.clear()
            if not self._busy:
                self.forward.trim()

    @property
    def running(self) -> int:
        """Requests that hold KV right now."""
        return len(self._rows)

    # One tick: whoever is cancelled goes, whoever waits comes, one prefill chunk, one decoding pass.

    def _tick(self) -> None:
        with self._turn:
            self._drop_cancelled()
            self._admit()
        filling = next((request for request in self._rows if not request.is_read), None)
        if filling is not None:
            self._guarded([filling], lambda: self._prefill(filling))
        ready = [r for r in self._rows if r.is_read and (r.in_full or len(r.steps) < AHEAD)]
        ready = sorted(ready, key=lambda r: len(r.steps))[
            : self.forward.rows
        ]  # the hungriest, then the oldest
        if ready:
            self._guarded(ready, lambda: self._pass(ready))

    def _admit(self) -> None:
        """Gives waiting requests arenas while fewer than R are active; one that is far ahead of its consumer is not."""
        active = sum(r.in_full or len(r.steps) < AHEAD for r in self._rows)
        while self._waiting and active < self.forward.rows:
            request = self._waiting.popleft()
            self._rows.append(request)
            active += 1
            self._guarded([request], lambda request=request: self._seat(request))  # type: ignore[misc]

    def _seat(self, request: Request) -> None:
        known = request.tokens[: request.last]
        found = self.prefixes.take(request.stats.scope, known, wants_evidence=request.wants_evidence)
        if found is not None:
            request.arena, request.known, request.evidence = found
            request.stats.reused_tokens = request.known
        else:
            self._make_room(len(request.tokens) + request.budget)
            request.arena = self._free.pop() if self._free else self.forward.new_arena()
        self.forward.reserve(request.arena, len(request.tokens) + min(request.budget, ROOM))
        if request.known == request.last:
            self._read_prompt(request)

    def _make_room(self, tokens: int) -> None:
        """Sees that the KV of a request fits before it begins; kept prefixes go first."""
        needed = self.forward.bytes_for(tokens)
        if needed > free_bytes(self.forward.device):
            self._free.clear()
            self.prefixes.clear()
            self.forward.trim()
            if needed > (free := free_bytes(self.forward.device)):
                raise ReaderError(
                    f"the KV of {tokens} tokens takes up to {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free on "
                    f"{self.forward.device}; lower max_tokens or the context, retrieve less, or run fewer requests at once"
                )

    def _drop_cancelled(self) -> None:
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in [request for request in self._rows if request.cancelled]:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._rows.remove(request)
        arena, request.arena = request.arena, None
        if arena is None:
            return
        if self.forward.exact and request.failure is None and request.budget:
            left: Sequence[object] = self.prefixes.put(
                request.stats.scope, request.tokens[: request.known], arena, request.evidence
            )
        else:
            left = [arena]
        self._free = [*self._free, *left][: self.forward.rows]

    def _guarded(self, requests: Sequence[Request], work: Callable[[], None]) -> None:
        """What goes wrong in `work` goes to the consumers of `requests`; the others and the loop go on."""
        try:
            work()
        except Exception as error:  # whatever it is: it belongs to whoever waits for these requests
            for request in requests:
                self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        request.failure = error
        if request in self._rows:
            self._release(request)

    # One request's prompt.

    def _prefill(self, request: Request) -> None:
        """1. Prefill all but the last prompt token, chunk by chunk; the last one is the root of the first pass."""
        began = time.perf_counter()
        start, stop = request.known, min(request.known + self.forward.chunk, request.last)
        logits = self.forward.prefill(
            request.arena, request.tokens[start:stop], start, want_logits=request.wants_evidence
        )
        if logits is not None:
            _, ids, probs = top_evidence(logits)
            request.evidence.ids.extend(ids)
            request.evidence.probs.extend(probs)
        request.known = stop
        request.stats.prefill_s += time.perf_counter() - began
        request.steps.append(Step((), ""))  # a place to stop at: a long prompt takes seconds
        if stop == request.last:
            self._read_prompt(request)

    def _read_prompt(self, request: Request) -> None:
        began = time.perf_counter()
        evidence = request.evidence if len(request.evidence) else None
        request.drafter.observe_prompt(
            request.tokens,
            None if evidence is None else np.array(evidence.ids),
            None if evidence is None else np.array(evidence.probs),
        )
        request.is_read = True
        request.stats.draft_s += time.perf_counter() - began
        if not request.budget:  # the prompt was all there is to learn from
            self._finish(request, (), "", "length")

    # One pass over several requests.

    def _pass(self, requests: Sequence[Request]) -> None:
        # 2. Draft: a tree of likely continuations for each row.
        drafts = self._drafts(requests)
        jobs = [
            Job(r.arena, len(r.tokens) - 1, [r.tokens[-1], *draft.tokens], draft.parents)
            for r, draft in zip(requests, drafts, strict=True)
        ]

        # 3. Verify: one forward pass over [last token, draft] of every row.
        began = time.perf_counter()
        decode = self.forward.decode if self._seconds is None else self.forward.decode_free  # type: ignore[union-attr]
        outputs = decode(jobs)
        found = pass_evidence(outputs)
        seconds = time.perf_counter() - began

        # 4. Walk each tree with the target's own choices, commit, learn, stream.
        for request, draft, logits, evidence in zip(requests, drafts, outputs, found, strict=True):
            request.stats.verify_s += seconds
            try:
                self._commit(request, draft, logits, evidence)
            except Exception as error:  # its processors, its sources, its text: nobody else's business
                self._fail(request, error)

    def _drafts(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = []
        for request in requests:
            began = time.perf_counter()
            left = request.budget - request.stats.tokens - 1
            if self._seconds is None:
                limit = min(self.forward.width - 1, left)
                chain_limit = min(limit, self.forward.chain_limit(len(request.tokens) - 1))
            else:
                limit = chain_limit = min(CANDIDATES, left)
            drafts.append(request.drafter.draft(request.pending[:chain_limit], limit, chain_limit))
            request.stats.draft_s += time.perf_counter() - began
        if self._seconds is None:
            return drafts
        drafts = spend(drafts, self._seconds)
        for row, request in enumerate(requests):
            if request.draws is not None:
                left = request.budget - request.stats.tokens - 1
                drafts[row] = request.draws.extend(drafts[row], request.drafter.source_names, left)
        return drafts

    def _commit(
        self,
        request: Request,
        draft: Draft,
        logits: torch.Tensor,
        evidence: Expected,
    ) -> None:
        began = time.perf_counter()
        stats, tokens = request.stats, request.tokens
        verdict = self._walk(request, draft, logits, evidence[0])
        delta = request.text.push(verdict.tokens)
        taken = verdict.tokens[: delta.kept_tokens]  # nothing after a stop string goes on from here
        nodes = verdict.nodes[: len(taken)]
        request.sampler.keep(logits, [0, *[node + 1 for node in nodes]][: len(taken)], taken)
        if self._seconds is not None and nodes != tuple(range(len(nodes))):
            request.arena.gather([len(tokens) + node for node in nodes], len(tokens))
        tokens.extend(taken)
        stats.passes += 1
        stats.tokens += len(taken)
        stats.count_draft([request.drafter.source_names[origin] for origin in draft.origins], nodes)
        ended = delta.stopped or taken[-1] in self._eos
        finish = "stop" if ended else "length" if stats.tokens >= request.budget else None
        request.pending = () if finish else verdict.pending

        # 5. Learn: what the model said at every position it computed is evidence for what comes later.
        learning = time.perf_counter()
        _learn(request, draft, taken, nodes, evidence[1], evidence[2])
        now = time.perf_counter()
        if stats.passes == 1:
            stats.ttft_s = now - request.started
        stats.other_s += learning - began
        stats.draft_s += now - learning
        if finish is None:
            request.shown.append(delta.text)
            request.steps.append(Step(taken, delta.text))
        else:
            self._finish(request, taken, delta.text, finish)

    def _walk(self, request: Request, draft: Draft, logits: torch.Tensor, best: list[int]) -> Verdict:
        sampler, tokens = request.sampler, request.tokens

        def choose(node: int, path: Sequence[int]) -> int:
            if sampler.is_greedy_plain:
                return best[node + 1]
            if request.draws is not None:
                token = request.draws.choose(logits[node + 1], [*tokens, *path], path)
                if token is not None:
                    return token
            return sampler.choose(logits[node + 1], [*tokens, *path], len(tokens) + len(path))

        if self._seconds is not None:
            return walk_any(draft.tokens, draft.parents, choose, self._eos.__contains__)
        return walk(draft.tokens, draft.parents, draft.chain, choose, self._eos.__contains__)

    def _finish(self, request: Request, taken: tuple[int, ...], text: str, finish: str) -> None:
        text += request.text.finish()
        request.shown.append(text)
        whole = "".join(request.shown)
        stats = request.stats
        stats.dropped_sources = request.drafter.dropped()
        stats.drafted_by_source = dict(sorted(stats.drafted_by_source.items()))
        answer = Answer(
            text=whole,
            tokens=tuple(request.tokens[request.prompt_tokens :]),
            finish_reason=finish,
            prompt_tokens=request.prompt_tokens,
            stats=stats,
            spans=find_spans(whole, request.chunks),
            tool_calls=request.text.calls,
            broken_calls=request.text.broken,
            logprobs=request.sampler.logprobs,
        )
        self._release(request)
        self._ended(request)
        request.is_done = True
        request.steps.append(Step(taken, text, finish, answer))


def _learn(
    request: Request,
    draft: Draft,
    taken: Sequence[int],
    nodes: Sequence[int],
    top_ids: list[list[int]],
    top_probs: list[list[float]],
) -> None:
    """Rows of the committed path belong to its tokens, all others to what was not committed."""
    committed = [0, *[node + 1 for node in nodes]][: len(taken)]
    paths: list[list[int]] = []
    for node, parent in enumerate(draft.parents):
        paths.append([*(paths[parent] if parent != ROOT else ()), draft.tokens[node]])
    beside = [node for node in range(len(paths)) if node + 1 not in committed]
    request.drafter.observe_branches(
        [paths[node] for node in beside],
        [top_ids[node + 1] for node in beside],
        [top_probs[node + 1] for node in beside],
    )
    request.drafter.observe(taken, [top_ids[i] for i in committed], [top_probs[i] for i in committed])
