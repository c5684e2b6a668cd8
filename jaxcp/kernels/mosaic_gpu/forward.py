"""FlashAttention-3's forward (arXiv:2407.08608, algorithm 2), with its ping-pong: while one computing warpgroup has the
tensor cores, the other has the exponentials.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcp import blocks, softmax
from jaxcp._jax import result_shape
from jaxcp.kernels.mosaic_gpu import common
from jaxcp.kernels.mosaic_gpu.common import COMPUTING_REGISTERS, LOADER, LOADING_REGISTERS, ROWS, TALL, TILE
from jaxcp.mask import Mask
from jaxcp.softmax import LOG2_E


class Config(NamedTuple):
    keys: int  # a tile
    stages: int  # tiles of keys, and of values, in shared memory


CONFIGS = {64: Config(128, 4), 128: Config(128, 2), 256: Config(64, 2)}


def forward(mask: Mask, config: Config, interpret, arguments):
    """out [b, t, n, h] and lse [b, n, t].

    `arguments` are the first of `attend`, arrays of whole tiles; `onto` are such results so far, or None.
    """
    q, k = arguments[:2]
    b, t, n, h = q.shape
    group = n // k.shape[2]
    rows_layout = common.one_for_each(0)

    def attend(
        q_gmem, k_gmem, v_gmem, q_tokens, kv_tokens, visits, onto, out_gmem, lse_gmem,
        *, q_smem, q_here, k_pipe, v_pipe, turn,
    ):  # fmt: skip
        head, i, batch, warpgroup = map(lax.axis_index, ("head", "tile", "batch", "warpgroup"))
        if mask.reach[1] == 0:  # the last rows see most: the longest go first, lest the end wait for them
            i = t // TALL - 1 - i
        q_tokens, kv_tokens, (order, full, seen) = (common.of_batch(x, batch) for x in (q_tokens, kv_tokens, visits))
        full, seen = full[i], seen[i]

        @pl.when(warpgroup < LOADER)
        def compute():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            rows, mine = common.rows(i, TALL, warpgroup)
            place = plgpu.layout_cast
            if onto is None:
                greatest = place(jnp.full(ROWS, softmax.FLOOR, jnp.float32), rows_layout)
                total = place(jnp.zeros(ROWS, jnp.float32), rows_layout)
                out = place(jnp.zeros((ROWS, h), jnp.float32), TILE)
            else:
                lse = common.load(onto[1].at[batch, head, rows], rows_layout)
                greatest = jnp.maximum(lse * LOG2_E, softmax.FLOOR)
                total = jnp.where(lse > softmax.FLOOR, 1.0, 0.0)
                out = common.load(onto[0].at[batch, rows, head], TILE)
            plgpu.barrier_wait(q_here.at[0])

            def pass_turn():
                plgpu.barrier_arrive(turn.at[0])
                plgpu.barrier_wait(turn.at[0])

            pl.when(seen > 0)(lambda: k_pipe.wait(0))
            pl.when(warpgroup == 1)(pass_turn)

            def add(m, state, masked):
                greatest, total, out = state

                def multiply(acc):
                    plgpu.wgmma(acc, q_smem.at[mine], common.transposed(k_pipe.at(m)))
                    pass_turn()
                    return acc[...]

                products = pl.run_scoped(multiply, plgpu.ACC((ROWS, config.keys), jnp.float32))
                k_pipe.free(m)
                capped, factor, _ = common.cap(mask, products)
                if masked:
                    columns = pl.ds(order[i, m] * config.keys, config.keys)
                    capped = common.hide(
                        mask, capped, -math.inf, common.cut(q_tokens, rows), common.cut(kv_tokens, columns), 0
                    )
                # FLOOR is finite: in a row that has seen nothing yet all weights are exp2(-inf - FLOOR), 0
                risen = jnp.maximum(greatest, capped.max(1) * factor)
                weights = jnp.exp2(capped * factor - common.spread(risen, capped.shape, 0))
                shrink = jnp.exp2(greatest - risen)
                total = total * shrink + weights.sum(1)
                out = out * common.spread(shrink, out.shape, 0)
                # all of this before the turn is passed, and with the weights in half their space
                out, total, risen, weights = lax.optimization_barrier((out, total, risen, weights.astype(v_gmem.dtype)))
                plgpu.barrier_arrive(turn.at[0])
                v_pipe.wait(m)
                plgpu.barrier_wait(turn.at[0])
                next_keys = lambda: pl.when(m + 1 < seen)(lambda: k_pipe.wait(m + 1))
                out = common.add_product(out, weights, v_pipe.at(m), interpret, next_keys)
                v_pipe.free(m)
                return risen, total, out

            greatest, total, out = blocks.walk(full, seen, add, (greatest, total, out))
            pl.when(warpgroup == 0)(pass_turn)
            some = total > 0
            total = jnp.where(some, total, 1.0)
            lse_gmem.at[batch, head, rows][...] = jnp.where(
                some, greatest * math.log(2) + jnp.log(total), softmax.FLOOR
            )
            out_gmem.at[batch, rows, head][...] = out * common.spread(1 / total, out.shape, 0)

        @pl.when(warpgroup == LOADER)
        def load():
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, pl.ds(i * TALL, TALL), head], q_smem, q_here.at[0])

            def visiting(m):
                columns = batch, pl.ds(order[i, m] * config.keys, config.keys), kv_head
                return (k_gmem.at[columns],), (v_gmem.at[columns],)

            common.stream(seen, visiting, k_pipe, v_pipe)

    pipe = common.Pipe.of(config.stages, common.smem(config.stages, config.keys, h, dtype=q.dtype))
    return common.call(
        attend,
        "forward",
        {"head": n, "tile": t // TALL, "batch": b},
        arguments,
        [result_shape((b, t, n, h), jnp.float32, arguments), result_shape((b, n, t), jnp.float32, arguments)],
        {
            "q_smem": common.smem(TALL, h, dtype=q.dtype),
            "q_here": plgpu.Barrier(num_barriers=1),
            "k_pipe": pipe,
            "v_pipe": pipe,
            "turn": plgpu.Barrier(num_barriers=1, num_arrivals=2),
        },
        interpret,
    )
