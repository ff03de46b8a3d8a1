"""Rows of a pass: products that round every row alike, passes without idle rows, and how many rows a Reader takes."""

import pytest
import torch
from torch import nn

from reader_rag import engine as engines
from reader_rag.engine import CPU_ROWS, build_engine
from reader_rag.load import load_model
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.kernels import HalfLinear, even_rows, forms_for
from reader_rag.verify.lean import LeanDecoder
from reader_rag.verify.selfcheck import idle_rows_matter
from tests.tiny_models import tiny

CPU = torch.device("cpu")


@pytest.fixture
def model():
    model = tiny()
    if "half" not in forms_for(model):
        pytest.skip("this torch build has no half products")
    return model


def forward_of(net, model, *, rows=3):
    return FixedForward(net, model.config, width=4, chunk=32, device=CPU, rows=rows)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 14, 31, 32, 61, 62, 128])
def test_a_row_of_a_half_product_does_not_know_how_many_rows_there_are(model, count):
    linear = HalfLinear(nn.Linear(96, 40), 16)
    row = torch.randn(1, 96)
    wanted = linear(row.repeat(24, 1))[0]
    assert all(torch.equal(out, wanted) for out in linear(row.repeat(count, 1)))
    assert count <= even_rows(count) < count + 12


def test_passes_without_idle_rows_give_the_bits_of_passes_with_them(model):
    forward = forward_of(LeanDecoder(model, 4, "half"), model)
    arenas = [forward.new_arena() for _ in range(3)]
    for length, arena in enumerate(arenas, 20):
        forward.prefill(arena, list(range(1, length)), 0, want_logits=False)
    jobs = [Job(arena, 19 + row, [5, 6, 7], [-1, 0]) for row, arena in enumerate(arenas)]
    wanted = forward.decode(jobs)
    shapes = []
    forward.model.register_forward_hook(lambda module, args, out: shapes.append(out.logits.shape[1]))
    forward.idle_rows = False
    for some in ([0], [2], [0, 1], [1, 2]):
        got = forward.decode([jobs[row] for row in some])
        assert all(torch.equal(logits, wanted[row]) for logits, row in zip(got, some, strict=True))
    assert shapes == [4, 4, 8, 8]


class Crowded(nn.Module):
    """A model whose logits depend on how many tokens a pass has, by what rounding would do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(
        self, input_ids, position_ids, attention_mask, past_key_values, logits_to_keep=0, use_cache=True
    ):
        out = self.net(input_ids, position_ids, attention_mask, past_key_values, logits_to_keep)
        out.logits = out.logits * (1 + 1e-6 * input_ids.shape[1])
        return out


def test_idle_rows_are_computed_where_the_kernels_know_of_them(model):
    net = LeanDecoder(model, 4, "half")
    assert not idle_rows_matter(forward_of(net, model), 300)
    forward = forward_of(Crowded(net), model)
    assert idle_rows_matter(forward, 300)
    assert forward.idle_rows  # the check leaves it as it was


def test_a_cpu_takes_several_rows_only_where_a_lone_request_does_not_pay_for_them(
    model, tiny_model, tmp_path, monkeypatch
):
    loaded = load_model(tiny_model, dtype="float32", device="cpu")
    monkeypatch.setattr(engines, "_kernels", lambda loaded, book: ["half"])

    def built(rows=None, exact=True):
        return build_engine(loaded, width=4, rows=rows, exact=exact, cache_dir=tmp_path).forward

    assert (built().rows, built().idle_rows) == (CPU_ROWS[0], False)
    assert (built(rows=2).rows, built(rows=2).idle_rows) == (2, False)
    assert built(exact=False).rows == CPU_ROWS[0]
    monkeypatch.setattr(engines, "idle_rows_matter", lambda forward, vocabulary: forward.rows > CPU_ROWS[1])
    assert (built().rows, built().idle_rows) == (CPU_ROWS[1], False)
    monkeypatch.setattr(engines, "idle_rows_matter", lambda forward, vocabulary: True)
    assert built().rows == 1
    assert (built(rows=2).rows, built(rows=2).idle_rows) == (2, True)
    monkeypatch.setattr(engines, "_net", lambda loaded, kernels: loaded.model)
    assert built().rows == 1
