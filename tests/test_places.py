"""One function, two places: on global arrays, wherever their mesh is said; and inside the user's own shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import AllGather, Contiguous, Ring, Striped, Ulysses, Zigzag
from tests import hlo
from tests.common import arrays, attend, mesh, program
from tests.oracle import Problem, dense_attention, solve, worst

PROBLEM = Problem.random((2, 16, 4, 8), is_causal=True, sinks=True)
TRUTH = solve(PROBLEM)
STRATEGIES = Ring("c"), AllGather("c"), Ulysses("c")
over_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


def exact(found, truth=TRUTH):
    error, name = worst(found, truth)
    assert error <= 1e-5, (error, name)


def lies(x, on, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(on, P(*spec)), x.ndim)


def gradients(attention, problem=PROBLEM):
    """What `solve` gives, of `attention(q, k, v, sinks) -> out, lse`; a function of arrays(problem)."""

    def run(q, k, v, sinks, dout, dlse):
        (out, lse), pull = jax.vjp(attention, q, k, v, sinks)
        return dict(out=out, lse=lse) | dict(zip(("dq", "dk", "dv", "dsinks"), pull((dout, dlse)), strict=True))

    return run


def placed(on, *spec, problem=PROBLEM):
    """arrays(problem), each but the sinks sharded by `spec`: batch, sequence, heads."""
    spec = (*spec, None, None)[:4]
    shard = lambda x: x if x is None or x.ndim == 1 else jax.device_put(x, NamedSharding(on, P(*spec[: x.ndim])))
    return [*map(shard, arrays(problem))]


@over_strategies
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_arrays_say_the_mesh(strategy, jit):
    on = mesh(c=4)
    found = jit(program(PROBLEM, strategy))(*placed(on, None, "c"))
    exact(found)
    assert lies(found["out"], on, None, "c") and lies(found["lse"], on, None, "c")


def test_arrays_say_batch_and_heads_too():
    """Outside jit a concrete query's sharding is its spec: batch and heads stay where they are."""
    on = mesh(data=2, tensor=2, c=2)
    run = lambda *args: jaxcp.dot_product_attention(*args, strategy=Ring("c"), is_causal=True)
    q, k, v, *_ = placed(on, "data", "c", "tensor")
    out = run(q, k, v)
    assert lies(out, on, "data", "c", "tensor")
    exact(dict(out=out), dict(out=solve(PROBLEM.replace(sinks=None))["out"]))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_ambient_mesh(jit):
    on = mesh(c=4)
    with jax.set_mesh(on):
        found = jit(program(PROBLEM, Ring("c")))(*arrays(PROBLEM))  # arrays that lie on one device
    exact(found)
    assert lies(found["out"], on, None, "c") and lies(found["dk"], on, None, "c")


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("strategy", [Ring("c"), Ulysses("c")], ids=repr)
def test_batch_over_data_and_heads_over_tensor(strategy, kv_heads):
    on, spec = mesh(data=2, tensor=2, c=2), P("data", "c", "tensor", None)
    problem = Problem.random((2, 16, 8, 8), kv_heads=kv_heads, is_causal=True, sinks=True)
    with jax.set_mesh(on):
        found = jax.jit(program(problem, strategy, spec=spec))(*placed(on, *spec, problem=problem))
    exact(found, solve(problem))
    assert all(lies(found[name], on, *spec) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("layout, segments", [(None, False), (Zigzag(4), True)], ids=repr)
def test_explicit_types_say_the_specs(layout, segments):
    on = mesh(explicit=True, data=2, c=4)
    ids = np.repeat([[0, 1, 2], [0, 0, 1]], [3, 5, 8], axis=1)
    problem = PROBLEM.replace(query_segment_ids=ids, key_value_segment_ids=ids) if segments else PROBLEM
    with jax.set_mesh(on):
        query, *_ = args = placed(on, "data", "c")
        found = jax.jit(program(problem, Ring("c"), layout))(*args)
    exact(found, solve(problem))
    assert all(lies(found[name], on, "data", "c") for name in ("out", "dq", "dk", "dv"))
    assert jax.typeof(found["out"]).sharding.spec == jax.typeof(query).sharding.spec


def test_explicit_heads_over_tensor():
    on = mesh(explicit=True, tensor=2, c=4)
    with jax.set_mesh(on):
        found = jax.jit(program(PROBLEM, Ulysses("c")))(*placed(on, None, "c", "tensor"))
    exact(found)
    assert lies(found["out"], on, None, "c", "tensor")


@pytest.mark.parametrize("layout", [Zigzag(4), Striped(4)], ids=repr)
def test_explicit_types_of_a_length_that_does_not_divide(layout):
    """A type cannot say that 13 rows are sharded over 4: they are whole, and stay so."""
    problem = Problem.random((2, 13, 4, 8), is_causal=True, sinks=True)
    found = attend(problem, Ring("c"), layout, on=mesh(explicit=True, data=2, c=4))
    exact(found, solve(problem))


@over_strategies
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_the_users_shard_map(strategy, check_vma):
    on, rows = mesh(data=2, c=4), P("data", "c")

    def attention(q, k, v, sinks):
        return jaxcp.dot_product_attention(
            q, k, v, strategy=strategy, layout=Zigzag(4), is_causal=True, sinks=sinks, return_residual=True
        )

    run = jax.shard_map(attention, mesh=on, in_specs=(rows, rows, rows, P()), out_specs=rows, check_vma=check_vma)
    layout = Zigzag(4)

    def dealt(q, k, v, sinks):
        return layout.undeal(run(*map(layout.deal, (q, k, v)), sinks))

    exact(jax.jit(gradients(dealt))(*arrays(PROBLEM)))


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=repr)
def test_differentiated_inside_the_users_shard_map(strategy):
    """The gradient of replicated sinks is summed over all ranks, that of sharded rows is each rank's own."""
    on, rows = mesh(data=2, c=4), P("data", "c")

    def attention(q, k, v, sinks):
        return jaxcp.dot_product_attention(
            q, k, v, strategy=strategy, is_causal=True, sinks=sinks, return_residual=True
        )

    run = gradients(attention)
    specs = dict(out=rows, lse=rows, dq=rows, dk=rows, dv=rows, dsinks=P())
    run = jax.shard_map(run, mesh=on, in_specs=(rows, rows, rows, P(), rows, rows), out_specs=specs)
    exact(jax.jit(run)(*arrays(PROBLEM)))


