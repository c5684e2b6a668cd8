"""Trains the same model with each strategy and mesh, and shows how far the losses lie apart: no more than rounding."""

import dataclasses

from rich.console import Console
from rich.table import Table

from models import options, spread
from models.options import Options
from models.train import prepare, train

STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid")
CONTEXTS = (1, 2, 4, 8)


def main(arguments: list[str] | None = None):
    parser = options.parser("python -m models.compare", __doc__, leave_out=("strategy", "mesh", "name", "run_dir"))
    parser.add_argument(
        "--tolerance",
        type=options.number(float, 0),
        default=1e-3,
        help="the greatest difference of a step's loss that counts as rounding (default: %(default)s)",
        metavar="X",
    )
    parser.set_defaults(steps=50, seq_len=256, batch_size=2)
    given = vars(parser.parse_args(arguments))
    tolerance, common = given.pop("tolerance"), Options(**given)
    try:
        spread.devices(max(CONTEXTS), common.platform)  # all at once: jax makes virtual devices before its first use
        ways = [(strategy, context) for strategy in STRATEGIES for context in CONTEXTS]
        runs = {way: prepare(dataclasses.replace(common, strategy=way[0], mesh=f"context={way[1]}")) for way in ways}
    except ValueError as mistake:
        parser.error(str(mistake))

    console, first, apart = Console(highlight=False), None, {}
    for (strategy, context), run in runs.items():
        losses = [row["loss"] for row in train(run)]
        first = first or losses
        apart[strategy, context] = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        console.print(f"{strategy} context={context}: loss {losses[0]:.4f} to {losses[-1]:.4f}", soft_wrap=True)

    table = Table("strategy", *(f"context={n}" for n in CONTEXTS), title="Greatest difference of a step's loss")
    for strategy in STRATEGIES:
        table.add_row(strategy, *(f"{apart[strategy, context]:.1e}" for context in CONTEXTS))
    console.print(table)
    worst = max(apart.values())
    console.print(f"{common.steps} steps, {common.dtype}: at most {worst:.1e} apart, {tolerance:.0e} allowed")
    raise SystemExit(0 if worst <= tolerance else 1)


if __name__ == "__main__":
    main()
