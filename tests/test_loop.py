"""Several requests at once: rows, waiting, cancelling, failures, and prefix reuse."""

from __future__ import annotations

import random
import threading

import pytest

from reader_rag import Drafting, Reader, Sampling
from reader_rag.errors import PromptError, ReaderError, SettingsError
from reader_rag.verify.forward import Job
from tests.request_mix import OFF, prompts_of, samplings_of, solo


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def batch_reader(request, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"rows-{request.param}")
    return Reader.load(tiny_model, dtype=request.param, width=4, rows=4, cache_dir=folder)


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_arrive_at_random_times_equal_their_solo_runs(batch_reader, seed):
    rng = random.Random(seed)
    prompts, samplings = prompts_of(seed, 10), samplings_of(seed, 10)
    wanted = [solo(batch_reader, p, s) for p, s in zip(prompts, samplings, strict=True)]
    batch_reader.forget()
    waiting = list(range(10))
    live: dict[int, object] = {}
    got: dict[int, object] = {}
    while waiting or live:
        if waiting and (not live or rng.random() < 0.4):
            i = waiting.pop(0)
            live[i] = batch_reader.stream(prompts[i], sampling=samplings[i])
        i = rng.choice(sorted(live))
        step = next(live[i])
        if step.answer:
            got[i] = (step.answer.tokens, step.answer.text, step.answer.finish_reason)
            live.pop(i)
        elif rng.random() < 0.03 and i % 3 == 0:  # somebody leaves
            live.pop(i).close()
    for i, answer in got.items():
        assert answer == wanted[i]
    assert len(got) >= 5
    assert batch_reader._loop.running == 0


def test_a_batch_gives_each_prompt_its_solo_answer(batch_reader):
    prompts, samplings = prompts_of(40, 9), samplings_of(40, 9)
    wanted = [solo(batch_reader, p, s) for p, s in zip(prompts, samplings, strict=True)]
    answers = batch_reader.generate_batch(prompts, sampling=samplings)
    assert [(a.tokens, a.text, a.finish_reason) for a in answers] == wanted


def test_a_batch_shares_passes(batch_reader):
    """Four requests of n tokens each take about as many forward passes as one of them."""
    calls = []
    decode = batch_reader._forward.decode
    batch_reader._forward.decode = lambda jobs: calls.append(len(jobs)) or decode(jobs)
    try:
        batch_reader.generate_batch(
            ["one", "two", "three", "four"],
            sampling=Sampling(max_tokens=12, logit_bias={2: -100.0}),
            drafting=OFF,
        )
    finally:
        del batch_reader._forward.decode
    assert len(calls) <= 16
    assert max(calls) == 4


def test_threads_share_rows_and_equal_their_solo_runs(batch_reader):
    prompts = prompts_of(7, 24)
    sampling = Sampling(max_tokens=10, temperature=0.7, seed=4)
    wanted = [solo(batch_reader, p, sampling)[0] for p in prompts]
    got: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: got.update({i: batch_reader.generate(prompts[i], sampling=sampling).tokens})
        )
        for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [got[i] for i in range(len(prompts))] == wanted


def test_a_long_prompt_stalls_nobody(batch_reader):
    """Between two of its prefill chunks everyone else gets a pass."""
    order = []
    forward = batch_reader._forward
    prefill, decode = forward.prefill, forward.decode
    forward.prefill = lambda *a, **k: order.append("prefill") or prefill(*a, **k)
    forward.decode = lambda jobs: order.append("decode") or decode(jobs)
    batch_reader.forget()
    try:
        short = batch_reader.submit("hello", sampling=Sampling(max_tokens=60, logit_bias={2: -100.0}))
        next(iter(short))
        order.clear()
        batch_reader.generate([5 + i % 90 for i in range(900)], sampling=Sampling(max_tokens=1))
    finally:
        del forward.prefill, forward.decode
    short.cancel()
    assert order.count("prefill") >= 899 // forward.chunk
    assert "prefill prefill" not in " ".join(order)


def test_a_paused_stream_gives_its_turn_to_others(batch_reader):
    paused = [
        batch_reader.stream(p, sampling=Sampling(max_tokens=200, logit_bias={2: -100.0}), drafting=OFF)
        for p in prompts_of(3, 4)
    ]
    for stream in paused:
        next(stream)
    answer = batch_reader.generate("And me?", sampling=Sampling(max_tokens=5))
    assert answer.stats.tokens >= 1
    assert all(len(request.steps) <= 17 for request in batch_reader._loop._rows)
    for stream in paused:
        stream.close()
    assert batch_reader._loop.running == 0


