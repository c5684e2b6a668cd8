"""Memory-efficient attention in plain XLA: online softmax over tiles, for any device, fast on CPU.

The forward is FlashAttention-2's (arXiv:2307.08691, algorithm 1), the backward its algorithm 2. A tile holds `block`
queries of every head that shares a key head, so that no key is repeated. Each row of tiles walks its own list of
visits (`jaxcp.blocks`): empty tiles are never touched and full ones never masked, whatever the positions and segments.

What makes it fast on CPU (measured on 2 Zen 4 cores; GF/s per core, float32 peak 117):
- tiles are contiguous in memory, [rows, head size] of one key head: the [rows, heads, head size] form costs 40%;
- 128 by 128 tiles stay in the near caches: a third faster than 256 by 256;
- XLA's fast matrix product wants the contracted dim last on the left. In float32 the backward sums dV and dK
  transposed (82 GF/s; 48 as the textbook writes it); in bfloat16 it transposes the logits (119; 55).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcp import blocks, softmax
from jaxcp._jax import opaque_zero
from jaxcp.algebra import Block, accumulator
from jaxcp.mask import Mask, Tokens


@dataclasses.dataclass(frozen=True)
class Blockwise:
    mask: Mask
    block: int = 128  # rows of a tile, at most

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block):
        cut = _Cut.of(block, self.block)
        q, k, v = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v)
        survey = self._survey(block, cut)
        visits = blocks.visits(survey.kinds)

        def tile(n):
            head, i = n // cut.rows, n % cut.rows
            who = survey.who(head // cut.kv_heads)
            queries = q[n], _tile(survey.q_tokens, who, i)
            empty = lambda fill, *more: jnp.full_like(q, fill, cut.dtype, shape=(q.shape[1], *more))

            def add(j, state, masked):
                m = head * cut.columns + j
                return self._add_tile(*queries, k[m], v[m], _tile(survey.kv_tokens, who, j), state, masked)

            return _normalised(*_visit(visits, who, i, add, (empty(softmax.FLOOR), empty(0), empty(0, v.shape[-1]))))

        # XLA:CPU would make buffers of constants at the program's start, those of every step of a ring
        zero = opaque_zero(k).astype(cut.dtype)
        store = lambda n, results: jax.tree.map(lambda all, x: _put(all, x, n), results, tile(n))
        results = jnp.broadcast_to(zero, (*q.shape[:2], v.shape[-1])), jnp.broadcast_to(zero, q.shape[:2])
        out, lse = lax.fori_loop(0, q.shape[0], store, results)
        return cut.from_queries(out), cut.from_queries(lse[..., None])[..., 0]

    def backward(self, block: Block, lse, delta, dout):
        cut = _Cut.of(block, self.block)
        q, k, v = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v)
        dout = cut.queries(dout.astype(block.q.dtype))
        lse, delta = (cut.queries(x.astype(cut.dtype)[..., None])[..., 0] for x in (lse, delta))
        survey = self._survey(block, cut)
        visits = blocks.visits(survey.kinds.swapaxes(1, 2))
        transposed = block.q.dtype == jnp.bfloat16
        gradients = self._gradients_transposed if transposed else self._gradients

        def column(m, sums):
            head, j = m // cut.columns, m % cut.columns
            who = survey.who(head // cut.kv_heads)
            keys = k[m], v[m], _tile(survey.kv_tokens, who, j)

            def add(i, sums, masked):
                dq, dk, dv = sums
                n = head * cut.rows + i
                queries = q[n], lse[n], delta[n], dout[n], _tile(survey.q_tokens, who, i)
                dq_tile, dk_tile, dv_tile = gradients(*queries, *keys, masked)
                return _put(dq, dq[n] + dq_tile, n), dk + dk_tile, dv + dv_tile

            dq, dk, dv = sums
            turn_keys = (lambda x: x) if transposed else _turn  # each form sums dk and dv in the shape it makes them
            none = [turn_keys(jnp.zeros_like(x, cut.dtype)) for x in keys[:2]]
            dq, *dkv = _visit(visits, who, j, add, (dq, *none))
            return dq, *(_put(all, turn_keys(x), m) for all, x in zip((dk, dv), dkv, strict=True))

        zero = opaque_zero(k).astype(cut.dtype)
        dq, dk, dv = lax.fori_loop(0, k.shape[0], column, tuple(jnp.broadcast_to(zero, x.shape) for x in (q, k, v)))
        scale = self.mask.scale
        return cut.from_queries(dq) * scale, cut.from_keys(dk) * scale, cut.from_keys(dv)

    def _survey(self, block: Block, cut: "_Cut") -> "_Survey":
        q_tokens, kv_tokens, kinds = blocks.survey(self.mask, block.q_tokens, block.kv_tokens, cut.block_q, cut.block_k)
        batch = kinds.shape[0]
        split = lambda x, size: jnp.broadcast_to(x, (batch, x.shape[1])).reshape(batch, -1, size)
        return _Survey(
            jax.tree.map(lambda x: split(x, cut.block_q), q_tokens),
            jax.tree.map(lambda x: split(x, cut.block_k), kv_tokens),
            kinds,
        )

    def _add_tile(self, q, q_tokens, k, v, kv_tokens, state, masked):
        """One step of the online softmax: `state` is the greatest logit, the sum, and the sum of values."""
        greatest, total, out = state
        logits, _ = self._cap(_dot("mh,kh->mk", q, k) * self.mask.scale)
        if masked:
            see = self._visible(q_tokens, kv_tokens, q.shape[0])
            logits = jnp.where(see, logits, softmax.FLOOR)
        risen = jnp.maximum(greatest, logits.max(-1))
        weights = jnp.exp(logits - risen[..., None])
        if masked:
            weights = jnp.where(see, weights, 0.0)  # a row that has seen nothing yet: exp(FLOOR - FLOOR) is 1
        shrink = jnp.exp(greatest - risen)
        total = total * shrink + weights.sum(-1)
        return risen, total, out * shrink[..., None] + _dot("mk,kh->mh", weights.astype(v.dtype), v)

    def _gradients(self, q, lse, delta, dout, q_tokens, k, v, kv_tokens, masked):
        """dq, dk and dv of one tile, less the scale of dq and dk; dk and dv transposed."""
        logits, slope = self._cap(_dot("mh,kh->mk", q, k) * self.mask.scale)
        weights = jnp.exp(logits - lse[..., None])
        if masked:
            weights = jnp.where(self._visible(q_tokens, kv_tokens, q.shape[0]), weights, 0.0)
        dlogits = weights * (_dot("mh,kh->mk", dout, v) - delta[..., None]) * slope
        weights, dlogits = weights.astype(v.dtype), dlogits.astype(q.dtype)
        dq = _dot("mk,kh->mh", dlogits, k)
        return dq, _dot("mh,mk->hk", q, dlogits), _dot("mh,mk->hk", dout, weights)

    def _gradients_transposed(self, q, lse, delta, dout, q_tokens, k, v, kv_tokens, masked):
        """The same by way of transposed logits; dk and dv upright."""
        logits, slope = self._cap(_dot("kh,mh->km", k, q) * self.mask.scale)
        weights = jnp.exp(logits - lse)
        if masked:
            weights = jnp.where(_turn(self._visible(q_tokens, kv_tokens, q.shape[0])), weights, 0.0)
        dlogits = weights * (_dot("kh,mh->km", v, dout) - delta) * slope
        weights, dlogits = weights.astype(v.dtype), dlogits.astype(q.dtype)
        dq = _turn(_dot("kh,km->hm", k, dlogits))
        return dq, _dot("km,mh->kh", dlogits, q), _dot("km,mh->kh", weights, dout)

    def _cap(self, logits):
        """The soft-capped logits, and the slope of the cap."""
        if self.mask.soft_cap is None:
            return logits, 1.0
        ratio = jnp.tanh(logits / self.mask.soft_cap)
        return ratio * self.mask.soft_cap, 1 - ratio**2

    def _visible(self, q_tokens: Tokens, kv_tokens: Tokens, rows: int):
        """bool [rows, block_k]; the heads of a tile repeat its queries."""
        see = self.mask.visible(*(jax.tree.map(lambda x: x[None], tokens) for tokens in (q_tokens, kv_tokens)))[0]
        return jnp.tile(see, (rows // see.shape[0], 1))


class _Survey(NamedTuple):
    q_tokens: Tokens  # [b | 1, rows, block_q]
    kv_tokens: Tokens  # [b | 1, columns, block_k]
    kinds: jax.Array  # the block map [b | 1, rows, columns]

    def who(self, batch):
        """The row of the survey for one of the batch."""
        return batch if self.kinds.shape[0] > 1 else 0


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How [b, t, n, h] falls into tiles [b * key heads * rows, queries a tile, h] and back.

    A tile of queries holds those of every head that shares a key head.
    """

    batch: int
    kv_heads: int
    group: int  # query heads a key head
    block_q: int
    block_k: int
    lengths: tuple[int, int]
    dtype: jnp.dtype  # of sums

    @property
    def rows(self) -> int:
        return -(-self.lengths[0] // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.lengths[1] // self.block_k)

    @classmethod
    def of(cls, block: Block, limit: int) -> "_Cut":
        b, t, n, _ = block.q.shape
        s, kv_heads = block.k.shape[1:3]
        limit = max(limit, -(-max(t, s) // 1024))  # the map has a number for each tile: at most 1024 by 1024
        fit = lambda length, limit: -(-length // -(-length // limit))  # the fewest tiles, then the smallest
        group = n // kv_heads
        return cls(
            b, kv_heads, group, fit(t, max(limit // group, 64)), fit(s, limit), (t, s), accumulator(block.q.dtype)
        )

    def queries(self, x):
        x = blocks.whole(x, self.block_q)
        x = x.reshape(self.batch, self.rows, self.block_q, self.kv_heads, self.group, -1)
        x = x.transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(self.batch * self.kv_heads * self.rows, self.group * self.block_q, -1)

    def from_queries(self, x):
        x = x.reshape(self.batch, self.kv_heads, self.rows, self.group, self.block_q, -1)
        x = x.transpose(0, 2, 4, 1, 3, 5)
        x = x.reshape(self.batch, self.rows * self.block_q, self.kv_heads * self.group, -1)
        return x[:, : self.lengths[0]]

    def keys(self, x):
        x = blocks.whole(x, self.block_k)
        x = x.reshape(self.batch, self.columns, self.block_k, self.kv_heads, -1)
        return x.transpose(0, 3, 1, 2, 4).reshape(self.batch * self.kv_heads * self.columns, self.block_k, -1)

    def from_keys(self, x):
        x = x.reshape(self.batch, self.kv_heads, self.columns, self.block_k, -1)
        x = x.transpose(0, 2, 3, 1, 4)
        return x.reshape(self.batch, self.columns * self.block_k, self.kv_heads, -1)[:, : self.lengths[1]]


def _visit(visits: blocks.Visits, who, row, body, state):
    """Runs body(column, state, masked) over the columns that a row is to visit."""
    order, full, seen = (x[who, row] for x in visits)
    return blocks.walk(full, seen, lambda n, state, masked: body(order[n], state, masked), state)


def _put(all, x, n):
    return lax.dynamic_update_index_in_dim(all, x, n, 0)


def _normalised(greatest, total, out):
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return out / total[..., None], jnp.where(seen, greatest + jnp.log(total), softmax.FLOOR)


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=accumulator(x.dtype))


def _turn(x):
    return x.T


def _tile(tokens: Tokens, who, i) -> Tokens:
    return jax.tree.map(lambda x: x[who, i], tokens)
