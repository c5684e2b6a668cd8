"""FlashAttention-2 (arXiv:2307.08691) in Pallas-Triton, for Ampere and newer.

Forward is the paper's algorithm 1. Backward is its algorithm 2 cut in two, so that no atomics sum anything and the
result is the same from run to run: one kernel owns a block of queries and gives dq, another owns a block of keys and
gives dk and dv. Each walks its own list of visits (`jaxcp.blocks`): empty blocks are never loaded, and full ones have a
loop of their own without masking.

Logits are kept in base 2, the scale times log2(e): exp2 is what the hardware has.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxcp import blocks, softmax
from jaxcp._jax import result_shape
from jaxcp.algebra import Block
from jaxcp.mask import Mask, Tokens
from jaxcp.softmax import LOG2_E


@dataclasses.dataclass(frozen=True)
class Triton:
    mask: Mask
    interpret: bool = False  # by Pallas's interpreter, on any device

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block, onto=None):
        cut = _Cut.of(block, _tiling(block).forward)
        q, k, v, survey = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v), cut.survey(self.mask, block)
        (b, t, n, _), hv = q.shape, v.shape[3]
        out, lse = self._call(
            _forward,
            cut.tiles,
            (t // cut.tiles.q, n, b),
            (q, k, v, survey.q_tokens, survey.kv_tokens, blocks.visits(survey.kinds)),
            [(b, t, n, hv), (b, n, t)],
            None if onto is None else (cut.queries(onto[0]), cut.rows(onto[1])),
        )
        t, hv = block.q.shape[1], block.v.shape[3]
        return out[:, :t, :, :hv], lse.swapaxes(1, 2)[:, :t]

    def backward(self, block: Block, lse, delta, dout, onto=None):
        (b, t, n, h), (_, s, kv_heads, hv) = block.q.shape, block.v.shape
        dout = dout.astype(block.q.dtype)

        def arguments(cut: _Cut):
            q, k, v, do = cut.queries(block.q), cut.keys(block.k), cut.keys(block.v), cut.queries(dout)
            survey = cut.survey(self.mask, block)
            return (q, k, v, do, cut.rows(lse), cut.rows(delta), survey.q_tokens, survey.kv_tokens), survey.kinds

        cut = _Cut.of(block, _tiling(block).dq)
        args, kinds = arguments(cut)
        q, k, v = args[:3]
        grid = q.shape[1] // cut.tiles.q, n, b
        running = None if onto is None else (cut.queries(onto[0]),)
        [dq] = self._call(_dq, cut.tiles, grid, (*args, blocks.visits(kinds)), [q.shape], running)

        cut = _Cut.of(block, _tiling(block).dkv)
        args, kinds = arguments(cut)
        q, k, v = args[:3]
        grid = k.shape[1] // cut.tiles.k, kv_heads, b
        running = None if onto is None else tuple(map(cut.keys, onto[1:]))
        visits = blocks.visits(kinds.swapaxes(1, 2))
        dk, dv = self._call(_dkv, cut.tiles, grid, (*args, visits), [k.shape, v.shape], running)
        return dq[:, :t, :, :h], dk[:, :s, :, :h], dv[:, :s, :, :hv]

    def _call(self, kernel, tiles: "Tiles", grid, arguments, shapes, onto):
        """Runs `kernel` over `grid`. Its arguments and results are whole arrays: it reads where it is from the grid.
        `onto` are results so far, in whose place the new ones are written."""
        oversize = [shape for shape in (*(x.shape for x in jax.tree.leaves(arguments)), *shapes) if _outgrows(shape)]
        if oversize:
            raise ValueError(
                f'implementation="triton": an array of {list(oversize[0])} on one device; Pallas-Triton addresses '
                f"{2**31} elements: shard the heads or the batch too, or use another implementation"
            )
        return pl.pallas_call(
            functools.partial(kernel, self.mask, tiles),
            grid=grid,
            out_shape=[result_shape(shape, jnp.float32, arguments) for shape in shapes],
            input_output_aliases={} if onto is None else {n: n for n in range(len(shapes))},
            compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
            interpret=self.interpret,
            name=f"jaxcp_triton{kernel.__name__}",
        )(onto, *arguments)


class Tiles(NamedTuple):
    q: int  # rows of queries
    k: int  # rows of keys
    warps: int
    stages: int  # of the pipeline that loads what is visited


def _forward(mask: Mask, tiles: Tiles, onto, q_ref, k_ref, v_ref, q_tokens, kv_tokens, visits, out_ref, lse_ref):
    i, head, batch = map(pl.program_id, range(3))
    if mask.reach[1] == 0:  # the last rows see most: the longest go first, lest the end wait for them
        i = pl.num_programs(0) - 1 - i
    rows = pl.ds(i * tiles.q, tiles.q)
    kv_head = lax.div(head, q_ref.shape[2] // k_ref.shape[2])
    q, q_tokens = q_ref[batch, rows, head, :], _read(q_tokens, batch, rows)

    def add(j, state, masked):
        greatest, total, out = state
        columns = pl.ds(j * tiles.k, tiles.k)
        logits, _ = _logits(mask, q, k_ref[batch, columns, kv_head, :])
        if masked:
            see = _visible(mask, q_tokens, _read(kv_tokens, batch, columns))
            logits = jnp.where(see, logits, softmax.FLOOR)
        risen = jnp.maximum(greatest, logits.max(1))
        weights = jnp.exp2(logits - risen[:, None])
        if masked:
            weights = jnp.where(see, weights, 0.0)  # a row that has seen nothing yet: exp2(FLOOR - FLOOR) is 1
        shrink = jnp.exp2(greatest - risen)
        out = out * shrink[:, None] + _dot(weights, v_ref[batch, columns, kv_head, :])
        return risen, total * shrink + weights.sum(1), out

    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    start = jnp.full(tiles.q, softmax.FLOOR, jnp.float32), zeros(tiles.q), zeros((tiles.q, v_ref.shape[3]))
    greatest, total, out = _visit(visits, batch, i, add, start)
    if onto is not None:  # the running softmax is one more part
        running, lse = onto[0][batch, rows, head, :], onto[1][batch, head, rows]
        risen = jnp.maximum(greatest, jnp.maximum(lse * LOG2_E, softmax.FLOOR))
        weight = jnp.where(lse > softmax.FLOOR, jnp.exp2(lse * LOG2_E - risen), 0.0)
        shrink = jnp.exp2(greatest - risen)
        greatest, total, out = risen, total * shrink + weight, out * shrink[:, None] + running * weight[:, None]
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out_ref[batch, rows, head, :] = out / total[:, None]
    lse_ref[batch, head, rows] = jnp.where(seen, greatest * math.log(2) + jnp.log(total), softmax.FLOOR)


def _dq(
    mask: Mask, tiles: Tiles, onto, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, q_tokens, kv_tokens, visits,
    dq_ref,
):  # fmt: skip
    i, head, batch = map(pl.program_id, range(3))
    if mask.reach[1] == 0:
        i = pl.num_programs(0) - 1 - i
    rows = pl.ds(i * tiles.q, tiles.q)
    kv_head = lax.div(head, q_ref.shape[2] // k_ref.shape[2])
    q, dout, q_tokens = q_ref[batch, rows, head, :], dout_ref[batch, rows, head, :], _read(q_tokens, batch, rows)
    lse, delta = (ref[batch, head, rows][:, None] for ref in (lse_ref, delta_ref))

    def add(j, dq, masked):
        columns = pl.ds(j * tiles.k, tiles.k)
        k, v = (ref[batch, columns, kv_head, :] for ref in (k_ref, v_ref))
        see = _visible(mask, q_tokens, _read(kv_tokens, batch, columns)) if masked else None
        _, dlogits = _weights(mask, q, k, dout, v, lse, delta, see)
        return dq + _dot(dlogits, k)

    dq = _visit(visits, batch, i, add, jnp.zeros(q.shape, jnp.float32))
    dq = dq * mask.scale
    dq_ref[batch, rows, head, :] = dq if onto is None else onto[0][batch, rows, head, :] + dq


def _dkv(
    mask: Mask, tiles: Tiles, onto, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, q_tokens, kv_tokens, visits,
    dk_ref, dv_ref,
):  # fmt: skip
    """Logits lie transposed here, [keys, queries]: so they are the left operand of both products that they enter."""
    j, kv_head, batch = map(pl.program_id, range(3))
    columns = pl.ds(j * tiles.k, tiles.k)
    k, v = (ref[batch, columns, kv_head, :] for ref in (k_ref, v_ref))
    kv_tokens = _read(kv_tokens, batch, columns)
    group = q_ref.shape[2] // k_ref.shape[2]

    def add_head(nth, sums):
        head = kv_head * group + nth

        def add(i, sums, masked):
            dk, dv = sums
            rows = pl.ds(i * tiles.q, tiles.q)
            q, dout = q_ref[batch, rows, head, :], dout_ref[batch, rows, head, :]
            lse, delta = (ref[batch, head, rows][None, :] for ref in (lse_ref, delta_ref))
            see = _visible(mask, _read(q_tokens, batch, rows), kv_tokens, transposed=True) if masked else None
            weights, dlogits = _weights(mask, k, q, v, dout, lse, delta, see)
            return dk + _dot(dlogits, q), dv + _dot(weights, dout)

        return _visit(visits, batch, j, add, sums)

    dk, dv = lax.fori_loop(0, group, add_head, tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v)))
    dk = dk * mask.scale
    if onto is not None:
        dk, dv = (ref[batch, columns, kv_head, :] + x for ref, x in zip(onto, (dk, dv), strict=True))
    dk_ref[batch, columns, kv_head, :] = dk
    dv_ref[batch, columns, kv_head, :] = dv


def _weights(mask: Mask, x, y, dx, dy, lse, delta, see):
    """The softmax's weights of logits x y, and the gradient of the logits less the scale."""
    logits, slope = _logits(mask, x, y)
    weights = jnp.exp2(logits - lse * LOG2_E)
    if see is not None:
        weights = jnp.where(see, weights, 0.0)  # first: a row that sees nothing has exp2(-FLOOR), infinity
    return weights, weights * (_dot(dx, dy.T) - delta) * slope


