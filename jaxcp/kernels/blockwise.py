"""Memory-efficient attention in plain XLA: online softmax over tiles, for any device, fast on CPU.

The forward is FlashAttention-2's (arXiv:2307.08691, algorithm 1), the backward its algorithm 2. A tile holds `block`
queries of every head that shares a key head, so that no key is repeated. Each row of tiles walks its own list of
visits (`jaxcp.blocks`): empty tiles are never touched and full ones never masked, whatever the positions and segments.

What makes it fast on CPU (measured on 2 Zen 4 cores; GF/s per core, float32 peak 117):
- tiles are contiguous in memory, [heads, rows, head size]: the [rows, heads, head size] form costs 40%;
- XLA's fast matrix product wants the contracted dim last on the left. In float32 the backward sums dV and dK
  transposed (82 GF/s; 48 as the textbook writes it); in bfloat16 it transposes the logits (119; 55).
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcp import blocks, softmax
from jaxcp.algebra import Block, accumulator
from jaxcp.mask import Mask, Tokens


@dataclasses.dataclass(frozen=True)
class Blockwise:
    mask: Mask
    block: int = 256  # rows of a tile, at most

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block):
        cut = _Cut.of(block, self.block)
        q, k, v = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v)
        q_tokens, kv_tokens, kinds = self._survey(block, cut)
        visits = blocks.visits(kinds)

        def head(args):
            index, q, k, v = args
            who = index // cut.chunks if kinds.shape[0] > 1 else 0  # the row of the batch

            def row(i):
                visit = self._visit(visits, who, i)
                q_tile, mine = q[i], _tile(q_tokens, who, i)
                accumulate = partial(self._add_tile, q_tile, mine)
                state = (
                    jnp.full_like(q_tile, softmax.FLOOR, cut.dtype, shape=q_tile.shape[:-1]),
                    jnp.zeros_like(q_tile, cut.dtype, shape=q_tile.shape[:-1]),
                    jnp.zeros_like(q_tile, cut.dtype, shape=(*q_tile.shape[:-1], v.shape[-1])),
                )
                key = lambda j: (k[j], v[j], _tile(kv_tokens, who, j))
                state = visit(lambda j, state, masked: accumulate(*key(j), state, masked), state)
                return _normalised(*state)

            return lax.map(row, jnp.arange(cut.rows))

        out, lse = lax.map(head, (jnp.arange(q.shape[0]), q, k, v))
        return cut.from_queries(out), cut.from_queries(lse[..., None])[..., 0]

    def backward(self, block: Block, lse, delta, dout):
        cut = _Cut.of(block, self.block)
        dtype = block.q.dtype
        q, k, v = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v)
        dout = cut.queries(dout.astype(dtype))
        lse, delta = (cut.queries(x.astype(cut.dtype)[..., None])[..., 0] for x in (lse, delta))
        q_tokens, kv_tokens, kinds = self._survey(block, cut)
        visits = blocks.visits(kinds.swapaxes(1, 2))

        def head(args):
            index, q, k, v, lse, delta, dout = args
            who = index // cut.chunks if kinds.shape[0] > 1 else 0

            def column(dq, j):
                visit = self._visit(visits, who, j)
                keys = k[j], v[j], _tile(kv_tokens, who, j)

                def add(i, state, masked):
                    dq, dk, dv = state
                    queries = q[i], lse[i], delta[i], dout[i], _tile(q_tokens, who, i)
                    dq_tile, dk_tile, dv_tile = self._tile_gradients(*queries, *keys, masked)
                    dq = lax.dynamic_update_index_in_dim(dq, dq[i] + dq_tile, i, 0)
                    return dq, dk + dk_tile, dv + dv_tile

                turned = lambda x: jnp.zeros_like(
                    x, cut.dtype, shape=_turn(x).shape if dtype != jnp.bfloat16 else x.shape
                )
                dq, dk, dv = visit(add, (dq, turned(keys[0]), turned(keys[1])))
                return dq, (dk, dv) if dtype == jnp.bfloat16 else (_turn(dk), _turn(dv))

            dq, (dk, dv) = lax.scan(column, jnp.zeros_like(q, cut.dtype), jnp.arange(cut.columns))
            return dq, dk, dv

        dq, dk, dv = lax.map(head, (jnp.arange(q.shape[0]), q, k, v, lse, delta, dout))
        scale = self.mask.scale
        return cut.from_queries(dq) * scale, cut.from_keys(dk) * scale, cut.from_keys(dv)

    def _survey(self, block: Block, cut: "_Cut"):
        """The tokens of each tile, and the block map."""
        q_tokens, kv_tokens = (
            _padded(block.q_tokens, cut.rows * cut.block_q),
            _padded(block.kv_tokens, cut.columns * cut.block_k),
        )
        kinds = blocks.block_map(
            self.mask, blocks.extents(q_tokens, cut.block_q), blocks.extents(kv_tokens, cut.block_k)
        )
        split = lambda tokens, size: jax.tree.map(
            lambda x: jnp.broadcast_to(x, (kinds.shape[0], x.shape[1])).reshape(kinds.shape[0], -1, size), tokens
        )
        return split(q_tokens, cut.block_q), split(kv_tokens, cut.block_k), kinds

    def _visit(self, visits: blocks.Visits, who, row):
        order, full, seen = (x[who, row] for x in visits)

        def visit(body, state):
            state = lax.fori_loop(0, full, lambda n, state: body(order[n], state, False), state)
            return lax.fori_loop(full, seen, lambda n, state: body(order[n], state, True), state)

        return visit

    def _add_tile(self, q, q_tokens, k, v, kv_tokens, state, masked):
        """One step of the online softmax: `state` is the greatest logit, the sum, and the sum of values."""
        greatest, total, out = state
        logits, _ = self._cap(_dot("cmh,ckh->cmk", q, k) * self.mask.scale)
        if masked:
            see = self._visible(q_tokens, kv_tokens, q.shape[1])
            logits = jnp.where(see, logits, softmax.FLOOR)
        risen = jnp.maximum(greatest, logits.max(-1))
        weights = jnp.exp(logits - risen[..., None])
        if masked:
            weights = jnp.where(see, weights, 0.0)  # a row that has seen nothing yet: exp(FLOOR - FLOOR) is 1
        shrink = jnp.exp(greatest - risen)
        total = total * shrink + weights.sum(-1)
        return risen, total, out * shrink[..., None] + _dot("cmk,ckh->cmh", weights.astype(v.dtype), v)

    def _tile_gradients(self, q, lse, delta, dout, q_tokens, k, v, kv_tokens, masked):
        """(dq, dk, dv) of one tile, less the scale of dq and dk; in float32 dk and dv are transposed."""
        if q.dtype == jnp.bfloat16:
            return self._tile_gradients_transposed(q, lse, delta, dout, q_tokens, k, v, kv_tokens, masked)
        logits, slope = self._cap(_dot("cmh,ckh->cmk", q, k) * self.mask.scale)
        weights = jnp.exp(logits - lse[..., None])
        if masked:
            weights = jnp.where(self._visible(q_tokens, kv_tokens, q.shape[1]), weights, 0.0)
        dlogits = weights * (_dot("cmh,ckh->cmk", dout, v) - delta[..., None]) * slope
        weights, dlogits = weights.astype(v.dtype), dlogits.astype(q.dtype)
        dq = _dot("cmk,ckh->cmh", dlogits, k)
        return dq, _dot("cmh,cmk->chk", q, dlogits), _dot("cmh,cmk->chk", dout, weights)

    def _tile_gradients_transposed(self, q, lse, delta, dout, q_tokens, k, v, kv_tokens, masked):
        logits, slope = self._cap(_dot("ckh,cmh->ckm", k, q) * self.mask.scale)
        weights = jnp.exp(logits - lse[:, None])
        if masked:
            weights = jnp.where(_turn(self._visible(q_tokens, kv_tokens, q.shape[1])), weights, 0.0)
        dlogits = weights * (_dot("ckh,cmh->ckm", v, dout) - delta[:, None]) * slope
        weights, dlogits = weights.astype(v.dtype), dlogits.astype(q.dtype)
        dq = _turn(_dot("ckh,ckm->chm", k, dlogits))
        return dq, _dot("ckm,cmh->ckh", dlogits, q), _dot("ckm,cmh->ckh", weights, dout)

    def _cap(self, logits):
        """The soft-capped logits, and the slope of the cap."""
        if self.mask.soft_cap is None:
            return logits, 1.0
        ratio = jnp.tanh(logits / self.mask.soft_cap)
        return ratio * self.mask.soft_cap, 1 - ratio**2

    def _visible(self, q_tokens: Tokens, kv_tokens: Tokens, rows: int):
        """bool [1, rows, block_k]; the heads of a tile repeat its queries."""
        see = self.mask.visible(*(jax.tree.map(lambda x: x[None], tokens) for tokens in (q_tokens, kv_tokens)))
        return jnp.tile(see, (1, rows // see.shape[1], 1))


class _Cut(NamedTuple):
    """How [b, t, n, h] falls into tiles [b * chunks, rows, heads, queries a tile, h] and back."""

    batch: int
    chunks: int  # groups of key heads, each a turn of the outer loop
    heads: int  # key heads a turn
    group: int  # query heads a key head
    block_q: int
    block_k: int
    lengths: tuple[int, int]
    dtype: jnp.dtype  # of sums

    rows = property(lambda self: -(-self.lengths[0] // self.block_q))
    columns = property(lambda self: -(-self.lengths[1] // self.block_k))

    @classmethod
    def of(cls, block: Block, limit: int) -> "_Cut":
        b, t, n, _ = block.q.shape
        s, kv_heads = block.k.shape[1:3]
        group = n // kv_heads
        heads = 1
        fit = lambda length, limit: -(-length // -(-length // limit))  # the fewest tiles, then the smallest
        return cls(
            batch=b,
            chunks=kv_heads // heads,
            heads=heads,
            group=group,
            block_q=fit(t, max(limit // group, 64)),
            block_k=fit(s, limit),
            lengths=(t, s),
            dtype=accumulator(block.q.dtype),
        )

    def queries(self, x):
        x = _pad_rows(x, self.rows * self.block_q)
        x = x.reshape(self.batch, self.rows, self.block_q, self.chunks, self.heads, self.group, -1)
        x = x.transpose(0, 3, 1, 4, 5, 2, 6)
        return x.reshape(self.batch * self.chunks, self.rows, self.heads, self.group * self.block_q, -1)

    def from_queries(self, x):
        x = x.reshape(self.batch, self.chunks, self.rows, self.heads, self.group, self.block_q, -1)
        x = x.transpose(0, 2, 5, 1, 3, 4, 6)
        x = x.reshape(self.batch, self.rows * self.block_q, self.chunks * self.heads * self.group, -1)
        return x[:, : self.lengths[0]]

    def keys(self, x):
        x = _pad_rows(x, self.columns * self.block_k)
        x = x.reshape(self.batch, self.columns, self.block_k, self.chunks, self.heads, -1)
        x = x.transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(self.batch * self.chunks, self.columns, self.heads, self.block_k, -1)

    def from_keys(self, x):
        x = x.reshape(self.batch, self.chunks, self.columns, self.heads, self.block_k, -1)
        x = x.transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(self.batch, self.columns * self.block_k, self.chunks * self.heads, -1)[:, : self.lengths[1]]


def _normalised(greatest, total, out):
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return out / total[..., None], jnp.where(seen, greatest + jnp.log(total), softmax.FLOOR)


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=accumulator(x.dtype))


def _turn(x):
    return jnp.swapaxes(x, -1, -2)


def _tile(tokens: Tokens, who, i) -> Tokens:
    return jax.tree.map(lambda x: x[who, i], tokens)


def _pad_rows(x, length: int):
    return x if x.shape[1] == length else jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def _padded(tokens: Tokens, length: int) -> Tokens:
    """`tokens` with padding rows up to `length`."""
    more = length - tokens.position.shape[1]
    if not more:
        return tokens
    segment = jnp.zeros_like(tokens.position) if tokens.segment is None else tokens.segment
    pad = lambda x, **how: jnp.pad(x, ((0, 0), (0, more)), **how)
    return Tokens(pad(tokens.position, mode="edge"), pad(segment, constant_values=-1))
