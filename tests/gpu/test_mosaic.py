"""The Mosaic kernels: what they become on an H100, without one, and their numbers and races in Pallas's interpreter."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import compiled
from jaxcp.algebra import Block
from jaxcp.kernels.mosaic_gpu import MosaicGPU
from jaxcp.mask import Mask, Tokens
from tests.cases import packed_ids
from tests.gpu import forward_and_backward, needs_compiler
from tests.oracle import Problem, errors, solve

ROOT = Path(__file__).parents[2]
interprets = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Pallas's interpreter of Mosaic GPU is public from jax 0.11 on"
)
# With nvJitLink at hand jax 0.12 links Mosaic kernels with it, whereupon ptxas ignores setmaxnreg.
LINKED = jax.__version_info__ >= (0, 12) and compiled.nvidia("lib/libnvJitLink.so*") is not None
MASKS = {
    "causal": dict(causal=True),
    "full": {},
    "segments": {},
    "window": dict(window=(1000, 10)),
    "soft cap": dict(causal=True, soft_cap=30.0),
    "all": dict(causal=True, window=(1000, 0), soft_cap=30.0),  # and segments
}


@functools.cache
def kernels(head_dim, kind, *, onto, dtype=jnp.bfloat16):
    """The kernels of forward and backward by their names, GQA 2:1.

    Compiled once: jax cannot read a program for described GPUs back from its persistent cache, and warns.
    """
    kernel = MosaicGPU(Mask(head_dim**-0.5, **MASKS[kind]))
    packed = kind in ("segments", "all")
    found = forward_and_backward(kernel, "h100", head_dim, packed=packed, onto=onto, dtype=dtype)
    found = {kernel.name.removesuffix("_mosaic_gpu_kernel"): kernel for kernel in found}
    assert sorted(found) == ["jaxcp_mosaic_gpu_dkv", "jaxcp_mosaic_gpu_dq", "jaxcp_mosaic_gpu_forward"]
    for kernel in found.values():
        assert kernel.threads == 384, kernel
        assert kernel.opcodes["HGMMA"] and kernel.opcodes["UTMALDG"], kernel
        assert LINKED or kernel.opcodes["USETMAXREG"], kernel
    return found


@needs_compiler
@pytest.mark.skipif(LINKED, reason="nvidia-nvjitlink is installed: ptxas ignores setmaxnreg")
@pytest.mark.parametrize("onto", [False, True], ids=["alone", "onto"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_spills(head_dim, kind, onto):
    for kernel in kernels(head_dim, kind, onto=onto).values():
        assert kernel.spill_bytes == 0, kernel


@needs_compiler
def test_float16():
    assert LINKED or all(
        kernel.spill_bytes == 0 for kernel in kernels(128, "causal", onto=False, dtype=jnp.float16).values()
    )


@needs_compiler
def test_large_heads():
    """The forward does not spill; the backward does, a little."""
    found = kernels(256, "causal", onto=False)
    assert LINKED or found["jaxcp_mosaic_gpu_forward"].spill_bytes == 0
    assert LINKED or all(kernel.spill_bytes <= 200 for kernel in found.values())


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_forward_does_without_setmaxnreg(head_dim):
    """Linked by nvJitLink, with 168 registers a thread, the causal forward still keeps all it has in them."""
    assert kernels(head_dim, "causal", onto=False)["jaxcp_mosaic_gpu_forward"].spill_bytes == 0


def test_it_says_what_it_takes():
    q = jax.ShapeDtypeStruct((1, 8, 1, 96), jnp.bfloat16)
    tokens = Tokens(jax.ShapeDtypeStruct((1, 8), jnp.int32), None)
    for x, y in (
        (q, q),
        (q.update(shape=(1, 8, 1, 64)), q),
        (*[q.update(shape=(1, 8, 1, 64), dtype=jnp.float32)] * 2,),
    ):
        with pytest.raises(ValueError, match=r"bfloat16 or float16 with both of them 64, 128, 256"):
            MosaicGPU(Mask(1.0)).place(Block(x, x, y, tokens, tokens))


def shuffled(length, seed):
    return np.random.default_rng(seed).permutation(length)[None]


def ids(length, batch=1):
    return {name: packed_ids(batch, length) for name in ("query_segment_ids", "key_value_segment_ids")}


# Each with the number of keys of its first part: what remains is computed onto that, with an lse and a delta that are
# of both. Tiles are of 128 queries and 64 or 128 keys, and the other way round.
PROBLEMS = {
    "causal": (Problem.random((1, 256, 2, 64), is_causal=True), 256),
    "causal, gqa, in parts": (Problem.random((1, 256, 4, 64), kv_heads=2, is_causal=True), 128),
    "full, other lengths": (Problem.random((1, 130, 2, 64), keys=200, kv_heads=1), 200),
    "full, in uneven parts": (Problem.random((1, 100, 2, 64), keys=300, kv_heads=1), 77),
    "packed": (Problem.random((2, 256, 1, 64), is_causal=True, **ids(256, 2)), 256),
    "window": (Problem.random((1, 384, 1, 64), local_window_size=(70, 9)), 384),
    "window, packed, in parts": (
        Problem.random((1, 200, 2, 64), kv_heads=1, local_window_size=(33, 9), **ids(200)),
        90,
    ),
    "soft cap": (Problem.random((1, 256, 3, 64), kv_heads=1, is_causal=True, logits_soft_cap=1.5), 256),
    "soft cap, packed, in parts": (
        Problem.random((1, 200, 1, 64), is_causal=True, logits_soft_cap=2.0, scale=0.3, **ids(200)),
        100,
    ),
    "shuffled": (
        Problem.random(
            (1, 192, 2, 64),
            is_causal=True,
            query_positions=shuffled(192, 0),
            key_value_positions=shuffled(192, 1),
        ),
        192,
    ),
    "some see nothing": (
        Problem.random((1, 256, 1, 64), is_causal=True, key_value_positions=np.arange(140, 396)[None]),
        128,
    ),
    "negative scale": (Problem.random((1, 128, 1, 64), is_causal=True, scale=-0.2), 128),
    "heads of 128": (Problem.random((1, 256, 2, 128), kv_heads=1, is_causal=True), 128),
    "heads of 256": (Problem.random((1, 150, 2, 256), kv_heads=1, is_causal=True, **ids(150)), 64),
}


def attend(problem: Problem, cut: int, dtype) -> dict:
    """out, lse, and gradients of `problem`: the first `cut` keys, and the rest onto them."""
    p = problem
    (_, t, _, h), s = p.query.shape, p.key.shape[1]
    mask = Mask(h**-0.5 if p.scale is None else p.scale, p.is_causal, p.local_window_size, p.logits_soft_cap)
    kernel = MosaicGPU(mask, plgpu.InterpretGPUParams(detect_races=True))

    def tokens(position, segment, rows):
        number = lambda x, default: default if x is None else jnp.asarray(x, jnp.int32)[:, rows]
        return Tokens(number(position, jnp.arange(max(t, s), dtype=jnp.int32)[None, rows]), number(segment, None))

    q, k, v, dout = (jnp.asarray(x, dtype) for x in (p.query, p.key, p.value, p.dout))
    q_tokens = tokens(p.query_positions, p.query_segment_ids, slice(t))

    def part(rows):
        kv_tokens = tokens(p.key_value_positions, p.key_value_segment_ids, rows)
        return Block(q, k[:, rows], v[:, rows], q_tokens, kv_tokens)

    forward, backward = jax.jit(kernel.forward), jax.jit(kernel.backward)
    parts = [kernel.place(part(rows)) for rows in (slice(cut), slice(cut, s))[: 1 + (cut < s)]]
    result = None
    for block in parts:
        result = forward(block, result)
    out, lse = result
    delta = (out * dout).sum(-1) - p.dlse
    dq, dkv = None, []
    for block in parts:
        so_far = None if dq is None else (dq, jnp.ones(block.k.shape), jnp.ones(block.v.shape))
        dq, dk, dv = backward(block, lse, delta, dout, so_far)
        dkv.append((dk, dv) if so_far is None else (dk - 1, dv - 1))
    dk, dv = (jnp.concatenate(x, 1) for x in zip(*dkv, strict=True))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@interprets
@pytest.mark.parametrize("name", PROBLEMS)
def test_exact(name):
    """Without races, and with errors at most twice those of dense attention in the same dtype."""
    problem, cut = PROBLEMS[name]
    dtype = jnp.float16 if name == "causal" else jnp.bfloat16
    truth = solve(problem)
    ours, theirs = (errors(x, truth) for x in (attend(problem, cut, dtype), solve(problem, dtype)))
    for which in truth:
        assert ours[which] <= 2 * theirs[which], (which, ours[which], theirs[which])


@interprets
@pytest.mark.parametrize("lost", ["done", "here"])
def test_a_lost_wait_is_a_race(lost):
    """Slots filled before they are empty, or read before they are full."""
    code = f"""if True:
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from tests import conftest
    from tests.gpu import test_mosaic
    from jaxcp.kernels.mosaic_gpu.common import Pipe
    if {lost!r} == "here":
        Pipe.wait = lambda self, n: None
    else:
        def fill(self, n, *sources):
            for source, target in zip(sources, self.smem, strict=True):
                plgpu.copy_gmem_to_smem(source, target.at[self.slot(n)], self.here.at[self.slot(n)])
        Pipe.fill = fill
        Pipe.drain = lambda self, count: None
    problem, cut = test_mosaic.PROBLEMS["window"]
    test_mosaic.attend(problem, cut, "bfloat16")
    """
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "RACE DETECTED" in ran.stderr, ran.stderr
