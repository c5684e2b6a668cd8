"""The specification: dense attention, every logit at once, forward and backward as the textbook writes them."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcp import softmax
from jaxcp.algebra import Block, accumulator
from jaxcp.mask import Mask


@dataclasses.dataclass(frozen=True)
class Reference:
    mask: Mask

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block):
        logits, _ = self._logits(block)
        greatest = logits.max(-1, keepdims=True)
        weights = jnp.where(logits == softmax.FLOOR, 0.0, jnp.exp(logits - greatest))
        total = weights.sum(-1, keepdims=True)
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, greatest + jnp.log(total), softmax.FLOOR)
        out = self._dot("bngts,bsnh->btngh", weights / total, block.v)
        b, t, n, _ = block.q.shape
        return out.reshape(b, t, n, -1), lse.reshape(b, n, t).swapaxes(1, 2)

    def backward(self, block: Block, lse, delta, dout):
        logits, capped = self._logits(block)
        by_head = lambda x: self._groups(x[..., None], block)[..., 0].transpose(0, 2, 3, 1)[..., None]
        q, dout = self._groups(block.q, block), self._groups(dout, block)
        weights = jnp.where(logits == softmax.FLOOR, 0.0, jnp.exp(logits - by_head(lse)))
        dweights = self._dot("btngh,bsnh->bngts", dout, block.v)
        dlogits = weights * (dweights - by_head(delta)) * self.mask.scale
        if capped is not None:
            dlogits *= 1 - capped**2
        dq = self._dot("bngts,bsnh->btngh", dlogits, block.k).reshape(block.q.shape)
        return dq, self._dot("bngts,btngh->bsnh", dlogits, q), self._dot("bngts,btngh->bsnh", weights, dout)

    def _logits(self, block: Block):
        """Logits [b, k, n/k, t, s], FLOOR where invisible; and tanh(logits / soft cap), if there is one."""
        logits = self._dot("btngh,bsnh->bngts", self._groups(block.q, block), block.k) * self.mask.scale
        capped = None
        if self.mask.soft_cap is not None:
            capped = jnp.tanh(logits / self.mask.soft_cap)
            logits = capped * self.mask.soft_cap
        see = self.mask.visible(block.q_tokens, block.kv_tokens)[:, None, None]
        return jnp.where(see, logits, softmax.FLOOR), capped

    def _groups(self, x, block: Block):
        b, t, n, h = x.shape
        return x.reshape(b, t, block.k.shape[2], n // block.k.shape[2], h)

    def _dot(self, spec, x, y):
        dtype = accumulator(y.dtype)
        return jnp.einsum(spec, x.astype(y.dtype), y, preferred_element_type=dtype, precision=jax.lax.Precision.HIGHEST)
