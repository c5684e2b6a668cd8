"""Every fault of the list of small inputs that broke other systems, reduced to the least program that shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import AllGather, Contiguous, Ring, Striped, Ulysses, Zigzag, softmax
from tests.common import arrays, attend, forward_and_backward, mesh, program
from tests.hlo import collectives
from tests.oracle import Problem, dense_attention, solve, worst

KINDS = "ring", "all_gather", "ulysses", "hybrid"
over_all = pytest.mark.parametrize("kind", KINDS)


def spread(kind: str, shards: int):
    """A strategy over `shards` devices, and their mesh."""
    if kind == "hybrid":
        return Ulysses("u", Ring("r")), mesh(u=2, r=shards // 2) if shards > 1 else mesh(u=1, r=1)
    return {"ring": Ring, "all_gather": AllGather, "ulysses": Ulysses}[kind]("c"), mesh(c=shards)


def run(problem, kind, shards, layout=None, **options):
    strategy, on = spread(kind, shards)
    return attend(problem, strategy, layout and layout(shards), on=on, **options)


def exact(found, truth, bar=1e-5):
    error, name = worst(found, truth)
    assert error <= bar, (error, name)


def close(a, b, bar=1e-5):
    """Trees `a` and `b`, element by element, relative to the largest element of each array of `b`."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.shape(x) == np.shape(y)
        error, largest = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(), np.abs(y).max()
        assert error <= bar * largest, (error, largest)


def same(a, b):
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def compiled(problem, strategy, on, layout=None, **options):
    with jax.set_mesh(on):
        return jax.jit(program(problem, strategy, layout, **options)).lower(*arrays(problem)).compile()


def moved(text, dtype="f32"):
    """(how many collectives of this dtype run, the bytes of all their operands)."""
    found = [c for c in collectives(text) if c.dtype == dtype]
    return sum(c.count for c in found), sum(c.count * c.bytes for c in found)


def documents(*lengths, batch=1):
    return np.repeat(np.arange(len(lengths)), lengths)[None].repeat(batch, 0).astype(np.int32)


def packed(ids):
    return dict(query_segment_ids=ids, key_value_segment_ids=ids)


