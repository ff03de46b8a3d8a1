"""CPU kernels of the verifying model: weights packed once for passes of a few rows, sums kept in float32.

A fixed-width pass multiplies a few rows by every weight matrix. torch's generic CPU path re-reads the weights in an order
made for one row or for hundreds. Two forms of packed weights are offered, and the engine keeps the one that is fastest here:

half    FBGEMM's float16 weights, widened in registers: half the memory traffic of float32, which is what a pass waits for. Taken only
        where float16 holds every weight (as it does those of bfloat16 and most quantized checkpoints, see `fits_half`)
packed  oneDNN's layout, in float32 (exact copies of any weight), or bfloat16 where the CPU multiplies that itself

On CPUs without bfloat16 units the generic bfloat16 product is a scalar loop, so both forms also serve bfloat16 models: inputs are
widened, sums stay in float32, results are rounded to bfloat16 once, which is what a bfloat16 unit does.

The caller's model is never changed: `packed_copy` returns a twin that shares every parameter except the packed ones.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence

import torch
from torch import nn

_PACK = "_reorder_linear_weight"
_APPLY = "_linear_pointwise"
HALF_ERROR = 2.0**-25
"""What float16 may round off a weight: half of its smallest step, far under the rounding of a float32 sum."""
EVEN_ROWS = 12
"""Rows of a float16 product that are all rounded in one way: full strips of FBGEMM's."""


class PackedLinear(nn.Module):
    """A linear layer over a weight that oneDNN packed for `rows` rows; input [..., in], output [..., out] of the input's dtype."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = weight.dtype if has_bfloat16_units() else torch.float32
        self.packed = getattr(torch.ops.mkldnn, _PACK)(weight.to(self.dtype), rows)
        self.packed_bias = None if bias is None else bias.to(self.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(torch.ops.mkldnn, _APPLY)(
            inputs.to(self.dtype), self.packed, self.packed_bias, "none", [], ""
        )
        return out.to(inputs.dtype)


class HalfLinear(nn.Module):
    """A linear layer over float16 weights with float32 sums; input [..., in], output [..., out] of the input's dtype."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.reshape(-1, self.in_features).float()
        count = flat.shape[0]
        if (padding := even_rows(count) - count) > 0:
            flat = nn.functional.pad(flat, (0, 0, 0, padding))
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(flat, self.packed)[:count]
        return out.view(*inputs.shape[:-1], self.out_features).to(inputs.dtype)


@functools.cache
def even_rows(rows: int) -> int:
    """The fewest rows, of `rows` and more, whose float16 product rounds every row in the same way, as that of EVEN_ROWS does.

    FBGEMM cuts a product into strips of rows, and its strips of one and two rows sum in another order than those of three to six. Which
    counts leave such a strip over is tried out, on a small matrix of which all rows are equal; `rows` where nothing is even.
    """
    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(7))
    packed, like = torch.ops.quantized.linear_prepack_fp16(numbers[1:].contiguous(), None), numbers[:1]
    wanted = torch.ops.quantized.linear_dynamic_fp16(like.repeat(EVEN_ROWS, 1), packed)[0]
    for count in range(rows, rows + EVEN_ROWS):
        out = torch.ops.quantized.linear_dynamic_fp16(like.repeat(count, 1), packed)
        if bool((out == wanted).all()):
            return count
    return rows


FORMS: dict[str, type[PackedLinear] | type[HalfLinear]] = {"packed": PackedLinear, "half": HalfLinear}
"""Packed forms by name. The engine measures; "generic" is torch's own product."""


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def forms_for(model: nn.Module) -> tuple[str, ...]:
    """The packed forms that this torch and CPU offer for the model's dtype; whether float16 fits is for `fits_half` to say."""
    weight = next((m.weight for m in model.modules() if type(m) is nn.Linear), None)
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ):
        return ()
    forms = []
    if _has_half():
        forms.append("half")
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if onednn and hasattr(torch.ops.mkldnn, _PACK) and hasattr(torch.ops.mkldnn, _APPLY):
        forms.append("packed")
    return tuple(forms)


def _has_half() -> bool:
    """Tried out, not looked up: torch names the operators also where no kernel is behind them."""
    try:
        HalfLinear(nn.Linear(8, 8), 1)(torch.zeros(1, 8))
    except (RuntimeError, AttributeError):
        return False
    return True


@torch.inference_mode()
def fits_half(model: nn.Module) -> bool:
    """Whether float16 holds every linear weight to within HALF_ERROR: all of its bits, unless it is smaller than 2**-14."""
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            error = (weight.to(torch.float16).float() - weight.float()).abs().max()
            if not float(error) <= HALF_ERROR:  # what overflows is inf, or nan
                return False
    return True


def packed_bytes(model: nn.Module, form: str) -> int:
    """Bytes that the packed copies would add."""
    size = 2 if form == "half" else 4
    return sum(size * m.weight.numel() for m in model.modules() if type(m) is nn.Linear)


@torch.inference_mode()
def packing_gains(
    model: nn.Module, forms: Sequence[str], rows: int, layers: int = 8, rounds: int = 12
) -> dict[str, float]:
    """Seconds of the generic product over seconds of each form at `rows` rows: fastest of `rounds` turns each."""
    linears = [m for m in model.modules() if type(m) is nn.Linear][:layers]
    turns: dict[str, Sequence[nn.Module]] = {"generic": linears}
    for form in forms:
        turns[form] = [FORMS[form](linear, rows) for linear in linears]
    inputs = [torch.randn(rows, m.in_features).to(m.weight.dtype) for m in linears]
    best = dict.fromkeys(turns, float("inf"))
    for _ in range(rounds):
        for form, modules in turns.items():
            start = time.perf_counter()
            for module, x in zip(modules, inputs, strict=True):
                module(x)
            best[form] = min(best[form], time.perf_counter() - start)
    return {form: best["generic"] / best[form] for form in forms}


def twin_of(model: nn.Module) -> nn.Module:
    """A second module tree over the same parameters and buffers, whose configuration can be set without touching the caller's."""
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo).eval()


def packed_copy(model: nn.Module, rows: int, form: str = "packed") -> nn.Module:
    """A twin of `model` with packed linear layers; all other parameters and buffers are shared, not copied."""
    twin = twin_of(model)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, FORMS[form](child, rows))
    return twin
