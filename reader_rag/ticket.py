"""A request that was submitted and not yet asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reader_rag.errors import ReaderError, SettingsError
from reader_rag.loop import Loop
from reader_rag.request import Request
from reader_rag.stats import Answer, Step


class Ticket:
    """Hands out a queued request's steps or its answer. Dropping or cancelling a ticket frees its row within one pass."""

    def __init__(self, loop: Loop, request: Request) -> None:
        self._loop, self._request = loop, request
        self._answer: Answer | None = None
        loop.submit(request)

    def __iter__(self) -> Iterator[Step]:
        """The steps that were not taken yet; the last one carries the Answer. Runs passes as needed."""
        while self._answer is None:
            if self._request.cancelled:
                raise ReaderError("the request was cancelled; submit it again")
            step = self._loop.take(self._request)
            self._answer = step.answer
            yield step

    def result(self) -> Answer:
        """Waits for the whole answer. Raises what went wrong in this request."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.cancel()
            raise
        assert self._answer is not None
        return self._answer

    @property
    def done(self) -> bool:
        """Whether the answer is complete, whether or not it was taken."""
        return self._request.is_done

    def cancel(self) -> None:
        """Stops the request; without effect once it is done."""
        self._loop.cancel(self._request)

    def __del__(self) -> None:
        self._request.cancelled = True  # without a lock: garbage is collected anywhere


def results(
    tickets: Sequence[Ticket | Exception], *, return_exceptions: bool = False
) -> list[Answer | Exception]:
    """Waits for all answers, in order. A failure is raised when all others are done, or takes its answer's place."""
    found: list[Answer | Exception] = []
    for ticket in tickets:
        try:
            found.append(ticket if isinstance(ticket, Exception) else ticket.result())
        except Exception as error:
            found.append(error)
    failures = [result for result in found if isinstance(result, Exception)]
    if failures and not return_exceptions:
        raise failures[0]
    return found


def option_of(name: str, value: Any, index: int, count: int) -> Any:
    """The value of an option for one prompt of a batch: its own entry of a list of them, or the one value for all."""
    lists = (
        name == "chunks"
        and isinstance(value, list | tuple)
        and any(isinstance(v, list | tuple) for v in value)
    )
    if not lists and not (name == "sampling" and isinstance(value, list | tuple)):
        return value
    if len(value) != count:
        raise SettingsError(
            f"{name} has {len(value)} entries for {count} prompts; give one for each, or one for all"
        )
    return value[index]