def test_replicated_keys_in_the_users_shard_map():
    """A key that is the same on every data rank gets the gradient of all of them."""
    one = lambda x: np.broadcast_to(x[:1], x.shape)
    problem = PROBLEM.replace(key=one(PROBLEM.key), value=one(PROBLEM.value))
    truth = solve(problem)
    truth = truth | {name: truth[name].sum(0, keepdims=True) for name in ("dk", "dv")}
    rows, shared = P("data", "c"), P(None, "c")
    attention = jax.shard_map(
        lambda q, k, v, sinks: jaxcp.dot_product_attention(
            q, k, v, strategy=Ring("c"), is_causal=True, sinks=sinks, return_residual=True
        ),
        mesh=mesh(data=2, c=4),
        in_specs=(rows, shared, shared, P()),
        out_specs=rows,
    )
    q, k, v, *rest = arrays(problem)
    exact(jax.jit(gradients(attention))(q, k[:1], v[:1], *rest), truth)


@over_strategies
def test_under_a_shard_map_over_other_axes(strategy):
    """The user's shard_map is over data alone; the context axis is Auto inside it."""
    on, rows = mesh(data=2, c=4), P("data")

    def attention(q, k, v, sinks):
        return jaxcp.dot_product_attention(
            q, k, v, strategy=strategy, is_causal=True, sinks=sinks, return_residual=True
        )

    run = jax.shard_map(
        attention, mesh=on, in_specs=(rows, rows, rows, P()), out_specs=rows, axis_names=frozenset({"data"})
    )
    with jax.set_mesh(on):
        exact(jax.jit(gradients(run))(*arrays(PROBLEM)))


ORDERS = [
    (Ulysses("u", Ring("r")), ("r", "u")),
    (Ulysses("u", Ring("r")), ("u", "r")),
    (Ring("r", Ulysses("u")), ("r", "u")),
    (Ring("r", Ulysses("u")), ("u", "r")),
    (Ring(("r", "u")), ("u", "r")),
    (Ring("r", Ring("u")), ("u", "r")),
]


@pytest.mark.parametrize("strategy, order", ORDERS, ids=repr)
@pytest.mark.parametrize("layout", [Contiguous(4), Zigzag(4)], ids=repr)
def test_the_sequence_in_another_order_than_the_strategys(strategy, order, layout):
    """The offsets that a ring leaves out are those of the order in which the sequence lies."""
    problem = Problem.random((1, 32, 4, 8), is_causal=True, local_window_size=(3, 0))
    exact(attend(problem, strategy, layout, on=mesh(r=2, u=2), spec=P(None, order)), solve(problem))


