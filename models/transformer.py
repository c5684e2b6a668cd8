"""A Llama-style decoder in flax.nnx. It knows no devices: the attention is an argument of its call."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal, variance_scaling

import jaxcp

# (query [B, S, heads, head_dim], key and value [B, S, kv_heads, head_dim], segment_ids [B, S]) -> as query
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda layer: layer,
    # What attention gave is kept: backward computes the rest of a layer again, and never its ring.
    "attention": partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names("jaxcp_out", "jaxcp_lse"),
        prevent_cse=False,  # scan does
    ),
    "full": partial(jax.checkpoint, prevent_cse=False),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder. Parameters are float32; activations `dtype`."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int = 257  # bytes, and what separates documents
    theta: float = 10_000.0  # RoPE's base
    dtype: str = "float32"
    remat: str = "none"  # one of REMAT


MODELS = {
    "tiny": Config(layers=4, dim=128, heads=4, kv_heads=2, head_dim=32, hidden=384),
    "small": Config(layers=8, dim=384, heads=6, kv_heads=2, head_dim=64, hidden=1024),
    "medium": Config(layers=12, dim=768, heads=12, kv_heads=4, head_dim=64, hidden=2048),
    "large": Config(layers=16, dim=2048, heads=16, kv_heads=4, head_dim=128, hidden=5632, theta=500_000.0),
}


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        make_blocks = nnx.vmap(partial(Block, config))  # every parameter becomes [layers, ...]
        self.embed = nnx.Embed(
            config.vocab, config.dim, dtype=jnp.dtype(config.dtype), embedding_init=normal(1.0), rngs=rngs
        )
        self.blocks = make_blocks(rngs.split(config.layers))
        self.norm = _norm(config, rngs)
        self.head = _linear(config, rngs, config.dim, config.vocab, preferred_element_type=jnp.float32)

    def __call__(self, tokens, positions, segment_ids, *, attend: Attend):
        """Logits, float32 [B, S, vocab], of `tokens` [B, S].

        The rows may be dealt in any order: `positions` [B, S] are what RoPE sees, `attend` knows who sees whom.
        """

        def layer(x, block):
            return block(x, positions, segment_ids, attend), None

        x, _ = jax.lax.scan(REMAT[self.config.remat](layer), self.embed(tokens), self.blocks)
        return self.head(self.norm(x))


class Block(nnx.Module):
    """Attention, then a gated MLP (SwiGLU), each behind a norm and beside a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        into = partial(_linear, config, rngs)
        out_of = partial(into, scale=1 / (2 * config.layers))  # so many outputs add up in the residual (GPT-2)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attention_norm = _norm(config, rngs)
        self.query, self.key, self.value = (into(config.dim, n) for n in (queries, keys, keys))
        self.attention_out = out_of(queries, config.dim)
        self.mlp_norm = _norm(config, rngs)
        self.gate, self.up = into(config.dim, config.hidden), into(config.dim, config.hidden)
        self.down = out_of(config.hidden, config.dim)

    def __call__(self, x, positions, segment_ids, attend: Attend):
        """[B, S, dim] to the same."""
        h = self.attention_norm(x)
        q, k, v = (self._heads(y) for y in (self.query(h), self.key(h), self.value(h)))
        q, k = (jaxcp.apply_rope(y, positions, theta=self.config.theta) for y in (q, k))
        out = attend(q, k, v, segment_ids)
        x = x + self.attention_out(out.reshape(*x.shape[:2], -1))
        h = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.dim, dtype=jnp.dtype(config.dtype), rngs=rngs)


def _linear(config: Config, rngs: nnx.Rngs, into: int, out: int, scale: float = 1.0, **kinds) -> nnx.Linear:
    """Without bias; its outputs begin with `scale` times the variance of its inputs."""
    initial = variance_scaling(scale, "fan_in", "normal")
    return nnx.Linear(into, out, use_bias=False, dtype=jnp.dtype(config.dtype), kernel_init=initial, rngs=rngs, **kinds)


def parameters(config: Config) -> int:
    """How many parameters a decoder has."""
    model = jax.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(model))
