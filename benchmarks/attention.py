"""Strategies x layouts x lengths, forward and forward + backward, beside what a user has without jaxcp.

    python -m benchmarks.attention                      # on 8 virtual CPU devices
    python -m benchmarks.attention --lengths 4096 --dtype bfloat16

Everything runs interleaved in one process, and medians are compared. "jax.nn, sharded" is jax.nn.dot_product_attention
left to plain jit over sequence-sharded arrays; "jax.nn" and "blockwise" are one device. Prints tables, writes JSON; the
last line is the JSON.
"""

import argparse
import contextlib
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcp
from benchmarks import common

LAYOUTS = {"contiguous": jaxcp.Contiguous, "zigzag": jaxcp.Zigzag, "striped": jaxcp.Striped}


def main(argv=None):
    args = parse(argv)
    jax.config.update("jax_platforms", args.platform)
    if args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", args.devices)
    rows, skipped = [], []
    for length in args.lengths:
        jobs, memory = build(args, length, skipped)
        for name, times in common.interleaved(
            jobs, args.repeats if length <= 8192 else max(args.repeats // 3, 3)
        ).items():
            what, layout, passes = name.split("|")
            row = {"length": length, "attention": what, "layout": layout, "passes": passes}
            rows.append(row | times | {"temp_mb": memory[name]})
    common.show(f"B={args.batch} N={args.heads} H={args.head_dim} {args.dtype}, causal, {args.devices} devices", rows)
    for line in skipped:
        print(line)
    ratios = compare(rows)
    common.show("Ratios", [{"what": name, "value": value} for name, value in ratios.items()])
    balance = measure_balance(args)
    common.show(f"Each rank's work alone, S={args.balance_length}: slowest over mean", balance)
    result = {"config": vars(args), "rows": rows, "skipped": skipped, "ratios": ratios, "balance": balance}
    common.write("attention", result, args.out)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[4096, 16384], help="sequence lengths")
    add("--devices", type=int, default=8, help="devices that share the sequence")
    add("--platform", default="cpu", help="cpu: virtual devices; cuda: those at hand")
    add("--batch", type=int, default=1, help="sequences")
    add("--heads", type=int, default=8, help="query heads")
    add("--kv-heads", type=int, default=None, help="key heads (as many)")
    add("--head-dim", type=int, default=64, help="size of a head")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the arguments")
    add("--repeats", type=int, default=9, help="rounds; a third of them above 8192 tokens")
    add("--memory-gb", type=float, default=6.0, help="leave out what needs more than this for temporaries")
    add("--balance-length", type=int, default=16384, help="sequence length for the balance of ranks; 0: leave it out")
    add("--out", default=None, help="where the JSON goes (benchmarks/results/)")
    return parser.parse_args(argv)