@pytest.mark.parametrize("order", [("r", "u"), ("u", "r")])
@pytest.mark.parametrize("inside", [False, True], ids=["global", "shard_map"])
def test_uneven_degrees_in_any_order(order, inside):
    """Ring of 4 and Ulysses of 2, windowed, with the order said by partition_spec also inside the user's shard_map."""
    on, layout, spec = mesh(r=4, u=2), Zigzag(8), P(None, order)
    problem = Problem.random((1, 64, 4, 8), is_causal=True, local_window_size=(9, 0), sinks=True)

    def attention(q, k, v, sinks):
        return jaxcp.dot_product_attention(
            q,
            k,
            v,
            strategy=Ulysses("u", Ring("r")),
            layout=layout,
            is_causal=True,
            local_window_size=(9, 0),
            sinks=sinks,
            partition_spec=spec,
            return_residual=True,
        )

    if inside:
        attention = jax.shard_map(attention, mesh=on, in_specs=(spec, spec, spec, P()), out_specs=spec)
    dealt = lambda q, k, v, sinks: layout.undeal(attention(*map(layout.deal, (q, k, v)), sinks))
    with jax.set_mesh(on):
        exact(jax.jit(gradients(dealt))(*arrays(problem)), solve(problem))


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_scanned_layers(explicit, remat):
    on = mesh(explicit=explicit, data=2, c=4)
    strategy, spec = Ring("c"), None if explicit else P("data", "c")
    scales = np.random.default_rng(0).uniform(0.5, 1, (3, *PROBLEM.value.shape)).astype(np.float32)

    def loss(attention, x, scales, cotangent):
        layer = lambda x, scale: (x + attention(x * scale, x, x), None)
        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, x, scales)[0] * cotangent).sum()

    def attention(*qkv):
        return jaxcp.dot_product_attention(*qkv, strategy=strategy, is_causal=True, partition_spec=spec)

    with jax.set_mesh(on):
        put = lambda x, *more: jax.device_put(x, NamedSharding(on, P(*more, "data", "c", None, None)))
        args = put(PROBLEM.value), put(scales, None), put(PROBLEM.dout)
        found = jax.jit(jax.grad(lambda *args: loss(attention, *args), (0, 1)))(*args)
    with jax.enable_x64(True):
        dense = lambda *qkv: dense_attention(PROBLEM, *qkv, None)[0]
        wide = [jnp.asarray(x, jnp.float64) for x in (PROBLEM.value, scales, PROBLEM.dout)]
        right = jax.grad(lambda *args: loss(dense, *args), (0, 1))(*wide)
        right = dict(zip(("dx", "dscales"), map(np.asarray, right), strict=True))
    exact(dict(dx=found[0], dscales=found[1]), right)
    assert lies(found[0], on, "data", "c")


def test_under_vmap():
    """Heads of several models at once: the batching rule of the whole is that of its parts."""
    problem = PROBLEM.replace(sinks=None)
    stacked = [jnp.stack([x, 2 * x]) for x in (problem.query, problem.key, problem.value)]
    attention = lambda *qkv: jaxcp.dot_product_attention(*qkv, strategy=Ring("c"), is_causal=True)
    with jax.set_mesh(mesh(c=4)):
        out = jax.jit(jax.vmap(attention))(*stacked)
    exact(dict(out=out[0]), dict(out=solve(problem)["out"]))
    doubled = problem.replace(query=2 * problem.query, key=2 * problem.key, value=2 * problem.value)
    exact(dict(out=out[1]), dict(out=solve(doubled)["out"]))


@pytest.mark.parametrize("explicit", [False, True])
def test_without_a_strategy_the_batch_stays_where_it_is(explicit):
    """No collective: each device attends over its own part of the batch."""
    problem = Problem.random((4, 12, 2, 8), is_causal=True)
    on = mesh(explicit=explicit, data=4)
    qkv = [jax.device_put(x, NamedSharding(on, P("data"))) for x in (problem.query, problem.key, problem.value)]
    spec = None if explicit else P("data")
    with jax.set_mesh(on):
        f = jax.jit(lambda *qkv: jaxcp.dot_product_attention(*qkv, strategy=None, partition_spec=spec, is_causal=True))
        program = f.lower(*qkv).compile()
        assert not hlo.collectives(program.as_text())
        out = program(*qkv)
    assert out.sharding.is_equivalent_to(qkv[0].sharding, 4)
    np.testing.assert_allclose(out, solve(problem)["out"], atol=2e-6)


def test_a_mesh_of_both_kinds_of_axes():
    """The batch's axis Explicit, the sequence's Auto: the query's type knows nothing of it, partition_spec does."""
    kinds = AxisType.Explicit, AxisType.Auto
    on = jax.make_mesh((2, 4), ("data", "c"), axis_types=kinds)
    with jax.set_mesh(on):
        q, k, v, sinks, *cotangents = placed(on, "data", "c")
        run = program(PROBLEM, Ring("c"), spec=P("data", "c"))
        exact({n: x for n, x in jax.jit(run)(q, k, v, sinks, *cotangents).items()})
