"""`dot_product_attention`: validate once, spread over the mesh, and the library's one custom_vjp."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxcp import blocks, softmax
from jaxcp._jax import vary_alike
from jaxcp.algebra import Attention, Block
from jaxcp.kernels import pick
from jaxcp.layout import Layout
from jaxcp.mask import Mask, Tokens
from jaxcp.strategies import Strategy
from jaxcp.where import Where


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    strategy: Strategy | None,
    layout: Layout | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    partition_spec: P | None = None,
    implementation: str | Callable[[Mask], Attention] | None = None,
    return_residual: bool = False,
):
    r"""Softmax attention, its sequence spread over devices: `jax.nn.dot_product_attention` for long contexts.

    Called on global arrays, under jit or not, it wraps itself in shard_map over the ambient mesh (`jax.set_mesh`), or
    that of the arrays. Called where the strategy's axes are manual already, in a shard_map of yours, it works on the
    local rows. The result is that of one device, in values and in gradients.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H]; N is a multiple of K (grouped-query attention).
      value: [B, S, K, Hv].
      strategy: `Ring`, `AllGather`, `Ulysses` or a composition, over the mesh axes that shard the sequence; None: it is
        not sharded, and nothing is sent.
      layout: how the sequence is dealt to the shards: the positions of the rows, when none are passed. None:
        contiguous.
      is_causal: a query sees no key at a later position.
      local_window_size: (left, right): a query at position p sees keys from p - left to p + right; an int is both.
      logits_soft_cap: logits become cap * tanh(logits / cap).
      scale: of the logits; None: H ** -0.5.
      sinks: [N], a logit for each head that only enlarges the softmax's denominator.
      query_positions, key_value_positions: int32 [T] or [B, T] (S for keys). Masks compare them, and only them.
      query_segment_ids, key_value_segment_ids: int32 [B, T] and [B, S]. Equal ids see each other; negative is padding,
        which sees nothing, is seen by nothing, and may hold anything, even NaN.
      partition_spec: P(batch, sequence, heads, None) of the query, where the mesh's axes are Auto; the key's and the
        value's follow. None: that of a concrete query, else the sequence over the strategy's axes and nothing more.
        Where axes are Explicit, it is read from the types.
      implementation: the kernel, "reference", "blockwise" or "triton" (NVIDIA GPUs from Ampere on); or a function of
        the static `Mask` that makes one of your own (`jaxcp.algebra.Attention`); None: "blockwise".
      return_residual: also return the logarithm of the softmax's denominator, float32 [B, T, N]; differentiable.

    Returns:
      [B, T, N, Hv] in the query's dtype, sharded as the query; with `return_residual` a pair of it and the residual.
      A row that sees no key is 0, its residual the least finite float32, its gradients 0.

    Raises:
      ValueError: a shape, axis, layout or option does not fit; the message names it and the remedy.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    mask = _mask(query, scale, is_causal, local_window_size, logits_soft_cap)
    _check_arrays(query, key, value, sinks)
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ValueError(f"strategy: Ring, AllGather, Ulysses, a composition of them, or None; not {strategy!r}")
    kernel = pick(implementation, mask)
    where = Where.find(query, key, strategy, partition_spec)
    layout = where.check(layout, strategy)
    q_tokens = _side("query", query, query_positions, query_segment_ids)
    kv_tokens = _side("key_value", key, key_value_positions, key_value_segment_ids)
    _check_sides(q_tokens, kv_tokens, same=query.shape[1] == key.shape[1])
    hinted = query_positions is None and key_value_positions is None
    call = _Call(strategy, kernel, mask, layout, where, hinted)
    if where.manual:
        out, lse = _on_rows(call, query, key, value, sinks, q_tokens, kv_tokens)
    else:
        out, lse = _on_mesh(call, query, key, value, sinks, q_tokens, kv_tokens)
    return (out, lse) if return_residual else out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(attention: Attention, q, k, v, sinks, q_tokens: Tokens, kv_tokens: Tokens):
    """(out, lse) of this device's rows. `attention` is bound: a kernel, or strategies with a kernel at the bottom."""
    return _attend_forward(attention, q, k, v, sinks, q_tokens, kv_tokens)[0]


