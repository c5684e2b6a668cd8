"""What a training run shows: a banner, a line or a bar for its steps, a summary, a picture."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import flax
import jax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 10  # steps between two lines, where no terminal shows a bar


class Show:
    """with Show(steps) as show: show.facts(..); show.step(row) for each; show.summary(..)"""

    def __init__(self, steps: int):
        self.steps = steps
        self.console = Console(highlight=False)
        self.started = time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("compiling", total=steps)

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def facts(self, **facts):
        """A name and a value on each line."""
        for name, value in facts.items():
            self.say(f"{name.replace('_', ' '):<{max(map(len, facts))}}  {value}")

    def say(self, line: str):
        self.console.print(line, soft_wrap=True, markup=False)

    def step(self, row: dict):
        done = row["step"] + 1
        said = (
            f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  {row['step_time'] * 1e3:,.0f} ms/step"
        )
        self.bar.update(self.task, completed=done, description=said)
        if self.bar.disable and (done % EVERY == 0 or done in (1, self.steps)):
            left = (self.steps - done) * row["step_time"]
            self.say(f"step {done}/{self.steps}  {said}  {left:.0f} s left")

    def summary(self, rows: Sequence[dict], files: Sequence[Path]):
        losses, times, rates = ([row[key] for row in rows] for key in ("loss", "step_time", "tokens_per_second"))
        took = time.perf_counter() - self.started
        self.facts(
            loss=f"{losses[0]:.4f} first, {losses[-1]:.4f} last, {min(losses):.4f} best, "
            f"{statistics.fmean(losses[-10:]):.4f} mean of the last {len(losses[-10:])}, in nats per byte",
            tokens_per_second=f"{statistics.harmonic_mean(rates):,.0f} mean",
            step_time=f"{statistics.median(times) * 1e3:,.0f} ms median",
            time=f"{took:.0f} s, of which {took - sum(times):.0f} s were not steps (compilation, mostly)",
            files=", ".join(map(str, files)),
        )


def versions() -> str:
    return f"jax {jax.__version__}, flax {flax.__version__}"


def plot(losses: Sequence[float], title: str, path: Path):
    """Draws the loss of each step, and the mean over a twentieth of them."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, linewidth=1, alpha=0.5, label="step")
    width = max(1, len(losses) // 20)
    smooth = [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]
    axes.plot(smooth, label=f"mean of {width}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