def flat(values, heads=2, dim=4):
    """q = k = 0 and v[i] = values[i]: each row is the mean of what it sees."""
    problem = Problem.random((1, len(values), heads, dim))
    value = np.broadcast_to(np.asarray(values, np.float32)[None, :, None, None], problem.value.shape)
    return problem.replace(query=0 * problem.query, key=0 * problem.key, value=value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_01_padding_is_neither_seen_nor_given_gradients(kind, causal):
    ids = np.array([[0] * 7 + [-1]], np.int32)
    found = run(flat([*range(7), 200]).replace(is_causal=causal, **packed(ids)), kind, 2)
    right = np.arange(7) / 2 if causal else np.full(7, 3.0)
    close(found["out"][0, :7], np.broadcast_to(right[:, None, None], (7, 2, 4)))
    assert not found["dk"][:, 7].any() and not found["dv"][:, 7].any() and not found["out"][:, 7].any()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_01_padding_of_our_own(kind):
    problem = flat(range(7)).replace(is_causal=True)
    exact(run(problem, kind, 2), solve(problem))


@pytest.mark.parametrize("length", [2, 6])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_02_a_zigzag_too_short_for_its_stretches(kind, length):
    problem = Problem.random((2, length, 2, 4), is_causal=True)
    exact(run(problem, kind, 2, Zigzag), solve(problem))


@over_all
def test_case_03_huge_logits(kind):
    problem = Problem.random((1, 8, 4, 64))
    problem = problem.replace(query=np.full_like(problem.query, 30), key=np.full_like(problem.key, 30))
    found, truth, dense = run(problem, kind, 4), solve(problem), solve(problem, np.float32)
    found = {name: found[name] for name in truth}
    assert all(np.isfinite(x).all() for x in found.values())
    for result in found, truth, dense:  # dq is 0, a difference of large numbers: judged by their size, which dk shows
        result["dq"] = np.concatenate([result["dq"], truth["dk"]])
    # float32 knows an lse of 7200 to 2.4e-4, and every weight with it, in a dense computation too
    exact(found, truth, bar=2 * worst(dense, truth)[0])


@over_all
def test_case_04_twenty_calls_are_bit_equal(kind):
    problem = Problem.random((1, 64, 8, 8), is_causal=True, sinks=True)
    strategy, on = spread(kind, 8)
    call = compiled(problem, strategy, on, Zigzag(8))
    with jax.set_mesh(on):
        results = [call(*arrays(problem)) for _ in range(20)]
    for result in results[1:]:
        same(result, results[0])


@over_all
def test_case_05_sinks(kind):
    problem = flat(range(8), heads=4).replace(sinks=np.full(4, 5, np.float32), is_causal=True)
    found = run(problem, kind, 4)
    i = np.arange(8)
    right = i / 2 * (i + 1) / (i + 1 + np.exp(5))
    close(found["out"], np.broadcast_to(right[None, :, None, None], found["out"].shape))
    assert np.abs(found["dsinks"]).min() > 0
    exact(found, solve(problem))


@pytest.mark.parametrize("name", ["sink", "dropout", "mask", "causal"])
def test_case_06_an_unknown_keyword_is_named(name):
    x = jnp.ones((1, 4, 1, 4))
    with pytest.raises(TypeError, match=f"'{name}'"):
        jaxcp.dot_product_attention(x, x, x, strategy=None, **{name: None})


@over_all
def test_case_07_with_and_without_jit(kind):
    shards = 4 if kind == "hybrid" else 2
    strategy, on = spread(kind, shards)
    problem = Problem.random((1, 64, 16, 8), is_causal=True)
    with jax.set_mesh(on):
        eager = program(problem, strategy)(*arrays(problem))
    exact({name: x for name, x in eager.items() if x is not None}, attend(problem, strategy, on=on), bar=1e-6)
    exact(eager, solve(problem))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_08_inside_the_users_shard_map(kind):
    problem = Problem.random((2, 16, 4, 8), is_causal=True)
    strategy, _ = spread(kind, 4)

    @jax.shard_map(mesh=mesh(data=2, c=4), in_specs=P("data", "c"), out_specs=P("data", "c"))
    def attention(*qkv):
        return jaxcp.dot_product_attention(*qkv, strategy=strategy, is_causal=True, return_residual=True)

    @jax.jit
    def both(q, k, v, dout, dlse):
        (out, lse), pull = jax.vjp(attention, q, k, v)
        dq, dk, dv = pull((dout, dlse))
        return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)

    exact(both(*(x for x in arrays(problem) if x is not None)), solve(problem))


