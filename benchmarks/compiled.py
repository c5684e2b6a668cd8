"""What a program becomes on an H100, A100 or B200, found out without a GPU: registers, spills, shared memory, opcodes.

    program = compiled.compile(function, *shapes, target="h100")
    for kernel in compiled.resources(program, "attention"):
        print(kernel)

XLA compiles for a described GPU (targets/*.txtpb) as for one at hand, ptxas included, and the executable it serializes
holds every kernel's cubin and its launch. Needs jax's CUDA plugin, NVIDIA's reader of cubins, and one of snappy:

    pip install jax-cuda13-plugin nvidia-cuda-cuobjdump cramjam

WARNING: with jax 0.12.0.1 a Mosaic kernel with wgmma compiled for another target than "h100" ends the process (LLVM:
"Cannot select"); there is no exception to catch. And where nvidia-nvjitlink is installed, as with jax[cuda13], that jax
links Mosaic kernels with it, whereupon ptxas ignores setmaxnreg; `hide_nvjitlink` shows the difference.
"""

import atexit
import importlib
import importlib.util
import itertools
import math
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

TARGETS = Path(__file__).parent / "targets"
PLUGINS = "jax_cuda13_plugin", "jax_cuda12_plugin"
WHOLE = P()
ELF = b"\x7fELF\x02\x01"  # how object files begin
CUBIN = re.compile(re.escape(ELF) + rb".{12}\xbe\0", re.DOTALL)  # up to e_machine, EM_CUDA
RIEGELI = bytes.fromhex("83af70d10d884a3f00000000000000004000000000000000")  # the first block's header


@dataclass(frozen=True)
class Kernel:
    """One kernel of an executable, as ptxas left it."""

    name: str  # the function's in the cubin
    registers: int  # a thread, at launch
    spill_bytes: int  # a thread's local memory: its stack frame, which in a Pallas kernel holds spilled registers only
    shared_bytes: int  # a block: static and dynamic, without the KiB that CUDA keeps
    threads: int  # a block
    occupancy: int  # blocks that an SM holds at a time
    opcodes: Counter  # SASS instructions by the name before the first dot: HGMMA, UTMALDG, LDL, ...


