"""Running a `Problem` through the library, on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import jaxcp
from tests.oracle import Problem

UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mesh(*, explicit: bool = False, **axes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices: mesh(data=2, context=4)."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=jax.devices()[:count]
    )


def attend(
    problem: Problem,
    strategy,
    layout=None,
    *,
    on,
    dtype=jnp.float32,
    spec: PartitionSpec | None = None,
    fast_compile: bool = False,
    **options,
):
    """out, lse and every gradient of `problem`, dealt, attended on mesh `on`, and undealt; a dict as oracle.solve's.

    `options` go to dot_product_attention. Jitted, differentiated by a random cotangent for out and for lse.
    `fast_compile`: leave out LLVM's optimisations, which take half of the time of a program that runs once.
    """
    run = program(problem, strategy, layout, dtype=dtype, spec=spec, **options)
    return next(run_on([problem], run, on=on, dtype=dtype, fast_compile=fast_compile))


def run_on(problems, run, *, on, dtype=jnp.float32, fast_compile: bool = False):
    """Yields what `run`, the `program` of the first of the problems, gives for each: they differ in their numbers."""
    run = jax.jit(run, compiler_options=UNOPTIMISED if fast_compile else None)
    for problem in problems:
        with jax.set_mesh(on):
            found = run(*arrays(problem, dtype))
        yield {name: np.asarray(x.astype(jnp.float32)) for name, x in found.items() if x is not None}


def arrays(problem: Problem, dtype=jnp.float32) -> list:
    """The floating arguments, and the cotangents."""
    p = problem
    cast = lambda x, dtype=dtype: None if x is None else jnp.asarray(x, dtype)
    return [*map(cast, (p.query, p.key, p.value, p.sinks, p.dout)), cast(p.dlse, jnp.float32)]


def program(problem: Problem, strategy, layout=None, *, dtype=jnp.float32, spec=None, **options):
    """The function of `arrays(problem)` that `attend` compiles."""
    p = problem
    deal = lambda x: x if layout is None or x is None else layout.deal(x)
    undeal = lambda x: x if layout is None else layout.undeal(x)
    rows = "query_positions", "key_value_positions", "query_segment_ids", "key_value_segment_ids"
    tokens = {name: deal(getattr(p, name)) for name in rows if getattr(p, name) is not None}

    def forward(query, key, value, sinks):
        out, lse = jaxcp.dot_product_attention(
            *map(deal, (query, key, value)),
            strategy=strategy,
            layout=layout,
            sinks=sinks,
            partition_spec=spec,
            return_residual=True,
            **tokens,
            **p.options,
            **options,
        )
        return undeal(out), undeal(lse)

    def run(query, key, value, sinks, dout, dlse):
        (out, lse), pull = jax.vjp(forward, query, key, value, sinks)
        dq, dk, dv, dsinks = pull((dout, dlse))
        assert out.dtype == dq.dtype == dk.dtype == dv.dtype == query.dtype
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}

    return run


def forward_and_backward(strategy, on, *qkv, **options):
    """The compiled forward and, apart from it, backward of attention on float32 arrays."""
    attention = lambda *qkv: jaxcp.dot_product_attention(*qkv, strategy=strategy, **options)
    with jax.set_mesh(on):
        forward = jax.jit(attention).lower(*qkv).compile()
        out, pull = jax.jit(lambda *qkv: jax.vjp(attention, *qkv))(*qkv)
        return forward, jax.jit(lambda pull, dout: pull(dout)).lower(pull, out).compile()
