"""`dot_product_attention`: validate once, spread over the mesh, and the library's one custom_vjp."""

import dataclasses
import math
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
from jaxcp.layout import Contiguous, Layout
from jaxcp.mask import Mask, Tokens
from jaxcp.strategies import Strategy


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
    implementation: str | None = None,
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
      strategy: `Ring`, `AllGather`, `Ulysses` or a composition, over the mesh axes that shard the sequence; None: no
        communication.
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
      implementation: the kernel, "reference" or "blockwise"; None: the best there is.
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
    where = _where(query, strategy, partition_spec)
    layout = _layout(layout, strategy, where)
    sides = [
        _side("query", query, query_positions, query_segment_ids),
        _side("key_value", key, key_value_positions, key_value_segment_ids),
    ]
    _check_sides(*sides, same=query.shape[1] == key.shape[1])
    call = _Call(strategy, kernel, layout, where, hinted=query_positions is None and key_value_positions is None)
    if strategy is None or where.manual:
        out, lse = call.on_rows(query, key, value, sinks, *sides)
    else:
        _check_mesh(where, query, key)
        out, lse = _on_mesh(call, query, key, value, sinks, *sides)
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
class _Where:
    """Where the sequence lies."""

    mesh: jax.sharding.AbstractMesh | jax.sharding.Mesh | None  # None: the ambient one
    manual: bool  # already inside a shard_map over the strategy's axes
    explicit: bool  # shardings are part of the types
    spec: P  # of the query: batch, sequence, heads, None
    sizes: tuple[tuple[str, int], ...]  # of the axes that shard the sequence, outermost first
    free: frozenset[str]  # the mesh axes that are not manual yet
    split: tuple[int, int] = (1, 1)  # over how many devices batch and heads are

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def shards(self) -> int:
        return math.prod(self.axes.values())


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static half of a call: hashable, so that calls outside jit are compiled once."""

    strategy: Strategy | None
    kernel: Attention
    layout: Layout
    where: _Where
    hinted: bool  # positions come from the layout

    def on_rows(self, q, k, v, sinks, q_tokens: Tokens, kv_tokens: Tokens):
        """Attention over this device's rows."""
        lengths = tuple(x.shape[1] * self.where.shards for x in (q, k))
        q_tokens, kv_tokens = (self._positioned(x, n) for x, n in zip((q_tokens, kv_tokens), lengths, strict=True))
        attention = self.kernel
        if self.strategy is not None:
            offsets = partial(blocks.ring_offsets, self.kernel.mask, self.layout, lengths, self.where.axes)
            attention = self.strategy.bind(self.kernel, self.where.axes, offsets if self.hinted else lambda axis: None)
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
        rank = lax.axis_index(tuple(self.where.axes))
        return tokens._replace(position=self.layout.positions(rank, length)[None])