def _attend_forward(attention, q, k, v, sinks, q_tokens, kv_tokens):
    operands = attention.place(Block(q, k, v, q_tokens, kv_tokens))
    out, lse = attention.forward(operands)
    if sinks is not None:
        out, lse = softmax.absorb_sink(out, lse, sinks)
    # Named here, where they are residuals: named outside, a remat policy that keeps them would still run forward twice.
    out, lse = checkpoint_name(out.astype(q.dtype), "jaxcp_out"), checkpoint_name(lse, "jaxcp_lse")
    return (out, lse), (operands, sinks, out, lse, [jnp.zeros_like(x, shape=(0,)) for x in (q, k, v)])


def _attend_backward(attention, residuals, cotangents):
    # Without the barrier XLA merges these transfers with forward's, and keeps every visiting block alive between.
    operands, sinks, out, lse, like = lax.optimization_barrier(residuals)
    dout, dlse = cotangents
    delta = (dout.astype(lse.dtype) * out).sum(-1) - dlse
    gradients = attention.backward(operands, lse, delta, dout)
    dsinks = None if sinks is None else -(jnp.exp(sinks - lse) * delta).sum((0, 1)).astype(sinks.dtype)
    return *(g.astype(x.dtype) for g, x in zip(gradients, like, strict=True)), dsinks, None, None


attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static half of a call: hashable, so that calls outside jit are compiled once."""

    strategy: Strategy | None
    kernel: Attention
    mask: Mask
    layout: Layout
    where: Where
    hinted: bool  # positions come from the layout

    def on_rows(self, q, k, v, sinks, q_tokens: Tokens, kv_tokens: Tokens):
        """Attention over this device's rows."""
        lengths = tuple(x.shape[1] * self.where.shards for x in (q, k))
        q_tokens, kv_tokens = (self._positioned(x, n) for x, n in zip((q_tokens, kv_tokens), lengths, strict=True))
        attention = self.kernel
        if self.strategy is not None:
            offsets: Callable = partial(blocks.ring_offsets, self.mask, self.layout, lengths, self.where.axes)
            if not self.hinted:
                offsets = lambda axis: None
            # a sink scales what comes out: rounded before as well as after, 16-bit gradients would err twice as much
            attention = self.strategy.bind(self.kernel, self.where.axes, offsets, outermost=sinks is None)
        q, k, v = q_tokens.clear(q), kv_tokens.clear(k), kv_tokens.clear(v)
        return attend(attention, *vary_alike((q, k, v, sinks, q_tokens, kv_tokens)))

    def _positioned(self, tokens: Tokens, length: int) -> Tokens:
        if tokens.position is not None:
            return tokens
        if self.strategy is None:
            return tokens._replace(position=jnp.asarray(self.layout.indices(length))[None])
        if length % self.layout.multiple:
            raise ValueError(
                f"{self.layout!r} deals {self.layout.multiple} equal stretches: {length} rows ({self.where.shards} "
                f"shards of {length // self.where.shards}) do not divide; pad the sequence, or pass positions"
            )
        axes = tuple(axis for axis, size in self.where.sizes if size > 1)
        rank = lax.axis_index(axes) if axes else 0
        return tokens._replace(position=self.layout.positions(rank, length)[None])


@partial(jax.jit, static_argnums=0)
def _on_rows(call: _Call, *args):
    """`call.on_rows`, compiled once where there is no jit outside."""
    return call.on_rows(*args)


