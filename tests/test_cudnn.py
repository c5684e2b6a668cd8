"""The cuDNN kernel around its two calls, which here compute densely and round where cuDNN rounds."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import AllGather, Contiguous, Ring, Ulysses, Zigzag, softmax
from jaxcp.algebra import Block
from jaxcp.kernels.cudnn import CAUSAL, FULL, Cudnn, with_delta
from jaxcp.kernels.reference import Reference
from jaxcp.mask import Mask, Tokens
from tests.common import UNOPTIMISED, mesh, program, run_on
from tests.oracle import Problem, errors, solve, worst


class Dense:
    """cuDNN's two functions as its documentation describes them: float32 sums of products of 16 bits."""

    @staticmethod
    def forward(q, k, v, scale, kind):
        logits = Dense._logits(q, k, scale, kind)
        greatest = logits.max(-1, keepdims=True)
        weights = jnp.exp(logits - greatest)
        total = weights.sum(-1, keepdims=True)
        out = _dot("bnts,bsnh->bnth", weights.astype(q.dtype), _heads(v, q)) / total
        return out.swapaxes(1, 2).astype(q.dtype), (greatest + jnp.log(total))[..., 0]

    @staticmethod
    def backward(q, k, v, lse, dout, out, scale, kind):
        assert dout.dtype == out.dtype == q.dtype and lse.dtype == jnp.float32
        delta = _dot("btnh,btnh->bnt", out, dout)[..., None]
        weights = jnp.exp(Dense._logits(q, k, scale, kind) - lse[..., None])
        dlogits = weights * (_dot("btnh,bsnh->bnts", dout, _heads(v, q)) - delta)
        weights, dlogits = weights.astype(q.dtype), dlogits.astype(q.dtype)
        of_keys = lambda x: x.reshape(*k.shape[:3], -1, x.shape[-1]).sum(3)
        dq = _dot("bnts,bsnh->btnh", dlogits, _heads(k, q)) * scale
        dk = of_keys(_dot("bnts,btnh->bsnh", dlogits, q)) * scale
        dv = of_keys(_dot("bnts,btnh->bsnh", weights, dout))
        return tuple(x.astype(q.dtype) for x in (dq, dk, dv))

    @staticmethod
    def _logits(q, k, scale, kind):
        logits = _dot("btnh,bsnh->bnts", q, _heads(k, q)) * scale
        see = jnp.tril(jnp.ones(logits.shape[2:], bool)) if kind == CAUSAL else True
        return jnp.where(see, logits, -jnp.inf)


