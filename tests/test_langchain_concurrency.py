"""Many callers of one model at once: each gets the serial answer, and none holds up the others."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_fakes import FakeReader, collect, faces, text_of, ticks

from reader_rag import Reader

QUESTIONS = [f"question {n}: how does a text go on?" for n in range(8)]


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.load(
        tiny_model, dtype="float32", device="cpu", width=4, rows=4, cache_dir=tmp_path_factory.mktemp("cache")
    )


def free(reader: Reader) -> bool:
    return reader._loop.running == 0


@faces
def test_sixteen_threads_get_the_serial_answers(face: Any, live: Reader) -> None:
    model = face(reader=live, max_tokens=8)
    serial = [text_of(model.invoke(question)) for question in QUESTIONS]
    assert len(set(serial)) == 8, "or an answer could be another's"

    def caller(number: int) -> list[str]:
        turn = [*range(number % 8, 8), *range(number % 8)]
        said = {}
        for n in turn:
            if n % 2:
                said[n] = text_of(model.invoke(QUESTIONS[n]))
            else:
                said[n] = "".join(text_of(chunk) for chunk in model.stream(QUESTIONS[n]))
        return [said[n] for n in range(8)]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(caller, range(16))) == [serial] * 16
    assert free(live)


@faces
async def test_thirty_two_coroutines_get_the_serial_answers(face: Any, live: Reader) -> None:
    model = face(reader=live, max_tokens=8)
    serial = [text_of(model.invoke(question)) for question in QUESTIONS]
    answers = await asyncio.gather(*(model.ainvoke(question) for question in QUESTIONS * 4))
    assert [text_of(answer) for answer in answers] == serial * 4
    streamed = await asyncio.gather(*(collect(model.astream(question)) for question in QUESTIONS))
    assert streamed == serial
    batched = await model.abatch(QUESTIONS)
    assert [text_of(answer) for answer in batched] == serial
    assert [text_of(answer) for answer in model.batch(QUESTIONS)] == serial
    assert free(live)


@faces
async def test_a_cancelled_stream_frees_its_row_and_the_others_go_on(face: Any, live: Reader) -> None:
    model = face(reader=live, max_tokens=8)
    serial = [text_of(model.invoke(question)) for question in QUESTIONS]
    leaving = [asyncio.create_task(collect(model.astream(q, max_tokens=400))) for q in QUESTIONS]
    staying = [asyncio.create_task(model.ainvoke(q)) for q in QUESTIONS]
    await asyncio.sleep(0.05)
    for task in leaving:
        task.cancel()
    assert [text_of(await task) for task in staying] == serial
    await asyncio.gather(*leaving, return_exceptions=True)
    async with asyncio.timeout(5):
        while not free(live):
            await asyncio.sleep(0.01)


@faces
async def test_an_error_inside_one_request_reaches_its_consumer_alone(face: Any, live: Reader) -> None:
    class Breaks:
        """A logits processor that gives up after some tokens."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.calls += 1
            if self.calls > 5:
                raise RuntimeError("the processor broke")
            return scores

    model = face(reader=live, max_tokens=12)
    expected = text_of(model.invoke(QUESTIONS[0]))
    other = asyncio.create_task(model.ainvoke(QUESTIONS[0]))
    with pytest.raises(RuntimeError, match="the processor broke"):
        await collect(model.astream(QUESTIONS[1], processors=[Breaks()]))
    with pytest.raises(RuntimeError, match="the processor broke"):
        list(model.stream(QUESTIONS[1], processors=[Breaks()]))
    with pytest.raises(RuntimeError, match="the processor broke"):
        model.invoke(QUESTIONS[1], processors=[Breaks()])
    assert text_of(await other) == expected
    assert free(live)


@faces
async def test_the_event_loop_keeps_ticking_while_a_model_runs(face: Any, live: Reader) -> None:
    model = face(reader=live, max_tokens=150)
    invoked, _ = await ticks(model.ainvoke(QUESTIONS[0]), every=0.001)
    streamed, _ = await ticks(collect(model.astream(QUESTIONS[0])), every=0.001)
    assert invoked > 5
    assert streamed > 5


@faces
def test_a_batch_shares_passes(face: Any, live: Reader) -> None:
    """Eight answers of a batch hold up to four rows at once: their streams are open together."""
    seen: list[int] = []

    def watch(input_ids: Any, scores: Any) -> Any:
        seen.append(live._loop.running)
        return scores

    face(reader=live, max_tokens=6).batch(QUESTIONS, processors=[watch])
    assert max(seen) == 4


def test_the_faces_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred steps through a face against the bare Reader; 3 % of a 100-token answer of the demo model are over 50 ms."""
    import time

    from langchain_reader_rag import ChatReader, ReaderLLM

    fake = FakeReader(" ".join(["word"] * 100))

    def seconds(ask: Any) -> float:
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            ask()
            best = min(best, time.process_time() - began)
        return best

    chat, llm = ChatReader(reader=fake), ReaderLLM(reader=fake)
    for ask in (
        lambda: chat.invoke("q"),
        lambda: list(chat.stream("q")),
        lambda: llm.invoke("q"),
        lambda: list(llm.stream("q")),
    ):
        assert seconds(ask) < 0.05
