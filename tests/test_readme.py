"""What the README says is so: its example runs, CI runs its commands, its figures were measured."""

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import cases
from tests.oracle import Problem, solve

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
COMMANDS = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)


def test_the_example_runs_and_is_right():
    code = [line for line in EXAMPLE.splitlines() if line]
    assert len(code) == 10
    names = {}
    exec(EXAMPLE, names)
    layout = names["layout"]
    q, k, v = (np.asarray(layout.undeal(x)) for x in (names["q"], names["k"], names["v"]))
    problem = Problem(q, k, v, dout=0 * q, dlse=0 * q[..., 0], is_causal=True)
    truth = solve(problem)["out"]
    np.testing.assert_allclose(names["value"], (truth**2).sum(), rtol=1e-5)
    gradients = solve(problem.replace(dout=(2 * truth)))
    for name, found in zip(("dq", "dk", "dv"), names["gradients"], strict=True):
        error = np.abs(layout.undeal(np.asarray(found)) - gradients[name]).max()
        assert error <= 1e-5 * np.abs(gradients[name]).max(), name


def test_the_commands_are_one_line_each_and_ci_runs_the_second():
    train_command, test_command = COMMANDS
    assert train_command.endswith("-m models.train") and "'.[train]'" in train_command
    assert test_command.endswith("-m pytest") and "'.[test]'" in test_command
    assert "grep -m1 -- '-m pytest$' README.md" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("module", ["models.train", "models.compare", "benchmarks.attention"])
def test_the_modules_it_names_have_help(module):
    assert f"python -m {module}" in README
    help = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for flag in re.findall(r"`(--[\w-]+)", README) if module == "models.train" else ():
        assert flag in help.stdout, flag


def test_the_grid_is_as_large_as_it_says():
    counts = len(cases.STRATEGIES), len(cases.LAYOUTS), len(cases.MASKS), len(cases.HEADS), len(cases.DTYPES)
    said = re.search(r"(\d+) compositions x (\d+) layouts x (\d+) masks x (\d+) head counts x (\d+) dtypes", README)
    assert counts == tuple(map(int, said.groups()))


def test_the_figures_are_those_of_the_results():
    path = re.search(r"`(benchmarks/results/attention_[^`]*\.json)`", README)[1]
    rows = json.loads((ROOT / path).read_text())["rows"]
    seconds = {(r["attention"], r["layout"], r["length"]): r for r in rows if r["passes"] == "forward+backward"}
    table = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", README, re.MULTILINE)
    lines = [line for line in table if re.match(r"[\d.]+ s", line[2])]
    assert len(lines) >= 6
    for attention, layout, short, memory, long in lines:
        measured = seconds[attention, layout, 4096]
        assert short == f"{measured['seconds']:.2f} s" and memory == f"{measured['temp_mb']:.0f} MB", attention
        longer = seconds.get((attention, layout, 16384))
        assert long == (f"{longer['seconds']:.1f} s" if longer else "does not fit"), attention