def test_case_09_the_ring_has_no_hop_to_spare():
    shards, heads, dim = 4, 2, 8
    q, k, v = (jnp.ones((1, 64, heads, dim)) for _ in range(3))
    forward, backward = (c.as_text() for c in forward_and_backward(Ring("c"), mesh(c=4), q, k, v, is_causal=True))
    keys = 64 // shards * heads * dim * 4
    assert moved(forward) == (2 * 3, (shards - 1) * 2 * keys)
    assert moved(backward) == (2 * 3 + 2 * 3, (shards - 1) * 2 * keys * 2)  # keys again, and float32 gradients
    assert moved(forward, "s32") == moved(backward, "s32") == (3, 3 * 64 // shards * 4)  # positions
    assert {c.kind for c in collectives(forward + backward)} == {"collective-permute"}


@over_all
def test_case_10_packed_documents_take_no_square_of_memory(kind):
    def temp(length):
        strategy, on = spread(kind, 4 if kind == "hybrid" else 2)
        problem = Problem.random((1, length, 2, 16), is_causal=True, **packed(documents(length // 4, length * 3 // 4)))
        return compiled(problem, strategy, on).memory_analysis().temp_size_in_bytes

    short, long = temp(2048), temp(4096)
    assert long <= 2 * short, (short, long)


def test_case_11_the_rings_memory_is_flat():
    def temps(shards):
        q, k, v = (jnp.ones((1, 512 * shards, 8, 64)) for _ in range(3))
        attention = lambda *qkv: jaxcp.dot_product_attention(*qkv, strategy=Ring("c"), is_causal=True)
        gradient = jax.grad(lambda *qkv: attention(*qkv).sum(), (0, 1, 2))
        with jax.set_mesh(mesh(c=shards)):
            programs = [jax.jit(f).lower(q, k, v).compile() for f in (attention, gradient)]
        return [p.memory_analysis().temp_size_in_bytes for p in programs]

    two, four, eight = map(np.array, map(temps, (2, 4, 8)))
    # two shards need less: their one hop comes in while the keys that were passed in are used, and no other follows
    assert np.all(two <= four) and np.all(np.abs(eight / four - 1) <= 0.1), (two, four, eight)
    assert eight[1] <= 30e6 / 2, eight  # bytes of temporaries a device, forward and backward


@pytest.mark.parametrize("layout", [Contiguous(2), Zigzag(2), Striped(2), Zigzag(3)], ids=repr)
def test_case_12_positions_restart_in_each_document(layout):
    ids = np.array([[1, 1, 1, 2, 2]], np.int32)
    batch = jaxcp.next_token_batch(np.arange(5)[None], layout=layout, segment_ids=ids)
    same(batch["positions"], np.array([[0, 1, 2, 0, 1]])[:, layout.indices(5)])
    same(layout.undeal(batch["positions"]), np.array([[0, 1, 2, 0, 1]]))


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)])
def test_case_13_the_hybrids_last_row_sees_the_first(degrees):
    on = mesh(u=degrees[0], r=degrees[1])
    found = attend(flat(range(8)).replace(is_causal=True), Ulysses("u", Ring("r")), on=on)
    close(found["out"][0, 7], np.full((2, 4), 3.5))
    moved = attend(flat([8, *range(1, 8)]).replace(is_causal=True), Ulysses("u", Ring("r")), on=on)
    close(moved["out"][0, 7], np.full((2, 4), 4.5))


def test_case_14_a_window_needs_one_hop():
    problem = Problem.random((1, 64, 2, 4), is_causal=True, local_window_size=(4, 0))
    exact(run(problem, "ring", 8), solve(problem))
    keys = 64 // 8 * 2 * 4 * 4
    q, k, v = (jnp.asarray(x) for x in (problem.query, problem.key, problem.value))
    options = dict(is_causal=True, local_window_size=(4, 0))
    forward, backward = (c.as_text() for c in forward_and_backward(Ring("c"), mesh(c=8), q, k, v, **options))
    assert moved(forward) == (2, 2 * keys) and moved(backward) == (4, 2 * 2 * keys)


@pytest.mark.parametrize("window", [(2, 2), (2, 0), (1, 0)])
def test_case_15_a_window_narrower_than_the_ring(window):
    problem = Problem.random((1, 16, 2, 4), local_window_size=window)
    exact(run(problem, "ring", 4, Striped), solve(problem))


def language_loss(parameters, batch, attention, rope):
    """A model of one layer: sum of weighted losses, and sum of weights."""
    x = parameters["embed"][batch["inputs"]]  # [B, S, N, H]
    q, k, v = (jnp.einsum("bsnh,hd->bsnd", x, parameters[name]) for name in "qkv")
    x = x + attention(rope(q, batch["positions"]), rope(k, batch["positions"]), v, batch["segment_ids"])
    scores = jax.nn.log_softmax(jnp.einsum("bsnh,vnh->bsv", x, parameters["embed"]))
    losses = -jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    return (losses * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


def language_problem(*lengths):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    parameters = dict(embed=normal(11, 4, 8), q=normal(8, 8), k=normal(8, 8), v=normal(8, 8))
    parameters = {name: x / np.float32(8**0.5) for name, x in parameters.items()}  # well conditioned
    return parameters, rng.integers(0, 11, (1, sum(lengths))), documents(*lengths)


def language_truth(parameters, tokens, ids, weights=None):
    """loss and gradients in float64, every label by hand."""
    place = np.concatenate([np.arange((ids == i).sum()) for i in np.unique(ids)])[None]
    last = np.append(ids[0, 1:] != ids[0, :-1], True)[None]
    batch = dict(
        inputs=tokens,
        targets=np.where(last, 0, np.append(tokens[:, 1:], [[0]], 1)),
        positions=place,
        segment_ids=ids,
        loss_weights=(1.0 - last) if weights is None else weights,
    )

    def rope(x, positions):
        angle = positions[..., None, None] * 10_000.0 ** (-np.arange(4) / 4)
        x1, x2 = x[..., :4], x[..., 4:]
        cos, sin = np.cos(angle), np.sin(angle)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def attention(q, k, v, ids):
        dense = Problem.random(q.shape, is_causal=True).replace(**packed(ids))
        return dense_attention(dense, q, k, v, None)[0]

    def loss(parameters):
        total, weight = language_loss(parameters, batch, attention, rope)
        return total / weight

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), parameters)
        return jax.tree.map(np.asarray, jax.value_and_grad(loss)(wide))


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_case_16_one_weighted_token(shards, manual):
    parameters, tokens, ids = language_problem(8)
    weights = np.array([[0, 0, 0, 0, 1, 0, 0, 0]], np.float32)
    layout = Zigzag(shards)
    batch = jaxcp.next_token_batch(tokens, layout=layout)
    batch["loss_weights"] = layout.deal(weights)

    def attention(q, k, v, ids):
        return jaxcp.dot_product_attention(q, k, v, strategy=Ring("c"), layout=layout, is_causal=True)

    def loss(parameters, batch):
        total, weight = language_loss(parameters, batch, attention, jaxcp.apply_rope)
        return jax.lax.psum(total, "c") / jax.lax.psum(weight, "c") if manual else total / weight

    with jax.set_mesh(mesh(c=shards)):
        if manual:
            loss = jax.shard_map(loss, in_specs=(P(), P(None, "c")), out_specs=P())
        value, gradients = jax.jit(jax.value_and_grad(loss))(parameters, batch)
    right, right_gradients = language_truth(parameters, tokens, ids, weights)
    close((value, gradients), (right, right_gradients))
    norm = lambda tree: np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))
    close(norm(gradients), norm(right_gradients))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_17_rope_turns_by_the_documents_own_positions(kind):
    parameters, tokens, ids = language_problem(4, 4)
    batch = jaxcp.next_token_batch(tokens, layout=Zigzag(2), segment_ids=ids)
    same(batch["positions"][:, :4], np.array([[0, 1, 2, 3]]))  # rank 0: tokens 0, 1 of one, 2, 3 of the other
    close(packed_loss(kind, Zigzag(2), parameters, batch), language_truth(parameters, tokens, ids))


