"""Ring Attention (Liu et al., arXiv:2310.01889)."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from jaxcp import softmax
from jaxcp._jax import in_order, peer_to_peer
from jaxcp.algebra import Block
from jaxcp.strategies.base import Strategy


@dataclasses.dataclass(frozen=True, repr=False)
class Ring(Strategy):
    """Queries stay; blocks of keys and values visit every rank, each transfer hidden behind a block's attention.

    Bytes per rank: (P - 1) 2k forward, (P - 1) 2k (1 + a) backward, with k those of the local keys and a = 2 where
    float32 gradients of 16-bit arguments travel.
    """

    offsets: tuple[int, ...] | None = None  # the visited ones; None: all

    def settled(self, offsets, outermost):
        return dict(offsets=offsets(self.axis)) if self.offsets is None else {}

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block):
        kv, state = block.kv, None
        for offset, following in self._steps():
            if state is not None:
                state, kv = in_order(state, kv)  # or XLA issues every transfer at the start
            if following is not None:
                coming = self._send(kv, following - offset)
            part = self.inner.forward(self.inner.place(block.see(kv)))
            state = part if state is None else softmax.merge(state, part)
            if following is not None:
                kv = coming
        return state

    def backward(self, block: Block, lse, delta, dout):
        """The gradient of a block travels with it, one step behind; its owner adds its own term last, so that the sum
        starts one rank later and needs no hop more."""
        kv, travelling, dq, own, behind = block.kv, None, None, [None, None], 0
        for offset, following in self._steps():
            if offset:
                (dq, own, travelling), kv = in_order((dq, own, travelling), kv)
            if following is not None:
                coming = self._send(kv, following - offset)
            if travelling is not None:
                travelling = self._send(travelling, offset - behind)
            part, *dkv = self.inner.backward(self.inner.place(block.see(kv)), lse, delta, dout)
            dq = part if dq is None else dq + part
            if not offset:
                own = dkv
            else:
                travelling = dkv if travelling is None else jax.tree.map(jnp.add, travelling, dkv)
            behind = offset
            if following is not None:
                kv = coming
        if travelling is not None:
            own = jax.tree.map(jnp.add, own, self._send(travelling, -behind))
        return dq, *own

    def _steps(self):
        """Pairs (offset, the next one or None): at offset o rank r holds the keys of rank r - o. The first is 0."""
        offsets = range(lax.axis_size(self.axis)) if self.offsets is None else self.offsets
        assert offsets[0] == 0, offsets
        return itertools.pairwise((*offsets, None))

    def _send(self, x, hops: int):
        n = lax.axis_size(self.axis)
        with peer_to_peer():
            return lax.ppermute(x, self.axis, [(i, (i + hops) % n) for i in range(n)])
