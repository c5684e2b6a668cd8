"""Who may see whom: a static `Mask` over traced `Tokens`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """Who each row is. Travels with the rows that it describes, so that no kernel need know a layout."""

    position: jax.Array | Any  # int32 [b | 1, s], in its document or in the sequence
    segment: jax.Array | None  # int32 [b | 1, s], or None: all in one segment. Negative: padding

    def clear(self, x):
        """`x` [b, s, ...] with zeros in the padding rows: 0 times a NaN that lies in padding would still be NaN."""
        if self.segment is None:
            return x
        padding = self.segment < 0
        return jnp.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), jnp.zeros((), x.dtype), x)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The static half of an attention: what a query may see, and what is done to its logits."""

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None  # (left, right): how many keys on each side, beside the query's own
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many positions (back, ahead) a query sees; None is no limit."""
        back, ahead = self.window or (None, None)
        if self.causal:
            ahead = 0
        return back, ahead

    def visible(self, q: Tokens, kv: Tokens):
        """bool [b, t, s]: may query t see key s?"""
        assert (q.segment is None) == (kv.segment is None), "padding on one side alone would be seen"
        distance = q.position[:, :, None] - kv.position[:, None, :]
        back, ahead = self.reach
        see = jnp.ones(distance.shape, bool)
        if back is not None:
            see &= distance <= back
        if ahead is not None:
            see &= distance >= -ahead
        if q.segment is not None and kv.segment is not None:
            see = see & (q.segment[:, :, None] == kv.segment[:, None, :]) & (q.segment >= 0)[:, :, None]
        return see
