"""Where jax is less than documented: what jaxcp/_jax.py rests on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcp import _jax
from tests.common import mesh

ON = dict(a=2, b=2)


def test_varying_axes():
    seen = []

    def look(both, one, none):
        seen.extend(map(_jax.varying_axes, (both, one, none)))
        return both

    specs = P("a", "b"), P("a"), P()
    x = jnp.ones((4, 4))
    jax.eval_shape(jax.shard_map(look, mesh=mesh(**ON), in_specs=specs, out_specs=P("a", "b")), x, x, x)
    assert seen == [{"a", "b"}, {"a"}, set()]
    look(x, x, x)
    assert seen[3:] == [set()] * 3  # outside shard_map
    run = jax.shard_map(look, mesh=mesh(**ON), in_specs=specs, out_specs=P("a", "b"), check_vma=False)
    jax.eval_shape(run, x, x, x)
    assert seen[6:] == [set()] * 3


def test_vary_alike_marks_every_array():
    def look(x, y, z):
        tree = _jax.vary_alike(dict(x=x, y=y, z=(z, None)))
        assert all(_jax.varying_axes(leaf) == {"a", "b"} for leaf in jax.tree.leaves(tree))
        return tree["x"]

    x = jnp.ones((4, 4))
    specs = P(None, "b"), P("a"), P()
    jax.eval_shape(jax.shard_map(look, mesh=mesh(**ON), in_specs=specs, out_specs=P("a", "b")), x, x, x)


def test_vary_alike_outside_is_nothing():
    x, y = jnp.ones(2), jnp.ones(3)
    assert all(same is own for same, own in zip(_jax.vary_alike((x, y, None)), (x, y, None), strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_the_gradient_of_a_replicated_array_is_summed(inside):
    """Marked outside a custom_vjp, whose backward knows only this rank's part."""

    @jax.custom_vjp
    def scale(x, w):
        return x * w

    scale.defvjp(lambda x, w: (x * w, (x, w)), lambda saved, ct: (ct * saved[1], ct * saved[0]))
    x = np.arange(16, dtype=np.float32).reshape(4, 4)

    def loss(x, w):
        return jax.lax.psum(scale(*_jax.vary_alike((x, w))).sum(), ("a", "b"))

    gradient = lambda loss: jax.grad(loss, argnums=1)
    w = np.ones((2, 2), np.float32)  # as large as a rank's x
    spread = lambda f, out: jax.shard_map(f, mesh=mesh(**ON), in_specs=(P("a", "b"), P()), out_specs=out)
    run = spread(gradient(loss), P()) if inside else gradient(spread(loss, P()))
    right = x.reshape(2, 2, 2, 2).sum((0, 2))
    np.testing.assert_array_equal(jax.jit(run)(x, w), right)


def test_peer_to_peer_marks_the_permutes_inside():
    def shift(x):
        turn = [(0, 1), (1, 0)]
        with _jax.peer_to_peer():
            there = jax.lax.ppermute(x, "a", turn)
        return jax.lax.ppermute(jnp.sin(there), "a", turn)

    run = jax.jit(jax.shard_map(shift, mesh=mesh(a=2), in_specs=P("a"), out_specs=P("a")))
    permutes = [line for line in run.lower(jnp.ones(4)).as_text().splitlines() if "collective_permute" in line]
    assert ['_xla_gpu_collective_stream = "p2p"' in line for line in permutes] == [True, False]


def test_in_order_is_a_barrier_on_gpu_and_more_on_cpu():
    """XLA:CPU drops barriers before it schedules; there, and only there, one element is written anew."""
    run = jax.jit(lambda done, x: _jax.in_order(done, x)[1])
    traced = run.trace(jnp.ones(3), jnp.ones(3))
    gpu, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    assert "optimization_barrier" in gpu and "optimization_barrier" in cpu
    assert "dynamic_update_slice" in cpu and "dynamic_update_slice" not in gpu


@pytest.mark.parametrize("value", [0.0, -1.5, jnp.inf, -jnp.inf, jnp.nan])
def test_opaque_zero_is_zero_whatever_it_is_made_of(value):
    x = jnp.full((2, 3), value)
    assert int(jax.jit(_jax.opaque_zero)(x)) == 0
    done, y = jax.jit(_jax.in_order)({"a": x}, [x, jnp.arange(3)])
    np.testing.assert_array_equal(y[0], x)
    np.testing.assert_array_equal(y[1], np.arange(3))
    np.testing.assert_array_equal(done["a"], x)


def test_result_shape_varies_as_what_varies_most():
    def look(both, one):
        shape = _jax.result_shape((3,), jnp.float32, (one, [both]))
        assert shape.shape == (3,) and shape.dtype == jnp.float32
        assert set(shape.manual_axis_type.varying) == {"a", "b"}
        return both

    x = jnp.ones((4, 4))
    jax.eval_shape(jax.shard_map(look, mesh=mesh(**ON), in_specs=(P("a", "b"), P("a")), out_specs=P("a", "b")), x, x)
    assert not _jax.result_shape((3,), jnp.float32, x).manual_axis_type.varying  # outside shard_map
