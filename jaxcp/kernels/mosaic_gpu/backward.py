"""FlashAttention-2's backward (arXiv:2307.08691, algorithm 2) cut in two, so that no atomics sum anything and the
result is the same from run to run: one kernel owns queries and gives dq, another owns keys and gives dk and dv.

Both take the first arguments of their `differentiate` as one tuple of arrays of whole tiles: lse in base 2, and `onto`,
such results so far, or None.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcp import blocks
from jaxcp._jax import result_shape
from jaxcp.kernels.mosaic_gpu import common
from jaxcp.kernels.mosaic_gpu.common import COMPUTING_REGISTERS, LOADER, LOADING_REGISTERS, ROWS, TALL, TILE, Pipe
from jaxcp.mask import Mask


class Config(NamedTuple):
    tall: int  # rows of logits in a tile: queries for dq, keys for dk and dv
    wide: int  # columns: keys for dq, queries for dk and dv
    stages: int  # tiles of what streams by, in shared memory


# By the size of a head. Registers hold dk and dv of 64 keys and 128 columns: where heads are larger, both computing
# warpgroups have the same keys and logits, and each sums half of the columns.
DQ = {64: Config(TALL, 128, 2), 128: Config(TALL, 64, 2), 256: Config(TALL, 32, 3)}
DKV = {64: Config(TALL, 64, 4), 128: Config(TALL, 64, 2), 256: Config(ROWS, 64, 2)}


def dq(mask: Mask, config: Config, interpret, arguments):
    """dq [b, t, n, h]."""
    q, k = arguments[:2]
    b, t, n, h = q.shape
    group = n // k.shape[2]

    def differentiate(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, q_tokens, kv_tokens, visits, onto, dq_gmem,
        *, q_smem, dout_smem, here, k_pipe, v_pipe,
    ):  # fmt: skip
        head, i, batch, warpgroup = map(lax.axis_index, ("head", "tile", "batch", "warpgroup"))
        if mask.reach[1] == 0:  # the last rows see most: the longest go first, lest the end wait for them
            i = t // config.tall - 1 - i
        q_tokens, kv_tokens, (order, full, seen) = (common.of_batch(x, batch) for x in (q_tokens, kv_tokens, visits))
        full, seen = full[i], seen[i]

        @pl.when(warpgroup < LOADER)
        def compute():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            rows, mine = common.rows(i, config.tall, warpgroup)
            lse, delta = (common.load(x.at[batch, head, rows], common.one_for_each(0)) for x in (lse_gmem, delta_gmem))
            plgpu.barrier_wait(here.at[0])

            def add(m, dq, masked):
                hide = None
                if masked:
                    columns = pl.ds(order[i, m] * config.wide, config.wide)
                    hide = functools.partial(
                        common.hide, mask, q=common.cut(q_tokens, rows), kv=common.cut(kv_tokens, columns), q_dim=0
                    )
                k_pipe.wait(m)
                v_pipe.wait(m)

                def multiply(products, dweights):
                    plgpu.wgmma(products, q_smem.at[mine], common.transposed(k_pipe.at(m)))
                    plgpu.wgmma(dweights, dout_smem.at[mine], common.transposed(v_pipe.at(m)))
                    _, sloped = _weights(mask, plgpu.wgmma_accumulator_load(products, wait_n=1), lse, 0, hide)
                    sloped = lax.optimization_barrier(sloped)
                    return sloped * (dweights[...] - common.spread(delta, sloped.shape, 0))

                acc = plgpu.ACC((ROWS, config.wide), jnp.float32)
                dlogits = pl.run_scoped(multiply, acc, acc)
                v_pipe.free(m)
                dq = common.add_product(dq, dlogits.astype(k_gmem.dtype), k_pipe.at(m), interpret)
                k_pipe.free(m)
                return dq

            dq = plgpu.layout_cast(jnp.zeros((ROWS, h), jnp.float32), TILE)
            dq = blocks.walk(full, seen, add, dq) * mask.scale
            if onto is not None:
                dq = dq + common.load(onto.at[batch, rows, head], TILE)
            dq_gmem.at[batch, rows, head][...] = dq

        @pl.when(warpgroup == LOADER)
        def load():
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))
            rows = batch, pl.ds(i * config.tall, config.tall), head
            plgpu.copy_gmem_to_smem(q_gmem.at[rows], q_smem, here.at[0])
            plgpu.copy_gmem_to_smem(dout_gmem.at[rows], dout_smem, here.at[0])

            def visiting(m):
                columns = batch, pl.ds(order[i, m] * config.wide, config.wide), kv_head
                return (k_gmem.at[columns],), (v_gmem.at[columns],)

            common.stream(seen, visiting, k_pipe, v_pipe)

    smem = functools.partial(common.smem, dtype=q.dtype, swizzle=min(2 * config.wide, 128))
    pipe, rows = Pipe.of(config.stages, smem(config.stages, config.wide, h)), smem(config.tall, h)
    [gradient] = common.call(
        differentiate,
        "dq",
        {"head": n, "tile": t // config.tall, "batch": b},
        arguments,
        [result_shape(q.shape, jnp.float32, arguments)],
        {
            "q_smem": rows,
            "dout_smem": rows,
            "here": plgpu.Barrier(num_barriers=1, num_arrivals=2),
            "k_pipe": pipe,
            "v_pipe": pipe,
        },
        interpret,
    )
    return gradient


def dkv(mask: Mask, config: Config, interpret, arguments):
    """dk and dv [b, s, k, h].

    Logits lie transposed here, [keys, queries]: so they are the left operand, in registers, of both products that they
    enter. A tile of keys sees the queries of all heads that share its head.
    """
    q, k, v = arguments[:3]
    b, s, kv_heads, h = k.shape
    group = q.shape[2] // kv_heads
    width = h * config.tall // TALL  # columns of dk and dv that a warpgroup sums

    def differentiate(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, q_tokens, kv_tokens, visits, onto, dk_gmem, dv_gmem,
        *, k_smem, v_smem, here, q_pipe, dout_pipe,
    ):  # fmt: skip
        kv_head, j, batch, warpgroup = map(lax.axis_index, ("head", "tile", "batch", "warpgroup"))
        q_tokens, kv_tokens, (order, full, seen) = (common.of_batch(x, batch) for x in (q_tokens, kv_tokens, visits))
        full, seen = full[j] * group, seen[j] * group

        def queries(m):
            """The rows of the visit, and its head."""
            nth, head = lax.div(m, jnp.int32(group)), kv_head * group + lax.rem(m, jnp.int32(group))
            return pl.ds(order[j, nth] * config.wide, config.wide), head

        @pl.when(warpgroup < LOADER)
        def compute():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            rows, mine = common.rows(j, config.tall, warpgroup)
            columns = pl.ds(pl.multiple_of(warpgroup * width, width) if width < h else 0, width)
            plgpu.barrier_wait(here.at[0])

            def add(m, sums, masked):
                dk, dv = sums
                hide = None
                if masked:
                    hide = functools.partial(
                        common.hide,
                        mask, q=common.cut(q_tokens, queries(m)[0]), kv=common.cut(kv_tokens, rows), q_dim=1,
                    )  # fmt: skip
                acc = plgpu.ACC((ROWS, config.wide), jnp.float32)
                q_pipe.wait(m)

                def multiply(products):
                    plgpu.wgmma(products, k_smem.at[mine], common.transposed(q_pipe.at(m)))
                    return products[...]

                products = pl.run_scoped(multiply, acc)
                lse = common.load(q_pipe.at(m, 1), common.one_for_each(1))
                weights, sloped = _weights(mask, products, lse, 1, hide)
                weights, sloped = lax.optimization_barrier((weights.astype(q_gmem.dtype), sloped))
                dout_pipe.wait(m)

                def multiply_too(dweights, dv=dv):
                    plgpu.wgmma(dweights, v_smem.at[mine], common.transposed(dout_pipe.at(m)))
                    dv = common.add_product(dv, weights, dout_pipe.at(m).at[:, columns], interpret)
                    return dv, dweights[...]

                dv, dweights = pl.run_scoped(multiply_too, acc)
                delta = common.load(dout_pipe.at(m, 1), common.one_for_each(1))
                dlogits = sloped * (dweights - common.spread(delta, sloped.shape, 1))
                plgpu.commit_smem()  # TMA is to write where lse and delta have been read
                dout_pipe.free(m)
                dk = common.add_product(dk, dlogits.astype(q_gmem.dtype), q_pipe.at(m).at[:, columns], interpret)
                q_pipe.free(m)
                return dk, dv

            none = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), TILE)
            dk, dv = blocks.walk(full, seen, add, (none, none))
            dk = dk * mask.scale
            place = batch, rows, kv_head, columns
            if onto is not None:
                dv = dv + common.load(onto[1].at[place], TILE)
            dv_gmem.at[place][...] = dv
            if onto is not None:
                dk = dk + common.load(onto[0].at[place], TILE)
            dk_gmem.at[place][...] = dk

        @pl.when(warpgroup == LOADER)
        def load():
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
            keys = batch, pl.ds(j * config.tall, config.tall), kv_head
            plgpu.copy_gmem_to_smem(k_gmem.at[keys], k_smem, here.at[0])
            plgpu.copy_gmem_to_smem(v_gmem.at[keys], v_smem, here.at[0])

            def visiting(m):
                rows, head = queries(m)
                matrix, numbers = (batch, rows, head), (batch, head, rows)
                return (q_gmem.at[matrix], lse_gmem.at[numbers]), (dout_gmem.at[matrix], delta_gmem.at[numbers])

            common.stream(seen, visiting, q_pipe, dout_pipe)

    pipe = Pipe.of(
        config.stages,
        common.smem(config.stages, config.wide, h, dtype=q.dtype),
        plgpu.SMEM((config.stages, config.wide), jnp.float32),
    )
    rows = common.smem(config.tall, h, dtype=q.dtype)
    return common.call(
        differentiate,
        "dkv",
        {"head": kv_heads, "tile": s // config.tall, "batch": b},
        arguments,
        [result_shape(x.shape, jnp.float32, arguments) for x in (k, v)],
        {
            "k_smem": rows,
            "v_smem": rows,
            "here": plgpu.Barrier(num_barriers=1, num_arrivals=2),
            "q_pipe": pipe,
            "dout_pipe": pipe,
        },
        interpret,
    )


def _weights(mask: Mask, products, lse, q_dim: int, hide):
    """The softmax's weights, and what the gradient of the logits is times: the same, times the slope of the cap."""
    capped, factor, slope = common.cap(mask, products)
    weights = jnp.exp2(capped * factor - common.spread(lse, capped.shape, q_dim))
    if hide is not None:
        weights = hide(x=weights, fill=0.0)  # a row that sees nothing has exp2(-FLOOR), infinity
    return weights, weights if slope is None else weights * slope()