def build(args, length: int, skipped: list[str]):
    """Compiled programs, "attention|layout|passes" -> a call of no arguments; and their temporary MB on a device."""
    outer = 2 ** (int(np.log2(args.devices)) // 2)
    mesh = jax.make_mesh((args.devices,), ("context",), axis_types=(AxisType.Auto,))
    grid = jax.make_mesh((args.devices // outer, outer), ("ring", "ulysses"), axis_types=(AxisType.Auto,) * 2)
    host = inputs(args, length)
    attend = partial(jaxcp.dot_product_attention, is_causal=True)
    plain = partial(jax.nn.dot_product_attention, is_causal=True)
    programs = {"jax.nn|-": (plain, None, None), "blockwise|-": (partial(attend, strategy=None), None, None)}
    programs["jax.nn, sharded|-"] = plain, mesh, P(None, "context")
    for strategy in (jaxcp.Ring("context"), jaxcp.AllGather("context"), jaxcp.Ulysses("context")):
        for name, layout in LAYOUTS.items():
            if isinstance(strategy, jaxcp.Ulysses) and name != "contiguous":
                continue  # every device has the whole sequence: the order changes nothing
            call = partial(attend, strategy=strategy, layout=layout(args.devices), partition_spec=P(None, "context"))
            programs[f"{type(strategy).__name__}|{name}"] = call, mesh, P(None, "context")
    spec = P(None, ("ring", "ulysses"))
    hybrid = jaxcp.Ulysses("ulysses", jaxcp.Ring("ring"))
    call = partial(attend, strategy=hybrid, layout=jaxcp.Zigzag(args.devices), partition_spec=spec)
    programs["Ulysses(Ring)|zigzag"] = call, grid, spec

    jobs, memory = {}, {}
    for name, (call, mesh, spec) in programs.items():
        arrays = host if mesh is None else [jax.device_put(x, NamedSharding(mesh, spec)) for x in host]
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            for passes, function in {"forward": forward(call), "forward+backward": both(call)}.items():
                label = f"{name}|{passes}"
                out = None if mesh is None else NamedSharding(mesh, spec)
                program = jax.jit(function, out_shardings=out).lower(*arrays).compile()
                temp = program.memory_analysis().temp_size_in_bytes
                if temp * (1 if mesh is None else args.devices) > args.memory_gb * 1e9:
                    skipped.append(f"left out: {label} at {length}: {temp / 1e9:.1f} GB of temporaries on a device")
                    continue
                jobs[label], memory[label] = partial(program, *arrays), temp / 1e6
    return jobs, memory


def inputs(args, length: int):
    rng = np.random.default_rng(0)
    heads = args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads, args.heads
    return [jnp.asarray(rng.standard_normal((args.batch, length, n, args.head_dim)), args.dtype) for n in heads]


def forward(call):
    return lambda q, k, v, dout: call(q, k, v)


def both(call):
    def run(q, k, v, dout):
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    return run


def compare(rows: list[dict]) -> dict[str, float | None]:
    """The ratios that the README speaks of, of medians of forward + backward."""
    seconds = {(r["length"], r["attention"], r["layout"]): r["seconds"] for r in rows if r["passes"] != "forward"}

    def ratio(a, b):
        return seconds[a] / seconds[b] if a in seconds and b in seconds else None

    ratios, lengths = {}, sorted({r["length"] for r in rows})
    for n in lengths:
        ring, one = (n, "Ring", "zigzag"), (n, "blockwise", "-")
        ratios[f"{n}: sharded jax.nn over ring, zigzag"] = ratio((n, "jax.nn, sharded", "-"), ring)
        ratios[f"{n}: one-device jax.nn over one-device blockwise"] = ratio((n, "jax.nn", "-"), one)
        ratios[f"{n}: one-device blockwise over ring, zigzag"] = ratio(one, ring)
    for short, long in itertools.pairwise(lengths):
        name = f"ring, zigzag: {long} over {short}"
        ratios[name] = ratio((long, "Ring", "zigzag"), (short, "Ring", "zigzag"))
    return ratios


def measure_balance(args) -> list[dict]:
    """The work of each rank, run alone on one device: virtual devices share the cores, so the whole hides it."""
    length, shards = args.balance_length, args.devices
    if not length:
        return []
    q, k, v, dout = inputs(args, length)
    positions = jnp.arange(length)
    run = jax.jit(
        lambda q, k, v, dout, rows: both(
            partial(jaxcp.dot_product_attention, strategy=None, is_causal=True, query_positions=rows)
        )(q[:, rows], k, v, dout[:, rows])
    )
    jobs = {}
    for name, layout in LAYOUTS.items():
        for rank, rows in enumerate(np.split(layout(shards).indices(length), shards)):
            jobs[f"{name}|{rank}"] = partial(run, q, k, v, dout, positions[rows])
    times = common.interleaved(jobs, 3)
    table = []
    for name in LAYOUTS:
        ranks = [times[f"{name}|{rank}"]["cpu_seconds"] for rank in range(shards)]
        spread = {"slowest_over_mean": max(ranks) / np.mean(ranks), "slowest_seconds": max(ranks)}
        table.append({"layout": name} | {key: float(x) for key, x in spread.items()})
    return table


if __name__ == "__main__":
    main()
