"""README and docs are true: every code block in them is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str):
    for page in PAGES:
        for number, (kind, body) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            if kind == language:
                yield pytest.param(body, id=f"{page.relative_to(ROOT)}-{number}")


def commands():
    """Every command line of every bash block, continuation lines joined."""
    for block in blocks("bash"):
        for number, line in enumerate(block.values[0].replace("\\\n", " ").splitlines()):
            if line.strip() and not line.startswith("#"):
                yield pytest.param(line.strip(), id=f"{block.id}-{number}")


def test_blocks_name_a_language_the_tests_know():
    for page in PAGES:
        fences = re.findall(r"^```(\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        opening = fences[::2]
        assert set(opening) <= {"python", "bash", "text"}, page


@pytest.mark.model
@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_blocks_run(block, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.model
@pytest.mark.parametrize("line", list(commands()))
def test_commands_run(line, tmp_path):
    words = shlex.split(line)
    if words[0] == "make":  # the targets themselves are what CI and the demo run
        ran = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    elif words[0] == "longspan":
        ran = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, cwd=tmp_path
        )
    elif words[0] in ("git", "cd", "pip"):
        return  # fetching this very checkout
    else:
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_links_to_files_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_tree_is_the_tree():
    """Every file named in the README's tree exists, and every package is named."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^```text\nsrc/longspan/\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert tree is not None
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines() if line.strip()}
    package = ROOT / "src" / "longspan"
    for name in named:
        assert list(package.rglob(name)), f"the README names {name}, which is not there"
    for home in package.iterdir():
        if home.is_dir() and home.name != "__pycache__":
            assert home.name in named, f"the README's tree does not name {home.name}/"
