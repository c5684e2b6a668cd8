"""Every mistake of a user gets one clear sentence, which names the thing and the remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import Contiguous, Ring, Striped, Ulysses, Zigzag
from tests.common import mesh

B, S, N, H = SHAPE = (2, 16, 4, 8)
ids = lambda *shape: jnp.zeros(shape, jnp.int32)


def attention(strategy=Ring("c"), *, query=SHAPE, key=SHAPE, value=SHAPE, dtypes=(jnp.float32,) * 3, **options):  # noqa: B008
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in zip((query, key, value), dtypes, strict=True)]
    return jaxcp.dot_product_attention(*arrays, strategy=strategy, **options)


def refused(call, *words, error=ValueError):
    """`call` raises one sentence, which holds `words` in this order, from jaxcp itself."""
    with pytest.raises(error, match=".*".join(map(re.escape, words))) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "jaxcp" in str(caught.traceback[-1].path) or error is TypeError


def case(name, words, *args, **options):
    return pytest.param(words, args, options, id=name)


MISTAKES = [
    # the strategy and its axes
    case("axis", ["Ring('contxt')", "no axis 'contxt'", "'data'", "'c'"], Ring("contxt")),
    case("inner axis", ["no axis 'r'"], Ulysses("c", Ring("r"))),
    case("strategy name", ["strategy", "Ring", "AllGather", "Ulysses", "'ring'"], "ring"),
    case("strategy class", ["strategy", "Ring", "not", "Ring"], Ring),
    case("kernel", ["implementation='flash'", "'reference'", "'blockwise'"], implementation="flash"),
    case("kernel alone", ["implementation='flash'", "'blockwise'"], None, implementation="flash"),
    case(
        "sequence elsewhere",
        ["Ring('c')", "sharded over c", "data", "reshard", "partition_spec"],
        partition_spec=P(None, "data"),
    ),
    case("sequence nowhere", ["sharded over c", "nothing", "partition_spec"], partition_spec=P("data")),
    case(
        "long spec",
        ["partition_spec", "P(batch, sequence, heads, None)"],
        partition_spec=P(None, "c", None, None, None),
    ),
    case(
        "spec axis", ["partition_spec", "'nowhere'", "each axis once", "'data', 'c'"], partition_spec=P("nowhere", "c")
    ),
    case("spec axis twice", ["partition_spec", "each axis once"], partition_spec=P("c", "c")),
    case("spec type", ["partition_spec", "P(batch, sequence, heads, None)"], partition_spec="c"),
    case(
        "spec of head size",
        ["partition_spec", "P(batch, sequence, heads, None)"],
        partition_spec=P(None, "c", None, "data"),
    ),
    # the layout
    case("layout shards", ["Zigzag(2)", "2 shards", "Ring('c')", "4"], layout=Zigzag(2)),
    case("layout name", ["layout", "Contiguous, Zigzag or Striped", "'zigzag'"], layout="zigzag"),
    case("layout class", ["layout", "Contiguous, Zigzag or Striped", "Zigzag"], layout=Zigzag),
    # the arrays
    case("query dimensions", ["query must be [B, T, N, H]", "[16, 4, 8]"], query=(16, 4, 8)),
    case("key dimensions", ["key [B, S, K, H]", "do not fit", "[16, 4, 8]"], key=(16, 4, 8)),
    case("head size", ["do not fit", "[2, 16, 4, 6]"], key=(B, S, N, 6)),
    case("value rows", ["do not fit", "[2, 12, 4, 8]"], value=(B, 12, N, H)),
    case("batches", ["do not fit", "[1, 16, 4, 8]"], key=(1, S, N, H), value=(1, S, N, H)),
    case("groups", ["4 query heads", "groups", "3 key heads"], key=(B, S, 3, H), value=(B, S, 3, H)),
    case("dtypes", ["one floating dtype", "bfloat16"], dtypes=(jnp.float32, jnp.bfloat16, jnp.float32)),
    case("integers", ["one floating dtype", "int32"], dtypes=(jnp.int32,) * 3),
    case(
        "batch",
        ["batch of 3", "2 devices"],
        query=(3, S, N, H),
        key=(3, S, N, H),
        value=(3, S, N, H),
        partition_spec=P("data", "c"),
    ),
    case(
        "heads over an axis",
        ["query heads", "1 key heads", "2 devices"],
        key=(B, S, 1, H),
        value=(B, S, 1, H),
        partition_spec=P(None, "c", "data"),
    ),
    case("sinks", ["sinks", "[3]", "each of the 4 query heads"], sinks=jnp.zeros(3)),
    case("sinks of integers", ["sinks", "int32", "floating"], sinks=ids(4)),
    # the mask
    case("window", ["local_window_size", "-1"], local_window_size=-1),
    case("window side", ["local_window_size", "(left, right)", "(4, -2)"], local_window_size=(4, -2)),
    case("window sides", ["local_window_size", "(left, right)", "(1, 2, 3)"], local_window_size=(1, 2, 3)),
    case("fraction of a window", ["local_window_size", "4.5"], local_window_size=4.5),
    case("soft cap", ["logits_soft_cap", "positive", "None"], logits_soft_cap=0),
    case("negative soft cap", ["logits_soft_cap", "positive"], logits_soft_cap=-3.0),
    # tokens
    case(
        "one of two segment ids",
        ["query_segment_ids", "key_value_segment_ids", "together", "twice"],
        query_segment_ids=ids(B, S),
    ),
    case("other of two segment ids", ["query_segment_ids", "together"], key_value_segment_ids=ids(B, S)),
    case(
        "segment shape",
        ["key_value_segment_ids [2, 12]", "[2, 16]", "each row of the key and value"],
        query_segment_ids=ids(B, S),
        key_value_segment_ids=ids(B, 12),
    ),
    case(
        "segments without a batch",
        ["query_segment_ids [16]", "[2, 16]"],
        query_segment_ids=ids(S),
        key_value_segment_ids=ids(S),
    ),
    case(
        "segments of floats",
        ["query_segment_ids", "integers", "float32"],
        query_segment_ids=jnp.zeros((B, S)),
        key_value_segment_ids=jnp.zeros((B, S)),
    ),
    case(
        "position shape",
        ["query_positions [12]", "[16]", "[2, 16]", "each row"],
        query_positions=ids(12),
        key_value_positions=ids(S),
    ),
    case(
        "positions of floats",
        ["key_value_positions", "integers", "float32"],
        query_positions=ids(S),
        key_value_positions=jnp.zeros(S),
    ),
    case(
        "one of two positions", ["query_positions", "key_value_positions", "together", "twice"], query_positions=ids(S)
    ),
]


@pytest.mark.parametrize("words, args, options", MISTAKES)
def test_a_mistake_in_the_call(words, args, options):
    with jax.set_mesh(mesh(data=2, c=4)):
        refused(lambda: attention(*args, **options), *words)


def test_no_mesh():
    refused(attention, "Ring('c')", "no mesh", "jax.set_mesh")
    refused(lambda: jax.eval_shape(attention), "no mesh")


def test_an_axis_used_twice():
    refused(lambda: Ring("c", Ulysses("c")), "Ring('c', Ulysses('c'))", "twice")
    refused(lambda: Ring(("a", "a")), "twice")


@pytest.mark.parametrize("axis", [None, 3, (), ("c", 1), [None]])
def test_an_axis_that_is_no_name(axis):
    refused(lambda: Ring(axis), "Ring(axis)", "mesh axis name", repr(axis))


def test_an_inner_that_is_no_strategy():
    refused(lambda: Ulysses("u", "ring"), "Ulysses('u', inner)", "another strategy", "'ring'")
    refused(lambda: Ulysses("u", Ring), "Ulysses('u', inner)", "another strategy", "Ring")


@pytest.mark.parametrize("shards", [0, -1, 2.0, "4", None])
@pytest.mark.parametrize("layout", [Contiguous, Zigzag, Striped])
def test_a_layout_needs_a_number_of_shards(layout, shards):
    refused(lambda: layout(shards), f"{layout.__name__}(shards)", "positive number", repr(shards))


def test_explicit_types_that_do_not_shard_the_sequence():
    on = mesh(explicit=True, data=2, c=4)
    with jax.set_mesh(on):
        whole, batch, right = (jax.reshard(jnp.zeros(SHAPE), spec) for spec in (P(), P("data"), P("data", "c")))
        call = lambda x, **options: jaxcp.dot_product_attention(x, x, x, strategy=Ring("c"), **options)
        refused(lambda: call(whole), "Ring('c')", "sharded over c", "nothing", "reshard")
        refused(lambda: jax.jit(call)(batch), "sharded over c", "nothing", "reshard")
        refused(lambda: call(right, partition_spec=P(None, "c")), "partition_spec", "query's type", "leave it out")
        refused(lambda: call(right, layout=Zigzag(2)), "Zigzag(2)", "2 shards")


def inside(call, *, over, on, spec):
    jax.shard_map(call, mesh=on, in_specs=spec, out_specs=spec, axis_names=frozenset(over))(jnp.zeros(SHAPE))


def test_half_of_the_axes_manual():
    strategy = Ulysses("u", Ring("r"))
    call = lambda x: jaxcp.dot_product_attention(x, x, x, strategy=strategy)
    refused(
        lambda: inside(call, over="u", on=mesh(u=2, r=2), spec=P(None, "u")),
        "Ulysses('u', Ring('r'))",
        "shard_map over u",
        "all its axes",
    )


def test_zigzag_needs_two_stretches_on_a_shard():
    call = lambda x: jaxcp.dot_product_attention(x[:, :3], x[:, :3], x[:, :3], strategy=Ring("c"), layout=Zigzag(4))
    refused(
        lambda: inside(call, over="c", on=mesh(c=4), spec=P(None, "c")),
        "Zigzag(4)",
        "8 equal stretches",
        "12 rows",
        "pad the sequence, or pass positions",
    )


def fn(**options):
    return jaxcp.attention_fn(strategy=None, **options)


@pytest.mark.parametrize(
    "words, options",
    [
        (["dense mask", "is_causal"], dict(mask=jnp.ones((1, 1, S, S), bool))),
        (["bias", "local_window_size"], dict(bias=jnp.ones((1, 1, S, S)))),
        (["dropout", "dropout_rate=0", "deterministic=True"], dict(dropout_rate=0.1)),
        (["weights", "sow_weights"], dict(module=object())),
        (["einsum"], dict(qk_attn_weights_einsum=jnp.einsum)),
        (["precision"], dict(precision=jax.lax.Precision.HIGHEST)),
    ],
    ids=["mask", "bias", "dropout", "sow", "einsum", "precision"],
)
def test_attention_fn_refuses(words, options):
    x = jnp.zeros(SHAPE)
    refused(lambda: fn()(x, x, x, **options), "jaxcp.attention_fn", *words)


def test_attention_fn_knows_its_options():
    refused(lambda: fn(sink=1), "attention_fn()", "'sink'", "sinks", error=TypeError)
    refused(lambda: fn(return_residual=True), "attention_fn()", "'return_residual'", error=TypeError)
    refused(lambda: jaxcp.attention_fn(is_causal=True), "attention_fn()", "strategy=", error=TypeError)
    with pytest.raises(TypeError, match="strategy"):
        jaxcp.dot_product_attention(*[jnp.zeros(SHAPE)] * 3)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(
    "words, options",
    [
        (["tokens", "integers [B, S]", "[4]"], dict(tokens=[1, 2, 3, 4])),
        (["tokens", "integers [B, S]", "float"], dict(tokens=[[1.0, 2.0]])),
        (["segment_ids", "tokens", "[1, 2]"], dict(tokens=[[1, 2]], segment_ids=[[0, 0, 0]])),
        (["segment_ids", "integers", "float"], dict(tokens=[[1, 2]], segment_ids=[[0.5, 1.5]])),
        (["layout", "Contiguous, Zigzag or Striped", "'zigzag'"], dict(tokens=[[1, 2]], layout="zigzag")),
    ],
    ids=["dimensions", "floats", "segment shape", "segments of floats", "layout"],
)
def test_next_token_batch(xp, words, options):
    arrays = {name: xp.asarray(x) if name != "layout" else x for name, x in options.items()}
    arguments = dict(layout=Zigzag(2)) | arrays
    refused(lambda: jaxcp.next_token_batch(arguments.pop("tokens"), **arguments), "next_token_batch", *words)


@pytest.mark.parametrize("x", [np.zeros((2, 8)), jnp.zeros((2, 8))], ids=["numpy", "jax"])
@pytest.mark.parametrize("axis", [2, -3])
def test_dealing_a_dimension_that_is_not_there(x, axis):
    refused(lambda: Zigzag(2).deal(x, axis), "[2, 8]", f"no dimension {axis}", "axis=")
    refused(lambda: Zigzag(2).undeal(dict(x=x), axis), "[2, 8]", f"no dimension {axis}", "axis=")


@pytest.mark.parametrize(
    "words, shape, positions",
    [
        (["head size", "even", "7"], (2, 16, 4, 7), ids(2, 16)),
        (["positions [12]", "[2, 16]", "[16]"], SHAPE, ids(12)),
        (["positions [16, 2]", "[2, 16]"], SHAPE, ids(16, 2)),
        (["positions", "integers", "float32"], SHAPE, jnp.zeros((2, 16))),
        (["x", "[B, T, N, H]", "[2, 16, 8]"], (2, 16, 8), ids(2, 16)),
    ],
    ids=["odd head", "length", "turned", "floats", "dimensions"],
)
def test_apply_rope(words, shape, positions):
    refused(lambda: jaxcp.apply_rope(jnp.zeros(shape), positions), "apply_rope", *words)
