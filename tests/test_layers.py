"""The house: imports go down only, heavy backends are imported when used, and files stay short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcp
from jaxcp import AllGather, Contiguous, Ring, Striped, Ulysses, Zigzag

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxcp").rglob("*.py"))
OUTSIDE = sorted([*(ROOT / "models").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
name = lambda path: path.relative_to(ROOT).as_posix()
PUBLIC = {thing for thing in dir(jaxcp) if not thing.startswith("_")} - {"annotations"}

# What each part may import of jaxcp, besides itself.
GROUND = {"_jax", "softmax", "mask", "layout", "rope", "algebra"}
ALLOWED = {
    "_jax": set(),
    "softmax": set(),
    "mask": set(),
    "layout": set(),
    "rope": set(),
    "algebra": {"mask"},
    "blocks": GROUND,
    "kernels": GROUND | {"blocks"},
    "strategies": GROUND | {"blocks"},
    "where": GROUND | {"strategies"},
    "attention": GROUND | {"blocks", "kernels", "strategies", "where"},
    "modules": GROUND | {"attention"},
    "__init__": GROUND | {"attention", "modules", "strategies"},
}


def imports(path):
    """(module, name or None) of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name(path)}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def parts(path):
    """The parts of jaxcp that a file imports."""
    for module, thing in imports(path):
        if module == "jaxcp":
            yield thing
        elif module.startswith("jaxcp."):
            yield module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path):
    part = path.relative_to(ROOT / "jaxcp").parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part}: say here what it may import"
    assert set(parts(path)) - {part} <= ALLOWED[part]


@pytest.mark.parametrize("path", OUTSIDE, ids=name)
def test_models_and_benchmarks_use_public_names(path):
    tree = ast.parse(path.read_text())
    for module, thing in imports(path):
        assert not module.startswith("jaxcp."), f"from {module} import ..."
        assert module != "jaxcp" or thing is None or thing in PUBLIC, f"from jaxcp import {thing}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxcp":
            assert node.attr in PUBLIC or node.attr == "__version__", f"jaxcp.{node.attr}"


def test_importing_is_light():
    heavy = "flax", "optax", "matplotlib", "rich", "jax.experimental.pallas"
    code = f"import jaxcp, sys; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name != "kernels"], ids=name)
def test_only_kernels_may_be_long(path):
    assert len(path.read_text().splitlines()) <= 350


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "_jax.py"], ids=name)
def test_what_is_undocumented_stands_in_one_file(path):
    text = path.read_text()
    for word in "_xla_gpu", "manual_axis_type", "jax._src", "jax.experimental.xla_metadata":
        assert word not in text, word


def test_strategies_and_layouts_print_as_the_call_that_made_them():
    for thing in Ring("c"), AllGather(("a", "b")), Ulysses("u", Ring("node", Ring("gpu"))), Zigzag(3), Striped(4):
        assert eval(repr(thing)) == thing and hash(eval(repr(thing))) == hash(thing)
    assert repr(Ulysses("u", Ring("r"))) == "Ulysses('u', Ring('r'))"
    assert Zigzag(2) != Contiguous(2) and Ring("c") != AllGather("c") and Ring("c") != Ring("d")