def available() -> str | None:
    """None where this module works, otherwise what is missing."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return f"the CUDA plugin of jax is not installed ({' or '.join(PLUGINS)})"
    if importlib.util.find_spec("cramjam") is None:
        return "cramjam, which reads snappy, is not installed"
    return None if cuobjdump() else "cuobjdump is not installed (nvidia-cuda-cuobjdump)"


def mesh(target: str, devices: int = 1) -> jax.sharding.Mesh:
    """GPUs that exist on paper only, along one axis, "context"."""
    described = (TARGETS / f"{target}.txtpb").read_text()
    if jax.__version_info__ < (0, 11):  # whose XLA does not know the field, and refuses what it does not know
        described = re.sub(r".*collective_memory_granularity.*\n", "", described)
    paper = topologies.get_topology_desc(target, "cuda", topology=f"1x1x{devices}", target_config=described)
    return jax.sharding.Mesh(np.array(paper.devices), ("context",))


def compile(
    function, *shapes, target: str, devices: int = 1, spec: P = WHOLE, check_vma: bool = True
) -> jax.stages.Compiled:
    """`function` under shard_map on `mesh(target, devices)`, for that target.

    `shapes` are pytrees of ShapeDtypeStruct, of whole arrays; `spec` is how all of them, and the results, are cut.
    """
    gpus = mesh(target, devices)
    mapped = jax.shard_map(function, mesh=gpus, in_specs=spec, out_specs=spec, check_vma=check_vma)
    lowered = jax.jit(mapped, in_shardings=NamedSharding(gpus, spec)).lower(*shapes)
    return lowered.compile({"xla_gpu_autotune_level": 0})  # which would run candidates on a GPU


def resources(compiled: jax.stages.Compiled, kernels: str = "") -> list[Kernel]:
    """The kernels, Pallas's and XLA's, whose name in the cubin has a match of the pattern; each once, if called often.

    A Triton kernel goes by its `name`; a Mosaic kernel of a function `body` is `body_mosaic_gpu_kernel`.
    """
    found = {}
    for cubin, threads, dynamic in launches(compiled.runtime_executable().serialize()):
        if (cubin, threads, dynamic) not in found:
            found[cubin, threads, dynamic] = read_cubin(cubin, threads, dynamic)
    matches = [kernel for kernel in found.values() if re.search(kernels, kernel.name)]
    if not matches:
        raise ValueError(f"no kernel's name matches {kernels!r}: there are {[x.name for x in found.values()]}")
    return matches


def read_cubin(cubin: bytes, threads: int, dynamic: int) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([cuobjdump(), flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    # nvJitLink adds functions that trap on misuse of tensor memory; a kernel has arguments, in constant bank 0.
    name, numbers = re.search(r"Function (\S+):\s+(.*CONSTANT\[0\].*)", usage).groups()
    use = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", numbers)}
    sm = re.search(r"sm_(\d+)", sass)[1]
    # From Hopper on SHARED, unless it is 0, counts the KiB that CUDA keeps: 1024 where a kernel's PTX declares nothing.
    shared = dynamic + max(use["SHARED"] - (1024 if int(sm) >= 90 else 0), 0)
    return Kernel(
        name=name,
        registers=use["REG"],
        spill_bytes=use["STACK"] + use["LOCAL"],
        shared_bytes=shared,
        threads=threads,
        occupancy=occupancy(sm, use["REG"], shared, threads),
        opcodes=Counter(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z]\w+)", sass)),
    )


def occupancy(sm: str, registers: int, shared_bytes: int, threads: int) -> int:
    """Blocks that an SM of compute capability `sm` ("90") holds at a time, as CUDA's cuda_occupancy.h counts them.

    Registers go to warps by 256, a quarter of them in each of an SM's four partitions; shared memory goes to blocks by
    128 bytes, with 1 KiB that CUDA keeps of each; 32 blocks is the limit of 8.0, 9.0 and 10.0 (CUDA C++ Programming
    Guide, "Technical Specifications per Compute Capability"). The rest is the target file's.
    """
    texts = (path.read_text() for path in TARGETS.glob("*.txtpb"))
    limits = next(text for text in texts if f"major: {sm[:-1]} " in text)
    limit = {key: int(value) for key, value in re.findall(r"(\w+_per_core\w*): (\d+)", limits)}
    warps = math.ceil(threads / 32)
    of_registers = 4 * (limit["registers_per_core_limit"] // 4 // (math.ceil(registers / 8) * 256)) // warps
    of_shared = limit["shared_memory_per_core"] // (math.ceil(shared_bytes / 128) * 128 + 1024)
    return min(of_registers, of_shared, limit["threads_per_core_limit"] // (warps * 32), 32)


def nvidia(pattern: str) -> str | None:
    """A file of NVIDIA's packages: their folders are nvidia/cu13 and nvidia/<name of a library>."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations or [] if spec else []
    return next((str(x) for place in places for x in Path(place).glob(f"*/{pattern}")), None)


def cuobjdump() -> str | None:
    return nvidia("bin/cuobjdump") or shutil.which("cuobjdump")


