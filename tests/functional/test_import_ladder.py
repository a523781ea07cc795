"""Who may import whom, read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "qwen3vl_functional"
# fmt: off
LADDER = [
    "config", "spec", "collectives", "peers", "sharding", "transforms", "transfers", "gathered", "layers", "positions", "moe",
    "vision", "text", "model", "loss", "optim", "step", "hf",
]
# fmt: on
ADAPTER = "hyper_parallel.models.qwen3_vl_moe"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Absolute dotted names of everything a file imports, wherever in the file: modules, and names taken from them."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            parent = ".".join([*base, *([node.module] if node.module else [])])
            found |= {parent, *(f"{parent}.{alias.name}" for alias in node.names)}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    assert files, package
    return files


@pytest.mark.parametrize("path", sources("qwen3vl_functional"), ids=lambda path: path.stem)
def test_model_knows_tensors_only(path):
    for name in imports(path):
        for forbidden in ("yaml", "transformers", "hyper_parallel", "time", "datetime", "logging", "os.environ", "os.getenv"):
            assert not within(name, forbidden), f"{path.name} imports {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv"), f"{path.name}:{node.lineno} reads the environment"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path.name}:{node.lineno} prints"
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                assert not ast.unparse(base).endswith("Module"), f"{path.name}: {node.name} is a {ast.unparse(base)}"


def test_model_files_import_upwards_only():
    files = {path.stem: path for path in sources("qwen3vl_functional") if path.stem != "__init__"}
    assert files.keys() <= set(LADDER), "a file has no rung on the ladder"
    for stem, path in files.items():
        used = {name.split(".")[1] for name in imports(path) if within(name, "qwen3vl_functional") and "." in name}
        for other in used & files.keys():
            assert LADDER.index(other) < LADDER.index(stem), f"{stem} imports {other}"
        assert "qwen3vl_functional" not in imports(path) or not used - files.keys(), f"{stem} imports the package itself"


def test_only_the_adapter_joins_the_packages():
    for path in sources("hyper_parallel"):
        if within(module_name(path), ADAPTER):
            continue
        for name in imports(path):
            assert not within(name, "qwen3vl_functional"), f"{module_name(path)} imports {name}"
            assert not within(name, ADAPTER), f"{module_name(path)} imports {name}"


def test_data_knows_neither_trainer_nor_model():
    for path in sources("hyper_parallel.data"):
        for name in imports(path):
            for forbidden in ("hyper_parallel.trainer", "hyper_parallel.models", "qwen3vl_functional"):
                assert not within(name, forbidden), f"{module_name(path)} imports {name}"


def test_imports_are_read_wherever_they_stand(tmp_path, monkeypatch):
    package = tmp_path / "a" / "b"
    package.mkdir(parents=True)
    (package / "c.py").write_text("def f():\n    import x.y\n    from . import p\n    from ..q import r\n    from z import w\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports(package / "c.py") == {"x.y", "a.b", "a.b.p", "a.q", "a.q.r", "z", "z.w"}
