"""The order of the samples in an epoch, and its division among ranks: pure functions of seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Shuffle = Literal["full", "window", "node"]
Order = npt.NDArray[np.int64]

VERSION = 1  # format version of the dict from `state_at`
OF_NODES = ("n_nodes", "earlier", "objects")  # what only the state of a node shuffle has


@dataclass(frozen=True)
class EpochOrders:
    """The order of the `n` samples of a dataset in each epoch.

    `shuffle`: "full" draws from all permutations. "window" keeps the samples of a group (`group_size` neighbors, such
    as those of a chunk) near one another, and mixes them with those of other groups. Groups come in random order, and
    an exponentially distributed delay moves each sample back, as if it were drawn from a pool that holds `window`
    groups. "node" is the order of "full", of which each node takes its own samples; `objects` is a checksum of what
    divides them. None keeps the order of the dataset.
    """

    n: int
    seed: int
    shuffle: Shuffle | None
    window: int = 64
    group_size: int = 1
    objects: int = 0

    def order(self, epoch: int) -> Order:
        """Return the indexes of all samples in the order of one epoch; a million take about 0.1 s, and 24 bytes each.

        The random numbers are raw Philox output (Salmon et al., 2011), which NumPy keeps stable, unlike `permutation`.
        """
        n, group_size, window = self.n, self.group_size, self.window
        if self.shuffle is None:
            return np.arange(n, dtype=np.int64)
        key = np.array([self.seed % (1 << 64), epoch % (1 << 64)], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw
        if self.shuffle != "window" or group_size >= n or window * group_size >= n:
            return np.argsort(words(n), kind="stable")
        n_groups = -(-n // group_size)
        places = np.empty(n_groups, dtype=np.float64)
        # The first `window` groups share place 0: the pool is full before the first draw.
        places[np.argsort(words(n_groups), kind="stable")] = np.maximum(np.arange(n_groups) - window + 1, 0)
        uniform = (words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        late = -np.log1p(-uniform) * window
        return np.argsort(places[np.arange(n) // group_size] + late, kind="stable")


@dataclass(frozen=True)
class EpochPosition:
    """A position in an epoch: all ranks together have received the first `position` samples of its order.

    With node shuffle, the ranks of each of the `n_nodes` nodes have received the first `position` samples of its own
    order. `earlier` has such pairs of `n_nodes` and `position` from before: each is of what was left by the last one.
    """

    epoch: int
    position: int = 0
    n_nodes: int = 1
    earlier: tuple[tuple[int, int], ...] = ()

    def next_epoch(self) -> EpochPosition:
        """Return the beginning of the epoch after this one."""
        return EpochPosition(self.epoch + 1, n_nodes=self.n_nodes)

    def on_nodes(self, n_nodes: int) -> EpochPosition:
        """Return the same position as seen from another number of nodes."""
        if n_nodes == self.n_nodes:
            return self
        read = ((self.n_nodes, self.position),) if self.position else ()
        return EpochPosition(self.epoch, 0, n_nodes, self.earlier + read)


@dataclass(frozen=True)
class RankDivision:
    """Division of an epoch of `n` samples among ranks, in steps.

    In each step, rank after rank gets the next `batch_size` samples of the order. The last samples may be fewer than
    one step. With `drop_last` they are left out, otherwise the ranks share them equally. With `pad`, each rank gets
    the same number: samples from the beginning of the order are repeated, at most one per rank. Without `pad`, the
    first ranks get one sample more, and if there are fewer samples than ranks, the last ranks get no batch.
    """

    n: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    pad: bool = True

    @property
    def step(self) -> int:
        """Samples that all ranks together get in one step."""
        return self.batch_size * self.world_size

    def after(self, position: int) -> int:
        """Return the position after one more step; `n` if no batch comes after that."""
        after = position + self.step
        return self.n if self.is_over(after) else after

    def is_over(self, position: int) -> bool:
        """Return whether no rank gets another batch from `position` on."""
        return self.n - position < (self.step if self.drop_last else 1)

    def n_batches(self, rank: int, position: int = 0) -> int:
        """Return how many batches a rank gets from `position` to the end."""
        n_whole, rest = divmod(max(0, self.n - position), self.step)
        return n_whole + (not self.drop_last and len(self._share(rest, rank)) > 0)

    def batches(self, order: Order, ranks: range, position: int = 0) -> Iterator[Order]:
        """Yield the samples that these adjacent ranks get in each step, in the order of the ranks.

        For a single rank, each yielded array is one batch.
        """
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
        """Return a rank's share of the last `n_left` samples, fewer than a step; indexes from `n_left` on are padding."""
        if self.pad:
            each = -(-n_left // self.world_size)
            return range(rank * each, (rank + 1) * each)
        each, n_more = divmod(n_left, self.world_size)
        first = rank * each + min(rank, n_more)
        return range(first, first + each + (rank < n_more))


def state_at(place: EpochPosition, epochs: EpochOrders) -> dict[str, Any]:
    """Return a small dict of numbers and strings from which `place_in` restores the position; lists of node shuffle."""
    state = {"version": VERSION, **asdict(place), "earlier": [*map(list, place.earlier)], **asdict(epochs)}
    return {name: value for name, value in state.items() if epochs.shuffle == "node" or name not in OF_NODES}


def place_in(state: Mapping[str, Any], epochs: EpochOrders) -> EpochPosition:
    """Return the position in `state`. Raises ValueError, which says what differs, if its order does."""
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"cannot resume from a state of version {version!r}: this release reads version {VERSION}"
        )
    here = asdict(epochs)
    names = [name for name in here if name not in OF_NODES]
    if missing := [name for name in ("epoch", "position", *names) if name not in state]:
        raise ValueError(f"this is not a state of a Loader: it has no {', '.join(missing)}")
    if epochs.shuffle != "window":  # the others do not affect the order
        names = ["n", "seed", "shuffle"] if epochs.shuffle else ["n", "shuffle"]
    differ = [name for name in names if state[name] != here[name]]
    if differ:
        said = "; ".join(f"{name}={state[name]!r}, and here it is {here[name]!r}" for name in differ)
        raise ValueError(f"the samples would come in another order: the state has {said}")
    earlier = tuple((int(n_nodes), int(position)) for n_nodes, position in state.get("earlier", ()))
    place = EpochPosition(int(state["epoch"]), int(state["position"]), int(state.get("n_nodes", 1)), earlier)
    if place.epoch < 0 or not 0 <= place.position <= epochs.n:
        raise ValueError(f"no such place: epoch {place.epoch}, {place.position:,} of {epochs.n:,} samples")
    if (place.position or earlier) and state.get("objects", 0) != epochs.objects:
        raise ValueError(
            f"the files, or their sizes, are not those of the state: which of them epoch {place.epoch} has read is "
            f"unknown. Call set_epoch({place.epoch}) to begin it again, or set_epoch({place.epoch + 1})"
        )
    return place
