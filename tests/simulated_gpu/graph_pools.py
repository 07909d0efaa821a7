"""Memory pools of CUDA graphs, as torch's caching allocator keeps them with expandable segments."""

import itertools
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GraphPools:
    """The pools of one machine.

    Attributes:
        graphs: Number of graphs alive, by pool.
    """

    graphs: Counter[Any] = field(default_factory=Counter)
    _number: Any = field(default_factory=lambda: itertools.count(1))

    def handle(self) -> tuple[int, int]:
        """Return a pool that no graph has used yet."""
        return 0, next(self._number)

    def begin(self, graph: Any, pool: Any) -> None:
        """Let a graph allocate in a pool; raise what torch raises if its last graph is gone."""
        if pool is None:
            return
        if pool in self.graphs and not self.graphs[pool]:
            raise RuntimeError(
                'it->second->use_count > 0 INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"'
            )
        self.graphs[pool] += 1
        weakref.finalize(graph, self._gone, pool)

    def _gone(self, pool: Any) -> None:
        self.graphs[pool] -= 1
