"""The order of an epoch: a function of seed and epoch alone, whatever reads it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["RankDivision", "EpochOrders", "EpochPosition", "Shuffle", "epoch_order", "place_in", "state_at"]


Shuffle = Literal["full", "window"]
Order = npt.NDArray[np.int64]


def epoch_order(
    n: int, *, seed: int, epoch: int, shuffle: Shuffle | None, group_size: int = 1, window: int = 64
) -> Order:
    """Return the numbers of `n` samples in the order of one epoch, each once.

    `shuffle`: "full" draws among all permutations. "window" keeps the samples of a group (`group_size` neighbours, as those
    of a chunk) near one another, and mixes them with those of other groups: groups come in random order, each of their
    samples later by an exponentially distributed while, as if drawn from a pool that holds `window` groups. None: as they are.

    The random numbers are those of Philox (Salmon et al., 2011) as NumPy keeps them stable, not of `permutation`, which
    may change between versions: an order outlives them. Takes some 0.1 s, and 24 bytes a sample, for a million.
    """
    if shuffle is None:
        return np.arange(n, dtype=np.int64)
    words = _Words(seed, epoch)
    if shuffle == "full" or group_size >= n or window * group_size >= n:
        return np.argsort(words.take(n), kind="stable")
    n_groups = -(-n // group_size)
    places = np.empty(n_groups, dtype=np.float64)
    # The pool is full before the first is drawn.
    places[np.argsort(words.take(n_groups), kind="stable")] = np.maximum(np.arange(n_groups) - window + 1, 0)
    late = -np.log1p(-words.uniform(n)) * window
    return np.argsort(places[np.arange(n) // group_size] + late, kind="stable")


class _Words:
    """Random numbers that follow from seed and epoch."""

    def __init__(self, seed: int, epoch: int) -> None:
        key = np.array([seed % (1 << 64), epoch % (1 << 64)], dtype=np.uint64)
        self._bits = np.random.Philox(key=key)

    def take(self, n: int) -> npt.NDArray[np.uint64]:
        """Return the next `n` words of 64 bits."""
        return np.asarray(self._bits.random_raw(n), dtype=np.uint64)

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """Return the next `n` numbers in [0, 1), of 53 bits."""
        return (self.take(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


VERSION = 1  # of what `state_at` returns


@dataclass(frozen=True)
class EpochOrders:
    """What the orders of all epochs of a dataset follow from."""

    n: int
    seed: int
    shuffle: Shuffle | None
    window: int = 64
    group_size: int = 1

    def order(self, epoch: int) -> Order:
        """Return the numbers of all samples in the order of one epoch."""
        return epoch_order(
            self.n,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            group_size=self.group_size,
            window=self.window,
        )


@dataclass(frozen=True)
class EpochPosition:
    """How much of an epoch all ranks together were given: `position` samples of its order."""

    epoch: int
    position: int = 0


@dataclass(frozen=True)
class RankDivision:
    """How an epoch of `n` samples is divided: in every step each rank gets the next `batch_size` of its order, rank after rank.

    What is left in the end, less than one step, is not given with `drop_last`. Else it is shared equally. With `pad` every
    rank gets as many as every other: samples from the beginning of the order are given once more, at most one a rank.
    Without, the first ranks get one sample more, and where there are fewer samples than ranks the last get no batch.
    """

    n: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    pad: bool = True

    @property
    def step(self) -> int:
        """Samples that all ranks together get at once."""
        return self.batch_size * self.world_size

    def after(self, position: int) -> int:
        """Return the position after one more batch of every rank: `n` when there is none after that."""
        after = position + self.step
        return self.n if self.is_over(after) else after

    def is_over(self, position: int) -> bool:
        """Return whether no rank gets a batch from there on."""
        return self.n - position < (self.step if self.drop_last else 1)

    def n_batches(self, rank: int, position: int = 0) -> int:
        """Return how many batches a rank gets from there to the end."""
        n_whole, rest = divmod(max(0, self.n - position), self.step)
        return n_whole + (not self.drop_last and len(self._share(rest, rank)) > 0)

    def batches(self, order: Order, ranks: range, position: int = 0) -> Iterator[Order]:
        """Yield what these adjacent ranks get in each step, those of the first rank first; a batch is that of one rank."""
        while not self.is_over(position):
            n_left = self.n - position
            if n_left >= self.step:
                first = position + ranks.start * self.batch_size
                yield order[first : first + len(ranks) * self.batch_size]
            else:
                shares = [self._share(n_left, rank) for rank in ranks]
                numbers = np.arange(shares[0].start, shares[-1].stop)
                numbers = np.where(numbers < n_left, numbers + position, (numbers - n_left) % self.n)
                if len(numbers):
                    yield order[numbers]
            position += self.step

    def _share(self, n_left: int, rank: int) -> range:
        """Return which of the last samples, less than a step, are a rank's; from `n_left` on those that pad them."""
        if self.pad:
            each = -(-n_left // self.world_size)
            return range(rank * each, (rank + 1) * each)
        each, n_more = divmod(n_left, self.world_size)
        first = rank * each + min(rank, n_more)
        return range(first, first + each + (rank < n_more))


def state_at(place: EpochPosition, epochs: EpochOrders) -> dict[str, Any]:
    """Return what has to be kept to go on from there: numbers and words, as many for any dataset."""
    return {"version": VERSION, **asdict(place), **asdict(epochs)}


def place_in(state: Mapping[str, Any], epochs: EpochOrders) -> EpochPosition:
    """Return where a kept state goes on. Raises ValueError when that would be in another order, saying what differs."""
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"cannot go on from a state of version {version!r}: this one reads version {VERSION}"
        )
    names = [field.name for field in fields(EpochOrders)]
    if missing := [name for name in ("epoch", "position", *names) if name not in state]:
        raise ValueError(f"this is no state of a Loader: it has no {', '.join(missing)}")
    if epochs.shuffle != "window":
        names = ["n", "seed", "shuffle"] if epochs.shuffle else ["n", "shuffle"]  # the others change no order
    there = {name: state[name] for name in names}
    here = {name: getattr(epochs, name) for name in names}
    if differ := [
        f"{name}={there[name]!r}, and here it is {here[name]!r}"
        for name in names
        if there[name] != here[name]
    ]:
        raise ValueError(f"the samples would come in another order: the state has {'; '.join(differ)}")
    place = EpochPosition(int(state["epoch"]), int(state["position"]))
    if place.epoch < 0 or not 0 <= place.position <= epochs.n:
        raise ValueError(f"no such place: epoch {place.epoch}, {place.position:,} of {epochs.n:,} samples")
    return place
