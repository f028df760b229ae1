"""How many samples each part measures: at full scale, for which figures are asked, and at a small one of seconds."""

from __future__ import annotations

from dataclasses import dataclass

from ....pipeline.conversion.plan import shard_count
from ..state.sizes import ROW_BYTES

SNAPSHOTS = 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A run on pairs with six fields a row, and its dataset."""

    rows: int = 10**7
    with_pandas: bool = True
    rounds: int = 3
    """Each contender's turns."""
    most_seconds: float | None = 60
    """Asked of a report; None where nothing is."""

    @property
    def shards(self) -> int:
        """As many as a conversion of so many samples makes."""
        return shard_count(self.rows, None)

    @property
    def shard_rows(self) -> int:
        return -(-self.rows // self.shards)

    @property
    def samples(self) -> int:
        """`rows`, rounded up to whole shards."""
        return self.shards * self.shard_rows

    @property
    def memory_bytes(self) -> int:
        """While the run is made, or of pandas."""
        return self.samples * max(2 * ROW_BYTES, 250 * self.with_pandas)

    @property
    def disk_bytes(self) -> int:
        """All snapshots, the state exported, and the one shard that is converted."""
        return self.samples * (SNAPSHOTS * ROW_BYTES + 45 * self.with_pandas) + self.shard_rows * 2000


FULL = {
    "beside_pandas": Sizes(),
    "alone": Sizes(rows=10**8, with_pandas=False, rounds=1, most_seconds=None),
}
SMALL = {
    "beside_pandas": Sizes(rows=4_000, rounds=1),
    "alone": Sizes(rows=4_000, with_pandas=False, rounds=1, most_seconds=None),
}