@pytest.mark.parametrize("layout", [Contiguous(2), Zigzag(2), Striped(2)], ids=repr)
def test_case_18_no_label_crosses_documents(layout):
    parameters, tokens, ids = language_problem(3, 5)
    batch = jaxcp.next_token_batch(tokens, layout=layout, segment_ids=ids)
    weights, targets = layout.undeal((batch["loss_weights"], batch["targets"]))
    same(weights, np.array([[1, 1, 0, 1, 1, 1, 1, 0]]))
    same(targets, np.append(tokens[:, 1:], [[0]], 1) * weights.astype(int))
    close(packed_loss("ring", layout, parameters, batch), language_truth(parameters, tokens, ids))


def packed_loss(kind, layout, parameters, batch):
    """loss and gradients of packed documents, positions and all from next_token_batch."""
    strategy, on = spread(kind, layout.shards)

    def attention(q, k, v, ids):
        here = dict(query_positions=batch["positions"], key_value_positions=batch["positions"])
        return jaxcp.dot_product_attention(q, k, v, strategy=strategy, is_causal=True, **here, **packed(ids))

    def loss(parameters, batch):
        total, weight = language_loss(parameters, batch, attention, jaxcp.apply_rope)
        return total / weight

    with jax.set_mesh(on):
        return jax.jit(jax.value_and_grad(loss))(parameters, batch)