@partial(jax.jit, static_argnums=0)
def _on_mesh(call: _Call, query, key, value, sinks, q_tokens: Tokens, kv_tokens: Tokens):
    """Pads what does not divide, and maps `call.on_rows` over the mesh."""
    where, layout = call.where, call.layout
    assert where.spec is not None
    batch, sequence, heads, _ = where.spec
    length = query.shape[1]

    uneven = any(layout.padded(x.shape[1]) != x.shape[1] for x in (query, key))

    def padded(tokens: Tokens, length: int) -> Tokens:
        position, segment = tokens
        if segment is None and uneven:
            segment = jnp.zeros((1, length), jnp.int32)
        return Tokens(
            None if position is None else layout.pad(position),
            None if segment is None else layout.pad(segment, fill=-1),
        )

    tokens = padded(q_tokens, length), padded(kv_tokens, key.shape[1])
    args = (*map(layout.pad, (query, key, value)), sinks, *tokens)
    rows = lambda x: None if x is None else P(batch if x.shape[0] > 1 else None, sequence)
    specs = (where.spec, where.spec, where.spec, None if sinks is None else P(heads), *jax.tree.map(rows, tokens))
    if where.explicit:
        args = jax.tree.map(jax.reshard, args, specs)
    on_rows = call.on_rows
    if where.nested:
        # jax names the outer axes too in the specs of what an inner shard_map keeps for backward, and then refuses them
        # (0.10.2 and 0.12.0): keep only what goes in and comes out.
        on_rows = jax.checkpoint(
            on_rows, policy=jax.checkpoint_policies.save_only_these_names("jaxcp_out", "jaxcp_lse")
        )
    out, lse = jax.shard_map(
        on_rows,
        mesh=where.mesh,
        in_specs=specs,
        out_specs=(where.spec, P(batch, sequence, heads)),
        axis_names=where.free,
    )(*args)
    if where.explicit and layout.padded(length) != length:
        out, lse = jax.reshard(out, P(batch, None, heads, None)), jax.reshard(lse, P(batch, None, heads))
    return layout.unpad(out, length), layout.unpad(lse, length)


def _mask(query, scale, is_causal, local_window_size, logits_soft_cap) -> Mask:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, N, H], not {list(query.shape)}")
    window = local_window_size
    if window is not None:
        window = tuple(window) if isinstance(window, tuple | list) else (window, window)
        if len(window) != 2 or not all(isinstance(side, int) and side >= 0 for side in window):
            raise ValueError(f"local_window_size: a number of keys or (left, right), not {local_window_size!r}")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap must be positive, or None for no cap, not {logits_soft_cap!r}")
    return Mask(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=bool(is_causal),
        window=window,
        soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
    )


def _check_arrays(query, key, value, sinks):
    b, _, n, h = query.shape
    fits = key.ndim == value.ndim == 4 and key.shape[0] == b and key.shape[3] == h and key.shape[:3] == value.shape[:3]
    if not fits:
        raise ValueError(
            f"query [B, T, N, H], key [B, S, K, H] and value [B, S, K, Hv] do not fit: "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if n % key.shape[2]:
        raise ValueError(f"{n} query heads do not divide into groups for {key.shape[2]} key heads")
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            f"query, key and value must have one floating dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if sinks is not None and (sinks.shape != (n,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks {sinks.dtype} {list(sinks.shape)} must hold one floating logit for each of the {n} query heads"
        )


def _side(name: str, x, positions, segments) -> Tokens:
    """The tokens of one side, as far as they were passed."""
    batch, length = x.shape[:2]
    if positions is not None:
        if positions.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"{name}_positions {list(positions.shape)} must be [{length}] or [{batch}, {length}], one for each row"
            )
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"{name}_positions must be integers, not {positions.dtype}")
        positions = jnp.asarray(positions, jnp.int32)
        positions = positions[None] if positions.ndim == 1 else positions
    if segments is not None:
        if segments.shape != (batch, length):
            raise ValueError(
                f"{name}_segment_ids {list(segments.shape)} must be [{batch}, {length}], one id for each row of the "
                + ("query" if name == "query" else "key and value")
            )
        if not jnp.issubdtype(segments.dtype, jnp.integer):
            raise ValueError(f"{name}_segment_ids must be integers, not {segments.dtype}")
        segments = jnp.asarray(segments, jnp.int32)
    return Tokens(positions, segments)


def _check_sides(q: Tokens, kv: Tokens, same: bool):
    if (q.segment is None) != (kv.segment is None):
        raise ValueError(
            "query_segment_ids and key_value_segment_ids go together; for self-attention pass the same array twice"
        )
    if same and (q.position is None) != (kv.position is None):
        raise ValueError(
            "query_positions and key_value_positions go together where there are as many keys as queries; for "
            "self-attention pass the same array twice"
        )
