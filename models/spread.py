"""How a training run is spread over devices: `--mesh`, `--strategy` and `--layout` become what jax and jaxcp take."""

import contextlib
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcp

STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid", "none")
LAYOUTS: dict[str, Any] = {"contiguous": jaxcp.Contiguous, "zigzag": jaxcp.Zigzag, "striped": jaxcp.Striped}


@dataclasses.dataclass(frozen=True)
class Spread:
    """A mesh over data and the sequence; calling it is attention over that mesh."""

    mesh: Mesh
    strategy: Any
    layout: Any

    @property
    def rows(self) -> P:
        """Of arrays [batch, sequence, ...]."""
        return P("data", None if self.strategy is None else self.strategy.axes)

    def __call__(self, query, key, value, segment_ids):
        """Causal attention inside each document, as `models.transformer` wants it.

        No positions are passed: those of the layout order a document as its own do, and tell the ring whom to visit.
        """
        return jaxcp.dot_product_attention(
            query,
            key,
            value,
            strategy=self.strategy,
            layout=self.layout,
            is_causal=True,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            partition_spec=self.rows,
        )

    def place(self, batch):
        """Shards a batch of host arrays [B, S] over the mesh."""
        return jax.device_put(batch, NamedSharding(self.mesh, self.rows))


def spread(mesh: str | None, strategy: str, layout: str, platform: str = "cpu") -> Spread:
    """The flags' spread. Raises ValueError, a sentence, for what does not fit."""
    sizes = mesh_sizes(mesh, strategy)
    shape = tuple(sizes.values())
    kinds = (AxisType.Auto,) * len(sizes)
    chosen = devices(math.prod(shape), platform)
    shards = math.prod(shape[1:])
    built: Any = {
        "ring": jaxcp.Ring("context"),
        "all_gather": jaxcp.AllGather("context"),
        "ulysses": jaxcp.Ulysses("context"),
        "hybrid": jaxcp.Ulysses("ulysses", jaxcp.Ring("ring")),
        "none": None,
    }[strategy]
    return Spread(jax.make_mesh(shape, tuple(sizes), kinds, devices=chosen), built, LAYOUTS[layout](shards))


def mesh_sizes(mesh: str | None, strategy: str) -> dict[str, int]:
    """{"data": 2, "context": 4} of "data=2,context=4": the batch's axis first, then the sequence's.

    Axes that are not named have one device. None is what 8 devices do well.
    """
    given = {}
    for pair in (mesh or ("data=2" if strategy == "none" else "data=2,context=4")).split(","):
        axis, _, size = (part.strip() for part in pair.partition("="))
        if not size.isdecimal() or int(size) < 1 or axis in given:
            raise ValueError(f"--mesh {mesh}: write each axis once, with a number of devices, as in data=2,context=4")
        given[axis] = int(size)
    axes = ("data", "context", "ulysses", "ring") if strategy == "hybrid" else ("data", "context")
    for axis in given:
        if axis not in axes:
            hint = "; ulysses and ring are axes of --strategy hybrid" if axis in ("ulysses", "ring") else ""
            raise ValueError(f"--mesh {mesh}: there is no axis {axis!r}, only {' and '.join(axes)}{hint}")
    data, context = {"data": given.get("data", 1)}, given.get("context", 1)
    if strategy == "none" and context > 1:
        raise ValueError(f"--mesh {mesh}: --strategy none leaves the sequence whole; set context=1, or pick a strategy")
    if strategy != "hybrid":
        return data | {"context": context}
    if given.keys() & {"ulysses", "ring"}:
        if "context" in given:
            raise ValueError(f"--mesh {mesh}: context is ulysses x ring; name either it or those two")
        return data | {axis: given.get(axis, 1) for axis in ("ulysses", "ring")}
    ulysses = max(n for n in range(1, math.isqrt(context) + 1) if context % n == 0)
    return data | {"ulysses": ulysses, "ring": context // ulysses}


def devices(count: int, platform: str = "cpu") -> list[jax.Device]:
    """The first `count` devices of a platform; on a CPU they are virtual, and made here if jax has not begun."""
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(RuntimeError):  # jax has begun: then those that it has must do
            jax.config.update("jax_num_cpu_devices", count)
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(f"--platform {platform}: jax finds no such device here") from error
    if len(found) < count:
        raise ValueError(f"--mesh asks for {count} devices, and there are {len(found)} ({platform}): make it smaller")
    return found[:count]