@over_all
def test_case_19_nan_in_padding_harms_nobody(kind):
    ids = np.array([[0] * 9 + [1] * 4 + [-1] * 3], np.int32)
    clean = Problem.random((1, 16, 4, 8), is_causal=True, **packed(ids))
    ruin = lambda x, fill: np.where((ids < 0)[..., None, None], np.float32(fill), x)
    spoil = lambda fill: {name: ruin(getattr(clean, name), fill) for name in ("query", "key", "value")}
    exact(run(clean.replace(**spoil(np.nan)), kind, 4, Zigzag), solve(clean.replace(**spoil(0))))


@pytest.mark.parametrize("kind", ["ulysses", "hybrid", "ring"])
def test_case_20_fewer_key_heads_than_ranks(kind):
    problem = Problem.random((2, 16, 8, 4), kv_heads=2)
    value = np.broadcast_to(np.array([3, -7], np.float32)[:, None], problem.value.shape)
    problem = problem.replace(value=value)
    found = run(problem, kind, 4)
    close(found["out"], np.broadcast_to(np.repeat([3, -7], 4)[:, None], found["out"].shape))
    exact(found, solve(problem))


BFLOAT16 = "out", "dq", "dk", "dv"


def test_case_21_bfloat16_error_does_not_grow_with_the_ring():
    problem = Problem.random((1, 4096, 1, 16), is_causal=True)
    truth = solve(problem)

    def errors(kind, shards):
        found = run(problem, kind, shards, Zigzag, dtype=jnp.bfloat16)
        exact(dict(lse=found["lse"]), dict(lse=truth["lse"]))  # float32 whatever the arguments are
        return {name: np.abs(found[name] - truth[name]).max() / np.abs(truth[name]).max() for name in BFLOAT16}

    dense = {name: x for name, x in solve(problem, jnp.bfloat16).items() if name in BFLOAT16}
    dense = {name: np.abs(x - truth[name]).max() / np.abs(truth[name]).max() for name, x in dense.items()}
    alone = errors("ring", 1)
    for kind in KINDS:
        for name, error in errors(kind, 8).items():
            assert error <= min(1.5 * alone[name], 2 * dense[name]), (kind, name, error, alone[name], dense[name])


@pytest.mark.parametrize("kind", ["ulysses", "hybrid"])
def test_case_22_the_exchange_there_and_back_loses_nothing(kind):
    """Rows that see only themselves: value travels to out, and dout to dv, untouched."""
    problem = Problem.random((2, 16, 8, 4), local_window_size=0)
    count = np.arange(problem.value.size, dtype=np.float32).reshape(problem.value.shape)
    found = run(problem.replace(value=count, dout=count[::-1]), kind, 4)
    same(found["out"], count)
    same(found["dv"], count[::-1])


