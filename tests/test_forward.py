"""Fixed-shape passes: bit-equality, buckets, masks, kernels."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.verify.arena import Arena
from reader_rag.verify.attention import use_grouped_attention
from reader_rag.verify.forward import FixedForward, Job, bucket_edge
from reader_rag.verify.kernels import FORMS, fits_half, forms_for, packed_copy, twin_of
from reader_rag.verify.lean import LeanDecoder, is_lean
from reader_rag.verify.selfcheck import why_not_exact
from tests.tiny_models import tiny

CPU = torch.device("cpu")
WIDTH = 8


def forward_of(model, *, width=WIDTH, form="generic"):
    if form.startswith("lean "):
        net = LeanDecoder(model, width, form.removeprefix("lean "))
    else:
        net = twin_of(model) if form == "generic" else packed_copy(model, width, form)
        use_grouped_attention(net)
    return FixedForward(net, model.config, width=width, chunk=32, device=CPU)


def filled(forward, prompt):
    arena = forward.new_arena()
    for start in range(0, len(prompt), forward.chunk):
        forward.prefill(arena, prompt[start : start + forward.chunk], start, want_logits=False)
    return arena


def decode(forward, arena, position, tokens, parents=()):
    return forward.decode([Job(arena, position, tokens, parents)])[0]


@given(st.integers(0, 200_000))
def test_buckets_are_functions_of_position_and_grow_slowly(position):
    edge = bucket_edge(position)
    assert position < edge
    assert bucket_edge(edge - 1) == edge
    assert edge - position <= max(256, position // 3 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["generic", "packed", "half", "lean packed", "lean half"])
@pytest.mark.parametrize("context", [5, 32, 250])
def test_a_drafted_pass_gives_the_bits_of_plain_passes(dtype, form, context):
    model = tiny().to(dtype)
    if form != "generic" and form.split()[-1] not in forms_for(model):
        pytest.skip(f"this torch build has no {form} products")
    forward = forward_of(model, form=form)
    rng = random.Random(context)
    prompt = [rng.randrange(300) for _ in range(context)]
    chain = [rng.randrange(300) for _ in range(WIDTH)]
    plain_arena = filled(forward, prompt)
    plain = [decode(forward, plain_arena, context + i, [token])[0] for i, token in enumerate(chain)]
    drafted_arena = filled(forward, prompt)
    keep = min(forward.chain_limit(context), 4)
    side = [rng.randrange(300) for _ in range(WIDTH - 1 - keep)]
    parents = [*range(-1, keep - 1), *[rng.randrange(-1, keep) for _ in side]]
    rows = decode(forward, drafted_arena, context, [chain[0], *chain[1 : keep + 1], *side], parents)
    for i in range(keep + 1):
        assert torch.equal(rows[i], plain[i])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_the_lean_decoder_computes_what_the_model_computes(kind):
    model = tiny(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # made as zeros and ones: nothing would show
                parameter.copy_(torch.randn_like(parameter))
    assert is_lean(model)
    forward = forward_of(model, form="lean packed")
    assert why_not_exact(forward, model, 300) is None
    ids = [random.Random(4).randrange(1, 300) for _ in range(90)]
    arena = filled(forward, ids[:70])
    got = torch.stack([decode(forward, arena, 70 + i, [ids[70 + i]])[0] for i in range(10)])
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(got, want[70:80], atol=1e-3, rtol=1e-3)


def test_the_lean_decoder_takes_no_model_that_computes_something_else():
    assert not is_lean(tiny("gemma3"))
    assert not is_lean(tiny("mistral", sliding_window=32))
    assert not is_lean(tiny(hidden_act="gelu"))
    hooked = tiny()
    hooked.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out)
    assert not is_lean(hooked)
    adapted = tiny()
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    assert not is_lean(adapted)


def test_a_chain_across_a_bucket_edge_would_differ_so_it_is_cut():
    forward = forward_of(tiny())
    assert forward.chain_limit(255) == 0
    assert forward.chain_limit(254) == 1
    assert forward.chain_limit(100) == WIDTH - 1


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_passes_agree_with_the_models_own_forward_also_past_a_sliding_window(kind):
    model = tiny(kind)
    forward = forward_of(model)
    rng = random.Random(1)
    ids = [rng.randrange(1, 300) for _ in range(90)]
    arena = filled(forward, ids[:70])
    got = torch.stack([decode(forward, arena, 70 + i, [ids[70 + i]])[0] for i in range(10)])
    branch = decode(
        forward, arena, 80, [ids[80], ids[81], 7, ids[82]], [-1, -1, 0]
    )  # main: 81; side: 7, and 82 under 81
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(got, want[70:80], atol=1e-3, rtol=1e-3)
    assert torch.allclose(branch[[0, 1, 3]], want[80:83], atol=1e-3, rtol=1e-3)


def test_a_prompts_last_chunk_is_only_as_long_as_it_must_be():
    model = tiny()
    forward = forward_of(model)
    forward.chunk = 128
    shapes = []
    forward.model.register_forward_pre_hook(
        lambda net, args, given: shapes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = [random.Random(1).randrange(300) for _ in range(300)]
    logits = []
    for length in (100, 128, 130, 290):
        arena = forward.new_arena()
        for start in range(0, length, forward.chunk):
            logits = forward.prefill(
                arena, prompt[start : min(start + forward.chunk, length)], start, want_logits=True
            )
    assert shapes == [128, 128, 128, 32, 128, 128, 64]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([prompt[:290]])).logits[0, 256:]
    assert torch.allclose(logits, wanted, atol=1e-3)


def test_leftovers_of_a_rejected_draft_change_nothing():
    forward = forward_of(tiny())
    prompt = list(range(1, 21))
    clean, dirty = filled(forward, prompt), filled(forward, prompt)
    decode(forward, dirty, 20, [9, *range(100, 100 + WIDTH - 1)], list(range(-1, WIDTH - 2)))
    assert torch.equal(decode(forward, clean, 20, [9]), decode(forward, dirty, 20, [9]))


def test_padding_never_makes_nan_and_the_arena_grows_without_losing_keys():
    model = tiny()
    forward = forward_of(model)
    prompt = [random.Random(2).randrange(300) for _ in range(300)]
    arena = filled(forward, prompt)
    grown = decode(forward, arena, 300, [1])
    assert arena.slots >= 512
    assert torch.isfinite(grown).all()
    with torch.inference_mode():
        want = model(torch.tensor([[*prompt, 1]])).logits[0, -1]
    assert torch.allclose(grown[0], want, atol=1e-3, rtol=1e-3)


def test_the_arena_counts_its_bytes():
    forward = forward_of(tiny())
    arena = filled(forward, [1, 2, 3])
    assert isinstance(arena, Arena)
    assert (
        arena.bytes() == 2 * 2 * 2 * 16 * arena.slots * 4
    )  # layers, keys and values, heads, head_dim, slots, float32


@pytest.mark.parametrize("form", ["packed", "half"])
def test_packing_keeps_products_and_leaves_the_callers_model_alone(form):
    model = tiny().to(torch.bfloat16)
    if form not in forms_for(model):
        pytest.skip(f"this torch build has no {form} products")
    before = {name: type(module) for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    net = packed_copy(model, WIDTH, form)
    use_grouped_attention(net)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == attention
    linear, packed = model.model.layers[0].mlp.up_proj, net.model.layers[0].mlp.up_proj
    assert isinstance(packed, FORMS[form])
    x = torch.randn(WIDTH, linear.in_features).to(torch.bfloat16)
    exact = x.double() @ linear.weight.double().T
    assert (packed(x).double() - exact).abs().max() <= exact.abs().max() / 128
    assert net.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_float16_weights_serve_only_models_that_they_hold():
    model = tiny().to(torch.bfloat16)
    assert fits_half(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] = 2.0**-30  # vanishes in float16, as it does in any float32 sum
    assert fits_half(model)
    assert not fits_half(tiny())  # random float32 weights have bits that float16 lacks
    with torch.no_grad():
        weight[0, 0] = 1e5
    assert not fits_half(model)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_self_check_passes_attention_models(kind):
    model = tiny(kind)
    assert why_not_exact(forward_of(model), model, 300) is None


def test_the_self_check_fails_a_model_whose_rows_see_each_other():
    model = tiny()
    forward = forward_of(model)
    norm = forward.model.model.norm
    norm.register_forward_hook(lambda module, args, out: out + 1e-3 * out.mean(dim=1, keepdim=True))
    reason = why_not_exact(forward, model, 300)
    assert reason is not None
    assert "beside another draft" in reason


def test_the_self_check_looks_at_every_slot_of_every_row():
    """A kernel that rounds the last rows of a product in another way: nothing near the root shows it."""
    model = tiny()
    for width, rows in ((WIDTH, 1), (WIDTH, 2)):
        forward = forward_of(model, width=width)
        forward.rows = rows
        assert why_not_exact(forward, model, 300) is None
        last = width * rows - 1

        def bent(module, args, out, last=last):
            if out.shape[1] > last:
                out = out.clone()
                out[:, last] *= 1 + 1e-6
            return out

        handle = forward.model.model.norm.register_forward_hook(bent)
        assert f"in slot {last} of a pass of {last + 1}" in (why_not_exact(forward, model, 300) or "")
        handle.remove()


def test_the_self_check_fails_a_model_that_reads_masks_in_another_way():
    model = tiny()
    forward = forward_of(model)
    for layer in forward.model.model.layers:
        layer.self_attn.forward = _blind(layer.self_attn.forward)
    reason = why_not_exact(forward, model, 300)
    assert reason is not None


def _blind(attend):
    def forward(*args, attention_mask=None, **kwargs):
        return attend(*args, attention_mask=torch.ones_like(attention_mask), **kwargs)

    return forward
