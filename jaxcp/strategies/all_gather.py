"""All-gather context parallelism (Llama 3, arXiv:2407.21783, section 3.3.2)."""

import dataclasses

import jax
from jax import lax

from jaxcp.algebra import Block
from jaxcp.strategies.base import Strategy


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Strategy):
    """Queries stay; the (few) key-value heads are gathered whole, and again for backward.

    Bytes per rank: 2k (P - 1) forward; backward as many, and one reduce-scatter of dK and dV.
    """

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block):
        return self.inner.forward(self._gathered(block))

    def backward(self, block: Block, lse, delta, dout):
        dq, *dkv = self.inner.backward(self._gathered(block), lse, delta, dout)
        scatter_sum = lambda x: lax.psum_scatter(x, self.axis, scatter_dimension=1, tiled=True)
        return dq, *map(scatter_sum, dkv)

    def _gathered(self, block: Block):
        gather = lambda x: lax.all_gather(x, self.axis, axis=1, tiled=True)
        return self.inner.place(block.see(jax.tree.map(gather, block.kv)))
