"""Recorded decoding passes: one CUDA graph per set of key views, replayed without launching kernel by kernel.

A pass of a 7B model is some two thousand kernels, and launching them takes longer than running them. Passes of exact mode have fixed
shapes, so each is recorded once and replayed. Nothing that differs between two passes of a shape may then be a Python value: tokens,
positions and the tree lie in one static buffer, masks and write slots are computed from it on the device, keys and values lie in seats
(seats.py), and logits end up in another static buffer. What a recorder does with the step is all that depends on CUDA;
`EagerRecorder` runs the same step on any device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from reader_rag.verify.arena import Arena, Storage, Stretch
from reader_rag.verify.buffers import Inputs, Keys, Output
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.seats import BakedRow, Seats

log = logging.getLogger("reader_rag")

RECORD_AFTER = 4
"""Passes of a shape that run unrecorded first. A recording costs about as much as a few passes, so waiting for as many keeps
the total within twice the least possible, whether the shape comes back or not."""
MOST = 32
"""Shapes that are kept; the longest unused is dropped. Their intermediate results share one pool of memory."""

Step = Callable[[], None]


class Recorder(Protocol):
    """Turns a step, which takes and returns nothing, into something that repeats its work on the device."""

    def record(self, step: Step) -> Step: ...


class EagerRecorder:
    """Repeats a step by calling it: what a graph does, without its speed."""

    def record(self, step: Step) -> Step:
        return step


class CudaRecorder:
    """Records a step as a CUDA graph. Raises RuntimeError where a step waits for the device or allocates behind torch's back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            with torch.cuda.stream(
                main
            ):  # torch leaves the recording's stream current when a recording fails
                self._stream.wait_stream(main)
                with torch.cuda.stream(self._stream):
                    step()  # libraries set up their workspaces for this stream
                main.wait_stream(self._stream)
                # Other threads may use the device meanwhile: an embedder, say.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    step()
        return graph.replay


@dataclass(slots=True)
class _Pass:
    """A shape that was met. step: the work, over tensors that are baked in; replay: its recording."""

    step: Step
    uses: int = 0
    replay: Step | None = None


class RecordedPasses:
    """`FixedForward.decode` from static buffers: row i of a pass is seat i, a shape is the tuple of its rows' views.

    `failure` says why recording was given up; passes then run unrecorded. Used by one thread at a time.
    """

    def __init__(
        self, forward: FixedForward, recorder: Recorder, *, record_after: int = RECORD_AFTER, most: int = MOST
    ) -> None:
        self.record_after, self.failure = record_after, ""
        self.recordings = self.replays = 0
        self._forward, self._recorder, self._most = forward, recorder, most
        self._seats = Seats(forward.rows)
        self._passes: OrderedDict[tuple[int, ...], _Pass] = OrderedDict()  # longest unused first
        self._inputs = Inputs(forward.rows, forward.width, forward.device)
        self._idle: Storage | None = None
        self._output = Output()

    @torch.inference_mode()
    def decode(self, jobs: Sequence[Job]) -> list[torch.Tensor] | None:
        """Logits [len(job.tokens), vocabulary] of each job; None where the pass must run unrecorded.

        That is so after a failure, and for arenas that no pass has written to yet: their shape is not known.
        """
        arenas = [job.arena for job in jobs]
        if self.failure or len(set(arenas)) < len(arenas) or not all(map(_is_written, arenas)):
            return None
        width = self._forward.width
        views = [self._forward.view(job.position) for job in jobs]
        for arena, view in zip(arenas, views, strict=True):
            arena.reserve(view)
        seats, changed = self._seats.take(arenas)
        self._drop(changed)
        shape = [0] * self._forward.rows  # 0: nobody decodes in this seat
        for seat, view in zip(seats, views, strict=True):
            shape[seat] = view
        self._inputs.fill(dict(zip(seats, jobs, strict=True)))
        try:
            self._run(tuple(shape))
        except RuntimeError as error:
            # The end of a failed recording raises once more, and says less than what made it fail.
            cause = error.__context__ or error
            self.failure = f"{type(cause).__name__}: {(str(cause) or 'no message').splitlines()[0]}"
            self._passes.clear()
            log.warning("decoding passes are no longer recorded: %s", self.failure)
            return None
        logits = self._output.copy()
        return [
            logits[seat * width : seat * width + len(job.tokens)]
            for seat, job in zip(seats, jobs, strict=True)
        ]

    def trim(self) -> None:
        """Frees the seats of arenas that are gone, and the recordings over them."""
        self._drop(self._seats.trim())

    def _drop(self, seats: set[int]) -> None:
        for shape in [shape for shape in self._passes if any(shape[seat] for seat in seats)]:
            del self._passes[shape]

    def _run(self, shape: tuple[int, ...]) -> None:
        if shape not in self._passes:
            while len(self._passes) >= self._most:
                self._passes.popitem(last=False)
            self._passes[shape] = _Pass(self._step(shape))
        one = self._passes[shape]
        self._passes.move_to_end(shape)
        one.uses += 1
        if one.replay is None and one.uses > self.record_after:
            one.replay = self._recorder.record(one.step)
            self.recordings += 1
        if one.replay is None:
            one.step()
        else:
            one.replay()
            self.replays += 1

    def _step(self, shape: tuple[int, ...]) -> Step:
        """The work of a pass of this shape. Every tensor that it touches is one of its own, of a seat, or static."""
        forward, inputs, output = self._forward, self._inputs, self._output
        views = [view or forward.view(0) for view in shape]
        storages = [
            self._seats.storage(seat) if view else self._idle_storage(shape)
            for seat, view in enumerate(shape)
        ]
        windows = {
            kind: forward.window if kind == "sliding_attention" else None for kind in forward.layer_kinds
        }
        keys = Keys(views, forward.width, forward.device)

        def step() -> None:
            ids, positions, inner = inputs.read()
            slots = inputs.slots(positions)
            stretches = [
                Stretch(BakedRow(storage, slots[row]), 0, forward.width, views[row])
                for row, storage in enumerate(storages)
            ]
            masks = {
                kind: keys.mask(positions, inner, windows[kind], forward.dtype)
                for kind in forward.layer_kinds
            }
            logits = forward.run(
                forward.model, stretches, ids.reshape(1, -1), positions.reshape(1, -1), masks, keep=0
            )
            output.put(logits)

        return step

    def _idle_storage(self, shape: tuple[int, ...]) -> Storage:
        """What rows without a job write to: nobody reads it but they."""
        if self._idle is None:
            like = self._seats.storage(next(seat for seat, view in enumerate(shape) if view))
            slots = self._forward.view(0)
            keys, values = (
                tuple(None if t is None else t.new_zeros(*t.shape[:2], slots, t.shape[3]) for t in tensors)
                for tensors in like
            )
            self._idle = keys, values
        return self._idle


def _is_written(arena: Arena) -> bool:
    return any(tensor is not None for tensor in arena.storage[0])
