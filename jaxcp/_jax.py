"""Where jax is less than documented: every such use stands here, each with a test in tests/test_jax.py."""

import contextlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def varying_axes(x) -> frozenset[str]:
    """Manual mesh axes over which `x` may differ; empty outside shard_map and under `check_vma=False`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_alike(tree):
    """Marks every array of `tree` as varying over each axis that any of them varies over.

    custom_vjp wants cotangents that vary as their arguments do. Marked first, outside it, the transpose of the mark
    sums the gradient of an array that was replicated.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def mark(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def peer_to_peer() -> contextlib.AbstractContextManager:
    """Puts the permutes issued inside on XLA:GPU's point-to-point stream.

    The attribute is undocumented. The stream is a scheduler resource of its own, with four transfers in flight (a
    ring's k, v, dk, dv) where ordinary collectives have one, so a permute neither waits nor is made synchronous.
    Other backends ignore it.
    """
    return set_xla_metadata(_xla_gpu_collective_stream="p2p")


def in_order(done, x):
    """(done, x), pytrees of arrays, of which `x` is not to be touched before `done` is there."""
    done, x = lax.optimization_barrier((done, x))
    # XLA:CPU drops barriers before it schedules, then starts every transfer of a ring at once and keeps every block
    # alive. There, one element of each array is written anew (in place) with a value that seems to depend on `done`.
    x = lax.platform_dependent(jax.tree.leaves(done)[0], x, cpu=_seem_to_depend, default=lambda _, x: x)
    return done, x


def _seem_to_depend(done, x):
    never = opaque_zero(done) == 1

    def rewrite(x):
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
        return lax.dynamic_update_slice(x, jnp.where(never, jnp.zeros_like(first), first), (0,) * x.ndim)

    return jax.tree.map(rewrite, x)


def opaque_zero(x):
    """int32 0 of which XLA believes that it depends on `x`, whatever x holds."""
    first = lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32)
    return jnp.right_shift(first & 1, 1)


def result_shape(shape, dtype, *arguments) -> jax.ShapeDtypeStruct:
    """The type of a Pallas kernel's result: under shard_map it must say over which axes the result varies."""
    leaves = jax.tree.leaves(arguments)
    kind = max((jax.typeof(x).manual_axis_type for x in leaves), key=lambda kind: len(kind.varying))
    assert kind.varying >= frozenset().union(*map(varying_axes, leaves)), "arguments that vary over different axes"
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