def test_one_failing_request_harms_no_other(batch_reader):
    def broken(input_ids, scores):
        raise RuntimeError("my processor")

    prompts = prompts_of(11, 4)
    wanted = [solo(batch_reader, p, Sampling(max_tokens=8))[0] for p in prompts]
    samplings = [Sampling(max_tokens=8)] * 4
    samplings[1] = Sampling(max_tokens=8, processors=(broken,))
    answers = batch_reader.generate_batch(prompts, sampling=samplings, return_exceptions=True)
    assert isinstance(answers[1], RuntimeError)
    assert [answers[i].tokens for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]
    with pytest.raises(RuntimeError, match="my processor"):
        batch_reader.generate_batch(prompts, sampling=samplings)
    assert batch_reader._loop.running == 0


def test_a_pass_that_fails_reaches_everyone_in_it_and_the_loop_goes_on(batch_reader):
    forward = batch_reader._forward

    def out_of_memory(jobs):
        raise MemoryError("no memory")

    forward.decode = out_of_memory
    try:
        answers = batch_reader.generate_batch(["a", "b"], return_exceptions=True)
    finally:
        del forward.decode
    assert [str(a) for a in answers] == ["no memory"] * 2
    assert batch_reader.generate("a", sampling=Sampling(max_tokens=3)).stats.tokens >= 1


def test_cancelling_frees_a_row_or_a_place_in_the_queue(batch_reader):
    tickets = [batch_reader.submit(p, sampling=Sampling(max_tokens=50)) for p in prompts_of(5, 6)]
    next(iter(tickets[0]))
    assert batch_reader._loop.running == 4
    for ticket in tickets[:5]:
        ticket.cancel()
    assert batch_reader._loop.running == 0
    with pytest.raises(Exception, match="was cancelled"):
        tickets[0].result()
    assert tickets[5].result().finish_reason in ("stop", "length")
    assert tickets[5].done


def test_a_dropped_ticket_runs_no_further(batch_reader):
    ticket = batch_reader.submit("drop me", sampling=Sampling(max_tokens=200))
    next(iter(ticket))
    del ticket
    batch_reader.generate("next", sampling=Sampling(max_tokens=1))
    assert batch_reader._loop.running == 0


def test_a_bad_prompt_in_a_batch_is_told_before_anything_runs(batch_reader):
    with pytest.raises(PromptError):
        batch_reader.generate_batch(["fine", "  "])
    answers = batch_reader.generate_batch(
        ["fine", "  "], return_exceptions=True, sampling=Sampling(max_tokens=2)
    )
    assert answers[0].stats.tokens >= 1
    assert isinstance(answers[1], PromptError)
    with pytest.raises(SettingsError, match="sampling has 1 entries for 2 prompts"):
        batch_reader.generate_batch(["a", "b"], sampling=[Sampling()])
    assert batch_reader.generate_batch([]) == []


def test_rows_must_be_a_number_that_can_be_meant(tiny_model, tmp_path):
    for rows in (0, -1, 1000):
        with pytest.raises(SettingsError, match="rows is"):
            Reader.load(tiny_model, rows=rows, cache_dir=tmp_path)
    with pytest.raises(SettingsError, match="prefix_bytes"):
        Reader.load(tiny_model, prefix_bytes=-1, cache_dir=tmp_path)


# Prefix reuse.


@pytest.mark.parametrize("drafting", [OFF, Drafting()], ids=["plain", "drafting"])
def test_a_second_turn_prefills_only_what_is_new_and_answers_the_same(batch_reader, drafting):
    first = [5 + (7 * i) % 400 for i in range(300)]
    second = [*first, *range(30, 70)]
    sampling = Sampling(max_tokens=20)
    batch_reader.forget()
    fresh = batch_reader.generate(second, sampling=sampling, drafting=drafting)
    assert fresh.stats.reused_tokens == 0
    batch_reader.forget()
    batch_reader.generate(first, sampling=sampling, drafting=drafting)
    again = batch_reader.generate(second, sampling=sampling, drafting=drafting)
    assert again.tokens == fresh.tokens
    assert again.stats.reused_tokens == 256  # 299 tokens were prefilled, in chunks of 128 or 256
    if drafting.sources:
        assert again.stats.passes <= fresh.stats.passes + 1  # the evidence of the reused part is there too


def test_the_same_prompt_again_needs_no_prefill(batch_reader):
    prompt = list(range(20, 200))
    batch_reader.forget()
    one = batch_reader.generate(prompt, sampling=Sampling(max_tokens=10))
    two = batch_reader.generate(prompt, sampling=Sampling(max_tokens=10))
    assert two.tokens == one.tokens
    assert two.stats.reused_tokens == 179
    assert two.stats.prefill_s == 0


