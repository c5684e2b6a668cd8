"""What travels, counted in compiled HLO, is what the formulas say (float32, so that XLA:CPU widens nothing)."""

import math
import re

import jax.numpy as jnp
import pytest

from jaxcp import AllGather, Ring, Ulysses, Zigzag
from tests import hlo
from tests.common import forward_and_backward, mesh

LENGTH, HEADS, KV_HEADS, DIM = 192, 16, 8, 4


def tallies(strategy, **axes):
    """kind -> (count, bytes) of forward, and of backward; and the bytes of local keys, queries and lse."""
    shards = math.prod(axes.values())
    q, k = (jnp.ones((1, LENGTH, n, DIM)) for n in (HEADS, KV_HEADS))
    options = {"is_causal": True, "layout": Zigzag(shards)}
    programs = forward_and_backward(strategy, mesh(**axes), q, k, k, **options)
    row = LENGTH // shards * 4
    return *(hlo.tally(p.as_text()) for p in programs), KV_HEADS * DIM * row, HEADS * DIM * row, HEADS * row


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_ring(shards):
    """(P - 1) 2k forward, (P - 1) 2k (1 + a) backward; a = 1 in float32."""
    forward, backward, k, _, _ = tallies(Ring("c"), c=shards)
    hops = shards - 1
    assert forward == {"collective-permute": (2 * hops, hops * 2 * k)}
    assert backward == {"collective-permute": (4 * hops, hops * 4 * k)}


def test_double_ring():
    """The inner ring turns once in each outer step: as many bytes as one ring, (O - 1) of them between nodes."""
    forward, backward, k, _, _ = tallies(Ring("node", Ring("gpu")), node=2, gpu=4)
    hops = (2 - 1) + 2 * (4 - 1)
    assert forward == {"collective-permute": (2 * hops, hops * 2 * k)}
    # inner gradients come home in each outer step, and go out with the outer ring once more
    assert backward == {"collective-permute": (4 * hops, hops * 4 * k)}


def test_all_gather():
    """Each rank gives its keys and values once forward; backward again, and one sum of 2k P is scattered."""
    forward, backward, k, _, _ = tallies(AllGather("c"), c=8)
    assert forward == {"all-gather": (2, 2 * k)}
    assert backward == {"all-gather": (2, 2 * k), "reduce-scatter": (2, 8 * 2 * k)}


def test_ulysses():
    """2q + 2k forward (and the small lse, where somebody wants it); the same backward, and the small lse and delta."""
    forward, backward, k, q, lse = tallies(Ulysses("c"), c=8)
    assert forward == {"all-to-all": (4, 2 * q + 2 * k)}
    assert backward == {"all-to-all": (5, 2 * q + 2 * k + 2 * lse)}


def test_ulysses_with_few_key_heads_replicates_the_least():
    """2 key heads over 8 ranks: each is sent to the 4 ranks whose query heads see it, one place a rank."""
    q, k = jnp.ones((1, LENGTH, 16, DIM)), jnp.ones((1, LENGTH, 2, DIM))
    forward, _ = forward_and_backward(Ulysses("c"), mesh(c=8), q, k, k, is_causal=True)
    row = LENGTH // 8 * 4
    assert hlo.tally(forward.as_text())["all-to-all"][1] == (2 * 16 * DIM + 2 * 8 * DIM) * row


def test_hybrid():
    """Ulysses over 2: 2q + 2k; the ring over 4 then moves shards of the same k."""
    forward, backward, k, q, lse = tallies(Ulysses("u", Ring("r")), u=2, r=4)
    assert forward == {"all-to-all": (4, 2 * q + 2 * k), "collective-permute": (6, 3 * 2 * k)}
    assert backward == {"all-to-all": (5, 2 * q + 2 * k + 2 * lse), "collective-permute": (12, 3 * 4 * k)}


@pytest.mark.parametrize("strategy", [Ring("c"), AllGather("c"), Ulysses("c")], ids=repr)
def test_no_array_has_both_lengths(strategy):
    """The largest array of a program is of the order of its arguments: nothing is [T, S]."""
    length, heads, dim = 4096, 8, 4
    q = jnp.ones((1, length, heads, dim))
    for program in forward_and_backward(strategy, mesh(c=8), q, q, q, is_causal=True):
        shapes = re.findall(r"\b(?:f32|pred|s32)\[([\d,]+)\]", program.as_text())
        largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        assert largest <= length * heads * dim < (length // 8) * length / 8
