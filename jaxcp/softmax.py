"""The algebra of partial softmaxes: pure functions of (out, lse), with no masks and no devices in them.

`out` [b, t, n, hv] is normalised by its own `lse` [b, t, n], the natural logarithm of the sum of exp(logits).
"""

import math

import jax.numpy as jnp
import numpy as np

# The lse of a row that sees no key. Finite, so that differences of two such rows are 0 and never NaN.
FLOOR = float(np.finfo(np.float32).min)

LOG2_E = math.log2(math.e)  # exp2, which hardware has, of a logit times this is exp of the logit


def merge(a, b):
    """Attention over the union of two disjoint sets of keys. Associative; `(0, FLOOR)` is the identity."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    greatest = jnp.maximum(lse_a, lse_b)
    weight_a, weight_b = jnp.exp(lse_a - greatest), jnp.exp(lse_b - greatest)
    total = weight_a + weight_b  # in [1, 2]
    out = out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]
    return out, greatest + jnp.log(total)


def absorb_sink(out, lse, sinks):
    """Adds to each row one more key, with logit `sinks` [n] and value zero: it only enlarges the denominator."""
    return merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sinks.astype(lse.dtype), lse.shape)))
