"""From a loaded model to passes: kernels, width, self-check. What is chosen here is fixed for the life of a Reader."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reader_rag.cache import write_text
from reader_rag.device import free_bytes
from reader_rag.load import Loaded, model_fingerprint
from reader_rag.verify.attention import use_grouped_attention
from reader_rag.verify.calibrate import best_rows, best_width, pass_seconds, prompt_evidence_pays, seconds_of
from reader_rag.verify.forward import FixedForward
from reader_rag.verify.graphs import CudaRecorder, RecordedPasses, Recorder
from reader_rag.verify.kernels import (
    fits_half,
    forms_for,
    has_bfloat16_units,
    packed_bytes,
    packed_copy,
    packing_gains,
    twin_of,
)
from reader_rag.verify.lean import LeanDecoder, is_lean
from reader_rag.verify.plain import PlainForward
from reader_rag.verify.selfcheck import idle_rows_matter, why_not_exact, why_not_recorded

log = logging.getLogger("reader_rag")

PACKING_PAYS = 1.05
"""Packed weights are kept when they are faster than the generic product by this factor."""
PACKED_ROWS = 16
MEASURED_AS = 3
"""Raised when passes are computed in another way: what was measured before is measured again."""
CPU_ROWS = (4, 2)
"""Requests that share a pass on a CPU, the first for which idle rows cost nothing: four together take little more than half as long as
one by one."""
SPARED_ROWS = 32
"""Most rows for which the load finds out whether idle ones can be left out."""
CPU_CHUNK, QUICK_CPU_CHUNK, ACCELERATOR_CHUNK = 128, 256, 512
"""Prompt tokens that are read at once: a larger chunk reads a long prompt quicker, but a conversation's next turn re-reads up to one."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A model in the form in which passes run, and why.

    mode: "exact", "throughput" or "plain"; `reason` says why it is not what was asked for. pass_seconds: the cost curve, by tokens.
    prompt_evidence: whether knowing what the model expects at the prompt's positions saves more than it costs.
    unrecorded: why decoding passes are not replayed from CUDA graphs; None where they are.
    """

    forward: FixedForward | PlainForward
    fingerprint: str
    kernels: str
    pass_seconds: dict[int, float]
    mode: str
    reason: str | None = None
    prompt_evidence: bool = False
    unrecorded: str | None = None

    def seconds_of(self, tokens: int) -> float:
        """Seconds of a pass of `tokens`."""
        return seconds_of(self.pass_seconds, tokens)


def build_engine(
    loaded: Loaded, *, width: int | None, rows: int | None, exact: bool, cache_dir: Path, graphs: bool = True
) -> Engine:
    """Chooses kernels, width and rows by measuring, once per model, dtype and machine (kept in `cache_dir`); runs the self-checks."""
    fingerprint = model_fingerprint(loaded.model, loaded.tokenizer)
    book = Calibration(cache_dir / "calibration.json", _machine_key(loaded, fingerprint))
    recorder, unrecorded = _recorder(loaded, exact=exact, graphs=graphs)
    reason: str | None = None
    for kernels in _kernels(loaded, book):
        try:
            engine = _engine(
                loaded, kernels, fingerprint, book, width=width, rows=rows, exact=exact, recorder=recorder
            )
            assert isinstance(engine.forward, FixedForward)
            reason = _settle_rows(engine.forward, loaded, exact=exact, given=rows is not None)
        except (AttributeError, TypeError) as error:
            reason = f"its configuration names no attention layers ({error})"
            break
        if reason is None:
            if recorder is not None:
                unrecorded = _record(engine.forward, recorder, loaded)
            return replace(engine, prompt_evidence=_prompt_evidence(engine, book), unrecorded=unrecorded)
        log.info("%s with %s kernels: %s", loaded.name, kernels, reason)
    if rows is not None and rows > 1:
        log.warning("%s runs one request per pass instead of %d: %s", loaded.name, rows, reason)
        return build_engine(loaded, width=width, rows=1, exact=exact, cache_dir=cache_dir, graphs=graphs)
    log.warning("%s runs without drafts: %s", loaded.name, reason)
    plain = PlainForward(loaded.model, chunk=_chunk(loaded), device=loaded.device)
    unrecorded = "its own cache does not stay at one place in memory"
    return Engine(plain, fingerprint, "generic", {}, "plain", reason, unrecorded=unrecorded)


def _engine(
    loaded: Loaded,
    kernels: str,
    fingerprint: str,
    book: Calibration,
    *,
    width: int | None,
    rows: int | None,
    exact: bool,
    recorder: Recorder | None,
) -> Engine:
    """The engine with these kernels, its width and rows measured where they are not given; not checked yet."""
    net = _net(loaded, kernels)
    if net is loaded.model and (rows or 1) > 1:
        log.warning(
            "%s runs one request per pass: its hooks or quantized layers keep torch's attention", loaded.name
        )
        rows = 1
    forward = FixedForward(
        net,
        loaded.model.config,
        width=width or PACKED_ROWS,
        chunk=_chunk(loaded),
        device=loaded.device,
        rows=rows or 1,
        single=None if exact or kernels in ("generic", "half") else _net(loaded, "generic"),
    )
    seconds: dict[int, float] = {}
    if width is None or not exact or (rows is None and loaded.device.type != "cpu"):
        name = f"seconds_{kernels}" if recorder is None else f"seconds_{kernels}_recorded"
        known = book.measured(
            name, lambda: {str(size): s for size, s in pass_seconds(forward, recorder=recorder).items()}
        )
        seconds = {int(size): float(s) for size, s in known.items()}
        forward.width = width or best_width(seconds, rows or 1)
        if rows is None and net is not loaded.model and loaded.device.type != "cpu":
            forward.rows = best_rows(seconds, forward.width)
    return Engine(forward, fingerprint, kernels, seconds, "exact" if exact else "throughput")


def _settle_rows(forward: FixedForward, loaded: Loaded, *, exact: bool, given: bool) -> str | None:
    """Runs the self-check; returns why the model fails it.

    Unless the rows were `given`, a CPU gets the first of CPU_ROWS where the check passes and, in exact mode, idle ones can be left out.
    """
    vocabulary, on_cpu = vocabulary_of(loaded.model), loaded.device.type == "cpu"
    counts = [forward.rows]
    if on_cpu and not given and forward.model is not loaded.model:
        counts[:0] = CPU_ROWS
    reason = None
    for forward.rows in counts:
        forward.idle_rows = True
        reason = why_not_exact(forward, loaded.model, vocabulary, bitwise=exact)
        if reason is None and exact and on_cpu and 1 < forward.rows <= SPARED_ROWS:
            forward.idle_rows = idle_rows_matter(forward, vocabulary)
        if reason is None and (given or not exact or forward.rows == 1 or not forward.idle_rows):
            break
    return reason


def recorder_for(device: torch.device) -> Recorder | None:
    """What records passes on this device."""
    return CudaRecorder(device) if device.type == "cuda" else None


def _recorder(loaded: Loaded, *, exact: bool, graphs: bool) -> tuple[Recorder | None, str | None]:
    """A recorder, or why there is none."""
    if not graphs:
        return None, "switched off with graphs=False"
    if not exact:
        return None, "passes of throughput mode have no fixed shapes"
    if _is_hooked(loaded.model):
        return None, "its hooks or quantized layers may do what a graph cannot repeat"
    recorder = recorder_for(loaded.device)
    return recorder, None if recorder is not None else "CUDA graphs need a CUDA device"


def _record(forward: FixedForward | PlainForward, recorder: Recorder, loaded: Loaded) -> str | None:
    """Has decoding passes recorded if replays give the same bits; returns why not."""
    assert isinstance(forward, FixedForward)
    passes = RecordedPasses(forward, recorder)
    reason = why_not_recorded(forward, passes, vocabulary_of(loaded.model))
    if reason is None:
        forward.recorded = passes
    else:
        log.warning("%s runs without CUDA graphs: %s", loaded.name, reason)
    return reason


def _prompt_evidence(engine: Engine, book: Calibration) -> bool:
    forward = engine.forward
    assert isinstance(forward, FixedForward)
    name = f"prompt_evidence_{engine.kernels}_{forward.rows}x{forward.width}"
    return bool(book.measured(name, lambda: prompt_evidence_pays(forward)))


def _chunk(loaded: Loaded) -> int:
    if loaded.device.type != "cpu":
        return ACCELERATOR_CHUNK
    return QUICK_CPU_CHUNK if loaded.dtype == torch.bfloat16 and has_bfloat16_units() else CPU_CHUNK


def _kernels(loaded: Loaded, book: Calibration) -> list[str]:
    """The packed forms that pay on this machine, the fastest first, then "generic"."""
    model = loaded.model
    room = free_bytes(loaded.device) // 4
    forms = [form for form in forms_for(model) if packed_bytes(model, form) <= room]
    if "half" in forms and not book.measured("fits_half", lambda: fits_half(model)):
        forms.remove("half")
    gains: dict[str, float] = book.get("packing_gains") or {}
    if not set(forms) <= set(gains):
        gains = {form: round(gain, 3) for form, gain in packing_gains(model, forms, PACKED_ROWS).items()}
        book.put("packing_gains", gains)
    paying = [form for form in forms if gains[form] >= PACKING_PAYS]
    return [*sorted(paying, key=lambda form: -gains[form]), "generic"]


def _net(loaded: Loaded, kernels: str) -> torch.nn.Module:
    """The module that passes run on: it shares the caller's weights and never changes the caller's object."""
    model: torch.nn.Module = loaded.model
    if _is_hooked(model):
        return model  # hooks and quantized layers are not copied
    if kernels != "generic" and is_lean(model):
        return LeanDecoder(model, PACKED_ROWS, kernels)
    net = twin_of(model) if kernels == "generic" else packed_copy(model, PACKED_ROWS, kernels)
    use_grouped_attention(net)
    return net


def _is_hooked(model: torch.nn.Module) -> bool:
    """Whether the model is spread over devices by hooks or has quantized layers."""
    return bool(getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None))


def _machine_key(loaded: Loaded, fingerprint: str) -> str:
    """A cache folder may be carried to another machine: what its processor can do is part of the key."""
    if loaded.device.type == "cuda":
        machine = torch.cuda.get_device_name(loaded.device)
    else:
        units = "-bf16" if has_bfloat16_units() else ""
        machine = (
            f"{loaded.device.type}-{torch.backends.cpu.get_cpu_capability()}{units}-{torch.get_num_threads()}"
        )
    return f"{fingerprint}-{loaded.dtype}-{machine}-{torch.__version__}-{MEASURED_AS}"


class Calibration:
    """What was measured for one model on this machine, in a JSON file that many models share."""

    def __init__(self, file: Path, key: str) -> None:
        self._file, self._key = file, key

    def get(self, name: str) -> Any:
        return self._read().get(self._key, {}).get(name)

    def measured(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is kept under this name; measured and kept where nothing is."""
        known = self.get(name)
        if known is None:
            known = measure()
            self.put(name, known)
        return known

    def put(self, name: str, value: Any) -> None:
        book = self._read()
        if book.get(self._key, {}).get(name) != value:
            book.setdefault(self._key, {})[name] = value
            try:
                write_text(self._file, json.dumps(book, indent=1, sort_keys=True))
            except OSError as error:
                log.warning(
                    "measurements could not be kept in %s (%s); they will be repeated", self._file, error
                )

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            book = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        whole = isinstance(book, dict) and all(isinstance(entry, dict) for entry in book.values())
        return book if whole else {}


def vocabulary_of(model: Any) -> int:
    """Rows of the embedding: every id below is one that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])