def test_a_prompt_that_another_one_began_with_reads_its_last_chunk_itself(batch_reader):
    """A shorter last chunk is a pass of another shape: its KV is not what the longer prompt left."""
    longer = [5 + (7 * i) % 400 for i in range(300)]
    batch_reader.forget()
    batch_reader.generate(longer, sampling=Sampling(max_tokens=1))
    chunk = batch_reader._forward.chunk
    for length, reused in ((257, 256), (230, 229 // chunk * chunk), (100, 0)):
        shorter = batch_reader.generate(longer[:length], sampling=Sampling(max_tokens=1))
        assert shorter.stats.reused_tokens == reused


def test_a_shared_head_is_copied_and_both_tails_stay_right(batch_reader):
    chunk = batch_reader._forward.chunk
    head = [9 + (3 * i) % 300 for i in range(chunk + 12)]
    tails = [[400 + i] * 400 for i in range(3)]
    sampling = Sampling(max_tokens=12)
    wanted = [solo(batch_reader, head + tail, sampling)[0] for tail in tails]
    batch_reader.forget()
    got = [batch_reader.generate(head + tail, sampling=sampling) for tail in tails]
    assert [answer.tokens for answer in got] == wanted
    assert [answer.stats.reused_tokens for answer in got] == [0, chunk, chunk]
    assert len(batch_reader._loop.prefixes) == 3
    again = batch_reader.generate_batch([head + tail for tail in tails], sampling=sampling)
    assert [answer.tokens for answer in again] == wanted


def test_a_scope_never_reads_another_scopes_prefixes(batch_reader):
    prompt = list(range(20, 300))
    batch_reader.forget()
    batch_reader.generate(prompt, sampling=Sampling(max_tokens=1), scope="a")
    other = batch_reader.generate(prompt, sampling=Sampling(max_tokens=1), scope="b")
    assert other.stats.reused_tokens == 0


def test_kept_prefixes_stay_under_their_cap(tiny_model, tmp_path):
    limit = 3_000_000
    reader = Reader.load(
        tiny_model, dtype="float32", width=4, cache_dir=tmp_path, prefix_bytes=limit, drafting=OFF
    )
    for i in range(12):
        reader.generate([5 + (i * j) % 380 for j in range(1, 400)], sampling=Sampling(max_tokens=1))
        assert reader._loop.prefixes.bytes() <= limit
    assert len(reader._loop.prefixes) > 1
    off = Reader.load(tiny_model, dtype="float32", width=4, cache_dir=tmp_path, prefix_bytes=0)
    for _ in range(2):
        assert off.generate(list(range(5, 300)), sampling=Sampling(max_tokens=1)).stats.reused_tokens == 0


def test_kv_that_does_not_fit_is_refused_before_it_is_made(batch_reader, monkeypatch):
    batch_reader.generate(list(range(20, 300)), sampling=Sampling(max_tokens=1))
    assert len(batch_reader._loop.prefixes) > 0
    monkeypatch.setattr("reader_rag.loop.free_bytes", lambda device: 1000)
    with pytest.raises(ReaderError, match=r"the KV of \d+ tokens takes up to .* lower max_tokens"):
        batch_reader.generate("Too much.")
    assert len(batch_reader._loop.prefixes) == 0  # what could be freed was freed first
    monkeypatch.undo()
    assert batch_reader.generate("Fine again.", sampling=Sampling(max_tokens=2)).stats.tokens >= 1


def test_the_kv_of_a_request_stays_under_its_prediction(batch_reader):
    forward = batch_reader._forward
    for length in (5, 130, 500, 900):
        arena = forward.new_arena()
        for start in range(0, length, forward.chunk):
            forward.prefill(arena, [7] * min(forward.chunk, length - start), start, want_logits=False)
        forward.decode([Job(arena, length, [7], [])])
        assert arena.bytes() <= forward.bytes_for(length)


def test_reading_a_text_teaches_the_drafts_of_its_scope(batch_reader):
    batch_reader.forget()
    assert batch_reader.learn("The reader looks up how a text goes on. " * 5, scope="taught") > 20
    assert len(batch_reader._memory.of("taught").ngrams) > 0
    assert batch_reader._loop.running == 0


def test_no_pass_of_a_usual_answer_grows_the_kv(tiny_model, tmp_path, monkeypatch):
    reader = Reader.load(tiny_model, dtype="float32", width=4, cache_dir=tmp_path)
    grown = []
    monkeypatch.setattr("reader_rag.verify.arena._resized", lambda *given: grown.append(given))
    answer = reader.generate(
        list(range(5, 245)), sampling=Sampling(max_tokens=300, logit_bias=dict.fromkeys(reader.eos, -100.0))
    )
    assert answer.stats.tokens == 300  # across two edges of buckets
    assert not grown