@over_all
def test_case_23_scanned_layers_with_traced_segments(kind):
    problem = Problem.random((1, 16, 4, 8), is_causal=True)
    ids = documents(5, 11)
    strategy, on = spread(kind, 4)
    scales = np.random.default_rng(0).uniform(0.5, 1, (2, *problem.value.shape)).astype(np.float32)

    def loss(attention, x, scales, ids, cotangent):
        layer = lambda x, scale: (x + attention(x * scale, x, x, ids), None)
        return (jax.lax.scan(layer, x, scales)[0] * cotangent).sum()

    spread_out = lambda q, k, v, ids: jaxcp.dot_product_attention(
        q, k, v, strategy=strategy, is_causal=True, **packed(ids)
    )
    dense = lambda q, k, v, _: dense_attention(problem.replace(**packed(ids)), q, k, v, None)[0]
    args = problem.value, scales, ids, problem.dout
    with jax.set_mesh(on):
        found = jax.jit(jax.grad(lambda *args: loss(spread_out, *args), (0, 1)))(*args)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in args]
        right = jax.grad(lambda *args: loss(dense, *args), (0, 1))(*map(jnp.asarray, wide))
    close(found, right)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("length", [192, 4092])
def test_case_24_lengths_that_no_tile_divides(length, shards):
    problem = Problem.random((1, length, 1, 8), is_causal=True)
    strategy, on = spread("ring", shards)
    call = compiled(problem, strategy if shards > 1 else None, on)
    with jax.set_mesh(on):
        results = [call(*arrays(problem)) for _ in range(10)]
    for result in results[1:]:
        same(result, results[0])
    exact(results[0], solve(problem))


@over_all
def test_case_25_the_later_half_of_the_queries(kind):
    problem = Problem.random((1, 128, 4, 8), keys=256, is_causal=True)
    problem = problem.replace(query_positions=np.arange(128, 256, dtype=np.int32)[None])
    exact(run(problem, kind, 4), solve(problem))


def test_case_26_remat_runs_no_ring_twice():
    x, w = jnp.ones((1, 16, 2, 8)), jnp.ones((2, 8, 8))

    def layer(x, w):
        q, k, v = x @ w, jnp.sin(x @ w), jnp.cos(x @ w)
        return x + jnp.tanh(jaxcp.dot_product_attention(q, k, v, strategy=Ring("c"), is_causal=True))

    def permutes(remat):
        loss = lambda x, w: remat(layer)(remat(layer)(x, w[0]), w[1]).sum()
        with jax.set_mesh(mesh(c=4)):
            text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
        return sum(c.count for c in collectives(text) if (c.kind, c.dtype) == ("collective-permute", "f32"))

    policy = jax.checkpoint_policies.save_only_these_names("jaxcp_out", "jaxcp_lse")
    kept = permutes(lambda layer: jax.checkpoint(layer, policy=policy))
    assert kept == 2 * 3 * (2 + 4), kept  # layers, hops: k, v forward; k, v, dk, dv backward
    assert permutes(jax.checkpoint) > kept  # what the policy saves


@over_all
def test_case_27_a_loss_through_the_residual(kind):
    problem = Problem.random((1, 16, 4, 8), kv_heads=2, is_causal=True)
    problem = problem.replace(dout=0 * problem.dout)
    exact(run(problem, kind, 4, Zigzag), solve(problem))


@over_all
def test_case_28_no_gradient_crosses_documents(kind):
    problem = Problem.random((1, 16, 4, 8), is_causal=True, **packed(np.array([[1] * 5 + [2] * 11], np.int32)))
    later = (np.arange(16) >= 5)[:, None, None]
    problem = problem.replace(dout=problem.dout * later, dlse=problem.dlse * later[..., 0])
    found = run(problem, kind, 4)
    assert not found["dv"][:, :5].any() and not found["dk"][:, :5].any() and not found["dq"][:, :5].any()
    exact(found, solve(problem))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_29_zigzag_order(kind):
    same(Zigzag(2).indices(8), np.array([0, 1, 6, 7, 2, 3, 4, 5]))
    problem = flat(range(8)).replace(is_causal=True)
    sixth = (np.arange(8) == 6)[:, None, None]
    found = run(problem.replace(dout=np.ones_like(problem.dout) * sixth), kind, 2, Zigzag)
    close(found["dv"][0, :7], np.full((7, 2, 4), 1 / 7))  # token 6 sees 0..6, alike
    assert not found["dv"][0, 7].any()


