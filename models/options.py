"""The flags of `python -m models.train`."""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from models.spread import LAYOUTS, STRATEGIES
from models.transformer import MODELS, REMAT


def number(kind, least):
    """An argparse type: a `kind` of at least `least`."""
    what = "a whole number" if kind is int else "a number"

    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {what} from {least} on, not {text}")
        return value

    return read


def flag(default, help: str, **argparse_options) -> Any:
    return dataclasses.field(default=default, metadata=dict(help=help, **argparse_options))


@dataclasses.dataclass(frozen=True)
class Options:
    strategy: str = flag("ring", "how attention is spread over the shards of a sequence", choices=STRATEGIES)
    layout: str = flag("zigzag", "how a sequence is dealt to its shards", choices=tuple(LAYOUTS))
    mesh: str | None = flag(
        None,
        "devices per axis; hybrid splits context into the two most equal factors, unless it reads ulysses=2,ring=4 "
        "(default: data=2,context=4; data=2 with --strategy none, which leaves the sequence whole)",
        metavar="AXIS=N,...",
    )
    platform: str = flag("cpu", "where; cpu devices are virtual, as many as the mesh has", choices=("cpu", "gpu"))
    model: str = flag("tiny", "its size", choices=tuple(MODELS))
    text: Sequence[str] = flag(
        (), "files, and folders of files, to train on (default: Python's standard library)", nargs="+", metavar="PATH"
    )
    seq_len: int = flag(1024, "symbols in a row of packed documents", type=number(int, 2), metavar="N")
    batch_size: int = flag(4, "rows in a step, over the whole mesh", type=number(int, 1), metavar="N")
    steps: int = flag(300, "how many", type=number(int, 1), metavar="N")
    lr: float = flag(3e-3, "AdamW's learning rate at its peak", type=number(float, 0), metavar="X")
    warmup: int | None = flag(
        None,
        "steps in which it rises, before a cosine takes it to a tenth (default: a tenth of --steps)",
        type=number(int, 0),
        metavar="N",
    )
    weight_decay: float = flag(0.1, "AdamW's; norms are left out", type=number(float, 0), metavar="X")
    clip: float = flag(1.0, "the greatest norm of a gradient", type=number(float, 0), metavar="X")
    dtype: str = flag("float32", "of activations; parameters are float32", choices=("float32", "bfloat16"))
    remat: str = flag(
        "none",
        "what backward computes again: none of a layer, all but its attention, or the full layer",
        choices=tuple(REMAT),
    )
    seed: int = flag(0, "of the parameters and of the order of the text", type=number(int, 0), metavar="N")
    name: str | None = flag(None, "of the run (default: MODEL-STRATEGY)")
    run_dir: str | None = flag(
        None, "where metrics.jsonl and loss.png go, over older ones (default: runs/NAME)", metavar="DIR"
    )

    @property
    def directory(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name or f'{self.model}-{self.strategy}'}")

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch_size * self.seq_len


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line, and nothing else."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def parser(prog: str, description: str | None, leave_out: Collection[str] = ()) -> Parser:
    """A flag for every field of Options, except those that are left out."""
    made = Parser(prog, description=description, allow_abbrev=False)
    for field in dataclasses.fields(Options):
        if field.name in leave_out:
            continue
        kinds = dict(field.metadata)
        if field.default not in (None, ()):
            kinds["help"] += " (default: %(default)s)"
        made.add_argument("--" + field.name.replace("_", "-"), default=field.default, **kinds)
    return made