def hide_nvjitlink():
    """For the rest of the process XLA does not find an installed nvidia-nvjitlink: nvidia("lib/libnvJitLink.so*").

    XLA looks beside its plugin (by an RPATH of $ORIGIN/../../nvidia/cu13/lib), so this has the plugin loaded through a
    link that lies elsewhere. It must come before jax's first look at devices. To show XLA one that is installed
    elsewhere: ctypes.CDLL(path of its libnvJitLink.so.13), before the first compilation.
    """
    if "xla_cuda_plugin" in Path("/proc/self/maps").read_text():
        raise RuntimeError("too late: the plugin is loaded")
    plugin = next(x for x in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12") if importlib.util.find_spec(x))
    plugin = importlib.import_module(plugin)
    library, folder = Path(plugin._get_library_path()), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    link = folder / "jax_plugins" / "cuda" / library.name
    link.parent.mkdir(parents=True)
    link.symlink_to(library)
    plugin._get_library_path = lambda: link


# The serialized executable. Numbers of fields are those of XLA's xla/backends/gpu/runtime/thunk.proto and of what it
# imports, and of Mosaic's CustomCallResources; the same in jax 0.10.2 and 0.12.0.1.


def launches(executable: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(cubin, threads of a block, bytes of dynamic shared memory) of every launch in a serialized executable."""
    for message in (message for record in records(executable) for message in messages(record)):
        cubin, state = get(message, 2, 2, 1), get(message, 8, 1)
        if isinstance(cubin, bytes) and cubin.startswith(ELF):  # a CustomKernelProto: Triton, fusions
            yield cubin, math.prod(get(message, 4, 1, i) for i in (1, 2, 3)), get(message, 6) or 0
        if isinstance(state, bytes) and b"mosaic" in state:  # a CustomCallThunkProto: attributes in 6, state in 8
            attributes = {get(x, 1): get(x, 2, 3) for x in fields(get(message, 6))[1]}
            host = get(message, 8, 2)  # holds the object file of the host that holds the cubin, or the cubin
            start = CUBIN.search(host).start()
            yield host[start:], *mosaic_launch(attributes[b"module"])


def mosaic_launch(module: bytes) -> tuple[int, int]:
    """(threads of a block, bytes of dynamic shared memory) that a kernel's MLIR asks for."""
    from jax.experimental.mosaic.gpu import dialect

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True  # the operations are stable_mosaic_gpu's
    with context:
        text = str(mlir.ir.Module.parse(module))
    operands = re.search(r'gpu\.launch"\(([^)]*)\)', text)[1].split(", ")  # token, grid, block, [cluster,] bytes
    sizes = [int(re.search(rf"{x} = .*constant.*value = (\d+)", text)[1]) for x in (*operands[4:7], operands[-1])]
    return math.prod(sizes[:3]), sizes[3]


def records(data: bytes) -> Iterator[bytes]:
    """The records of the first Riegeli file in the data, and of those within.

    Chunks with a header of 40 bytes each, cut by a header of 24 at every 64 KiB:
    https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md; "s", snappy, is younger than that.
    """
    import cramjam

    inflate = lambda block: bytes(cramjam.snappy.decompress_raw(block[varint(block, 0)[1] :]))
    data = data[data.index(RIEGELI) :]
    data = b"".join(data[i + 24 : i + 65536] for i in range(0, len(data), 65536))
    at = 0
    while at + 40 <= len(data):
        size, kind = struct.unpack_from("<8xQ8xc", data, at)
        chunk = data[at + 40 : at + 40 + size]
        at += 40 + size
        if kind == b"s":  # the signature
            continue
        if kind != b"r":  # the end of the file
            break
        middle, start = varint(chunk, 1)
        sizes, values = chunk[start : start + middle], chunk[start + middle :]
        if chunk[:1] == b"s":
            sizes, values = inflate(sizes), inflate(values)
        elif chunk[0]:
            raise NotImplementedError(f"compressed with {chunk[:1]}")
        here = begin = 0
        while here < len(sizes):
            length, here = varint(sizes, here)
            record = values[begin : begin + length]
            yield from records(record) if RIEGELI in record else [record]
            begin += length


def messages(data: bytes) -> Iterator[dict]:
    """The fields of a serialized message and of all messages within, and of bytes that happen to read like one."""
    try:
        message = fields(data)
    except LookupError:
        return
    yield message
    for value in itertools.chain(*message.values()):
        if isinstance(value, bytes) and not value.startswith(ELF):
            yield from messages(value)


def fields(data: bytes) -> dict[int, list]:
    """{number: values} of a serialized message of protobuf, values being int or bytes; LookupError if it is none."""
    at, found = 0, {}
    while at < len(data):
        key, at = varint(data, at)
        number, kind = divmod(key, 8)
        value, at = varint(data, at) if kind in (0, 2) else ({1: 8, 5: 4}[kind], at)
        if kind:  # the value is a length
            value, at = data[at : at + value], at + value
        if not number or at > len(data):
            raise LookupError("not a message")
        found.setdefault(number, []).append(value)
    return found


def get(message: dict | bytes, *path: int):
    """The first value at a path of numbers of fields, or None."""
    try:
        for number in path:
            message = (fields(message) if isinstance(message, bytes) else message)[number][0]
    except (LookupError, TypeError):
        return None
    return message


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, least first, and where it ends."""
    value = shift = 0
    while data[at] & 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