@pytest.mark.parametrize(
    "kind, layout",
    [*(("ring", layout) for layout in (Contiguous, Zigzag, Striped)), *((k, Zigzag) for k in KINDS[1:3])],
)
def test_case_30_three_shards(kind, layout):
    problem = Problem.random((1, 24, 3, 4), is_causal=True)
    exact(run(problem, kind, 3, layout), solve(problem))


@over_all
def test_case_31_queries_that_no_key_answers(kind):
    queries, keys = np.array([[1] * 6 + [9] * 4 + [2] * 6]), np.array([[1] * 6 + [3] * 4 + [2] * 6])
    problem = Problem.random((1, 16, 4, 8), query_segment_ids=queries, key_value_segment_ids=keys)
    found = run(problem, kind, 4)
    lonely = slice(6, 10)
    assert not any(found[name][:, lonely].any() for name in ("out", "dq", "dk", "dv"))
    assert np.all(found["lse"][:, lonely] == softmax.FLOOR)
    exact(found, solve(problem))


@over_all
def test_case_32_each_gradient_has_its_arguments_dtype(kind):
    strategy, on = spread(kind, 4)
    x, w, sinks = jnp.ones((1, 8, 4, 8), jnp.bfloat16), jnp.ones((8, 8)), jnp.ones(4)

    def loss(x, w, sinks):
        q = x @ w.astype(x.dtype)
        out = jaxcp.dot_product_attention(q, x, x, strategy=strategy, sinks=sinks)
        assert out.dtype == jnp.bfloat16
        return out.astype(jnp.float32).sum()

    with jax.set_mesh(on):
        gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, w, sinks)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]


def linen_module(attention_fn, **options):
    """Parameters, and a function of them, x and the keywords of the call."""
    build = lambda attention_fn: linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn, **options)
    parameters = build(linen.dot_product_attention).init(jax.random.key(0), jnp.ones((1, 4, 8)), deterministic=True)
    rngs = dict(dropout=jax.random.key(1))
    return parameters, lambda parameters, x, **how: build(attention_fn).apply(parameters, x, **how, rngs=rngs)


def nnx_module(attention_fn, **options):
    module = nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn, **options
    )
    definition, parameters, rest = nnx.split(module, nnx.Param, ...)
    return parameters, lambda parameters, x, **how: nnx.merge(definition, parameters, rest)(x, **how)


MODULES = pytest.mark.parametrize(
    "build, default",
    [(linen_module, linen.dot_product_attention), (nnx_module, nnx.dot_product_attention)],
    ids=["linen", "nnx"],
)


@MODULES
def test_case_33_flax_modules_refuse_what_cannot_be(build, default):
    x = jnp.ones((1, 4, 8))
    fn = jaxcp.attention_fn(strategy=None)
    parameters, call = build(fn)
    with pytest.raises(ValueError, match=r"no dense mask or bias.*is_causal"):
        call(parameters, x, mask=jnp.ones((1, 1, 4, 4), bool))
    with pytest.raises(ValueError, match="sow_weights"):
        call(parameters, x, sow_weights=True)
    parameters, call = build(fn, dropout_rate=0.5)
    call(parameters, x, deterministic=True)
    with pytest.raises(ValueError, match=r"no attention dropout.*deterministic=True"):
        call(parameters, x, deterministic=False)


@MODULES
def test_case_33_flax_modules_compute_the_same(build, default):
    normal = np.random.default_rng(0).standard_normal
    x, cotangent = (jnp.asarray(normal((1, 8, 8)), jnp.float32) for _ in range(2))
    parameters, dense = build(default)
    _, spread_out = build(jaxcp.attention_fn(strategy=Ring("c"), is_causal=True))
    mask = linen.make_causal_mask(jnp.ones((1, 8)))

    def loss(call, parameters, **how):
        out = call(parameters, x, **how)
        return (out * cotangent).sum(), out

    right = jax.grad(lambda p: loss(dense, p, mask=mask), has_aux=True)(parameters)
    with jax.set_mesh(mesh(c=4)):
        found = jax.jit(jax.grad(lambda p: loss(spread_out, p), has_aux=True))(parameters)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(right[0]))  # of all: the key's bias has gradient 0
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(right[0]), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * largest
    close(found[1], right[1])


