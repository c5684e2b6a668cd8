"""Kernels alone, on one device: over several tiles, lengths that no tile divides, and any tokens."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import AllGather, Ring, Ulysses, Zigzag, softmax
from jaxcp.algebra import Block
from jaxcp.kernels import KERNELS, pick
from jaxcp.kernels.blockwise import Blockwise
from jaxcp.kernels.triton import Triton
from jaxcp.mask import Mask, Tokens
from tests.cases import packed_ids
from tests.common import UNOPTIMISED, attend, mesh
from tests.oracle import Problem, errors, solve, worst

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def ids(length, batch=2):
    return {name: packed_ids(batch, length) for name in ("query_segment_ids", "key_value_segment_ids")}


PROBLEMS = {
    "causal": Problem.random((1, 300, 2, 16), is_causal=True),
    "full, other lengths": Problem.random((2, 130, 4, 8), keys=300, kv_heads=2, value_dim=24),
    "window, packed": Problem.random((2, 200, 6, 8), kv_heads=2, local_window_size=(33, 9), **ids(200)),
    "soft cap": Problem.random((1, 257, 3, 8), kv_heads=1, is_causal=True, logits_soft_cap=1.5),
    "shuffled": Problem.random(
        (1, 192, 2, 8),
        is_causal=True,
        query_positions=np.random.default_rng(0).permutation(192)[None],
        key_value_positions=np.random.default_rng(1).permutation(192)[None],
    ),
}


HERE = {name: name for name in KERNELS} | {"triton": partial(Triton, interpret=True)}  # what runs on any device


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", PROBLEMS)
def test_exact(name, dtype, kernel):
    problem = PROBLEMS[name]
    truth = solve(problem)
    found = attend(problem, None, on=mesh(c=1), dtype=dtype, implementation=HERE[kernel], fast_compile=True)
    if dtype == jnp.float32:
        error, which = worst(found, truth)
        assert error <= 1e-5, (which, error)
        return
    ours, theirs = (errors(x, truth) for x in (found, solve(problem, dtype)))
    for which in truth:
        assert ours[which] <= 2 * theirs[which], (which, ours[which], theirs[which])


STRATEGIES = {
    "ring": (Ring("c"), dict(c=4)),
    "ring of 2": (Ring("c"), dict(c=2)),
    "all-gather": (AllGather("c"), dict(c=4)),
    "ulysses": (Ulysses("c"), dict(c=2)),
    "ulysses of ring": (Ulysses("u", Ring("c")), dict(u=2, c=2)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_triton_under_strategies(strategy, monkeypatch):
    """Zigzag and packed, with an odd number of query heads a key head."""
    # Pallas's interpreter mixes what varies over the mesh with its own indices, which do not (jax 0.10.2 to 0.12.0)
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    strategy, axes = STRATEGIES[strategy]
    problem = Problem.random((2, 160, 6, 16), kv_heads=2, is_causal=True, **ids(160))
    layout = Zigzag(math.prod(axes.values()))
    found = attend(
        problem, strategy, layout, on=mesh(**axes), implementation=partial(Triton, interpret=True), fast_compile=True
    )
    error, which = worst(found, solve(problem))
    assert error <= 1e-5, (which, error)


@pytest.mark.parametrize("length", [64, 100])
def test_triton_goes_on_from_what_there_is(length):
    """`onto`: the same as merging the parts' results, or adding their gradients, afterwards."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    tokens = Tokens(jnp.arange(length, dtype=jnp.int32)[None], None)
    mask = Mask(0.3, causal=True)
    block = Block(array(1, length, 4, 16), array(1, length, 2, 16), array(1, length, 2, 24), tokens, tokens)
    kernel = Triton(mask, interpret=True)
    out, lse = kernel.forward(block)
    before = array(*out.shape), array(*lse.shape).at[:, ::3].set(softmax.FLOOR)
    before = before[0] * (before[1] > softmax.FLOOR)[..., None], before[1]
    compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, kernel.forward(block, before), softmax.merge(before, (out, lse)))
    dout, delta = array(*out.shape), array(*lse.shape)
    gradients = kernel.backward(block, lse, delta, dout)
    before = tuple(array(*g.shape) for g in gradients)
    added = kernel.backward(block, lse, delta, dout, before)
    jax.tree.map(compare, added, tuple(map(jnp.add, before, gradients)))