def _logits(mask: Mask, x, y):
    """x y in base 2, capped; and the slope of the cap."""
    product = _dot(x, y.T)
    if mask.soft_cap is None:
        return product * (mask.scale * LOG2_E), 1.0
    ratio = jnp.tanh(product * (mask.scale / mask.soft_cap))
    return ratio * (mask.soft_cap * LOG2_E), 1 - ratio * ratio


def _visible(mask: Mask, q: Tokens, kv: Tokens, transposed: bool = False):
    """`mask.visible` of one block of queries and one of keys, their padding marked by `blocks.survey`."""
    row, column = (slice(None), None), (None, slice(None))
    mine, theirs = (column, row) if transposed else (row, column)
    distance = q.position[mine] - kv.position[theirs]
    back, ahead = mask.reach
    conditions = []
    if back is not None:
        conditions.append(distance <= back)
    if ahead is not None:
        conditions.append(distance >= -ahead)
    if q.segment is not None and kv.segment is not None:
        conditions.append(q.segment[mine] == kv.segment[theirs])
    return functools.reduce(jnp.logical_and, conditions, jnp.full(distance.shape, True))


def _visit(visits: blocks.Visits, batch, row, body, state):
    """Runs body(column, state, masked) over the columns that a row is to visit."""
    who = batch if visits.full.shape[0] > 1 else 0
    step = lambda n, state, masked: body(visits.order[who, row, n], state, masked)
    return blocks.walk(visits.full[who, row], visits.seen[who, row], step, state)