@over_all
def test_case_34_zigzag_without_a_causal_mask(kind):
    problem = Problem.random((1, 16, 4, 8))
    exact(run(problem, kind, 4, Zigzag), solve(problem))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_case_35_no_two_dimensions_are_equal(kind):
    problem = Problem.random((5, 8, 3, 7), keys=10, value_dim=6)
    exact(run(problem, kind, 2), solve(problem))


def test_case_36_merging_by_the_sums():
    part = lambda out, total: (jnp.full((1, 1, 1, 1), float(out)), jnp.full((1, 1, 1), np.log(total)))
    out, lse = softmax.merge(part(0, 2), part(1, 8))
    close((out, lse), (np.full((1, 1, 1, 1), 0.8), np.full((1, 1, 1), np.log(10))))


@pytest.mark.parametrize("strategy", [Ring("c"), AllGather("c"), Ulysses("c"), Ulysses("c", Ring("d"))], ids=repr)
def test_case_37_one_device_is_told_nothing(strategy):
    problem = Problem.random((1, 16, 2, 4), kv_heads=1, is_causal=True, sinks=True)
    on = mesh(c=1, d=1)
    exact(attend(problem, strategy, on=on), solve(problem))
    assert collectives(compiled(problem, strategy, on).as_text()) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("positions", [[2**24 + 1, 2**24 + 3, 2**25 + 1, 2**27 + 5], [2**31 - 1, 2**31 - 2, 0, 257]])
def test_case_38_rope_far_out(positions, dtype):
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4, 3, 64))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    frequencies = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    angle = np.multiply.outer(np.array(positions, np.longdouble), frequencies.astype(np.longdouble))[None, :, None]
    x1, x2 = x[..., :32], x[..., 32:]
    cos, sin = (f(angle).astype(np.float64) for f in (np.cos, np.sin))
    right = np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    found = jax.jit(jaxcp.apply_rope)(jnp.asarray(x, dtype), jnp.asarray(positions, jnp.int32))
    assert found.dtype == dtype
    rounding = 2.0**-8 * np.abs(right) if dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found.astype(jnp.float32)) - right)
    assert np.all(error <= 1e-6 + rounding), error.max()


@over_all
def test_case_39_the_primal_under_vjp_is_the_primal(kind):
    problem = Problem.random((1, 16, 4, 8), is_causal=True)
    strategy, on = spread(kind, 4)
    qkv = [jnp.asarray(x) for x in (problem.query, problem.key, problem.value)]
    attention = lambda *qkv: jaxcp.dot_product_attention(*qkv, strategy=strategy, is_causal=True)
    with jax.set_mesh(on):
        plain, (primal, _) = attention(*qkv), jax.vjp(attention, *qkv)
    same(plain, primal)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_case_40_a_sink_is_absorbed_once(kind):
    problem = Problem.random((1, 16, 4, 8), is_causal=True, sinks=True)
    truth = solve(problem)
    for shards in 1, 2, 4:
        exact(run(problem, kind, shards), truth)


@pytest.mark.parametrize("kind, layout", [("ring", Contiguous), *((kind, Zigzag) for kind in KINDS)])
def test_case_41_segments_ride_with_their_rows(kind, layout):
    ids = np.stack([documents(3, 6, 7)[0], documents(10, 1, 5)[0]])
    problem = Problem.random((2, 16, 4, 8), is_causal=True, **packed(ids))
    exact(run(problem, kind, 4, layout), solve(problem))
