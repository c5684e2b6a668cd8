"""Reading the collectives out of compiled HLO text."""

import re
from collections import Counter
from typing import NamedTuple

KINDS = "collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


class Collective(NamedTuple):
    kind: str
    bytes: int  # of its operands, on one device
    count: int  # how often it runs: the trip counts of the loops around it, multiplied
    dtype: str


def collectives(text: str) -> list[Collective]:
    """Every collective of `compiled.as_text()`."""
    types, lines, calls, current = {}, {}, {}, None
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?(%?[\w.-]+) \(.*\{$", line):
            current = opened[1].lstrip("%")
            lines[current] = []
        elif made := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line):
            types[made[1]] = made[2]
            lines[current].append(made[2])
            trips = re.search(r'known_trip_count\D*"(\d+)"', line)
            for attribute, callee in re.findall(r"(\w+)=%([\w.-]+)", line):
                often = int(trips[1]) if trips and attribute == "body" else 1
                calls.setdefault(callee, set()).add((current, often, made[1]))

    def runs(computation: str) -> int:
        callers = calls.get(computation, ())
        return sum(often * runs(caller) for caller, often, _ in callers) if callers else 1

    found = []
    for computation, body in lines.items():
        for made in body:
            if op := re.search(rf" ({'|'.join(KINDS)})(?:-start)?\(([^)]*)\)", made):
                operands = [types[name] for name in re.findall(r"%([\w.-]+)", op[2])]
                arrays = [re.match(r"(\w+)\[([\d,]*)\]", x) for x in operands]
                size = sum(_BYTES[x[1]] * _product(x[2]) for x in arrays)
                found.append(Collective(op[1], size, runs(computation), arrays[0][1]))
    return found


def tally(text: str, dtype: str = "f32") -> dict[str, tuple[int, int]]:
    """kind -> (how many run, the bytes of all their operands), of one dtype."""
    count, total = Counter(), Counter()
    for c in collectives(text):
        if c.dtype == dtype:
            count[c.kind] += c.count
            total[c.kind] += c.count * c.bytes
    return {kind: (count[kind], total[kind]) for kind in count}


def _product(dims: str) -> int:
    size = 1
    for n in filter(None, dims.split(",")):
        size *= int(n)
    return size
