"""cuDNN's fused attention, the fastest on Hopper, as XLA's custom call: through `jax.ffi`, without cuDNN at trace time.

cuDNN knows no positions. It computes a block whole (FULL), or on and below the diagonal of row numbers (CAUSAL). That
is enough where rows fall into runs of consecutive positions, as the contiguous and the zigzag layout deal them: a run
of queries sees a run of keys not at all, wholly, or causally where their positions are the same. Which one holds is
data; `lax.switch` chooses between calls compiled beforehand.

cuDNN gives results and gradients in the arguments' 16 bits. Those of several calls are merged and summed in float32.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcp import softmax
from jaxcp._jax import vary_alike
from jaxcp.algebra import Block
from jaxcp.mask import Mask

EMPTY, CAUSAL, FULL, NEITHER = range(4)  # what a run of queries sees of a run of keys
KINDS = {CAUSAL: "CAUSAL", FULL: "NO_MASK"}  # XLA's names of what cuDNN computes
DTYPES = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}


class CustomCalls:
    """cuDNN's two functions of a block. Tests put others in their place where there is no GPU."""

    @staticmethod
    def forward(q, k, v, scale: float, kind: int):
        """out [b, t, n, hv] in q's dtype; lse [b, n, t] float32."""
        (b, t, n, _), hv = q.shape, v.shape[3]
        out, lse = _custom_call(
            "__cudnn$fmhaSoftmax", FORWARD_PRODUCTS, (q, k, v), [((b, n, t, hv), q.dtype), ((b, n, t), jnp.float32)],
            scale, kind,
        )  # fmt: skip
        return out.swapaxes(1, 2), lse

    @staticmethod
    def backward(q, k, v, lse, dout, out, scale: float, kind: int):
        """dq, dk, dv in the arguments' dtype. `lse` [b, n, t] and `out` [b, t, n, hv] are of the whole softmax."""
        shapes = [((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v)]
        arguments = q, k, v, lse, dout, out
        gradients = _custom_call("__cudnn$fmhaSoftmaxBackward", BACKWARD_PRODUCTS, arguments, shapes, scale, kind)
        return tuple(x.swapaxes(1, 2) for x in gradients)


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """For 16 bits, no segments, and masks that are causal or none.

    `chunks`: into how many runs of consecutive positions the queries and the keys of a block fall, equally long. Their
    order is free, but where both are two: there it rises, as a layout deals them. Where the positions of a causal block
    are not so, or a run sees only a part of another, what comes of those rows is NaN.

    cuDNN sums dq in no fixed order, unless XLA is told --xla_gpu_deterministic_ops=true.
    """

    mask: Mask
    chunks: tuple[int, int] = (1, 1)
    calls: Any = CustomCalls

    def place(self, block: Block) -> Block:
        return block

    def forward(self, block: Block, onto=None):
        def call(rows, columns, kind):
            out, lse = self.calls.forward(*rows, *columns, self.mask.scale, kind)
            return (out.astype(jnp.float32), lse.swapaxes(1, 2)), ()

        def nothing(rows, columns):
            [q], [_, v] = rows, columns
            return (_full(q, (*q.shape[:3], v.shape[3]), 0), _full(q, q.shape[:3], softmax.FLOOR)), ()

        part = _Part([block.q], [block.k, block.v])
        found, _ = self._over(block, _Pass(call, softmax.merge, nothing), part, None if onto is None else (onto, ()))
        return found

    def backward(self, block: Block, lse, delta, dout, onto=None):
        def call(rows, columns, kind):
            q, lse, dout, out = rows
            dq, *dkv = self.calls.backward(q, *columns, lse.swapaxes(1, 2), dout, out, self.mask.scale, kind)
            return _wide([dq]), _wide(dkv)

        def nothing(rows, columns):
            return tuple([_full(x, x.shape, 0) for x in arrays] for arrays in (rows[:1], columns))

        rows = [block.q, lse.astype(jnp.float32), *with_delta(dout.astype(block.q.dtype), delta)]
        part = _Part(rows, [block.k, block.v])
        so_far = None if onto is None else (list(onto[:1]), list(onto[1:]))
        (dq,), (dk, dv) = self._over(block, _Pass(call, _add, nothing), part, so_far)
        return dq, dk, dv

    def _over(self, block: Block, work: "_Pass", part: "_Part", so_far):
        """`so_far` and the results of `work` over all that is visible."""
        mask, (q_tokens, kv_tokens) = self.mask, block[3:]
        assert mask == Mask(mask.scale, mask.causal), f"{mask}: cuDNN has no such window, and no soft cap"
        assert q_tokens.segment is None and kv_tokens.segment is None, "cuDNN knows no segments"
        if not mask.causal:
            return work.run([_Call(WHOLE, WHOLE, FULL)], so_far, part)
        q_runs, kv_runs = (_Runs.of(x.position, n) for x, n in zip((q_tokens, kv_tokens), self.chunks, strict=True))
        kinds = _kinds(q_runs, kv_runs)
        if self.chunks == (2, 2) and block.q.shape[1] == block.k.shape[1]:
            return _two_by_two(work, kinds, so_far, part)
        return _by_runs(work, kinds, jnp.argsort(kv_runs.first[0]), so_far, part)


WHOLE = slice(None)


class _Call(NamedTuple):
    """One call of cuDNN, on a stretch of the queries and a stretch of the keys."""

    rows: slice
    columns: slice
    kind: int


class _Part(NamedTuple):
    """What a call is about: pytrees of arrays [b, t, ...] and [b, s, ...]."""

    rows: Any
    columns: Any


class _Pass(NamedTuple):
    """Forward or backward. Results are a pair too: of the rows and of the columns."""

    call: Callable  # (rows, columns, kind) -> results
    join: Callable  # of two results of the same rows
    nothing: Callable  # (rows, columns) -> the results of no call

    def run(self, calls, so_far, part: _Part):
        """`so_far`, None for nothing, and the results of `calls`."""
        of_rows, of_columns = self.nothing(*part) if so_far is None else so_far
        for rows, columns, kind in calls:
            found = self.call(_cut(part.rows, rows), _cut(part.columns, columns), kind)
            of_rows = _put(of_rows, rows, self.join(_cut(of_rows, rows), found[0]))
            of_columns = _put(of_columns, columns, _add(_cut(of_columns, columns), found[1]))
        return of_rows, of_columns

    def spoil(self, so_far, part: _Part):
        """NaN in place of all results."""
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), self.run([], so_far, part))


