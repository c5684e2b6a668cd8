"""The block map: which blocks of keys a block of queries must visit, and which of those need no masking.

Kernels, the plan, the benchmarks and the pictures all count from here. Everything takes numpy or jax arrays.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcp.layout import Layout
from jaxcp.mask import Mask, Tokens

EMPTY, PARTIAL, FULL = 0, 1, 2


class Extents(NamedTuple):
    """The least and greatest position and segment of each block, its padding rows left out. All [b | 1, blocks]."""

    first: Any
    last: Any
    least: Any
    greatest: Any
    some: Any  # bool: holds a row that is not padding
    whole: Any  # bool: holds no padding


def extents(tokens: Tokens, block: int) -> Extents:
    """Summarises `tokens` [b, s] in blocks of `block` rows; s must be a multiple of it."""

    xp = np if isinstance(tokens.position, np.ndarray) else jnp
    cut = lambda x: x.reshape(x.shape[0], -1, block)
    position = cut(tokens.position)
    if tokens.segment is None:
        zero, true = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
        return Extents(position.min(-1), position.max(-1), zero, zero, true, true)
    segment = cut(tokens.segment)
    real, limits = segment >= 0, np.iinfo(np.int32)
    least = lambda x: xp.where(real, x, limits.max).min(-1)
    greatest = lambda x: xp.where(real, x, limits.min).max(-1)
    return Extents(least(position), greatest(position), least(segment), greatest(segment), real.any(-1), real.all(-1))


def block_map(mask: Mask, q: Extents, kv: Extents):
    """int32 [b | 1, query blocks, key blocks] of EMPTY, PARTIAL, FULL.

    EMPTY is never said of a block with a visible pair, nor FULL of one with an invisible pair. Both are exact where
    positions rise inside a block; elsewhere a block may be called PARTIAL and be masked for nothing.
    """
    q, kv = (Extents(*side) for side in ([x[:, :, None] for x in q], [x[:, None, :] for x in kv]))
    some, every = q.some & kv.some, q.whole & kv.whole  # blocks of padding alone have no bounds: never looked at
    back, ahead = mask.reach
    if back is not None:
        some, every = some & (q.first - kv.last <= back), every & (q.last - kv.first <= back)
    if ahead is not None:
        some, every = some & (kv.first - q.last <= ahead), every & (kv.last - q.first <= ahead)
    some = some & (q.least <= kv.greatest) & (kv.least <= q.greatest)
    every = every & (q.least == kv.greatest) & (q.greatest == kv.least) & some
    xp = np if isinstance(q.first, np.ndarray) else jnp
    kinds = some.astype(np.int32) + every.astype(np.int32)
    return xp.broadcast_to(kinds, (some.shape[0], q.first.shape[1], kv.first.shape[2]))


class Survey(NamedTuple):
    """A call cut into blocks: its tokens, padded to whole blocks, and its block map.

    Padding has the segment -1 among queries and -2 among keys: one comparison says who sees whom.
    """

    q_tokens: Tokens  # [b | 1, rows * block_q]
    kv_tokens: Tokens  # [b | 1, columns * block_k]
    kinds: Any  # int32 [b | 1, rows, columns]


def survey(mask: Mask, q_tokens: Tokens, kv_tokens: Tokens, block_q: int, block_k: int) -> Survey:
    """Cuts queries and keys of any lengths into blocks. Where one side needs padding, both get segments."""
    q_length, kv_length = (
        -(-tokens.position.shape[1] // block) * block for tokens, block in ((q_tokens, block_q), (kv_tokens, block_k))
    )
    if (q_length, kv_length) != (q_tokens.position.shape[1], kv_tokens.position.shape[1]):
        q_tokens, kv_tokens = _padded(q_tokens, q_length), _padded(kv_tokens, kv_length)
    kinds = block_map(mask, extents(q_tokens, block_q), extents(kv_tokens, block_k))
    return Survey(_marked(q_tokens, -1), _marked(kv_tokens, -2), kinds)


def _padded(tokens: Tokens, length: int) -> Tokens:
    """`tokens` with padding rows up to `length`."""
    position, segment = tokens
    if segment is None:
        segment = jnp.zeros_like(position)
    pad = lambda x, **how: jnp.pad(x, ((0, 0), (0, length - x.shape[1])), **how)
    return Tokens(pad(position, mode="edge"), pad(segment, constant_values=-1))


def _marked(tokens: Tokens, padding: int) -> Tokens:
    """`tokens` with one number for the segment of all padding."""
    if tokens.segment is None:
        return tokens
    return tokens._replace(segment=jnp.where(tokens.segment < 0, padding, tokens.segment))


def whole(x, block: int):
    """`x` [b, s, ...] with zeros up to whole blocks of `block` rows."""
    more = -x.shape[1] % block
    return jnp.pad(x, [(0, more if dim == 1 else 0) for dim in range(x.ndim)]) if more else x


class Visits(NamedTuple):
    """For each row of a block map, the columns to visit: first the full, then the partial."""

    order: Any  # int32 [b | 1, rows, columns]; the first `seen` count
    full: Any  # int32 [b | 1, rows]
    seen: Any  # int32 [b | 1, rows]


def visits(kinds) -> Visits:
    """The visiting list of each row of `kinds`; transpose it for that of each column."""
    order = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
    return Visits(order, (kinds == FULL).sum(-1, dtype=jnp.int32), (kinds != EMPTY).sum(-1, dtype=jnp.int32))


def walk(full, seen, body, state):
    """Runs body(nth, state, masked) over a row's visits: first without masking, then with."""
    state = lax.fori_loop(0, full, lambda n, state: body(n, state, False), state)
    return lax.fori_loop(full, seen, lambda n, state: body(n, state, True), state)


