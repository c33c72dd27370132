"""What was sent for ahead of the readers of one open file, or of one object that is read by ranges."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cachedfs.flights import Flight
from cachedfs.plan.readahead import History, Run

__all__ = ["SentAhead"]


class SentAhead:
    """The requests ahead of each run of a history. The loop appends to them, their reader takes from the left.

    They are kept until their run has passed them: where nothing can be stored, what they bring would be lost before.
    """

    def __init__(self) -> None:
        self._by_run: dict[int, deque[Flight]] = {}

    def __iter__(self) -> Iterator[Flight]:
        """Yield all of them, as they are now."""
        for flights in self._by_run.values():
            yield from [*flights]

    def of(self, run: Run) -> deque[Flight]:
        """Return the requests ahead of a run, without those that it left behind; they need not have come in its order."""
        flights = self._by_run.setdefault(run.number, deque())
        is_backwards = run.repeats > 0 and run.start < run.origin
        for _ in range(len(flights)):
            flight = flights.popleft()
            if flight.start < run.stop if is_backwards else flight.stop > run.start:
                flights.append(flight)
        return flights

    def over(self, history: History) -> tuple[History, list[deque[Flight]]]:
        """Return what was sent for runs that are over, to be ended, and the history without what of it does not come."""
        unwanted = []
        for number in self._by_run.keys() - {run.number for run in history.runs}:
            flights = self._by_run.pop(number)
            history = history.given_up(number, [flight.coming for flight in [*flights]])
            unwanted.append(flights)
        return history, unwanted

    def clear(self) -> list[deque[Flight]]:
        """Return all of them, which are not wanted any more."""
        flights, self._by_run = [*self._by_run.values()], {}
        return flights
