"""Recorded passes: what a CUDA graph would replay, run on the CPU by an eager recorder over the same static buffers."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import pytest
import torch

from reader_rag.verify.buffers import Inputs, Keys
from reader_rag.verify.forward import Job
from reader_rag.verify.graphs import CudaRecorder, EagerRecorder, RecordedPasses
from tests.tiny_forwards import VOCABULARY, WIDTH, forward_of

CPU = torch.device("cpu")


class Twins:
    """The same requests twice: over arenas for unrecorded passes and over arenas for recorded ones."""

    def __init__(self, forward, passes, seed=0):
        self.forward, self.passes, self.rng = forward, passes, random.Random(seed)
        self.requests = {}

    def open(self, name, length):
        prompt = [self.rng.randrange(VOCABULARY) for _ in range(length)]
        arenas = []
        for _ in range(2):
            arena = self.forward.new_arena()
            for start in range(0, length, 32):
                self.forward.prefill(arena, prompt[start : start + 32], start, want_logits=False)
            arenas.append(arena)
        self.requests[name] = [*arenas, length]

    def check(self, *names):
        """One pass over these requests, with drafts of their own; then each has a few more tokens."""
        jobs = [], []
        for name in names:
            plain, recorded, length = self.requests[name]
            chain = min(self.forward.chain_limit(length), self.rng.randrange(WIDTH))
            side = self.rng.randrange(WIDTH - chain)
            parents = [*range(-1, chain - 1), *[self.rng.randrange(-1, chain + i) for i in range(side)]]
            tokens = [self.rng.randrange(VOCABULARY) for _ in range(1 + chain + side)]
            for arena, kept in zip((plain, recorded), jobs, strict=True):
                kept.append(Job(arena, length, tokens, parents))
            self.requests[name][2] += 1 + self.rng.randrange(chain + 1)
        want, got = self.forward.decode(jobs[0]), self.passes.decode(jobs[1])
        assert got is not None, self.passes.failure
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "one window", "two windows"])
def test_replays_give_the_bits_of_unrecorded_passes_across_a_buckets_edge(kind, dtype):
    forward = forward_of(kind, dtype=dtype)
    passes = RecordedPasses(forward, EagerRecorder(), record_after=1)
    twins = Twins(forward, passes)
    twins.open("a", 200)
    while twins.requests["a"][2] < 300:
        twins.check("a")
    assert passes.recordings == 2  # below and above position 256
    assert passes.replays > 20


@pytest.mark.parametrize("kind", ["llama", "two windows"])
def test_rows_come_and_go_and_each_keeps_its_bits(kind):
    forward = forward_of(kind, rows=4)
    passes = RecordedPasses(forward, EagerRecorder(), record_after=1, most=4)
    twins = Twins(forward, passes, seed=1)
    rng, born = random.Random(2), 0
    for turn in range(60):
        for name in list(twins.requests):  # some end, some are cancelled: their arenas are simply gone
            if rng.random() < 0.08:
                del twins.requests[name]
        while len(twins.requests) < 6:  # more than there are seats: two wait or read slowly
            twins.open(born, rng.choice([5, 40, 250, 270]))
            born += 1
        names = rng.sample(sorted(twins.requests), 4 if turn % 3 else rng.randrange(1, 4))
        twins.check(*names)
    assert passes.recordings > 0
    assert len(passes._passes) <= 4


def test_a_row_that_outgrows_its_seat_takes_its_recordings_along():
    forward = forward_of(rows=2)
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    twins = Twins(forward, passes)
    twins.open("long", 500)
    twins.open("short", 20)
    for _ in range(12):
        twins.check("short")
        twins.check("short", "long")
    twins.open("longer", 600)
    del twins.requests["short"]
    gc.collect()
    for _ in range(4):
        twins.check("long", "longer")


def test_a_row_grows_inside_a_long_seat_without_leaving_it():
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    twins = Twins(forward, passes)
    twins.open("long", 600)
    twins.check("long")
    storage = passes._seats.storage(0)
    del twins.requests["long"]
    gc.collect()
    twins.open("short", 240)
    while twins.requests["short"][2] < 270:
        twins.check("short")
    assert passes._seats.storage(0) is storage
    arena = twins.requests["short"][1]
    arena.reserve(arena.slots + 1)
    assert arena.storage[0][0] is storage[0][0]
    assert arena.slots < storage[0][0].shape[2]


def test_logits_outlast_the_next_pass():
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    arena = forward.new_arena()
    forward.prefill(arena, [1, 2, 3], 0, want_logits=False)
    (first,) = passes.decode([Job(arena, 3, [4], [])])
    kept = first.clone()
    passes.decode([Job(arena, 3, [5], [])])
    assert torch.equal(first, kept)


def test_kept_keys_serve_the_next_request_from_the_same_seat_or_as_a_copy():
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    twins = Twins(forward, passes)
    twins.open("first", 96)
    for _ in range(3):
        twins.check("first")
    for head in (64, 96):  # as prefixes.py hands them on: a copy of the head, then the arena itself
        plain, recorded, _ = twins.requests["first"]
        pair = [a.copy(head, head) if head == 64 else a for a in (plain, recorded)]
        tail = [twins.rng.randrange(VOCABULARY) for _ in range(20)]
        for arena in pair:
            forward.prefill(arena, tail, head, want_logits=False)
        twins.requests[f"from {head}"] = [*pair, head + 20]
        for _ in range(3):
            twins.check(f"from {head}")


def test_a_seat_that_another_row_needs_is_left_with_all_keys():
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    twins = Twins(forward, passes)
    for name, length in (("a", 50), ("b", 30), ("c", 70)):
        twins.open(name, length)
    for name in "abcabcaabbcc":
        twins.check(name)


@pytest.mark.parametrize("kind", ["llama", "one window", "two windows"])
def test_masks_made_on_the_device_are_those_made_on_the_host(kind):
    forward = forward_of(kind, rows=3)
    branch = [-1, -1, -1, 2, 3, 4, 5]  # slots and depths differ, and a window of 3 ends inside
    jobs = [Job(forward.new_arena(), at, range(WIDTH), branch) for at in (0, 130, 255)]
    blocks = [forward._block(job, WIDTH) for job in jobs]
    inputs = Inputs(3, WIDTH, CPU)
    inputs.fill(dict(enumerate(jobs)))
    keys = Keys([block.stretch.view for block in blocks], WIDTH, CPU)
    _, positions, inner = inputs.read()
    for layers in forward.layer_kinds:
        window = forward.window if layers == "sliding_attention" else None
        made = keys.mask(positions, inner, window, forward.dtype)
        assert torch.equal(made, forward._mask(layers, blocks))


def test_each_static_buffer_matters(monkeypatch):
    """A buffer that is not refreshed shows: the checks above could not pass without it."""
    from reader_rag.verify import buffers

    packed = buffers._packed
    stale = {
        "ids": lambda ids, positions, inner: packed(ids * 0, positions, inner),
        "positions": lambda ids, positions, inner: packed(ids, positions // 8 * 8, inner),
        "tree": lambda ids, positions, inner: packed(ids, positions, inner * 0 + 1),
    }
    for name, broken in stale.items():
        forward = forward_of()
        passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
        twins = Twins(forward, passes)
        twins.open("a", 33)
        twins.check("a")
        monkeypatch.setattr(buffers, "_packed", broken)
        with pytest.raises(AssertionError):
            twins.check("a")
        monkeypatch.undo()
        assert passes.failure == "", name


def test_arenas_without_keys_and_failures_are_left_to_unrecorded_passes(caplog):
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    forward.recorded = passes
    fresh = forward.new_arena()
    (first,) = forward.decode([Job(fresh, 0, [5], [])])  # a prompt of one token: nothing was prefilled
    assert passes.replays == 0
    (again,) = forward.decode([Job(fresh, 0, [5], [])])
    assert passes.replays == 1
    assert torch.equal(first, again)

    class Refusing:
        def record(self, step):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            finally:
                raise RuntimeError("the recording was invalidated")  # as torch does when it ends a failed one

    forward.recorded = passes = RecordedPasses(forward, Refusing(), record_after=1)
    for _ in range(3):
        (logits,) = forward.decode([Job(fresh, 0, [5], [])])
        assert torch.equal(logits, first)
    assert passes.failure == "RuntimeError: operation not permitted when stream is capturing"
    assert caplog.text.count("no longer recorded") == 1


def test_a_shape_is_recorded_when_it_has_come_back_often_enough():
    forward = forward_of()
    passes = RecordedPasses(forward, EagerRecorder())
    twins = Twins(forward, passes)
    twins.open("a", 20)
    for turn in range(passes.record_after + 3):
        assert passes.recordings == (turn > passes.record_after)
        twins.check("a")
    assert passes.replays == 3


def test_trimming_frees_the_seats_of_arenas_that_are_gone():
    forward = forward_of(rows=2)
    passes = RecordedPasses(forward, EagerRecorder(), record_after=0)
    twins = Twins(forward, passes)
    for name in "ab":
        twins.open(name, 20)
    twins.check("a", "b")
    twins.check("b")
    twins.requests.pop("a")
    gc.collect()
    passes.trim()
    assert [seat.storage is None for seat in passes._seats._seats] == [True, False]
    assert len(passes._passes) == 1  # b's own
    twins.check("b")


def test_the_cuda_recorder_records_on_its_own_stream_and_in_one_pool(monkeypatch):
    """With stand-ins for torch.cuda: which calls are made, in which order; their effect needs a device."""
    from contextlib import contextmanager

    calls, current = [], ["main"]

    @contextmanager
    def stream(one):
        before, current[0] = current[0], one
        try:
            yield
        finally:
            current[0] = before

    class Stream:
        def __init__(self, device=None):
            self.name = "side"

        def wait_stream(self, other):
            calls.append(("side waits", other))

    class Graph:
        def replay(self):
            calls.append("replay")

    class Recording:
        def __init__(self, graph, *, pool, stream, capture_error_mode):
            calls.append(("record", pool, stream.name, capture_error_mode))

        def __enter__(self):
            current[0] = "recording"

        def __exit__(self, *args):
            calls.append("end")

    @contextmanager
    def on(device):
        yield

    main = SimpleNamespace(wait_stream=lambda other: calls.append("main waits"))
    fake = {"Stream": Stream, "stream": stream, "CUDAGraph": Graph, "graph": Recording, "device": on}
    fake |= {"graph_pool_handle": lambda: "pool", "current_stream": lambda: main}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    recorder = CudaRecorder(torch.device("cuda", 0))
    replay = recorder.record(lambda: calls.append("step"))
    wanted = [
        ("side waits", main),
        "step",
        "main waits",
        ("record", "pool", "side", "thread_local"),
        "step",
        "end",
    ]
    assert calls == wanted
    replay()
    assert calls[-1] == "replay"

    def waits_for_the_device():
        if current == ["recording"]:
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(waits_for_the_device)
    assert current == ["main"]
