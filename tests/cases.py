"""The grid: strategy x layout x mask x heads x dtype x shards.

`GRID` is the whole of it, less what is the same program twice: an axis of one device is no axis, so that with one
shard all strategies are one, and with two or three the compositions are their parts (tests/test_cases.py has that).
"""

import itertools
import random
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcp import AllGather, Contiguous, Ring, Striped, Ulysses, Zigzag
from tests.oracle import Problem

STRATEGIES = {
    "ring": Ring("a"),
    "all_gather": AllGather("a"),
    "ulysses": Ulysses("a"),
    "ulysses(ring)": Ulysses("a", Ring("b")),
    "ulysses(all_gather)": Ulysses("a", AllGather("b")),
    "all_gather(ring)": AllGather("a", Ring("b")),
    "ring(ring)": Ring("a", Ring("b")),
    "ring(ulysses)": Ring("a", Ulysses("b")),
}
LAYOUTS = {"contiguous": Contiguous, "zigzag": Zigzag, "striped": Striped}
# query heads, key heads, head size, value size: few that divide anything
HEADS = {"mha": (4, 4, 16, 16), "gqa": (6, 2, 16, 24), "odd": (9, 3, 8, 8)}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 4)},
    "packed": {"is_causal": True},
    "cross": {"is_causal": True, "keys": 72},
    "uneven": {"is_causal": True, "logits_soft_cap": 2.0, "sinks": True, "scale": 0.7},
}


class Case(NamedTuple):
    strategy: str
    layout: str
    mask: str
    heads: str
    dtype: str
    shards: int

    def __str__(self):
        return "-".join(map(str, self)).replace(" ", "_")

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: 4 is 2 x 2 and 8 is 2 x 4 where the strategy has two axes."""
        if len(STRATEGIES[self.strategy].axes) == 1:
            return {"a": self.shards}
        return {"a": 2, "b": self.shards // 2}

    @property
    def call(self) -> tuple:
        """(strategy, layout)."""
        return STRATEGIES[self.strategy], LAYOUTS[self.layout](self.shards)

    def problem(self, draw: int = 0) -> Problem:
        n, k, h, hv = HEADS[self.heads]
        length = 43 if self.mask == "uneven" else 48
        options = {"kv_heads": k, "value_dim": hv} | MASKS[self.mask]
        if self.mask == "packed":
            ids = packed_ids(2, length)
            options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
        if self.mask == "cross":  # the queries are the last of the keys
            where = np.arange(72 - 48, 72)[None]
            options |= {"query_positions": where, "key_value_positions": np.arange(72)[None]}
        return Problem.random((2, length, n, h), seed=(hash(self) + draw) % 2**31, **options)

    def __hash__(self):  # the same from run to run, as str's is not
        return int.from_bytes(str(self).encode(), "big") % (2**61 - 1)


def packed_ids(batch: int, length: int) -> np.ndarray:
    """Documents of many lengths, others in each row, and padding at the end of the first."""
    cuts = [np.cumsum([5, 1, 17, 2, 11]) + row for row in range(batch)]
    ids = np.stack([np.searchsorted(cut, np.arange(length), "right") for cut in cuts]).astype(np.int32)
    ids[0, -4:] = -1
    return ids


def _same_as_another(case: Case) -> bool:
    if case.shards == 1:
        return case.strategy != "ring"
    return case.shards < 4 and len(STRATEGIES[case.strategy].axes) == 2


GRID = [
    case
    for case in itertools.starmap(Case, itertools.product(STRATEGIES, LAYOUTS, MASKS, HEADS, DTYPES, (1, 2, 3, 4, 8)))
    if not _same_as_another(case)
]


def sample(count: int, seed: int) -> list[Case]:
    """`count` cases of the grid, the same each time."""
    return random.Random(seed).sample(GRID, count)
