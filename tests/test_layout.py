"""Dealing: any length, any number of shards, there and back; and the batches made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import Contiguous, Striped, Zigzag
from tests.common import attend, mesh
from tests.oracle import Problem, solve, worst

LAYOUTS = Contiguous, Zigzag, Striped
over_layouts = pytest.mark.parametrize("kind", LAYOUTS)
same = np.testing.assert_array_equal


def every(kind, lengths=range(1, 41)):
    return ((kind(shards), length) for shards in range(1, 6) for length in lengths)


@over_layouts
def test_indices_are_a_permutation_of_any_length(kind):
    for layout, length in every(kind):
        indices = layout.indices(length)
        assert indices.dtype == np.int32
        same(np.sort(indices), np.arange(length))


@over_layouts
def test_indices_are_the_padded_order_without_the_padding(kind):
    for layout, length in every(kind):
        padded = layout.padded(length)
        assert 0 <= padded - length < layout.multiple and padded % layout.multiple == 0
        order = layout.indices(padded)
        same(layout.indices(length), order[order < length])


@over_layouts
def test_a_shard_holds_its_runs(kind):
    for layout, length in every(kind):
        padded = layout.padded(length)
        for rank, held in enumerate(layout.indices(padded).reshape(layout.shards, -1)):
            runs = layout.runs(rank, padded)
            same(held, np.concatenate([start + step * np.arange(count) for start, step, count in runs]))

    layout = kind(3)
    positions = [layout.positions(rank, 18) for rank in range(3)]
    same(np.concatenate(positions), layout.indices(18))
    same(jax.jit(lambda rank: layout.positions(rank, 18))(2), positions[2])


def test_the_orders():
    same(Contiguous(2).indices(8), [0, 1, 2, 3, 4, 5, 6, 7])
    same(Zigzag(2).indices(8), [0, 1, 6, 7, 2, 3, 4, 5])
    same(Striped(2).indices(8), [0, 2, 4, 6, 1, 3, 5, 7])
    same(Zigzag(2).indices(6), [0, 1, 2, 3, 4, 5])  # of 8: 6 and 7 are padding
    same(Striped(3).indices(5), [0, 3, 1, 4, 2])


@over_layouts
def test_dealing_and_back_is_nothing(kind):
    for layout, length in every(kind):
        tree = dict(a=np.arange(2 * length).reshape(2, length), b=np.arange(length * 3.0).reshape(1, length, 3))
        dealt = layout.deal(tree)
        same(dealt["a"], tree["a"][:, layout.indices(length)])
        assert isinstance(dealt["a"], np.ndarray) and dealt["b"].dtype == tree["b"].dtype
        jax.tree.map(same, layout.undeal(dealt), tree)
        jax.tree.map(same, layout.deal(layout.undeal(tree)), tree)


@over_layouts
def test_padding_and_back(kind):
    for layout, length in every(kind, (1, 7, 24)):
        x = np.arange(1, length + 1, dtype=np.int32)[None]
        padded = layout.pad(layout.deal(x), fill=-1)
        right = np.pad(x, ((0, 0), (0, layout.padded(length) - length)), constant_values=-1)
        same(padded, layout.deal(right))
        same(layout.unpad(padded, length), layout.deal(x))


@over_layouts
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_numpy_and_jax_deal_alike_along_any_axis(kind, axis):
    layout, x = kind(3), np.arange(7 * 7 * 7).reshape(7, 7, 7)
    right = np.take(x, layout.indices(7), axis)
    same(layout.deal(x, axis), right)
    same(jax.jit(lambda x: layout.deal(x, axis))(x), right)
    eager = layout.deal(jnp.asarray(x), axis)
    assert isinstance(eager, jax.Array)
    same(layout.undeal(eager, axis), x)


@over_layouts
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_sharded_arrays_keep_their_sharding(kind, explicit):
    layout, x = kind(4), np.arange(2 * 16 * 3, dtype=np.int32).reshape(2, 16, 3)
    on = mesh(data=2, context=4, explicit=explicit)
    with jax.set_mesh(on):
        sharding = jax.sharding.NamedSharding(on, P("data", "context"))
        placed = jax.device_put(x, sharding)
        for deal, undeal in (layout.deal, layout.undeal), (jax.jit(layout.deal), jax.jit(layout.undeal)):
            dealt = deal(placed)
            same(dealt, layout.deal(x))
            same(undeal(dealt), x)
            if explicit:
                assert dealt.sharding.is_equivalent_to(sharding, 3)


@over_layouts
def test_one_device_reads_dealt_arrays_of_any_length(kind):
    """strategy=None with a layout: positions are those of the dealt rows."""
    problem = Problem.random((1, 7, 2, 4), is_causal=True)
    found = attend(problem, None, kind(3), on=mesh(c=1))
    assert worst(found, solve(problem))[0] <= 1e-5


@pytest.mark.parametrize("layout", [Contiguous(1), Zigzag(2), Striped(3)], ids=repr)
@pytest.mark.parametrize("xp", [np, jnp])
def test_next_token_batch(layout, xp):
    tokens = np.random.default_rng(0).integers(1, 100, (3, 17))
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (3, 17)), axis=1)
    ids[2, 12:] = -7  # any negative is padding
    batch = jaxcp.next_token_batch(xp.asarray(tokens), layout=layout, segment_ids=xp.asarray(ids))
    for name, x in batch.items():
        assert isinstance(x, np.ndarray if xp is np else jax.Array) and x.shape == (3, 17), name
    assert (
        batch["loss_weights"].dtype == np.float32 and batch["positions"].dtype == batch["segment_ids"].dtype == np.int32
    )
    assert batch["inputs"].dtype == batch["targets"].dtype == xp.asarray(tokens).dtype
    found = layout.undeal(batch)
    for b in range(3):
        for t in range(17):
            follows = t < 16 and ids[b, t] == ids[b, t + 1] >= 0
            assert found["loss_weights"][b, t] == follows
            assert found["targets"][b, t] == (tokens[b, t + 1] if follows else 0)
            assert found["inputs"][b, t] == tokens[b, t]
            assert found["segment_ids"][b, t] == max(ids[b, t], -1)
            assert found["positions"][b, t] == t - list(ids[b]).index(ids[b, t])


def test_next_token_batch_without_documents():
    tokens = np.array([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    batch = jaxcp.next_token_batch(tokens, layout=Contiguous(1), pad_id=0)
    same(batch["targets"], [[6, 7, 0, 0, 0], [2, 3, 4, 5, 0]])
    same(batch["loss_weights"], [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    same(batch["segment_ids"], [[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]])
    same(batch["positions"][1], np.arange(5))


def test_next_token_batch_under_jit():
    tokens, ids = np.arange(12).reshape(2, 6), np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 2, -1]])
    make = lambda tokens, ids: jaxcp.next_token_batch(tokens, layout=Zigzag(2), segment_ids=ids, pad_id=3)
    jax.tree.map(same, jax.jit(make)(tokens, ids), make(tokens, ids))
