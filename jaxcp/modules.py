"""The attention of flax modules: one argument turns `MultiHeadAttention` context-parallel."""

import inspect

import jax
import jax.numpy as jnp

from jaxcp.attention import dot_product_attention

_OPTIONS = frozenset(
    name for name, p in inspect.signature(dot_product_attention).parameters.items() if p.kind == p.KEYWORD_ONLY
) - {"return_residual"}


def attention_fn(**options):
    """`dot_product_attention` as flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention call it.

        nnx.MultiHeadAttention(..., attention_fn=jaxcp.attention_fn(strategy=jaxcp.Ring("context"), is_causal=True))

    Args:
      **options: the keywords of `dot_product_attention`, `strategy` among them; not `return_residual`.

    Returns:
      A function of (query, key, value) and the keywords that flax passes. It refuses what context parallelism cannot
      honour: dense masks and biases, dropout, sowing the weights, einsum and precision overrides.

    Raises:
      TypeError: an option is unknown, or `strategy` is missing.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown or "strategy" not in options:
        raise TypeError(
            f"attention_fn() got an unexpected option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}"
            if unknown
            else "attention_fn() needs strategy=; None is one device"
        )

    # flax.linen passes only those of its keywords that are named here, so a mask not named would be lost in silence.
    def attend(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        del broadcast_dropout, dropout_rng  # without dropout they say nothing
        if mask is not None or bias is not None:
            raise ValueError(
                "jaxcp.attention_fn takes no dense mask or bias, which would be [T, S]; say it as is_causal, "
                "local_window_size or segment ids in attention_fn(...), and call the module without a mask"
            )
        if dropout_rate and not deterministic:
            raise ValueError("jaxcp.attention_fn has no attention dropout; set dropout_rate=0 or deterministic=True")
        if module is not None:
            raise ValueError(
                "jaxcp.attention_fn never holds the attention weights; call the module without sow_weights"
            )
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError("jaxcp.attention_fn has matrix products of its own; leave the einsum overrides out")
        if precision not in (None, jax.lax.Precision.DEFAULT):
            raise ValueError("jaxcp.attention_fn sums in float32 always; leave precision out")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        chosen = options | dict(is_causal=is_causal or options.get("is_causal", False))
        return dot_product_attention(query, key, value, **chosen)

    return attend