class _Runs(NamedTuple):
    """The runs of a side's positions. All [b | 1, runs]."""

    first: Any
    last: Any
    true: Any  # bool: the positions are consecutive

    @classmethod
    def of(cls, position, count: int) -> "_Runs":
        assert position.shape[1] % count == 0, f"{position.shape[1]} rows are not {count} equal runs"
        x = position.reshape(position.shape[0], count, -1)
        return cls(x[..., 0], x[..., -1], (x == x[..., :1] + jnp.arange(x.shape[2], dtype=x.dtype)).all(-1))


def _kinds(q: _Runs, k: _Runs):
    """int32 [query runs, key runs] of EMPTY, CAUSAL, FULL; NEITHER where no one kind holds for all of the batch."""
    q, k = _Runs(*(x[:, :, None] for x in q)), _Runs(*(x[:, None, :] for x in k))
    kinds = jnp.where(k.first == q.first, CAUSAL, NEITHER)
    kinds = jnp.where(k.first > q.last, EMPTY, kinds)
    kinds = jnp.where(k.last <= q.first, FULL, kinds)
    return jnp.where((q.true & k.true & (kinds == kinds[:1])).all(0), kinds[0], NEITHER)


def _two_by_two(work: _Pass, kinds, so_far, part: _Part):
    """A ring's step with two runs of queries and of keys on each rank, the first before the second: few calls."""
    half = part.rows[0].shape[1] // 2
    first, second = slice(0, half), slice(half, None)
    calls = {
        ((CAUSAL, EMPTY), (FULL, CAUSAL)): [_Call(WHOLE, WHOLE, CAUSAL)],  # keys of the same rank
        # zigzag's: of an earlier, of a later rank
        ((FULL, EMPTY), (FULL, EMPTY)): [_Call(WHOLE, first, FULL)],
        ((EMPTY, EMPTY), (FULL, FULL)): [_Call(second, WHOLE, FULL)],
        # those of stretches that lie a ring apart, as Ulysses gathers them
        ((FULL, EMPTY), (FULL, FULL)): [_Call(WHOLE, first, FULL), _Call(second, second, FULL)],
        ((EMPTY, EMPTY), (FULL, EMPTY)): [_Call(second, first, FULL)],
        # those of stretches side by side
        ((FULL, FULL), (FULL, FULL)): [_Call(WHOLE, WHOLE, FULL)],
        ((EMPTY, EMPTY), (EMPTY, EMPTY)): [],
    }
    fits = (kinds == np.array(list(calls))).all((1, 2))
    which = jnp.where(fits.any(), fits.argmax(), len(calls))
    return lax.switch(which, [*(partial(work.run, x) for x in calls.values()), work.spoil], so_far, part)


