"""The load-time self-checks: is this model, on this device, fit for canonical execution, which rows must be computed for it, and do
recorded passes replay it?"""

from __future__ import annotations

import random

import torch
from torch import nn

from reader_rag.verify.arena import Arena
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.graphs import RecordedPasses

CONTEXT = 24
DEPTH = 3
REPLAYS = 3
"""Replays of each recording that the check compares."""
LOOSE = {torch.float32: 2e-2, torch.bfloat16: 0.5, torch.float16: 0.1}


def why_not_exact(
    forward: FixedForward, model: nn.Module, vocabulary: int, *, bitwise: bool = True
) -> str | None:
    """None when the model passes, else the reason why drafting is off.

    Two properties are compared. A drafted pass must give, bit for bit, the logits of plain passes of the same shape: with two
    different drafts behind the same chain, in the last row beside busy neighbours as in the first beside idle ones, and in every
    slot of every row (a kernel may treat the last few rows of a product in another way). And these logits must be close to those
    of the model's ordinary forward pass, or the model read our masks or our cache in another way than we meant. Throughput mode
    needs the second property alone (`bitwise=False`).
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocabulary, (CONTEXT + forward.width + 1,), generator=generator).tolist()
    prompt, chain = ids[:CONTEXT], ids[CONTEXT:]
    depth = min(DEPTH, forward.width - 1)
    try:
        plain_arena = forward.new_arena()
        forward.prefill(plain_arena, prompt, 0, want_logits=False)
        plain = [
            forward.decode([Job(plain_arena, CONTEXT + i, [chain[i]], [])])[0][0] for i in range(depth + 1)
        ]
        drafted_arena = forward.new_arena()
        forward.prefill(drafted_arena, prompt, 0, want_logits=False)
        for other in (0, 1):
            tail = [(t + other) % vocabulary for t in chain[depth + 1 : forward.width]]
            drafted = [*chain[1 : depth + 1], *tail]
            parents = [*range(-1, depth - 1), *[(i % (depth + 1)) - 1 for i in range(len(tail))]]
            job = Job(drafted_arena, CONTEXT, [chain[0], *drafted], parents)
            neighbours = [Job(forward.new_arena(), 0, [tail[0] if tail else 0], [])] * (forward.rows - 1)
            logits = forward.decode([*(neighbours if other else ()), job])[-1]
            for i in range(depth + 1):
                if bitwise and not torch.equal(logits[i], plain[i]):
                    return f"its kernels round a token differently beside another draft or row (first at depth {i})"
        if bitwise and (slot := _uneven_slot(forward, drafted_arena, chain)) is not None:
            return f"its kernels round a token differently in slot {slot} of a pass of {forward.rows * forward.width} tokens"
        with torch.inference_mode():
            wanted = model(
                input_ids=torch.tensor([[*prompt, *chain[: depth + 1]]], device=forward.device)
            ).logits[0, CONTEXT:]
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
        IndexError,
        KeyError,
    ) as error:
        kinds = ", ".join(forward.layer_kinds)
        return f"its layers ({kinds}) do not take a tree mask over preallocated keys ({type(error).__name__}: {error})"
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(plain, wanted, strict=True))
    scale = float(wanted.float().abs().max())
    if not worst <= LOOSE.get(wanted.dtype, 0.5) * max(scale, 1.0):
        return f"masked passes differ from its ordinary forward pass by {worst:.3g} in logits of size {scale:.3g}"
    return None


def idle_rows_matter(forward: FixedForward, vocabulary: int) -> bool:
    """Whether a row gets other bits when the rows beside it are left out: passes of every number of rows against those of all rows."""
    rng = random.Random(7)
    prompt = [rng.randrange(vocabulary) for _ in range(CONTEXT)]
    first = forward.new_arena()
    for start in range(0, CONTEXT, forward.chunk):
        forward.prefill(first, prompt[start : start + forward.chunk], start, want_logits=False)
    tokens = [rng.randrange(vocabulary) for _ in range(forward.width)]
    jobs = [
        Job(first.copy(CONTEXT, CONTEXT), CONTEXT - row % CONTEXT, tokens, range(-1, forward.width - 2))
        for row in range(forward.rows)
    ]
    before = forward.idle_rows
    try:
        forward.idle_rows = True
        wanted = forward.decode(jobs)
        forward.idle_rows = False
        for count in range(1, forward.rows):
            for left in (0, forward.rows - count):
                got = forward.decode(jobs[left : left + count])
                if not all(map(torch.equal, got, wanted[left : left + count])):
                    return True
    finally:
        forward.idle_rows = before
    return False


def why_not_recorded(forward: FixedForward, passes: RecordedPasses, vocabulary: int) -> str | None:
    """None when recorded passes give, bit for bit, the logits of unrecorded ones; else the reason why they are not used.

    Every pass has other tokens, another tree and other positions than the one that was recorded, so whatever a model keeps outside
    of the static buffers shows. Rows are at different lengths, all of them first, then only the first row.
    """
    rng = random.Random(7)
    rows, width = forward.rows, forward.width
    prompt = [rng.randrange(vocabulary) for _ in range(CONTEXT + rows)]
    first, before = forward.new_arena(), forward.recorded
    reason: str | None = None
    for start in range(0, len(prompt), forward.chunk):
        forward.prefill(first, prompt[start : start + forward.chunk], start, want_logits=False)
    plain, recorded = ([first.copy(len(prompt), len(prompt)) for _ in range(rows)] for _ in range(2))
    forward.recorded = None
    turns = passes.record_after + REPLAYS
    for turn in range(turns if rows == 1 else 2 * turns):
        drafts = []
        for row in range(rows if turn < turns else 1):
            tokens = [rng.randrange(vocabulary) for _ in range(width)]
            parents = [rng.randrange(-1, node) for node in range(width - 1)]
            drafts.append((CONTEXT + row + turn, tokens, parents))
        wanted = forward.decode([Job(arena, *draft) for arena, draft in zip(plain, drafts, strict=False)])
        got = passes.decode([Job(arena, *draft) for arena, draft in zip(recorded, drafts, strict=False)])
        if got is None:
            reason = f"recording failed ({passes.failure})"
            break
        if not all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True)):
            reason = f"a replayed pass differs from the same pass unrecorded (pass {turn} of the check)"
            break
    forward.recorded = before
    return reason


def _uneven_slot(forward: FixedForward, arena: Arena, chain: list[int]) -> int | None:
    """The first slot of a pass in which a token gets other bits than in the slot before it, or than in the first row.

    Two passes suffice: the second begins one token later, so every token stands one slot earlier in it.
    """
    count = min(forward.width, forward.chain_limit(CONTEXT + 1) + 1)
    arenas = [arena.copy(CONTEXT, CONTEXT) for _ in range(forward.rows)]
    early, late = (
        forward.decode(
            [Job(row, CONTEXT + shift, chain[shift : shift + count], range(-1, count - 2)) for row in arenas]
        )
        for shift in (0, 1)
    )
    for row in range(forward.rows):
        for slot in range(count):
            same_row = slot == 0 or torch.equal(early[row][slot], late[row][slot - 1])
            if not same_row or not torch.equal(early[row][slot], early[0][slot]):
                return row * forward.width + slot
    return None
