"""The truth: dense attention in float64 and its autodiff, which shares no line with the library.

A `Problem` is the numpy inputs of one call, in the order of the text, and its random cotangents; `solve` gives the
outputs and every gradient.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, K, H]
    value: np.ndarray  # [B, S, K, Hv]
    dout: np.ndarray  # [B, T, N, Hv]
    dlse: np.ndarray  # [B, T, N]
    sinks: np.ndarray | None = None  # [N]
    query_positions: np.ndarray | None = None  # [B, T]
    key_value_positions: np.ndarray | None = None  # [B, S]
    query_segment_ids: np.ndarray | None = None  # [B, T]
    key_value_segment_ids: np.ndarray | None = None  # [B, S]
    is_causal: bool = False
    local_window_size: Any = None
    logits_soft_cap: float | None = None
    scale: float | None = None

    @classmethod
    def random(cls, shape, *, seed: int = 0, keys=None, kv_heads=None, value_dim=None, sinks=False, **options):
        """shape: (B, T, N, H). keys: S. Floats are normal and exactly representable in bfloat16."""
        b, t, n, h = shape
        s, k, hv = keys or t, kv_heads or n, value_dim or h
        rng = np.random.default_rng(seed)
        normal = lambda *dims: np.asarray(jnp.asarray(rng.standard_normal(dims), jnp.bfloat16).astype(jnp.float32))
        arrays = normal(b, t, n, h), normal(b, s, k, h), normal(b, s, k, hv), normal(b, t, n, hv), normal(b, t, n)
        return cls(*arrays, sinks=normal(n) if sinks else None, **options)

    def replace(self, **fields) -> "Problem":
        return dataclasses.replace(self, **fields)

    @property
    def options(self) -> dict:
        """The static keywords of the call."""
        names = "is_causal", "local_window_size", "logits_soft_cap", "scale"
        return {name: getattr(self, name) for name in names}


def solve(problem: Problem, dtype=np.float64) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv and, with sinks, dsinks. In another dtype: the naive dense computation, a yardstick."""
    p = problem
    with jax.enable_x64(True):
        cast = lambda x: None if x is None else jnp.asarray(x, dtype)
        args = [cast(x) for x in (p.query, p.key, p.value, p.sinks)]
        (out, lse), pull = jax.vjp(lambda *args: dense_attention(p, *args), *args)
        gradients = pull((cast(p.dout), cast(p.dlse).astype(lse.dtype)))
        names = "out", "lse", "dq", "dk", "dv", "dsinks"
        found = zip(names, (out, lse, *gradients), strict=True)
        return {name: np.asarray(x, np.float64) for name, x in found if x is not None}


def dense_attention(p: Problem, q, k, v, sinks):
    (b, t, n, h), (_, s, kv_heads, _) = q.shape, k.shape
    repeat = lambda x: jnp.repeat(x, n // kv_heads, axis=2)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scale = h**-0.5 if p.scale is None else p.scale
    logits = jnp.einsum("btnh,bsnh->bnts", q, repeat(k)).astype(wide) * scale
    if p.logits_soft_cap is not None:
        logits = p.logits_soft_cap * jnp.tanh(logits / p.logits_soft_cap)
    see = visible(p)[:, None]
    logits = jnp.where(see, logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(wide)[None, :, None, None], (b, n, t, 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    # a row that sees nothing: logits of 0 in place of -inf keep autodiff finite, and the row is cut out afterwards
    lonely = jnp.all(logits == -jnp.inf, axis=-1, keepdims=True)
    logits = jnp.where(lonely, 0.0, logits)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(lonely, 0.0, jnp.exp(logits - lse[..., None]))[..., :s].astype(q.dtype)
    lse = jnp.where(lonely[..., 0], float(np.finfo(np.float32).min), lse)
    # padding may hold anything: 0 * NaN is NaN
    v = v if p.key_value_segment_ids is None else jnp.where((p.key_value_segment_ids < 0)[..., None, None], 0, v)
    return jnp.einsum("bnts,bsnh->btnh", weights, repeat(v)), lse.swapaxes(1, 2)


def visible(p: Problem) -> np.ndarray:
    """bool [B, T, S], from the definitions."""
    (b, t), s = p.query.shape[:2], p.key.shape[1]
    spread = lambda x, n: np.broadcast_to(np.arange(n) if x is None else x, (b, n)).astype(np.int64)
    distance = spread(p.query_positions, t)[:, :, None] - spread(p.key_value_positions, s)[:, None, :]
    see = np.ones((b, t, s), bool)
    if p.is_causal:
        see &= distance >= 0
    if p.local_window_size is not None:
        left, right = np.broadcast_to(p.local_window_size, 2)
        see &= (distance <= left) & (distance >= -right)
    if p.query_segment_ids is not None:
        mine, theirs = p.query_segment_ids[:, :, None], p.key_value_segment_ids[:, None, :]
        see &= (mine == theirs) & (mine >= 0)
    return see


def errors(found: dict, truth: dict) -> dict[str, float]:
    """The greatest error of each array, relative to the array's largest element."""
    sizes = {}
    for name, right in truth.items():
        got = np.asarray(found[name], np.float64)
        assert got.shape == right.shape, (name, got.shape, right.shape)
        real = right > -1e38  # the floor of lonely rows is compared apart, exactly
        assert np.array_equal(got[~real], right[~real]), name
        assert not np.isnan(got).any(), name
        difference = np.abs(got - right)[real].max(initial=0)
        sizes[name] = difference / np.abs(right[real]).max() if difference else 0.0
    return sizes


def worst(found: dict, truth: dict) -> tuple[float, str]:
    """The greatest of `errors`, and that array's name."""
    return max((error, name) for name, error in errors(found, truth).items())
