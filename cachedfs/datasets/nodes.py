"""Node shuffle: which node has which samples, and where this process is among the nodes."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachedfs.datasets.arguments import at_least
from cachedfs.datasets.sampler import EpochOrders, EpochPosition, Order, RankDivision

logger = logging.getLogger("cachedfs.datasets")

Keys = npt.NDArray[np.uint64]

RUNS = 256  # runs of a dataset within one object: nodes share the blocks at their borders, which costs up to 1 MiB a run
UNEVEN = 1.5  # times as many samples on one node as on another are worth a warning


class Ranks(NamedTuple):
    """The place of a process in a training: every node has equally many ranks, and they are adjacent."""

    rank: int
    world_size: int
    n_nodes: int = 1

    @property
    def n_local(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.n_nodes

    @property
    def node(self) -> int:
        """The number of this process's node."""
        return self.rank // self.n_local

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its node."""
        return self.rank % self.n_local

    def on_this_node(self, ranks: range) -> range:
        """Return the local ranks of those of `ranks` that are on this node."""
        first = self.node * self.n_local
        return range(max(0, ranks.start - first), min(ranks.stop - first, self.n_local))


def nodes_of(n_nodes: int | None, node_rank: int | None) -> tuple[int, int | None] | None:
    """Return the checked `(n_nodes, node_rank)`; None if both are None."""
    if n_nodes is None:
        if node_rank is not None:
            raise ValueError(f"node_rank={node_rank!r}: give n_nodes, too")
        return None
    n_nodes = at_least(1, n_nodes=n_nodes)
    if node_rank is not None and at_least(0, node_rank=node_rank) >= n_nodes:
        raise ValueError(f"node_rank={node_rank!r}: expected 0 to {n_nodes - 1}, because n_nodes={n_nodes}")
    return n_nodes, node_rank


def ranks_on_nodes(
    ranks: tuple[int, int] | None, nodes: tuple[int, int | None] | None, environment: Mapping[str, str]
) -> Ranks:
    """Return the place of the process with these `(rank, world_size)` and `(n_nodes, node_rank)`.

    `nodes`: None for those that the environment of torchrun or SLURM names. `ranks`: None without torch.distributed; then
    each node is one process. Raises ValueError if the number of nodes is unknown, or does not fit the ranks.
    """
    if ranks is None:
        n_nodes, node_rank = nodes or (1, None)
        if node_rank is None and n_nodes > 1:
            raise ValueError(
                f"n_nodes={n_nodes}: give node_rank, too, or rank and world_size, or initialize torch.distributed"
            )
        return Ranks(node_rank or 0, n_nodes, n_nodes)
    rank, world_size = ranks
    n_nodes, node_rank = nodes or _nodes_in(environment, rank, world_size)
    if world_size % n_nodes:
        raise ValueError(
            f"shuffle='node': world_size={world_size} ranks on n_nodes={n_nodes}, but every node must have equally many"
        )
    found = Ranks(rank, world_size, n_nodes)
    if node_rank not in (None, found.node):
        raise ValueError(
            f"shuffle='node': rank {rank} of {world_size} is on node {node_rank} of {n_nodes}, but must be on node {found.node}: "
            "the ranks of a node must be adjacent, as torchrun and srun --distribution=block number them"
        )
    return found


def _nodes_in(environment: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int | None]:
    """Return `(n_nodes, node_rank)` as torchrun or SLURM say them."""
    if world_size == 1:
        return 1, None
    numbers = {name: int(value) for name, value in environment.items() if value.isdecimal()}
    of_torchrun = numbers.get("RANK"), numbers.get("WORLD_SIZE")
    if of_torchrun == (rank, world_size) and "LOCAL_WORLD_SIZE" in numbers:
        return world_size // numbers["LOCAL_WORLD_SIZE"], numbers.get("GROUP_RANK")
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if name in numbers and "SLURM_NODEID" in numbers:
            return numbers[name], numbers["SLURM_NODEID"]
    raise ValueError(
        f"shuffle='node': nothing says on how many nodes the {world_size} ranks are: give n_nodes, or start with torchrun or srun"
    )


def name_keys(names: Iterable[str], n: int) -> Keys:
    """Return a hash of each of the `n` names; it is the same in every process and release."""

    def hashed(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())

    return np.fromiter(map(hashed, names), np.uint64, n)


def run_size(n: int, group_size: int = 1) -> int:
    """Return how many neighbors of `n` samples stay together: whole groups, so that there are at most `RUNS` runs."""
    return group_size * max(1, -(-n // (group_size * RUNS)))


def run_keys(n: int, size: int) -> Keys:
    """Return a hash for each of `n` samples, equal for `size` neighbors."""
    return np.random.Philox(key=0).random_raw(-(-n // size))[np.arange(n) // size]


def cuts(sizes: Order, n_parts: int) -> Order:
    """Return where to cut a row of objects into parts of equal bytes, to one object; no part is empty.

    Part `i` has the objects from `cuts[i]` to before `cuts[i + 1]`. Raises ValueError for fewer objects than parts.
    """
    n = len(sizes)
    if n < n_parts:
        raise ValueError(
            f"shuffle='node': {n} objects cannot be divided among {n_parts} nodes; use shuffle=True, or fewer nodes"
        )
    sizes = np.maximum(sizes, 1)
    ends = np.cumsum(sizes, dtype=np.int64)
    # An object belongs to the part that its middle is in.
    bounds = [2 * int(ends[-1]) * i // n_parts for i in range(1, n_parts)]
    ideal = np.concatenate([[0], np.searchsorted(2 * ends - sizes, bounds), [n]])
    places = np.arange(n_parts + 1)
    return places + np.minimum(np.maximum.accumulate(ideal - places), n - n_parts)


@dataclass(frozen=True, eq=False)
class StoredObjects:
    """The objects of a dataset's samples. `keys`: for each sample, a hash of its object.

    `sizes`: for each sample, the bytes of its object; None if an object is as large as it has samples.
    """

    keys: Keys
    sizes: Order | None = None
    _nodes: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict, repr=False)

    @cached_property
    def checksum(self) -> int:
        """A number that differs if the keys or the sizes do."""
        return zlib.crc32(
            b"" if self.sizes is None else self.sizes.tobytes(), zlib.crc32(self.keys.tobytes())
        )

    def nodes(self, n_nodes: int) -> npt.NDArray[np.int32]:
        """Return the node of each sample: objects in the order of their keys, cut into parts of equal bytes."""
        if n_nodes not in self._nodes:
            self._nodes[n_nodes] = self._divided(n_nodes)
        return self._nodes[n_nodes]

    def _divided(self, n_nodes: int) -> npt.NDArray[np.int32]:
        if not len(self.keys):
            return np.empty(0, np.int32)
        _, first, objects, counts = np.unique(
            self.keys, return_index=True, return_inverse=True, return_counts=True
        )
        ends = cuts(counts if self.sizes is None else self.sizes[first], n_nodes)[1:]
        nodes = np.searchsorted(ends, objects, side="right").astype(np.int32)
        n_samples = np.bincount(nodes, minlength=n_nodes)
        if n_samples.max() > UNEVEN * n_samples.min():
            logger.warning(
                "shuffle='node': parts of equal bytes have %d to %d samples; nodes with fewer repeat theirs, or with "
                "drop_last=True the others leave some out",
                n_samples.min(),
                n_samples.max(),
            )
        return nodes


@dataclass(frozen=True)
class NodeOrders:
    """The order of one node's samples in each epoch: its part of the order of all samples, which its ranks share.

    With `pad`, all nodes get as many as that with the most: the others repeat samples from the beginning of their
    order. With `drop_last`, all get as many as that with the fewest. Otherwise each node gets its own ones. `objects` is
    None without node shuffle, which has one node for all.
    """

    epochs: EpochOrders
    objects: StoredObjects | None
    ranks: Ranks
    batch_size: int = 1
    drop_last: bool = False
    pad: bool = True

    @property
    def n(self) -> int:
        """Samples that this node gets in a whole epoch."""
        return self._lengths(self._nodes(self.ranks.n_nodes))[0]

    @property
    def n_positions(self) -> int:
        """Samples that the node with the most gets in a whole epoch."""
        return self._lengths(self._nodes(self.ranks.n_nodes))[1]

    def division(self, n: int) -> RankDivision:
        """Return how the ranks of this node share `n` samples."""
        return RankDivision(n, self.batch_size, self.ranks.n_local, self.drop_last, self.pad)

    def at(self, place: EpochPosition) -> tuple[Order, int]:
        """Return the order of this node's samples in an epoch, and the length of the longest order of all nodes.

        What was read before on other numbers of nodes is left out.
        """
        order = left = self.epochs.order(place.epoch)
        for n_nodes, position in place.earlier:
            left = left[_numbers_within(self._nodes(n_nodes)[left]) >= position]
        nodes = self._nodes(self.ranks.n_nodes)
        n, n_positions = self._lengths(nodes[left])
        own = left[nodes[left] == self.ranks.node][:n]
        padding = np.resize(order[nodes[order] == self.ranks.node], n - len(own))
        return np.concatenate([own, padding]), n_positions

    def _nodes(self, n_nodes: int) -> npt.NDArray[np.int32]:
        return np.zeros(self.epochs.n, np.int32) if self.objects is None else self.objects.nodes(n_nodes)

    def _lengths(self, nodes: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Return how many samples this node gets, and the node with the most, if each of `nodes` is that of a sample."""
        counts = np.bincount(nodes, minlength=self.ranks.n_nodes)
        if self.drop_last:
            return int(counts.min()), int(counts.min())
        return int(counts.max() if self.pad else counts[self.ranks.node]), int(counts.max())


def _numbers_within(groups: npt.NDArray[np.int32]) -> Order:
    """Return for each element how many before it are of the same group."""
    by_group = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    found = np.empty(len(groups), dtype=np.int64)
    found[by_group] = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found
