"""The house: imports only go down, names mean one thing, importing changes nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

SOURCE = Path(longspan.__file__).parent

# From the ground up; a package may import from its own floor and those before it.
FLOORS = (
    ("errors", "_version", "files"),
    ("rotary", "bias", "masks"),
    ("attention",),
    ("caches",),
    ("adapters", "models"),
    ("metrics", "training"),
    ("tools",),
    ("report", "cli", "__main__"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
BELOW_MODELS = [name for names in FLOORS[1:4] for name in names]


def sources(*packages: str) -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    return [path for path in found if not packages or package_of(path) in packages]


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The packages of longspan that a file imports from, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("longspan.")}
    return found & set(FLOOR_OF)


def test_every_package_has_a_floor():
    homes = {package_of(path) for path in sources()} - {"__init__"}
    assert homes <= set(FLOOR_OF), homes - set(FLOOR_OF)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_go_down(path: Path):
    if path == SOURCE / "__init__.py":
        return  # the front door opens onto every floor, lazily
    floor = FLOOR_OF[package_of(path)]
    upward = {name for name in imported(path) if FLOOR_OF[name] > floor}
    assert not upward, f"{path.name} (floor {floor}) imports upward from {upward}"


def test_an_upward_import_would_be_seen(tmp_path: Path):
    upward = tmp_path / "upward.py"
    upward.write_text("def f():\n    from longspan.tools.plan import plan\n")
    assert imported(upward) == {"tools"}


def test_only_adapters_import_transformers():
    pattern = re.compile(r"^\s*(from|import) transformers", re.MULTILINE)
    typing_only = re.compile(r"if TYPE_CHECKING:\n(?:    .*\n|\n)*", re.MULTILINE)
    for path in sources():
        text = typing_only.sub("", path.read_text(encoding="utf-8"))
        if package_of(path) not in ("adapters", "models"):
            assert not pattern.search(text), path


def test_below_adapters_the_words_model_and_config_do_not_appear():
    word = re.compile(r"\b(model|config)\b", re.IGNORECASE)
    for path in sources(*BELOW_MODELS):
        text = path.read_text(encoding="utf-8").replace("config.json", "")
        assert not word.search(text), f"{path}: {word.search(text)}"


def test_there_is_one_rotation():
    pattern = re.compile(r"def (rotate_half|apply_rotary\w*|_?rotate_every_two)\b")
    assert [path for path in sources() if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_no_drawers_and_no_empty_packages():
    names = {path.stem for path in sources()}
    assert not names & {"utils", "helpers", "common", "misc"}


def test_importing_longspan_pulls_in_neither_torch_nor_transformers():
    code = (
        "import sys, longspan; "
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"


def test_every_public_name_is_importable_and_listed():
    assert set(longspan._HOME) | {"__version__"} == set(longspan.__all__)
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    assert set(longspan.__all__) <= set(dir(longspan))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="banana"):
        longspan.banana  # noqa: B018