def test_float64_stays_float64():
    problem = PROBLEMS["soft cap"]
    with jax.enable_x64(True):
        found = jax.jit(
            lambda q, k, v: Blockwise(Mask(8**-0.5, causal=True, soft_cap=1.5)).forward(
                Block(q, k, v, *[Tokens(jnp.arange(257, dtype=jnp.int32)[None], None)] * 2)
            )
        )(*(jnp.asarray(x, jnp.float64) for x in (problem.query, problem.key, problem.value)))
        out, lse = map(np.asarray, found)
    truth = solve(problem)
    np.testing.assert_allclose(out, truth["out"], atol=1e-14)
    np.testing.assert_allclose(lse, truth["lse"], atol=1e-13)


def test_an_empty_tile_is_never_touched_and_a_full_one_never_masked():
    """Keys of NaN in another document: a tile that is visited would spread them, for 0 * NaN is NaN."""
    length, block = 512, 128
    segments = np.repeat(np.arange(4), block)[None].astype(np.int32)
    q, k, v = (jnp.ones((1, length, 1, 8)) for _ in range(3))
    k, v = k.at[:, :block].set(jnp.nan), v.at[:, :block].set(jnp.nan)
    tokens = Tokens(jnp.arange(length, dtype=jnp.int32)[None], jnp.asarray(segments))
    kernel = Blockwise(Mask(1.0), block)
    out, lse = jax.jit(kernel.forward)(Block(q, k, v, tokens, tokens))
    assert np.isnan(out[:, :block]).all() and np.isfinite(out[:, block:]).all()
    gradients = jax.jit(kernel.backward)(Block(q, k, v, tokens, tokens), lse, jnp.zeros_like(lse), jnp.ones_like(out))
    assert all(np.isfinite(g[:, block:]).all() for g in gradients)


def test_pick_names_what_there_is():
    assert pick(None, Mask(1.0)) == pick("blockwise", Mask(1.0))
    with pytest.raises(ValueError, match=r"implementation='flash'.*'reference', 'blockwise'"):
        pick("flash", Mask(1.0))


def test_merge_is_associative_and_has_an_identity():
    rng = np.random.default_rng(0)
    part = lambda: (jnp.asarray(rng.standard_normal((1, 3, 2, 4))), jnp.asarray(rng.standard_normal((1, 3, 2)) * 50))
    a, b, c = part(), part(), part()
    left, right = softmax.merge(softmax.merge(a, b), c), softmax.merge(a, softmax.merge(b, c))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), left, right)
    nothing = jnp.zeros_like(a[0]), jnp.full_like(a[1], softmax.FLOOR)
    for merged in (softmax.merge(a, nothing), softmax.merge(nothing, a)):
        jax.tree.map(np.testing.assert_array_equal, merged, a)
    jax.tree.map(np.testing.assert_array_equal, softmax.merge(nothing, nothing), nothing)


def test_long_sequences_have_larger_tiles():
    """The block map has at most 1024 x 1024 entries: at 2**20 tokens, tiles of 1024."""
    tokens = Tokens(jax.ShapeDtypeStruct((1, 2**20), jnp.int32), None)
    x = jax.ShapeDtypeStruct((1, 2**20, 1, 8), jnp.float32)
    lowered = jax.jit(Blockwise(Mask(1.0, causal=True)).forward, compiler_options=UNOPTIMISED).lower(
        Block(x, x, x, tokens, tokens)
    )
    assert "1024x1024xi32" in lowered.as_text() and "8192x8192xi32" not in lowered.as_text()
