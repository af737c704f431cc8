"""The page: complete, escaped, accessible, and in need of nothing else."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longspan.errors import ConfigError, OutputError
from longspan.report.page import evaluation_page, read_template, write_page
from longspan.report.page_rows import MEANINGS
from longspan.tools.evaluation import Evaluation, Protocol
from report_examples import EIGHT, PLAIN, TWO, YARN, evaluation, trials

COMMAND = "longspan evaluate smollm2 --method none,yarn --text novel.txt"
HOSTILE = "<script>alert(1)</script>"
PASSKEY = trials({"none": {4096: 5, 12_288: 0, 16_384: 0}, "yarn": {4096: 5, 12_288: 4}})
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Collects tags and visible text, and refuses tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        whole = " ".join(" ".join(self.words).split())
        return whole.replace("\N{WORD JOINER}", "").replace("\N{NO-BREAK SPACE}", " ")


def page(made: Evaluation, command: str = COMMAND) -> Page:
    return Page(evaluation_page(made, command=command))


def test_headline_and_numbers() -> None:
    text = page(evaluation(TWO, half=0.1, passkey=PASSKEY)).text
    for expected in (
        "plain RoPE rises to 3.67 nats at 10k–12k; YaRN falls to 3.16",
        "YaRN is better than plain RoPE by 0.51 nats (95 % interval 0.42 to 0.60 over 256-token",
        "YaRN finds 4 of 5 keys past the trained 8k tokens; plain RoPE 0 of 5.",
        "YaRN yarn 2 1.069 3.282 26.62 +0.51 +0.42 to +0.60 better 12,287 41.2",
        "Plain RoPE none – 1 3.352 28.55 – 12,287 41.2",
        "past the trained 8k tokens 8k–10k 3.45 3.35–3.55 3.45 3.35–3.55 10k–12k",
        "Plain RoPE 5/5 0/5 – 5/10 5/10 5",
        "a prompt of 16384 tokens does not fit the limit of 12288 (5 trials)",
        COMMAND,
        "torch 2.13.0",
        '"rope_type": "yarn"',
    ):
        assert expected in text, expected


def test_headline_turns_with_the_data() -> None:
    html = evaluation_page(evaluation({"none": YARN, "yarn": PLAIN}), command=COMMAND)
    assert "plain RoPE falls to 3.16" in Page(html).text
    assert "worse than plain RoPE" in Page(html).text


def test_every_field_of_the_protocol_is_shown_and_explained() -> None:
    names = [item.name for item in fields(Protocol)]
    text = page(evaluation(TWO, window=4096, stride=512)).text
    for name in names:
        assert name in text
        assert name in MEANINGS
    assert "ab12" * 16 in text
    assert "window 4,096 tokens of a forward" in text
    assert "window none tokens of a forward" in page(evaluation(TWO)).text
    assert "past the trained 8k tokens" not in text


def test_everything_is_escaped() -> None:
    made = evaluation(
        {"none": PLAIN, HOSTILE: YARN},
        passkey=[
            replace(one, method=HOSTILE, reason=HOSTILE if one.status == "invalid" else "")
            for one in PASSKEY
        ],
        rope_parameters={HOSTILE: {HOSTILE: HOSTILE}},
        model=HOSTILE,
        texts=((HOSTILE, HOSTILE),),
        dtype=HOSTILE,
        phase=HOSTILE,
        semantics=HOSTILE,
        versions=((HOSTILE, HOSTILE),),
    )
    html = evaluation_page(made, command=f'{HOSTILE} & "quotes"')
    assert "<script" not in html
    found = Page(html)
    assert all(tag != "script" for tag, _ in found.tags)
    assert found.text.count(HOSTILE) > 10
    assert f'{HOSTILE} & "quotes"' in found.text


@pytest.mark.parametrize("rows", [TWO, EIGHT], ids=["two", "eight"])
def test_page_needs_nothing_else(rows: dict[str, tuple[float, ...]]) -> None:
    html = evaluation_page(evaluation(rows, passkey=PASSKEY), command=COMMAND)
    for tag, attributes in Page(html).tags:
        assert tag not in ("script", "iframe", "object", "embed", "img", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action", "poster"):
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
    assert re.findall(r"url\((?!#)[^)]*\)", html) == []
    assert "@import" not in html
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'content="{policy}"' in html


def test_page_is_accessible() -> None:
    found = page(evaluation(EIGHT, half=0.1, passkey=PASSKEY))
    assert ("html", {"lang": "en"}) in found.tags
    assert sum(tag == "h1" for tag, _ in found.tags) == 1
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in found.tags if tag == "th")
    figures = [attrs for tag, attrs in found.tags if tag == "svg"]
    assert len(figures) == sum(tag == "figcaption" for tag, _ in found.tags) == 2
    assert all(attrs["role"] == "img" for attrs in figures)
    assert "YaRN falls to 3.16" in str(figures[0]["aria-label"])
    assert "YaRN finds 4 of 5" in str(figures[1]["aria-label"])
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in found.tags:
        assert attrs.get("aria-labelledby") in (None, *ids)


def test_page_follows_the_theme_in_every_colour() -> None:
    html = evaluation_page(evaluation(EIGHT, passkey=PASSKEY), command=COMMAND)
    assert "@media screen and (prefers-color-scheme: dark)" in html
    assert "@media print" in html
    body = html[html.index("<body") :]
    assert re.findall(r"#[0-9a-f]{6}\b", body) == []
    used = set(re.findall(r"var\((--[\w]+)\)", html))
    light, dark = html.split("prefers-color-scheme: dark")
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark.split("</style>")[0]


def test_no_passkey_no_section() -> None:
    found = page(evaluation(TWO))
    assert "Passkey" not in found.text
    assert sum(tag == "svg" for tag, _ in found.tags) == 1


def test_single_document_has_no_intervals() -> None:
    text = page(evaluation(TWO)).text
    assert "too few" not in text  # said in the figure, which is drawn, not written
    assert "with the mean's 95 % interval" not in text
    assert "0–2k 3.35 3.37 2k–4k" in text


def test_one_method_has_no_difference() -> None:
    found = page(evaluation({"none": PLAIN}))
    assert "Difference" not in found.text
    assert "The difference is" not in found.text


def test_page_is_deterministic() -> None:
    made = evaluation(EIGHT, half=0.1, passkey=PASSKEY)
    assert evaluation_page(made, command="c") == evaluation_page(made, command="c")


def test_empty_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no method"):
        evaluation_page(replace(evaluation(TWO), methods=()), command="c")


def test_templates_are_package_data() -> None:
    assert read_template("base.html.j2").startswith("<!DOCTYPE html>")
    assert '{% extends "base.html.j2" %}' in read_template("page.html.j2")


def test_page_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    assert write_page(str(path), "<p>λ</p>") == path
    assert path.read_text(encoding="utf-8") == "<p>λ</p>"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_page(tmp_path / "file" / "page.html", "<p></p>")
