"""What every attention is: three functions over the rows that one device holds.

    place(block)                          -> operands      what backward will want: the residual
    forward(operands)                     -> out, lse
    backward(operands, lse, delta, dout)  -> dq, dk, dv    lse and delta are of the whole softmax

Leaves are kernels; a strategy takes an attention and gives one, spread over one more mesh axis. `out`, `lse` and the
gradients are in `accumulator(q.dtype)`, so that partial results can be merged and summed without loss.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxcp.mask import Tokens

Operands = Any


class Block(NamedTuple):
    """Queries, and the keys and values that they are to see."""

    q: jax.Array  # [b, t, n, h]
    k: jax.Array  # [b, s, k, h]
    v: jax.Array  # [b, s, k, hv]
    q_tokens: Tokens  # [b | 1, t]
    kv_tokens: Tokens  # [b | 1, s]

    @property
    def kv(self):
        """What visits, travels and is gathered together."""
        return self.k, self.v, self.kv_tokens

    def see(self, kv) -> "Block":
        """The same queries before other keys and values."""
        k, v, tokens = kv
        return self._replace(k=k, v=v, kv_tokens=tokens)


class Attention(Protocol):
    """A kernel, or a bound strategy."""

    def place(self, block: Block) -> Operands: ...

    def forward(self, operands: Operands) -> tuple[jax.Array, jax.Array]: ...

    def backward(
        self, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def accumulator(dtype) -> jnp.dtype:
    """The dtype in which sums of `dtype` are kept: float32, or float64 where the arguments are."""
    return jnp.promote_types(dtype, jnp.float32)
