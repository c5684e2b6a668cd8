"""DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509), for any number of heads."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcp.algebra import Block
from jaxcp.strategies.base import Strategy


@dataclasses.dataclass(frozen=True, repr=False)
class Ulysses(Strategy):
    """An exchange trades a shard of the sequence for a shard of the heads; another trades back.

    Bytes per rank: 2q + 2k forward and as many backward, times (P - 1) / P on the wire. Where the heads do not divide,
    the least number of key heads is replicated, and query heads are padded (see `Heads`).
    """

    only_moves = True
    narrow: bool = False  # send results in the arguments' dtype: nobody sums them

    def settled(self, offsets, outermost):
        return dict(narrow=outermost)

    def place(self, block: Block) -> "Placed":
        q, k, v, q_tokens, kv_tokens = block
        heads = Heads(q.shape[2], k.shape[2], lax.axis_size(self.axis))
        q, k, v = map(self._to_heads, (heads.pad(q), heads.replicate(k), heads.replicate(v)))
        tokens = jax.tree.map(lambda x: lax.all_gather(x, self.axis, axis=1, tiled=True), (q_tokens, kv_tokens))
        return Placed(heads, jnp.dtype(q.dtype), self.inner.place(Block(q, k, v, *tokens)))

    def forward(self, placed: "Placed"):
        out, lse = self.inner.forward(placed.operands)
        if self.narrow:
            out = out.astype(placed.dtype)
        return tuple(placed.heads.cut(self._to_sequence(x)) for x in (out, lse))

    def backward(self, placed: "Placed", lse, delta, dout):
        heads = placed.heads
        rows = self._to_heads(heads.pad(jnp.stack((lse, delta), axis=-1)))
        dout = self._to_heads(heads.pad(dout))
        dq, dk, dv = self.inner.backward(placed.operands, rows[..., 0], rows[..., 1], dout)
        if self.narrow:
            dq = dq.astype(placed.dtype)
            if not heads.replicates:
                dk, dv = dk.astype(placed.dtype), dv.astype(placed.dtype)
        dq, dk, dv = map(self._to_sequence, (dq, dk, dv))
        return heads.cut(dq), heads.sum_replicas(dk), heads.sum_replicas(dv)

    def _to_heads(self, x):
        return lax.all_to_all(x, self.axis, split_axis=2, concat_axis=1, tiled=True)

    def _to_sequence(self, x):
        return lax.all_to_all(x, self.axis, split_axis=1, concat_axis=2, tiled=True)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which rank gets which heads. Each needs as many, in the same groups, though nothing need divide.

    `queries` heads are padded to a multiple of `degree`. A rank's queries fall into runs that share one key head, all
    of length gcd(heads a rank, heads a group); each run is sent its key head.
    """

    queries: int
    keys: int
    degree: int

    @property
    def padded(self) -> int:
        return -(-self.queries // self.degree) * self.degree

    @property
    def sources(self) -> np.ndarray:
        """int [degree * key heads a rank]: the key head that is sent to each place."""
        group = self.queries // self.keys
        run = math.gcd(self.padded // self.degree, group)
        return np.minimum(
            np.arange(0, self.padded, run) // group, self.keys - 1
        )  # padding takes the last: its dout is 0

    @property
    def replicates(self) -> bool:
        return len(self.sources) != self.keys

    def pad(self, x):
        """[b, t, n, ...] with zero heads up to a multiple of the degree."""
        more = self.padded - self.queries
        return jnp.pad(x, [(0, more if d == 2 else 0) for d in range(x.ndim)]) if more else x

    def cut(self, x):
        return x[:, :, : self.queries] if self.padded != self.queries else x

    def replicate(self, x):
        return x[:, :, self.sources] if self.replicates else x

    def sum_replicas(self, x):
        if not self.replicates:
            return x
        return jnp.stack([x[:, :, self.sources == head].sum(2) for head in range(self.keys)], axis=2)


@partial(jax.tree_util.register_dataclass, data_fields=["operands"], meta_fields=["heads", "dtype"])
@dataclasses.dataclass(frozen=True)
class Placed:
    heads: Heads
    dtype: jnp.dtype  # of the arguments
    operands: Any  # of the inner attention
