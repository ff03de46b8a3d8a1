"""CPU kernels of the verifying model: weights packed once for passes of W rows, sums kept in float32.

A fixed-width pass multiplies a few rows by every weight matrix. torch's generic CPU path re-reads the weights in an order
made for one row or for hundreds; oneDNN packs them once for a stated number of rows. On CPUs without bfloat16 units the generic
bfloat16 product is a scalar loop, so there the packed float32 weights (exact copies) also serve bfloat16 models: inputs are
widened, sums stay in float32, results are rounded to bfloat16 once, which is what a bfloat16 unit does.

The caller's model is never changed: `packed_copy` returns a twin that shares every parameter except the packed ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import nn

_PACK = "_reorder_linear_weight"
_APPLY = "_linear_pointwise"


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


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(model: nn.Module) -> bool:
    """True on a CPU whose torch has the packed product and for weights that it can hold exactly."""
    weight = next((m.weight for m in model.modules() if type(m) is nn.Linear), None)
    return (
        weight is not None
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, _PACK)
        and hasattr(torch.ops.mkldnn, _APPLY)
    )


def packed_bytes(model: nn.Module) -> int:
    """Bytes that the packed copies would add."""
    return sum(4 * m.weight.numel() for m in model.modules() if type(m) is nn.Linear)


@torch.inference_mode()
def packing_gain(model: nn.Module, rows: int, layers: int = 8, rounds: int = 12) -> float:
    """Seconds of the generic product over seconds of the packed one at `rows` rows: fastest of `rounds` turns each."""
    linears = [m for m in model.modules() if type(m) is nn.Linear][:layers]
    packed = [PackedLinear(m, rows) for m in linears]
    inputs = [torch.randn(rows, m.in_features).to(m.weight.dtype) for m in linears]
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        turns: tuple[Sequence[nn.Module], ...] = (linears, packed)
        for turn, modules in enumerate(turns):
            start = time.perf_counter()
            for module, x in zip(modules, inputs, strict=True):
                module(x)
            best[turn] = min(best[turn], time.perf_counter() - start)
    return best[0] / best[1]


def twin_of(model: nn.Module) -> nn.Module:
    """A second module tree over the same parameters and buffers, whose configuration can be set without touching the caller's."""
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo).eval()


def packed_copy(model: nn.Module, rows: int) -> nn.Module:
    """A twin of `model` with packed linear layers; all other parameters and buffers are shared, not copied."""
    twin = twin_of(model)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child, rows))
    return twin