def _read(tokens: Tokens, batch, rows) -> Tokens:
    return jax.tree.map(lambda ref: ref[batch if ref.shape[0] > 1 else 0, rows], tokens)


def _dot(x, y):
    """x y in float32; x is rounded to y's dtype. float32 arguments are multiplied as such, not as TF32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return plt.dot(x.astype(y.dtype), y, precision=precision)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Pads rows to whole tiles, and head sizes to what Triton's products take: powers of two, 16 at least."""

    tiles: Tiles

    @classmethod
    def of(cls, block: Block, tiles: Tiles) -> "_Cut":
        fit = lambda tile, length: min(tile, max(16, _power_of_two(length)))
        return cls(tiles._replace(q=fit(tiles.q, block.q.shape[1]), k=fit(tiles.k, block.k.shape[1])))

    def queries(self, x):
        return _pad(x, self.tiles.q)

    def keys(self, x):
        return _pad(x, self.tiles.k)

    def rows(self, x):
        """[b, t, n], a number for each query, as [b, n, t]: an instance reads those of one head."""
        return blocks.whole(x, self.tiles.q).swapaxes(1, 2)

    def survey(self, mask: Mask, block: Block) -> blocks.Survey:
        return blocks.survey(mask, block.q_tokens, block.kv_tokens, self.tiles.q, self.tiles.k)


def _pad(x, tile: int):
    more = max(16, _power_of_two(x.shape[3])) - x.shape[3]
    return blocks.whole(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) if more else x, tile)


def _outgrows(shape) -> bool:
    return math.prod(shape) >= 2**31


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _tiling(block: Block) -> "_Tiling":
    """Tiles whose registers ptxas does not spill (jax 0.12.0.1, H100, bfloat16): asserted in tests/gpu for head sizes
    64 and 128. Those for larger heads are small enough for an A100's shared memory."""
    if block.q.dtype == jnp.float32:  # multiplied without tensor cores
        return _Tiling(*3 * [Tiles(32, 32, 4, 1)])
    widest = max(block.q.shape[3], block.v.shape[3])
    if widest > 128:
        return _Tiling(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2))
    return _Tiling(Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 128 if widest <= 64 else 64, 8, 2))


class _Tiling(NamedTuple):
    forward: Tiles
    dq: Tiles
    dkv: Tiles
