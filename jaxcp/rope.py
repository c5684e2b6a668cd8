"""Rotary position embedding, exact at any position."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def apply_rope(x, positions, *, theta: float = 10_000.0, scaling: Callable[[np.ndarray], np.ndarray] | None = None):
    """Rotates pairs (i, i + H/2) of each head by an angle that grows with the position (RoFormer, arXiv:2104.09864).

    The angle is counted in 2**-32 of a turn with integers that wrap, so that position 2_000_000_000 is as exact as
    position 0; float32 would round the position itself from 2**24 on, and bfloat16 from 257 on.

    Args:
      x: [B, T, N, H], H even.
      positions: integers [B, T] or [T], in the order of x's rows (dealt, where x is).
      theta: the base: pair i turns by theta ** (-2 i / H) radians a position.
      scaling: maps those H/2 angles (float64, radians a position) to others, e.g. `lambda angles: angles / 4`.

    Returns:
      An array like `x`, computed in float32.

    Raises:
      ValueError: H is odd, or positions fit neither [B, T] nor [T].
    """
    if x.ndim != 4:
        raise ValueError(f"apply_rope: x must be [B, T, N, H], not {list(x.shape)}")
    batch, length, _, dim = x.shape
    if dim % 2:
        raise ValueError(f"apply_rope rotates pairs: the head size must be even, not {dim}")
    if positions.shape not in ((batch, length), (1, length), (length,)):
        raise ValueError(f"apply_rope: positions {list(positions.shape)} must be [{batch}, {length}] or [{length}]")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"apply_rope: positions must be integers, not {positions.dtype}")
    angles = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is not None:
        angles = np.asarray(scaling(angles), np.float64)
    angle = _angle(jnp.asarray(positions, jnp.int32), angles)[..., None, :]  # [B | -, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _angle(positions: jax.Array, angles: np.ndarray) -> jax.Array:
    """positions * angles modulo a turn, float32 in [-pi, pi], within 4e-7 of the exact product."""
    turns = np.mod(angles / (2 * np.pi), 1.0) * 2.0**32  # a position's, in 2**-32 of a turn
    units = np.floor(turns)
    rest = (turns - units).astype(np.float32)
    whole = positions.astype(jnp.uint32)[..., None] * units.astype(np.uint32)  # wraps at a turn
    part = jnp.round(positions.astype(jnp.float32)[..., None] * rest).astype(jnp.int32)
    turned = lambda n: jax.lax.bitcast_convert_type(n, jnp.int32)
    return turned(whole + part.astype(jnp.uint32)).astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
