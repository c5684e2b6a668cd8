"""The block map against the mask itself, element by element; pairs, FLOPs and the offsets of a ring."""

import numpy as np
import pytest

from jaxcp import Contiguous, Striped, Zigzag, blocks
from jaxcp.blocks import EMPTY, FULL, PARTIAL
from jaxcp.mask import Mask, Tokens

MASKS = [
    Mask(1.0),
    Mask(1.0, causal=True),
    Mask(1.0, window=(9, 3)),
    Mask(1.0, causal=True, window=(17, 17)),
]


def tokens(positions, segments=None):
    cast = lambda x: None if x is None else np.asarray(x, np.int32)[None]
    return Tokens(cast(positions), cast(segments))


def kinds(mask, q, kv, block_q, block_k):
    found = blocks.block_map(mask, blocks.extents(q, block_q), blocks.extents(kv, block_k))
    assert isinstance(found, np.ndarray)
    return found[0]


def dense(mask, q, kv, block_q, block_k):
    """The block map from the mask's every element."""
    see = np.asarray(mask.visible(q, kv))[0]
    tiles = see.reshape(len(see) // block_q, block_q, -1, block_k)
    return tiles.any((1, 3)).astype(int) + tiles.all((1, 3))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", [Contiguous(4), Zigzag(4)], ids=repr)
def test_exact_where_positions_rise(mask, layout):
    q = kv = tokens(layout.indices(128))
    np.testing.assert_array_equal(kinds(mask, q, kv, 8, 16), dense(mask, q, kv, 8, 16))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_never_wrong_in_any_order(mask, seed):
    """EMPTY has no visible pair, FULL no invisible one, whatever the order, the documents and the padding."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(-1, 4, 128))
    order = rng.permutation(128) if seed % 2 else np.arange(128)
    q = kv = tokens(np.arange(128)[order], segments[order])
    found, right = kinds(mask, q, kv, 8, 16), dense(mask, q, kv, 8, 16)
    assert np.all(right[found == EMPTY] == EMPTY) and np.all(right[found == FULL] == FULL)
    if order[0] == 0 and order[1] == 1:
        assert np.all(found[right == FULL] == FULL)


def test_packed_documents_are_skipped():
    """Positions restart in each document; the segments do the skipping."""
    ids = np.repeat([1, 2, 3, 4], 32)
    q = kv = tokens(np.tile(np.arange(32), 4), ids)
    found = kinds(MASKS[1], q, kv, 16, 16)
    assert (found != EMPTY).sum() == 4 * 3 and (found == FULL).sum() == 4


def test_padding_widens_no_block():
    q = kv = tokens([*range(100, 116), *[0] * 16], [0] * 16 + [-1] * 16)
    assert kinds(MASKS[1], q, kv, 16, 16).tolist() == [[PARTIAL, EMPTY], [EMPTY, EMPTY]]


def test_visits_list_the_full_then_the_partial():
    order, full, seen = blocks.visits(np.array([[[PARTIAL, EMPTY, FULL, FULL], [EMPTY] * 4]]))
    assert order[0, 0, :3].tolist() == [2, 3, 0]
    assert full.tolist() == [[2, 0]] and seen.tolist() == [[3, 0]]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_visible_pairs_are_counted_exactly(mask, packed):
    rng = np.random.default_rng(0)
    order = rng.permutation(200)
    segments = np.sort(rng.integers(-1, 5, 200))[order] if packed else None
    q, kv = tokens(order, segments), tokens(np.arange(200), None if segments is None else np.sort(segments))
    assert blocks.visible_pairs(mask, q, kv) == np.asarray(mask.visible(q, kv)).sum()


def work(layout, length, block):
    """Pairs that each rank computes over all its steps, and pairs that it sees."""
    mask, ranks = MASKS[1], np.split(layout.indices(length), layout.shards)
    everything = tokens(np.concatenate(ranks))
    computed = [blocks.computed_pairs(kinds(mask, tokens(r), everything, block, block), block, block) for r in ranks]
    return np.array(computed), np.array([blocks.visible_pairs(mask, tokens(r), everything) for r in ranks])


def test_zigzag_is_even_and_wastes_little():
    """At 16 blocks a shard, P=8: at most 1.10x of what is visible, and the same on every rank to one block."""
    block, length = 8, 8 * 16 * 8
    computed, visible = work(Zigzag(8), length, block)
    assert computed.sum() <= 1.10 * visible.sum()
    assert np.ptp(computed) <= block * block
    assert visible.max() / visible.mean() <= 1.001


def test_contiguous_is_uneven():
    """The last of P shards sees (2P - 1) / P of the mean."""
    computed, visible = work(Contiguous(8), 1024, 8)
    assert visible.max() / visible.mean() == pytest.approx(15 / 8, rel=0.01)
    assert computed.max() / computed.mean() == pytest.approx(15 / 8, rel=0.01)


def test_eight_tokens_on_two_ranks():
    assert work(Contiguous(2), 8, 1)[1].tolist() == [10, 26]
    assert work(Zigzag(2), 8, 1)[1].tolist() == [18, 18]


def test_flops():
    assert blocks.flops(10, 2, 64) == 2 * 10 * 2 * 128
    assert blocks.flops(10, 2, 64, 128, backward=True) == 2 * 10 * 2 * (3 * 64 + 2 * 128)


@pytest.mark.parametrize("layout", [Contiguous(8), Zigzag(8), Striped(8)], ids=repr)
@pytest.mark.parametrize("mask", [*MASKS, Mask(1.0, causal=True, window=(1, 0)), Mask(1.0, window=(0, 5))], ids=str)
@pytest.mark.parametrize("axes", [{"a": 8}, {"a": 2, "b": 4}, {"b": 4, "a": 2}], ids=str)
def test_ring_offsets_are_those_that_some_rank_sees(layout, mask, axes):
    length = 64
    ranks = np.split(layout.indices(length), 8)
    seen = np.array([[np.asarray(mask.visible(tokens(q), tokens(k))).any() for k in ranks] for q in ranks])
    for axis in axes:
        place = np.stack(np.unravel_index(np.arange(8), tuple(axes.values())))[list(axes).index(axis)]
        offsets = (place[:, None] - place[None, :]) % axes[axis]
        right = sorted(set(offsets[seen].tolist()) | {0})
        assert blocks.ring_offsets(mask, layout, (length, length), axes, axis) == tuple(right)


def test_a_window_leaves_a_contiguous_ring_few_hops():
    """min(P - 1, ceil(left / (S / P)))."""
    for left in (0, 1, 7, 8, 9, 16, 63):
        offsets = blocks.ring_offsets(Mask(1.0, causal=True, window=(left, 0)), Contiguous(8), (64, 64), {"c": 8}, "c")
        assert len(offsets) - 1 == min(7, -(-left // 8))
