"""`python -m models.train` from its flags to its files, and what it says to mistakes."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from models import compare, spread, train
from models.options import Options

SMALL = ["--steps", "4", "--seq-len", "64", "--batch-size", "2", "--text", str(Path(__file__).parent)]


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """All of them, before a run makes fewer."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function of more flags: the folder of the run, which is made once."""
    done = {}

    def run(*flags):
        if flags not in done:
            done[flags] = tmp_path_factory.mktemp("run")
            train.main([*SMALL, "--run-dir", str(done[flags]), *flags])
        return done[flags]

    return run


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


def test_a_run_leaves_metrics_and_a_picture(run):
    rows = metrics(run("--strategy", "none"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0].keys() == {"step", "loss", "grad_norm", "lr", "step_time", "tokens_per_second"}
    assert all(math.isfinite(value) and value >= 0 for row in rows for value in row.values())
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["tokens_per_second"] == pytest.approx(2 * 64 / rows[0]["step_time"])
    assert (run("--strategy", "none") / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [(), ("--strategy", "hybrid", "--remat", "attention")], ids=["ring", "hybrid"])
def test_the_loss_is_that_of_one_device(run, flags):
    np.testing.assert_allclose(losses(run(*flags)), losses(run("--strategy", "none")), rtol=0, atol=1e-4)


def test_the_console(capsys, tmp_path):
    train.main([*SMALL, "--strategy", "none", "--mesh", "context=1", "--dtype", "bfloat16", "--run-dir", str(tmp_path)])
    said = capsys.readouterr().out
    for word in (
        "jax",
        "data=1, context=1",
        "none, zigzag",
        "853,376 parameters",
        "128 tokens",
        "step 1/4",
        "step 4/4",
    ):
        assert word in said, word
    for word in ("tokens/s", "ms/step", "s left", "first", "last", "best", "median", "metrics.jsonl", "loss.png"):
        assert word in said, word


def test_compare(monkeypatch, capsys):
    monkeypatch.setattr(compare, "STRATEGIES", ("all_gather",))
    monkeypatch.setattr(compare, "CONTEXTS", (1, 2))
    with pytest.raises(SystemExit) as ended:
        compare.main(SMALL)
    assert ended.value.code == 0
    assert "4 steps, float32: at most" in capsys.readouterr().out


def test_mesh():
    assert spread.mesh_sizes(None, "ring") == {"data": 2, "context": 4}
    assert spread.mesh_sizes("context=8", "ring") == {"data": 1, "context": 8}
    assert spread.mesh_sizes(" context = 2 , data=3", "ulysses") == {"data": 3, "context": 2}
    assert spread.mesh_sizes(None, "none") == {"data": 2, "context": 1}
    assert spread.mesh_sizes("data=2,ulysses=2,ring=4", "hybrid") == {"data": 2, "ulysses": 2, "ring": 4}
    for context, pair in {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (2, 3), 7: (1, 7), 8: (2, 4), 16: (4, 4)}.items():
        sizes = spread.mesh_sizes(f"context={context}", "hybrid")
        assert sizes == {"data": 1, "ulysses": pair[0], "ring": pair[1]}


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--strategy rings", "argument --strategy: invalid choice: 'rings' (choose from"),
        ("--layout zag", "argument --layout: invalid choice: 'zag' (choose from"),
        ("--steps few", "argument --steps: must be a whole number from 1 on, not few"),
        ("--lr -1", "argument --lr: must be a number from 0 on, not -1"),
        ("--mesh data2", "--mesh data2: write each axis once, with a number of devices, as in data=2,context=4"),
        ("--mesh data=0", "--mesh data=0: write each axis once, with a number of devices"),
        ("--mesh data=2,data=2", "--mesh data=2,data=2: write each axis once, with a number of devices"),
        ("--mesh model=2", "--mesh model=2: there is no axis 'model', only data and context"),
        (
            "--mesh ring=2",
            "there is no axis 'ring', only data and context; ulysses and ring are axes of --strategy hyb",
        ),
        ("--strategy hybrid --mesh context=2,ring=2", "context is ulysses x ring; name either it or those two"),
        ("--strategy none --mesh context=2", "--strategy none leaves the sequence whole; set context=1, or pick a"),
        ("--mesh context=16", "--mesh asks for 16 devices, and there are 8 (cpu): make it smaller"),
        ("--platform gpu", "--platform gpu: jax finds no such device here"),
        ("--batch-size 3", "--batch-size 3 does not divide over the 2 devices of the mesh's data axis: make it a mult"),
        (
            "--seq-len 60",
            "--seq-len 60 does not divide into the 8 stretches that --layout zigzag deals to 4 devices: m",
        ),
        ("--warmup 4 --steps 4", "--warmup 4 must end before the last of --steps 4: make it smaller"),
        ("--text no/such/file", "--text no/such/file: cannot be read (No such file or directory)"),
        ("--seq-len 80000000", "symbols, less than a row of --seq-len 80000000: give more text, or shorter rows"),
        ("--run-dir pyproject.toml/run", "--run-dir pyproject.toml/run: cannot be written (Not a directory)"),
    ],
)
def test_a_mistake_gets_one_sentence(capsys, flags, sentence):
    with pytest.raises(SystemExit) as ended:
        train.main([*SMALL, *flags.split()])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1 and said.out == ""


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Options):
        assert f"--{field.name.replace('_', '-')} " in said
        default = field.default if field.default not in (None, ()) else ""
        assert f"(default: {default}" in said[said.index(field.metadata["help"][:30]) :]


def test_only_norms_are_spared_weight_decay():
    """A step with no gradient moves what decays, and nothing else."""
    run = train.prepare(Options(steps=4, warmup=0, text=(__file__,), seq_len=64))
    model, optimizer = train.initial(run)
    before = jax.tree.map(np.asarray, model)
    optimizer.update(model, jax.tree.map(jax.numpy.zeros_like, model))
    for (path, x), y in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(model), strict=True):
        assert (x == np.asarray(y)).all() == ("norm" in jax.tree_util.keystr(path)), path


def test_where_a_run_goes():
    assert Options().directory == Path("runs/tiny-ring")
    assert Options(name="mine").directory == Path("runs/mine")
    assert Options(name="mine", run_dir="elsewhere").directory == Path("elsewhere")
    assert Options(batch_size=3, seq_len=5).tokens == 15
