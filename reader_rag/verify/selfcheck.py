"""The load-time self-check: is this model, on this device, fit for canonical execution?"""

from __future__ import annotations

import torch
from torch import nn

from reader_rag.verify.forward import FixedForward, Job

CONTEXT = 24
DEPTH = 3
LOOSE = {torch.float32: 2e-2, torch.bfloat16: 0.5, torch.float16: 0.1}


def why_not_exact(
    forward: FixedForward, model: nn.Module, vocabulary: int, *, bitwise: bool = True
) -> str | None:
    """None when the model passes, else the reason why drafting is off.

    Two properties are compared. A drafted pass must give, bit for bit, the logits of plain passes of the same shape, with two
    different drafts behind the same chain, and in the last row beside busy neighbours as in the first beside idle ones. And
    these logits must be close to those of the model's ordinary forward pass, or the model read our masks or our cache in
    another way than we meant. Throughput mode needs the second property alone (`bitwise=False`).
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
