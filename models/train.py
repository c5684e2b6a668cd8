"""Trains a byte-level decoder on text, each sequence spread over the devices of a mesh.

With no flags: on the source of Python's standard library, over 8 virtual CPU devices, in a few minutes.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import data, options, show
from models.options import Options
from models.spread import Spread, spread
from models.transformer import MODELS, Config, Decoder, parameters


def main(arguments: list[str] | None = None):
    parser = options.parser("python -m models.train", __doc__)
    chosen = Options(**vars(parser.parse_args(arguments)))
    metrics, picture = chosen.directory / "metrics.jsonl", chosen.directory / "loss.png"
    try:
        run = prepare(chosen)
        chosen.directory.mkdir(parents=True, exist_ok=True)
        metrics.touch()
    except ValueError as mistake:
        parser.error(str(mistake))
    except OSError as error:
        parser.error(f"--run-dir {chosen.directory}: cannot be written ({error.strerror})")

    rows = []
    with show.Show(chosen.steps) as screen, metrics.open("w") as file:
        screen.facts(**facts(run))
        for row in train(run):
            rows.append(row)
            screen.step(row)
            print(json.dumps(row), file=file, flush=True)
    show.plot([row["loss"] for row in rows], chosen.directory.name, picture)
    screen.summary(rows, [metrics, picture])


@dataclasses.dataclass(frozen=True)
class Run:
    """All that training needs, checked."""

    options: Options
    spread: Spread
    text: data.Rows
    config: Config
    schedule: optax.Schedule


def prepare(chosen: Options) -> Run:
    """Turns flags into a run. Raises ValueError, one sentence, where they do not fit together."""
    over = spread(chosen.mesh, chosen.strategy, chosen.layout, chosen.platform)
    parts, stretches = over.mesh.shape["data"], over.layout.multiple
    if chosen.batch_size % parts:
        raise ValueError(
            f"--batch-size {chosen.batch_size} does not divide over the {parts} devices of the mesh's data axis: "
            f"make it a multiple of {parts}"
        )
    if chosen.seq_len % stretches:
        raise ValueError(
            f"--seq-len {chosen.seq_len} does not divide into the {stretches} stretches that --layout "
            f"{chosen.layout} deals to {over.layout.shards} devices: make it a multiple of {stretches}"
        )
    warmup = chosen.steps // 10 if chosen.warmup is None else chosen.warmup
    if warmup >= chosen.steps:
        raise ValueError(f"--warmup {warmup} must end before the last of --steps {chosen.steps}: make it smaller")
    schedule = optax.warmup_cosine_decay_schedule(0.0, chosen.lr, warmup, chosen.steps, chosen.lr / 10)
    text = data.load(tuple(chosen.text), chosen.seq_len, chosen.seed)
    config = dataclasses.replace(MODELS[chosen.model], dtype=chosen.dtype, remat=chosen.remat)
    return Run(chosen, over, text, config, schedule)


def train(run: Run) -> Iterator[dict]:
    """Yields the metrics of each step, the parameters and the optimizer's state living on the mesh."""
    batch = lambda step: run.spread.place(run.text.batch(step, run.options.batch_size, run.spread.layout))
    everywhere = NamedSharding(run.spread.mesh, P())
    with jax.set_mesh(run.spread.mesh):
        state = jax.jit(partial(initial, run), out_shardings=everywhere)()
        step_of = jax.jit(partial(update, run), donate_argnums=0, out_shardings=everywhere)
        compiled = step_of.lower(state, batch(0)).compile()  # ahead, so that no step's time holds it

    coming, started = batch(0), time.perf_counter()
    for step in range(run.options.steps):
        state, metrics = compiled(state, coming)
        coming = batch(step + 1)  # while the devices work
        metrics = {name: float(x) for name, x in metrics.items()}
        ended = time.perf_counter()
        took, started = ended - started, ended
        yield {"step": step, **metrics, "step_time": took, "tokens_per_second": run.options.tokens / took}


def initial(run: Run):
    """The state that training begins with."""
    model = Decoder(run.config, nnx.Rngs(run.options.seed))
    decays = partial(jax.tree.map_with_path, lambda path, _: "norm" not in jax.tree_util.keystr(path))
    optimizer = optax.chain(
        optax.clip_by_global_norm(run.options.clip),
        optax.adamw(run.schedule, b2=0.95, weight_decay=run.options.weight_decay, mask=decays),
    )
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def update(run: Run, state, batch):
    """One step: the state after it, and its metrics."""
    model, optimizer = state
    value, gradients = jax.value_and_grad(loss)(model, batch, run.spread)
    metrics = dict(loss=value, grad_norm=optax.tree.norm(gradients), lr=run.schedule(optimizer.step[...]))
    optimizer.update(model, gradients)
    return (model, optimizer), metrics


def loss(model: Decoder, batch, attend):
    """Nats per byte: the sum of all losses over the sum of their weights, whatever the sharding."""
    logits = model(batch["inputs"], batch["positions"], batch["segment_ids"], attend=attend)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["loss_weights"]
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1)


def facts(run: Run) -> dict[str, str]:
    """What the banner says."""
    mesh, chosen = run.spread.mesh, run.options
    return dict(
        versions=show.versions(),
        devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        mesh=", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        strategy=f"{chosen.strategy}, {chosen.layout}",
        model=f"{chosen.model}, {parameters(run.config):,} parameters, {chosen.dtype}, remat {chosen.remat}",
        text=f"{run.text.rows.size:,} symbols in rows of {chosen.seq_len:,}",
        step=f"{chosen.batch_size} rows, {chosen.tokens:,} tokens",
    )


if __name__ == "__main__":
    main()