def visible_pairs(mask: Mask, q: Tokens, kv: Tokens) -> int:
    """How many (query, key) pairs are visible, counted exactly, in O(s log s) of host time and for any dealing.

    `q` and `kv` hold numpy arrays [1, s] of one sequence.
    """

    def rows(tokens):
        position = np.asarray(tokens.position[0], np.int64)
        segment = np.zeros_like(position) if tokens.segment is None else np.asarray(tokens.segment[0], np.int64)
        return position[segment >= 0], segment[segment >= 0]

    (q_position, q_segment), (position, segment) = rows(q), rows(kv)
    stride = np.int64(2**34)  # farther apart than any two int32 positions and a reach
    keys = np.sort(segment * stride + position)
    back, ahead = (2**32 if side is None else side for side in mask.reach)
    centre = q_segment * stride + q_position
    return int((np.searchsorted(keys, centre + ahead, "right") - np.searchsorted(keys, centre - back, "left")).sum())


def computed_pairs(kinds, block_q: int, block_k: int) -> int:
    """How many pairs a kernel computes that visits every block which is not EMPTY."""
    return int((np.asarray(kinds) != EMPTY).sum()) * block_q * block_k


def flops(pairs: int, heads: int, head_dim: int, value_dim: int | None = None, *, backward: bool = False) -> int:
    """Floating point operations of the matrix products over `pairs` pairs a head.

    Forward is q k and p v; backward is q k again, dout v, p dout, ds k and ds q (Dao, arXiv:2307.08691, section 3.1).
    """
    value_dim = head_dim if value_dim is None else value_dim
    return 2 * pairs * heads * (3 * head_dim + 2 * value_dim if backward else head_dim + value_dim)


def ring_offsets(mask: Mask, layout: Layout, lengths: tuple[int, int], axes: dict[str, int], axis) -> tuple[int, ...]:
    """The offsets along `axis` at which some rank sees some key: all that a ring need visit.

    At offset o rank r holds the keys of rank r - o. `axes` are the sequence's mesh axes and their sizes, outermost
    first; `lengths` the (padded) numbers of queries and of keys. 0 is always among them.
    """
    names = (axis,) if isinstance(axis, str) else axis
    sizes = tuple(axes.values())
    coordinates = [dict(zip(axes, np.unravel_index(rank, sizes), strict=True)) for rank in range(layout.shards)]
    ring = tuple(axes[name] for name in names)
    place = [int(np.ravel_multi_index([at[name] for name in names], ring)) for at in coordinates]
    size = int(np.prod(ring))
    if mask.reach == (None, None):
        return tuple(range(size))
    queries, keys = ([layout.runs(rank, length) for rank in range(layout.shards)] for length in lengths)
    found = {0}
    for rank, q_runs in enumerate(queries):
        for other, kv_runs in enumerate(keys):
            offset = (place[rank] - place[other]) % size
            if offset not in found and any(_touch(mask.reach, q, kv) for q in q_runs for kv in kv_runs):
                found.add(offset)
    return tuple(sorted(found))


def _touch(reach, q, kv) -> bool:
    """Is there a query in run `q` and a key in run `kv` whose distance lies within `reach`?"""
    (q_start, step, q_count), (kv_start, _, kv_count) = q, kv
    if not q_count or not kv_count:
        return False
    # the distances are q_start - kv_start + step * i for every i in [1 - kv_count, q_count)
    least, greatest = q_start - kv_start + step * (1 - kv_count), q_start - kv_start + step * (q_count - 1)
    back, ahead = reach
    low = least if ahead is None else max(least, -ahead)
    low += (least - low) % step  # the first distance at or above
    return low <= (greatest if back is None else min(greatest, back))
