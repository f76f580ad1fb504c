"""Pure: which ranks share a host."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.exchange.plan.transport import Members


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The hosts of a group, as one of its ranks sees them.

    The ranks of different hosts are matched in lanes: the first ranks of all hosts form lane 0, the second
    ones lane 1, and so on. There are as many lanes as the smallest host has ranks.
    """

    #: The ranks of the group and their shards.
    members: Members
    #: `ranks[h]` are the ranks on host h, ascending. Hosts are in the order of their first ranks.
    ranks: tuple[tuple[int, ...], ...]

    @property
    def own_host(self) -> int:
        """The number of this rank's host."""
        return next(h for h, ranks in enumerate(self.ranks) if self.members.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this rank's host."""
        return self.ranks[self.own_host]

    @property
    def local_rank(self) -> int:
        """The position of this rank on its host."""
        return self.local_ranks.index(self.members.rank)

    @property
    def num_lanes(self) -> int:
        """The number of lanes."""
        return min(map(len, self.ranks))

    @property
    def own_lane(self) -> tuple[int, ...]:
        """The ranks of this rank's lane, by host; empty if it is in none."""
        if self.local_rank >= self.num_lanes:
            return ()
        return tuple(ranks[self.local_rank] for ranks in self.ranks)

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """All shards of each host, ascending."""
        return tuple(tuple(sorted(s for r in ranks for s in self.members.shards[r])) for ranks in self.ranks)

    def make_host_members(self) -> Members:
        """Return the hosts as members."""
        return Members(self.own_host, self.shards, self.members.num_shards)

    def make_local_members(self) -> Members:
        """Return this host's ranks as members, with its shards numbered from 0."""
        order = self.shards[self.own_host]
        shards = tuple(tuple(order.index(s) for s in self.members.shards[rank]) for rank in self.local_ranks)
        return Members(self.local_rank, shards, len(order))