@partial(jax.jit, static_argnums=0)
def _on_mesh(call: _Call, query, key, value, sinks, q_tokens: Tokens, kv_tokens: Tokens):
    """Pads what does not divide, and maps `call.on_rows` over the mesh."""
    where, layout = call.where, call.layout
    batch, sequence, heads, _ = where.spec
    length = query.shape[1]

    def padded(tokens: Tokens, length: int) -> Tokens:
        if tokens.segment is None and layout.padded(length) != length:
            tokens = tokens._replace(segment=jnp.zeros((1, length), jnp.int32))
        return Tokens(
            None if tokens.position is None else layout.pad(tokens.position),
            None if tokens.segment is None else layout.pad(tokens.segment, fill=-1),
        )

    tokens = padded(q_tokens, length), padded(kv_tokens, key.shape[1])
    args = (*map(layout.pad, (query, key, value)), sinks, *tokens)
    rows = lambda x: None if x is None else P(batch if x.shape[0] > 1 else None, sequence)
    specs = (where.spec, where.spec, where.spec, None if sinks is None else P(heads), *jax.tree.map(rows, tokens))
    if where.explicit:
        args = jax.tree.map(jax.reshard, args, specs)
    out, lse = jax.shard_map(
        call.on_rows,
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
        window = (window, window) if isinstance(window, int) else tuple(window)
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
    if sinks is not None and sinks.shape != (n,):
        raise ValueError(f"sinks {list(sinks.shape)} must hold one logit for each of the {n} query heads")


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


def _where(query, strategy: Strategy | None, partition_spec: P | None) -> _Where:
    if strategy is None:
        return _Where(None, False, False, P(), (), frozenset())
    ambient = jax.sharding.get_abstract_mesh()
    typed = jax.typeof(query).sharding
    concrete = None if isinstance(query, jax.core.Tracer) else query.sharding
    mesh = ambient if not ambient.empty else getattr(concrete, "mesh", typed.mesh)
    if mesh.empty:
        raise ValueError(
            f"{strategy!r}: no mesh; call under `with jax.set_mesh(mesh):`, or pass arrays that lie on one"
        )
    for axis in strategy.axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{strategy!r}: the mesh has no axis {axis!r}, only {', '.join(map(repr, mesh.axis_names))}"
            )
    manual = frozenset(ambient.manual_axes)
    inside = manual.issuperset(strategy.axes)
    if not inside and not manual.isdisjoint(strategy.axes):
        raise ValueError(
            f"{strategy!r}: inside a shard_map over {', '.join(sorted(manual))} only; make all its axes manual, or none"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = any(kinds[axis] == jax.sharding.AxisType.Explicit for axis in strategy.axes)
    spec = _spec(strategy, partition_spec, typed.spec if explicit else getattr(concrete, "spec", None), explicit)
    batch, sequence, heads, _ = map(_names, spec)
    shards = math.prod(mesh.shape[axis] for axis in strategy.axes)
    if explicit and not sequence and query.shape[1] % shards:
        sequence = strategy.axes  # a type cannot say that 7 rows are sharded over 2
    if set(sequence) != set(strategy.axes):
        raise ValueError(
            f"{strategy!r}: the sequence must be sharded over {' and '.join(strategy.axes)}, and is over "
            f"{' and '.join(sequence) or 'nothing'} ({spec}); reshard the arrays, or pass partition_spec"
        )
    sizes = tuple((axis, mesh.shape[axis]) for axis in sequence)
    return _Where(
        mesh=mesh if ambient.empty else None,
        manual=inside,
        explicit=explicit,
        spec=P(batch or None, sequence, heads or None, None),
        sizes=sizes,
        free=frozenset(mesh.axis_names) - manual,
        split=tuple(math.prod(mesh.shape[axis] for axis in names) for names in (batch, heads)),
    )


def _spec(strategy: Strategy, asked: P | None, found: P | None, explicit: bool) -> tuple:
    """The four entries of the query's partition spec."""
    four = lambda spec: (*spec, None, None, None, None)[:4]
    if asked is not None:
        if len(asked) > 4:
            raise ValueError(f"partition_spec: P(batch, sequence, heads, None), not {asked}")
        if explicit and [*map(_names, four(asked))] != [*map(_names, four(found))]:
            raise ValueError(f"partition_spec {asked} is not the sharding in the query's type, {found}; leave it out")
        return four(asked)
    if found is not None and (explicit or _names(four(found)[1])):
        return four(found)
    return None, strategy.axes, None, None


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _check_mesh(where: _Where, query, key):
    (batch, heads), (n, k) = where.split, (query.shape[2], key.shape[2])
    if query.shape[0] % batch:
        raise ValueError(f"a batch of {query.shape[0]} does not divide over {batch} devices ({where.spec})")
    if n % heads or k % heads:
        raise ValueError(f"{n} query heads and {k} key heads do not both divide over {heads} devices ({where.spec})")


def _layout(layout: Layout | None, strategy: Strategy | None, where: _Where) -> Layout:
    if layout is None:
        return Contiguous(where.shards)
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: Contiguous, Zigzag or Striped, or None for contiguous; not {layout!r}")
    if strategy is not None and layout.shards != where.shards:
        raise ValueError(
            f"{layout!r} deals to {layout.shards} shards, but {strategy!r} spreads the sequence over {where.shards}"
        )
    return layout