def _heads(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def kernel(*chunks, calls=Dense):
    return partial(Cudnn, chunks=chunks, calls=calls)


# name: strategy, mesh, layout, runs of queries and of keys in a block
STRATEGIES = {
    "one device": (None, dict(c=1), Contiguous, (1, 1)),
    "ring": (Ring("c"), dict(c=4), Contiguous, (1, 1)),
    "ring, in halves": (Ring("c"), dict(c=2), Contiguous, (2, 2)),
    "ring, zigzag": (Ring("c"), dict(c=4), Zigzag, (2, 2)),
    "ring of 2, zigzag": (Ring("c"), dict(c=2), Zigzag, (2, 2)),
    "all-gather": (AllGather("c"), dict(c=4), Contiguous, (1, 4)),
    "all-gather of 2, zigzag": (AllGather("c"), dict(c=2), Zigzag, (2, 4)),
    "ulysses": (Ulysses("c"), dict(c=2), Contiguous, (1, 1)),
    "ulysses, zigzag": (Ulysses("c"), dict(c=4), Zigzag, (8, 8)),
    "ulysses of ring": (Ulysses("u", Ring("c")), dict(u=2, c=2), Contiguous, (2, 2)),
    "ulysses of ring, zigzag": (Ulysses("u", Ring("c")), dict(u=2, c=2), Zigzag, (4, 4)),
    "ring of all-gather, zigzag": (Ring("n", AllGather("c")), dict(n=2, c=2), Zigzag, (2, 4)),
}
FULL_TOO = "ring", "all-gather of 2, zigzag", "ulysses of ring, zigzag"


def compiled(name, problem, **options):
    """The function of `problem`'s like, and the mesh to run it on."""
    strategy, axes, layout, chunks = STRATEGIES[name]
    layout = None if strategy is None else layout(math.prod(axes.values()))
    return program(problem, strategy, layout, implementation=kernel(*chunks), **options), mesh(**axes)


@pytest.mark.parametrize("name, causal", [(x, True) for x in STRATEGIES] + [(x, False) for x in FULL_TOO])
def test_exact(name, causal):
    problem = Problem.random((2, 32, 4, 16), kv_heads=2, is_causal=causal)
    run, on = compiled(name, problem)
    [found] = run_on([problem], run, on=on, fast_compile=True)
    error, which = worst(found, solve(problem))
    assert error <= 1e-5, (which, error)


@pytest.mark.parametrize("through", ["out and lse", "lse alone"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
def test_in_16_bits(dtype, through):
    """At most twice the dense error, in most of nine draws: see test_attention.py."""
    problems = [Problem.random((1, 64, 4, 32), kv_heads=2, is_causal=True, seed=seed) for seed in range(9)]
    if through == "lse alone":
        problems = [problem.replace(dout=0 * problem.dout) for problem in problems]
    truth = [solve(problem) for problem in problems]
    run, on = compiled("ring, zigzag", problems[0], dtype=dtype)
    found = list(run_on(problems, run, on=on, dtype=dtype, fast_compile=True))
    dense = [solve(problem, dtype) for problem in problems]
    if through == "lse alone":  # dv is 0, and the dout that replaces 0 adds next to nothing to it
        dv = [[x.pop("dv") for x in xs] for xs in (found, truth)]
        assert not np.any(dv[1]) and np.abs(dv[0]).max() < 2**-10
    pairs = [[errors(x, right) for x, right in zip(xs, truth, strict=True)] for xs in (found, dense)]
    for name in truth[0]:
        held = sum(ours[name] <= 2 * theirs[name] for ours, theirs in zip(*pairs, strict=True))
        assert held > 4, (name, pairs)


def block(*positions, kv_heads=2, seed=0):
    """A block whose queries and keys have these positions, and all that a backward takes."""
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    tokens = [Tokens(jnp.asarray(x, jnp.int32).reshape(-1, np.shape(x)[-1]), None) for x in positions]
    (t, s), b = (np.shape(x)[-1] for x in positions), 2
    q, k, v = array(b, t, 4, 8), array(b, s, kv_heads, 8), array(b, s, kv_heads, 8)
    return Block(q, k, v, *tokens), array(b, t, 4) + 3, array(b, t, 4), array(b, t, 4, 8)


@partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMISED)
def both(kernel, block, lse, delta, dout, onto=()):
    """What forward and what backward give."""
    return kernel.forward(block, *onto[:1]), kernel.backward(block, lse, delta, dout, *onto[1:])


def alike(ours, theirs):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)


MASK = Mask(0.3, causal=True)
N = 8  # rows of a run


def runs(*starts, n=N):
    return np.concatenate([N * start + np.arange(n) for start in starts])


@pytest.mark.parametrize("chunks", [(1, 1), (2, 2), (3, 4), (1, 3), (4, 1)], ids=str)
def test_any_runs_in_any_order(chunks):
    """As the reference sees them; with 2 and 2 runs, those that layouts deal."""
    rng = np.random.default_rng(0)
    if chunks == (2, 2):
        draws = [((1, 6), kv) for kv in ((1, 6), (0, 7), (2, 5))] + [((1, 4), kv) for kv in ((0, 3), (2, 5))]
        draws += [((2, 3), kv) for kv in ((0, 1), (4, 5))]
    else:
        draws = [[rng.permutation(6)[:count] for count in chunks] for _ in range(8)]
    for seed, (q, kv) in enumerate(draws):
        args = block(runs(*q), runs(*kv), seed=seed)
        alike(both(Cudnn(MASK, chunks, Dense), *args), both(Reference(MASK), *args))


@pytest.mark.parametrize("length, keys", [(12, 12), (12, 20), (20, 12)])
def test_lengths_may_differ_on_one_device(length, keys):
    args = block(np.arange(length), np.arange(keys))
    alike(both(Cudnn(MASK, calls=Dense), *args), both(Reference(MASK), *args))


MISFITS = {
    "a part of the keys": ((1, 1), runs(2), runs(2) + 1),
    "more keys than the run": ((1, 1), runs(2), runs(2, n=2 * N) - 2),
    "striped": ((1, 1), 2 * np.arange(N), 2 * np.arange(N) + 1),
    "striped before": ((1, 1), 100 + np.arange(N), 2 * np.arange(N)),
    "queries that fall": ((1, 1), 100 - np.arange(N), runs(12)),
    "the first key is the last query": ((1, 1), runs(0), runs(0) + N - 1),
    "zigzag as one": ((1, 1), runs(0, 3), runs(0, 3)),
    "sequences that differ": ((1, 1), np.stack([runs(1), runs(1)]), np.stack([runs(0), runs(2)])),
    "restarting": ((2, 3), runs(0, 1), runs(0, 0, 1)),
    "two and two, not rising": ((2, 2), runs(3, 0), runs(3, 0)),
    "two and two, straddling": ((2, 2), runs(0, 3) + 2, runs(0, 3)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_nan(name):
    chunks, q, kv = MISFITS[name]
    (out, lse), (dq, dk, dv) = both(Cudnn(MASK, chunks, Dense), *block(q, kv))
    bad = slice(0, N) if name == "restarting" else slice(None)
    for x in (out, lse, dq):
        assert np.isnan(x[:, bad]).all() and np.isfinite(np.delete(x, np.arange(x.shape[1])[bad], 1)).all()
    assert np.isnan(dk).all() and np.isnan(dv).all()
    merged = softmax.merge((jnp.ones_like(out), jnp.ones_like(lse)), (out, lse))
    assert all(np.isnan(x[:, bad]).all() for x in merged)


def test_positions_do_not_matter_where_all_is_visible():
    args = block(*MISFITS["striped"][1:])
    alike(both(Cudnn(Mask(0.3), calls=Dense), *args), both(Reference(Mask(0.3)), *args))


@pytest.mark.parametrize("call", [((1, 6), (1, 6)), ((1, 6), (0, 7)), ((1, 6), (2, 5))], ids=str)
def test_a_ring_step_of_zigzag_is_one_call(call):
    """`Mark` writes into out how much it was given; what no call reached is 0."""

    class Mark:
        @staticmethod
        def forward(q, k, v, scale, kind):
            return jnp.full_like(q, 100 * q.shape[1] + k.shape[1]), jnp.full_like(q[..., 0], kind).swapaxes(1, 2)

    out, lse = Cudnn(MASK, (2, 2), Mark).forward(block(*map(runs, *zip(*call, strict=True)))[0])
    (rows, columns, kind), first = {
        (1, 6): ((2 * N, 2 * N, CAUSAL), 0),
        (0, 7): ((2 * N, N, FULL), 0),
        (2, 5): ((N, 2 * N, FULL), N),
    }[call[1]]
    assert (out[:, first:] == 100 * rows + columns).all() and (lse[:, first:] == kind).all()
    assert not out[:, :first].any() and (lse[:, :first] == softmax.FLOOR).all()


@pytest.mark.parametrize("chunks", [(1, 1), (2, 2), (2, 4)], ids=str)
def test_goes_on_from_what_there_is(chunks):
    """`onto`: the same as merging the results, or adding the gradients, afterwards."""
    args, kernel = block(runs(*range(1, 1 + chunks[0])), runs(*range(chunks[1]))), Cudnn(MASK, chunks, Dense)
    results, gradients = both(kernel, *args)
    rng = np.random.default_rng(0)
    before, so_far = (
        tuple(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in xs) for xs in (results, gradients)
    )
    goes_on = both(kernel, *args, onto=(before, so_far))
    alike(goes_on, (softmax.merge(before, results), tuple(map(jnp.add, so_far, gradients))))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda x: x.__name__)
def test_with_delta(dtype):
    """cuDNN's sum over `out` and dout is delta, and dout is what it was, so far as `dtype` tells."""
    rng = np.random.default_rng(0)
    eps, least = (float(getattr(jnp.finfo(dtype), name)) for name in ("eps", "smallest_subnormal"))
    for size in 0.0, 1e-6, 1e-3, 1.0, 1e3:
        given = jnp.asarray(size * rng.standard_normal((2, 50, 3, 64)), dtype)
        for scale in 0.0, 1e-5, 1.0, 100.0:
            delta = jnp.asarray(scale * rng.standard_normal((2, 50, 3)), jnp.float32)
            dout, out = with_delta(given, delta)
            assert dout.dtype == out.dtype == dtype and np.isfinite(np.asarray(out, np.float64)).all()
            found = (np.asarray(dout, np.float64) * np.asarray(out, np.float64)).sum(-1)
            greatest = np.abs(np.asarray(dout, np.float64)).max(-1)
            np.testing.assert_array_less(
                np.abs(found - delta), max(eps, 2**-20) * np.abs(delta) + 64 * least * greatest + 1e-37
            )
            changed = np.abs(np.asarray(dout, np.float64) - np.asarray(given, np.float64)).max(-1)
            np.testing.assert_array_less(changed, 2**-14 * np.abs(delta) + 2 * least)
            np.testing.assert_array_equal(dout[..., 1:], given[..., 1:])
            if not scale or size == scale == 1:
                np.testing.assert_array_equal(dout, given)
