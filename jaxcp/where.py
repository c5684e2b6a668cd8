"""Where the sequence lies: the mesh, its axes and the specs of one call, read once and checked."""

import dataclasses
import math

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcp.layout import Contiguous, Layout
from jaxcp.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Where:
    mesh: jax.sharding.AbstractMesh | jax.sharding.Mesh | None = None  # None: the ambient one
    manual: bool = True  # the rows are this device's already: inside a shard_map over the strategy's axes, or no mesh
    nested: bool = False  # inside a shard_map
    explicit: bool = False  # shardings are part of the types
    spec: P | None = None  # of the query: batch, sequence, heads, None
    sizes: tuple[tuple[str, int], ...] = ()  # of the axes that shard the sequence, outermost first
    free: frozenset[str] = frozenset()  # the mesh axes that are not manual yet

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def shards(self) -> int:
        return math.prod(self.axes.values())

    @classmethod
    def find(cls, query, key, strategy: Strategy | None, partition_spec: P | None) -> "Where":
        """Where a call with these arguments runs; ValueError where it cannot."""
        ambient = jax.sharding.get_abstract_mesh()
        typed = jax.typeof(query).sharding
        concrete = None if isinstance(query, jax.core.Tracer) else query.sharding
        mesh = ambient if not ambient.empty else getattr(concrete, "mesh", typed.mesh)
        manual = frozenset(ambient.manual_axes)
        axes = () if strategy is None else strategy.axes
        inside = _check_axes(strategy, axes, mesh, manual)
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = any(kinds[axis] == AxisType.Explicit for axis in axes or mesh.axis_names)
        spec = _spec(axes, partition_spec, typed.spec if explicit else getattr(concrete, "spec", None), explicit)
        batch, sequence, heads, _ = map(_names, spec)
        if explicit and not sequence and query.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
            sequence = axes  # a type cannot say that 7 rows are sharded over 2
        used = (*batch, *sequence, *heads)
        if strategy is None and manual.issuperset(used):
            return cls()
        if not set(used) <= set(mesh.axis_names) or len(set(used)) < len(used):
            raise ValueError(
                f"partition_spec {P(*spec)}: each axis once, and of the mesh's, {_quoted(mesh.axis_names)}"
            )
        if set(sequence) != set(axes):
            raise ValueError(
                f"{'strategy=None' if strategy is None else repr(strategy)}: the sequence must be sharded over "
                f"{' and '.join(axes) or 'nothing'}, and is over {' and '.join(sequence) or 'nothing'} ({P(*spec)}); "
                "reshard the arrays, or pass partition_spec"
            )
        if not inside:
            _check_divides(query, key, P(*spec), *(math.prod(mesh.shape[a] for a in names) for names in (batch, heads)))
        # nothing varies over an axis of one device: no sum over it then, of the sinks' gradient, in the program
        live = lambda names: names if explicit else tuple(axis for axis in names if mesh.shape[axis] > 1)
        return cls(
            mesh=mesh if ambient.empty else None,
            manual=inside,
            nested=bool(manual),
            explicit=explicit,
            spec=P(*(live(names) or None for names in (batch, sequence, heads)), None),
            sizes=tuple((axis, mesh.shape[axis]) for axis in sequence),
            free=frozenset(mesh.axis_names) - manual,
        )

    def check(self, layout: Layout | None, strategy: Strategy | None) -> Layout:
        """`layout`, or the contiguous one; ValueError where it deals to another number of shards."""
        if layout is None:
            return Contiguous(self.shards)
        if not isinstance(layout, Layout):
            raise ValueError(f"layout: Contiguous, Zigzag or Striped, or None for contiguous; not {layout!r}")
        if strategy is not None and layout.shards != self.shards:
            raise ValueError(
                f"{layout!r} deals to {layout.shards} shards, but {strategy!r} spreads the sequence over {self.shards}"
            )
        return layout


def _check_axes(strategy: Strategy | None, axes: tuple[str, ...], mesh, manual: frozenset[str]) -> bool:
    """Whether the strategy's axes are manual already."""
    if axes and mesh.empty:
        raise ValueError(
            f"{strategy!r}: no mesh; call under `with jax.set_mesh(mesh):`, or pass arrays that lie on one"
        )
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"{strategy!r}: the mesh has no axis {axis!r}, only {_quoted(mesh.axis_names)}")
    if axes and manual.issuperset(axes):
        return True
    if not manual.isdisjoint(axes):
        raise ValueError(
            f"{strategy!r}: inside a shard_map over {', '.join(sorted(manual))} only; make all its axes manual, or none"
        )
    return False


def _spec(axes: tuple[str, ...], asked: P | None, found: P | None, explicit: bool) -> tuple:
    """The four entries of the query's partition spec."""
    four = lambda spec: (*spec, None, None, None, None)[:4]
    if asked is not None:
        if not isinstance(asked, P) or len(asked) > 4 or four(asked)[3] is not None:
            raise ValueError(f"partition_spec: P(batch, sequence, heads, None), not {asked!r}")
        if explicit and [*map(_names, four(asked))] != [*map(_names, four(found))]:
            raise ValueError(f"partition_spec {asked} is not the sharding in the query's type, {found}; leave it out")
        return four(asked)
    if found is not None and (explicit or (axes and _names(four(found)[1]))):
        return four(found)
    return None, axes, None, None


def _check_divides(query, key, spec: P, batch: int, heads: int):
    (b, _, n, _), k = query.shape, key.shape[2]
    if b % batch:
        raise ValueError(f"a batch of {b} does not divide over {batch} devices ({spec})")
    if n % heads or k % heads:
        raise ValueError(f"{n} query heads and {k} key heads do not both divide over {heads} devices ({spec})")


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _quoted(names) -> str:
    return ", ".join(map(repr, names))
