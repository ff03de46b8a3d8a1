"""A synchronous generator of steps, driven from an event loop without blocking it."""

from asyncio import wrap_future
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from functools import cache
from typing import TypeVar

T = TypeVar("T")


@cache
def _pool() -> ThreadPoolExecutor:
    """Own threads, so that requests waiting for the model never fill the loop's default pool."""
    return ThreadPoolExecutor(max_workers=32, thread_name_prefix="reader_rag")


def driven(steps: Generator[T, None, None]) -> aclosing[AsyncGenerator[T, None]]:
    """`drive` in an `async with`, which closes it however it is left."""
    return aclosing(drive(steps))


async def drive(steps: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield from `steps`, each of them computed in a worker thread.

    The handoff holds one step: the next is asked for when the consumer comes back, so nobody works ahead
    of a slow client. When the consumer leaves (aclose, break, cancellation, an exception) `steps` is
    closed: at once if it is between two steps, else by the worker as soon as the step under way is done.
    """

    def following() -> T | None:
        return next(steps, None)

    context = copy_context()
    pending: Future[T | None] | None = None
    exhausted = False
    try:
        while True:
            pending = _pool().submit(context.run, following)
            step = await wrap_future(pending)
            if step is None:
                exhausted = True
                return
            yield step
    finally:
        if not exhausted and pending is not None:
            if pending.done():
                await wrap_future(_pool().submit(steps.close))
            else:
                pending.add_done_callback(lambda _: steps.close())