def _by_runs(work: _Pass, kinds, order, so_far, part: _Part):
    """For each run of queries one call for all the runs of keys before it, and one for its own.

    With the keys in the order of their positions, those before it lie in front, and its own is the next.
    """
    runs, columns = kinds.shape
    size, full, causal = part.columns[0].shape[1] // columns, (kinds == FULL).sum(1), (kinds == CAUSAL).sum(1)
    which = jnp.where((kinds == NEITHER).any(1) | (causal > 1), 2 * columns + 1, 2 * full + causal)

    def calls(full, causal):
        before, own = slice(0, full * size), slice(full * size, (full + 1) * size)
        return [_Call(WHOLE, before, FULL)] * (full > 0) + [_Call(WHOLE, own, CAUSAL)] * causal

    branches = [partial(work.run, calls(*divmod(n, 2))) for n in range(2 * columns + 1)] + [work.spoil]
    if (runs, columns) == (1, 1):
        return lax.switch(which[0], branches, so_far, part)
    of_rows, of_columns = work.nothing(*part) if so_far is None else so_far
    rearranged = lambda tree, order: jax.tree.map(partial(_rearranged, order=order), tree)
    in_order = rearranged(part.columns, order)

    def step(i, so_far):
        of_rows, of_columns = so_far
        length = part.rows[0].shape[1] // runs
        mine = lambda tree: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * length, length, 1), tree)
        found, of_columns = lax.switch(
            which[i], branches, (mine(of_rows), of_columns), _Part(mine(part.rows), in_order)
        )
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * length, 1)
        return jax.tree.map(put, of_rows, found), of_columns

    of_rows, of_columns = lax.fori_loop(0, runs, step, (of_rows, rearranged(of_columns, order)))
    return of_rows, rearranged(of_columns, jnp.argsort(order))


def with_delta(dout, delta):
    """`dout` [b, t, n, hv], and an `out` of its dtype such that rowsum(out * dout) is `delta` [b, t, n].

    cuDNN's backward asks for `out` to compute that sum, and for nothing else. A multiple of dout is the shortest `out`
    that gives it, so that rounding costs least: in the sum a fourth of what rounding the true `out` costs, with 64 dims
    a head (a sixth with 128, half with 16; causal, 512 normal rows), which `delta` has already paid.

    A dout too short for such an `out` in 16 bits (0, under a gradient of lse alone) gets a first element large enough,
    and small beside delta: 2**-60 of it, 2**-15 in float16.
    """
    delta = delta.astype(jnp.float32)
    size = jnp.abs(delta) * (2.0**-15 if dout.dtype == jnp.float16 else 2.0**-60)
    size = jnp.where(delta == 0, 0, jnp.maximum(size, float(jnp.finfo(dout.dtype).smallest_subnormal)))
    short = (jnp.abs(dout).max(-1) < size)[..., None] & (jnp.arange(dout.shape[-1]) == 0)
    dout = jnp.where(short, size.astype(dout.dtype)[..., None], dout)
    wide = dout.astype(jnp.float32)
    greatest = jnp.abs(wide).max(-1)
    greatest = jnp.where(greatest == 0, 1, greatest)
    unit = wide / greatest[..., None]  # its square neither overflows nor vanishes
    square = jnp.maximum((unit * unit).sum(-1), 1)
    return dout, (unit * (delta / greatest / square)[..., None]).astype(dout.dtype)


# Dot dimension numbers of the matrix products in cuDNN's graphs: contracting dims (left, right), batch dims (left,
# right), of arrays [b, t, n, h] and weights [b, n, t, s].
FORWARD_PRODUCTS = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


def _custom_call(name: str, products: dict, arguments, shapes, scale: float, kind: int):
    """Results of `shapes`; those with four dims [b, n, t, h] lie in memory as [b, t, n, h]."""
    (b, t, n, _), s = arguments[0].shape, arguments[1].shape[1]
    layouts = [(0, 2, 1, 3) if len(shape) == 4 else tuple(range(len(shape))) for shape, _ in shapes]
    results = jax.ffi.ffi_call(
        name,
        [jax.ShapeDtypeStruct(*shape) for shape in [*shapes, ((0,), jnp.uint8)]],  # the last: XLA's workspace
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config((b, n, t, s), arguments[0].dtype, products, scale, kind),
    )(*arguments)
    return vary_alike((results[:-1], arguments))[0]  # ffi_call takes no result that varies (jax 0.10.2 to 0.12.0)


def _backend_config(weights, dtype, products: dict, scale: float, kind: int) -> str:
    """XLA's GpuBackendConfig (xla/service/gpu/backend_configs.proto); `weights` is the shape [b, n, t, s]."""
    numbers = lambda x: [str(n) for n in x]
    dots = {
        f"{product}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": numbers(contracting[:1]),
            "rhs_contracting_dimensions": numbers(contracting[1:]),
            "lhs_batch_dimensions": numbers(batch[0]),
            "rhs_batch_dimensions": numbers(batch[1]),
        }
        for product, (contracting, batch) in products.items()
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": DTYPES[jnp.dtype(dtype)],
            "dimensions": numbers(weights),
            "tuple_shapes": [],
            "layout": {"minor_to_major": numbers((3, 2, 1, 0))},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": KINDS[kind],
        **dots,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


def _full(like, shape, fill):
    return jnp.full_like(like, fill, jnp.float32, shape=shape)


def _wide(arrays):
    return [x.astype(jnp.float32) for x in arrays]


def _add(x, y):
    return jax.tree.map(jnp.add, x, y)


def _cut(tree, stretch: slice):
    return jax.tree.map(lambda x: x[:, stretch], tree)


def _put(tree, stretch: slice, new):
    return new if stretch == WHOLE else jax.tree.map(lambda x, y: x.at[:, stretch].set(y), tree, new)


def _rearranged(x, order):
    """The runs of `x` [b, s, ...] in another order."""
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)
