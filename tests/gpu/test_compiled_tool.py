"""What benchmarks/compiled.py reads out of executables is right where it is known beforehand."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt
from jax.sharding import PartitionSpec as P

from benchmarks import compiled
from jaxcp._jax import result_shape
from tests.gpu import needs_compiler, triton_is_deprecated

ROOT = Path(__file__).parents[2]
pytestmark = [needs_compiler, triton_is_deprecated]
STATIC_AT_MOST = 1024  # bytes of shared memory that a compiler adds by itself


def multiply(x, y, warps=4):
    """x @ y by a Triton kernel of one block."""

    def product(x_ref, y_ref, out_ref):
        out_ref[...] = plt.dot(x_ref[...], y_ref[...])

    out = result_shape((x.shape[0], y.shape[1]), jnp.float32, x, y)
    params = plt.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(product, out_shape=out, compiler_params=params, name="product")(x, y)


def copy(x):
    """x by a Mosaic kernel: into shared memory, and out again."""

    def through(x_gmem, out_gmem, x_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(x_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(through, out_type=out, scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("target, opcode", [("h100", "HGMMA"), ("a100", "HMMA"), ("b200", "UTCHMMA")])
def test_triton(target, opcode):
    program = compiled.compile(multiply, array(64, 64), array(64, 64), target=target)
    (kernel,) = compiled.resources(program, "^product$")
    assert kernel.opcodes[opcode] and not kernel.spill_bytes and not kernel.opcodes["LDL"] + kernel.opcodes["STL"]
    assert kernel.threads == 128 and 16 < kernel.registers <= 255
    # Wgmma takes both operands from shared memory; a layout for mma, at least one.
    assert 64 * 64 * 2 <= kernel.shared_bytes <= 64 * 64 * 4 + STATIC_AT_MOST
    assert 2 <= kernel.occupancy <= 16


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_spills(target):
    """64 K float32 results in the registers of a block of 128 threads: 512 each, where 255 is the most."""
    program = compiled.compile(multiply, array(256, 16), array(16, 256), target=target)
    (kernel,) = compiled.resources(program, "product")
    assert kernel.registers <= 255 and kernel.spill_bytes >= 4 * (512 - 255)
    assert kernel.opcodes["LDL"] and kernel.opcodes["STL"]


def test_mosaic():
    program = compiled.compile(copy, array(64, 64, dtype=jnp.float32), target="h100")
    (kernel,) = compiled.resources(program)
    assert kernel.name == "through_mosaic_gpu_kernel" and kernel.threads == 128
    assert kernel.opcodes["UTMALDG"] == 1 and not kernel.spill_bytes
    assert 64 * 64 * 4 < kernel.shared_bytes <= 64 * 64 * 4 + STATIC_AT_MOST
    assert kernel.occupancy == 13  # 228 KiB over 17.2: the copy, a barrier, CUDA's KiB, and rounding


def test_each_kernel_once():
    program = compiled.compile(
        lambda x, y: multiply(multiply(x, y).astype(y.dtype), y), array(64, 64), array(64, 64), target="h100"
    )
    assert len(compiled.resources(program, "product")) == 1
    with pytest.raises(ValueError, match=r"'attention': there are \['product"):
        compiled.resources(program, "attention")


def test_devices():
    seen = []

    def shifted(x):
        seen.append((jax.sharding.get_abstract_mesh().abstract_device.device_kind, x.shape))
        return jax.lax.ppermute(x, "context", [(i, (i + 1) % 4) for i in range(4)])

    program = compiled.compile(shifted, array(64, 64), target="a100", devices=4, spec=P("context"))
    assert seen[0] == ("NVIDIA A100-SXM4-80GB", (16, 64))
    assert "collective-permute" in program.as_text()


@pytest.mark.parametrize(
    "blocks, of",
    [
        (1, ("90", 168, 167001, 384)),  # a warp-specialized kernel: registers and shared memory
        (2, ("90", 167, 98560, 128)),  # shared memory: 2 x 97.25 KiB of 228
        (1, ("80", 167, 98560, 128)),  # ... of 164
        (8, ("90", 32, 0, 256)),  # threads: 2048
        (16, ("80", 32, 0, 128)),
        (2, ("90", 128, 0, 256)),  # registers: a partition holds 4 warps of 4096
        (2, ("90", 126, 0, 256)),  # ... which are given by 256: 4032 is 4096
        (32, ("100", 16, 0, 32)),
        (0, ("80", 64, 200_000, 128)),
    ],
)
def test_occupancy(blocks, of):
    assert compiled.occupancy(*of) == blocks


def test_hiding_nvjitlink():
    """XLA's plugin comes from a folder that has none beside it; too late once it is loaded."""
    code = """if True:
    import jax, jax.numpy as jnp
    from benchmarks import compiled
    jax.config.update("jax_platforms", "cpu")
    compiled.hide_nvjitlink()
    program = compiled.compile(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="h100")
    print(program.as_text()[:9], "libnvJitLink" in open("/proc/self/maps").read())
    compiled.hide_nvjitlink()
    """
    ran = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == ["HloModule", "False"] and "too late: the plugin is loaded" in ran.stderr, ran.stderr
