"""The decoder: the same on a mesh as on one device, in logits and gradients; documents are worlds of their own."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcp
from models.spread import spread
from models.train import loss
from models.transformer import MODELS, REMAT, Config, Decoder, parameters

CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab=37)
LENGTHS = (24, 3, 37)  # of the documents in a row


def one_device(query, key, value, segment_ids):
    return jaxcp.dot_product_attention(
        query,
        key,
        value,
        strategy=None,
        is_causal=True,
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        implementation="reference",
    )


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Decoder(CONFIG, nnx.Rngs(0)))()


def tokens(seed=0, rows=2):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, (rows, sum(LENGTHS)), np.int32)


def batch_of(tokens, layout=jaxcp.Contiguous(1), lengths=LENGTHS):  # noqa: B008
    segments = np.broadcast_to(np.repeat(np.arange(len(lengths)), lengths), tokens.shape)
    return jaxcp.next_token_batch(tokens, layout=layout, segment_ids=segments)


@partial(jax.jit, static_argnames="attend")
def logits_of(model, batch, attend=one_device):
    return model(batch["inputs"], batch["positions"], batch["segment_ids"], attend=attend)


def assert_close(found, wanted, tolerance=1e-5):
    """Element by element, relative to the largest of each array."""
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()
        assert error <= tolerance, (jax.tree_util.keystr(path), error)


def solve(model, batch, attend):
    """Logits, and the gradients of the loss."""
    return logits_of(model, batch, attend), jax.grad(loss)(model, batch, attend)


@pytest.fixture(scope="module")
def wanted(model):
    return jax.jit(partial(solve, attend=one_device))(model, batch_of(tokens()))


@pytest.mark.parametrize(
    "mesh, strategy, layout",
    [
        ("data=2,context=4", "ring", "zigzag"),
        ("context=8", "ring", "striped"),
        ("data=2,context=4", "all_gather", "contiguous"),
        ("data=2,context=4", "ulysses", "zigzag"),
        ("data=2,context=4", "hybrid", "striped"),
        ("ulysses=2,ring=4", "hybrid", "zigzag"),
        ("data=2", "none", "contiguous"),
    ],
)
def test_a_mesh_changes_nothing(model, wanted, mesh, strategy, layout):
    on = spread(mesh, strategy, layout)
    with jax.set_mesh(on.mesh):
        logits, gradients = jax.jit(partial(solve, attend=on))(model, on.place(batch_of(tokens(), on.layout)))
    assert_close((on.layout.undeal(np.asarray(logits)), gradients), wanted)


def test_remat_repeats_no_ring(model):
    """Every policy gives the same gradients; `attention` sends as often as no remat at all, `full` more often."""
    on = spread("context=2", "ring", "zigzag")
    batch = on.place(batch_of(tokens(), on.layout))
    asked, sent, gradients = {}, {}, {}
    for remat in REMAT:
        remade = nnx.clone(model)
        remade.config = dataclasses.replace(CONFIG, remat=remat)
        with jax.set_mesh(on.mesh):
            lowered = jax.jit(jax.grad(partial(loss, attend=on))).lower(remade, batch)
        asked[remat] = lowered.as_text().count("stablehlo.collective_permute")
        compiled = lowered.compile()
        sent[remat] = len(re.findall(r" collective-permute(?:-start)?\(", compiled.as_text()))
        gradients[remat] = jax.tree.leaves(compiled(remade, batch))
    assert sent["attention"] == sent["none"] > 0
    assert asked["attention"] == asked["none"] < asked["full"]  # XLA:CPU merges some of the last again
    assert_close([gradients["attention"], gradients["full"]], [gradients["none"]] * 2, 1e-6)


def test_documents_do_not_see_each_other(model):
    """Another middle document changes its own logits, and not a bit of the others'."""
    on = spread("data=2,context=4", "ring", "zigzag")
    row, middle = tokens(), slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    changed = row.copy()
    changed[:, middle] = (row[:, middle] + 1) % CONFIG.vocab
    with jax.set_mesh(on.mesh):
        a, b = (
            on.layout.undeal(np.asarray(logits_of(model, on.place(batch_of(x, on.layout)), on))) for x in (row, changed)
        )
    assert (a[:, middle] != b[:, middle]).any()
    np.testing.assert_array_equal(np.delete(a, middle, 1), np.delete(b, middle, 1))


def test_positions_restart_in_each_document(model):
    """A document has the same logits wherever it lies in its row."""
    row = tokens()
    first, _, last = np.split(row, np.cumsum(LENGTHS)[:-1], axis=1)
    packed = logits_of(model, batch_of(row))
    moved = logits_of(model, batch_of(np.concatenate([last, row[:, :3], first], 1), lengths=LENGTHS[::-1]))
    assert_close(moved[:, : LENGTHS[-1]], packed[:, -LENGTHS[-1] :])


def test_bfloat16_activations_over_float32_parameters():
    model = Decoder(dataclasses.replace(CONFIG, dtype="bfloat16"), nnx.Rngs(0))
    seen = []

    def attend(query, key, value, segment_ids):
        seen.extend(x.dtype for x in (query, key, value))
        return one_device(query, key, value, segment_ids)

    batch = batch_of(tokens())
    logits = model(batch["inputs"], batch["positions"], batch["segment_ids"], attend=attend)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in (logits, *jax.tree.leaves(model))} == {jnp.dtype(jnp.float32)}


def test_presets():
    sizes = {name: parameters(config) for name, config in MODELS.items()}
    assert list(sizes.values()) == sorted(sizes.values())
    assert sizes["tiny"] < 1e6
    block = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # norms; query and out; key and value; the MLP
    assert parameters(CONFIG) == 2 * 37 * 32 + 2 * block + 32
