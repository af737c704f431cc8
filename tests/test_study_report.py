"""A study's figures, tables and page: claims that turn with the numbers, and nothing hidden."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from longspan.errors import ConfigError, NumericalError, OutputError
from longspan.models.encodings import ENCODINGS
from longspan.report import study as report
from longspan.report.figures.study import (
    study_figures,
    study_memory,
    study_positions,
    study_scalings,
    study_windows,
)
from longspan.report.figures.study_lines import Line, leavings, view_top
from longspan.report.study import study_page, write_study
from longspan.report.study_claims import (
    memory_claim,
    position_claim,
    scaling_claim,
    study_claims,
    window_claim,
)
from longspan.report.study_curves import TITLES, bucket_at, multiples, past_buckets, trained_bucket
from longspan.report.study_rows import MEANINGS
from longspan.report.study_tables import print_study
from longspan.report.style import ENCODING_STYLES, UNKNOWN, encoding_style, method_style, theme
from longspan.tools.study_results import StudyProtocol, StudyResult, from_json, to_json
from study_examples import (
    ALONE,
    PROTOCOL,
    RECURRENT,
    SCALED,
    WHOLE,
    WINDOWS,
    curve,
    full_study,
    study_of,
)
from test_report_figures import SIGHTS, lightness_and_hue, title, visible_texts
from test_report_page import HOSTILE, Page

# --- what is said

FLAT, UP = (3.7, 3.3, 3.1, 3.1, 3.1, 3.1, 3.1), (3.7, 3.3, 3.1, 3.2, 3.3, 3.4, 3.5)


def positions(**rows: tuple[float, ...]) -> str:
    return position_claim(study_of(whole=rows))


def test_which_encodings_hold_and_which_rise() -> None:
    assert positions(alibi=FLAT, rope=UP) == (
        "Past the trained 256 tokens ALiBi holds to 4k; RoPE rises from 3.10 to 3.50 nats"
    )
    assert positions(alibi=UP, rope=FLAT) == (
        "Past the trained 256 tokens RoPE holds to 4k; ALiBi rises from 3.10 to 3.50 nats"
    )
    assert positions(alibi=FLAT, rope=FLAT).endswith("ALiBi and RoPE hold to 4k")
    assert positions(none=WHOLE["none"], rope=UP, t5=UP).endswith(
        "NoPE, RoPE and T5 rise, NoPE most, from 3.28 to 5.81 nats"
    )


@pytest.mark.parametrize(("end", "verb"), [(3.149, "holds"), (3.151, "rises"), (2.0, "holds")])
def test_a_rise_is_more_than_five_hundredths(end: float, verb: str) -> None:
    assert f"RoPE {verb}" in positions(rope=(*FLAT[:-1], end))


def test_a_rise_that_comes_back_is_a_rise() -> None:
    assert "RoPE rises from 3.10 to 4.00" in positions(rope=(3.7, 3.3, 3.1, 4.0, 3.1, 3.1, 3.1))


def test_where_plain_rope_and_the_best_scaling_end() -> None:
    claim = scaling_claim(full_study())
    assert claim == (
        "Past the trained 256 tokens plain RoPE rises to 4.51 nats at 2k–4k; YaRN rises to 3.31"
    )
    turned = study_of(whole={"rope": SCALED["yarn"]}, scaled={"yarn": WHOLE["rope"]})
    assert scaling_claim(turned) == (
        "Past the trained 256 tokens plain RoPE rises to 3.31 nats at 2k–4k; no scaling goes lower"
    )
    down = study_of(whole={"rope": UP}, scaled={"ntk": (3.8, 3.4, 3.3, 3.2, 3.1, 3.1, 3.1)})
    assert "NTK-aware falls to 3.10" in scaling_claim(down)
    assert scaling_claim(study_of(scaled={"yarn": FLAT})) == (
        "Past the trained 256 tokens YaRN stays at 3.10 nats at 2k–4k"
    )


@pytest.mark.parametrize(("half", "noise"), [(0.19, False), (0.21, True), (None, False)])
def test_intervals_that_meet_are_noise(half: float | None, noise: bool) -> None:
    claim = scaling_claim(study_of(whole={"rope": UP}, scaled={"yarn": FLAT}, half=half))
    assert claim.endswith(", within noise") == noise


def test_what_longer_windows_change() -> None:
    better, worse = (3.4, 3.3, 3.2, 3.1), (3.1, 3.2, 3.3, 3.4)
    claim = window_claim(study_of(windows={"alibi": better, "rope": worse}))
    assert claim == (
        "Read in windows of 2k tokens instead of 256, ALiBi improves by 0.30 nats; "
        "RoPE worsens by 0.30 nats"
    )
    turned = window_claim(study_of(windows={"alibi": worse, "rope": better}))
    assert "RoPE improves by 0.30 nats; ALiBi worsens" in turned
    most = window_claim(study_of(windows={"t5": worse, "none": (3.1, 3.2, 4.0, 5.0)}))
    assert most.endswith("T5 and NoPE worsen, NoPE most, by 1.90 nats")
    still = window_claim(study_of(windows={"t5": (3.1, 3.2, 3.1, 3.14)}))
    assert still.endswith("T5 stays within 0.05 nats")


def test_seeds_that_disagree_claim_no_better_window() -> None:
    made = study_of(windows={"alibi": (3.4, 3.1)})
    short, long = made.curves
    split = replace(made, curves=(short, replace(long, by_seed=(2.7, 3.5))))
    assert window_claim(made).endswith("ALiBi improves by 0.30 nats")
    assert window_claim(split).endswith("ALiBi changes, but not alike in every seed")


def test_a_whole_reading_is_the_longest_window() -> None:
    made = study_of(windows={"alibi": (3.4, 3.3)}, whole={"alibi": (3.0,) * 7})
    assert "windows of 4k tokens instead of 256, ALiBi improves by 0.40" in window_claim(made)


def test_what_memory_changes() -> None:
    claim = memory_claim(study_of(memory={"transformer_xl": (ALONE, RECURRENT)}))
    assert claim == (
        "Over all positions memory of 256 tokens lowers Transformer-XL from 3.34 to 3.13 nats"
    )
    turned = memory_claim(study_of(memory={"transformer_xl": (RECURRENT, ALONE)}))
    assert "raises Transformer-XL from 3.13 to 3.34 nats" in turned
    both = {"transformer_xl": (ALONE, RECURRENT), "rope+memory": (FLAT, FLAT)}
    assert memory_claim(study_of(memory=both)).endswith(
        "3.13 nats; does not change RoPE with memory alike in every seed"
    )


def test_memory_that_one_seed_does_not_gain_from_is_not_claimed() -> None:
    made = study_of(memory={"transformer_xl": (FLAT, FLAT)})
    alone, recurrent = made.curves
    gains = replace(recurrent, nll=alone.nll - 0.1, by_seed=(alone.nll - 0.3, alone.nll + 0.1))
    claim = memory_claim(replace(made, curves=(alone, gains)))
    assert "does not change Transformer-XL alike in every seed" in claim


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    only = study_of(alone={"learned": ALONE})
    assert study_claims(only) == []
    assert study_claims(study_of(whole={"rope": UP})) == [positions(rope=UP)]
    assert positions(rope=(3.7, 3.3, 3.1)) == ""  # nothing past the trained length
    assert len(study_claims(full_study())) == 4


def test_places_are_buckets_that_end_there() -> None:
    assert multiples(PROTOCOL) == [256, 512, 1024, 2048, 4096]
    assert multiples(replace(PROTOCOL, reach=3 * 256)) == [256, 512, 768]
    one = curve("rope", UP)
    found = [bucket_at(one, place) for place in multiples(PROTOCOL)]
    assert [bucket.nll for bucket in found if bucket] == [3.1, 3.2, 3.3, 3.4, 3.5]
    assert bucket_at(one, 700) is None
    assert trained_bucket(one, 256) == one.buckets[2]
    assert trained_bucket(one, 255) == one.buckets[1]
    assert past_buckets(one, 256) == list(one.buckets[3:])
    assert past_buckets(one, 257) == list(one.buckets[4:])


# --- figures

EIGHT = {**WHOLE, "shaw": FLAT, "transformer_xl-memory": (3.7, 3.3, 3.1, 3.11, 3.12, 3.2, 3.6)}
FIGURES: dict[str, Callable[[], Figure]] = {
    "positions": lambda: study_positions(full_study()),
    "positions of one": lambda: study_positions(study_of(whole={"rope": UP})),
    "positions of eight": lambda: study_positions(study_of(whole=EIGHT, half=0.3)),
    "scalings": lambda: study_scalings(full_study()),
    "windows": lambda: study_windows(full_study()),
    "windows apart": lambda: study_windows(study_of(windows=WINDOWS, spread=0.4)),
    "memory": lambda: study_memory(full_study()),
    "memory of two": lambda: study_memory(
        study_of(memory={"transformer_xl": (ALONE, RECURRENT), "rope+memory": (ALONE, FLAT)})
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    figure = FIGURES[name]()
    boxes = [(text.get_text(), text.get_window_extent()) for text in visible_texts(figure)]
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(another.padded(-1)), (one, other)


def note(figure: Figure) -> str:
    return figure.texts[1].get_text().replace("\n", " ")


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_every_figure_bears_its_claim() -> None:
    made = full_study()
    assert [title(figure) for figure in study_figures(made).values()] == study_claims(made)
    assert list(study_figures(made)) == list(report.FIGURES)
    assert list(study_figures(study_of(alone={"learned": ALONE}))) == []
    assert list(study_figures(study_of(windows=WINDOWS))) == ["windows"]


@pytest.mark.parametrize("draw", [study_positions, study_scalings, study_windows, study_memory])
def test_a_figure_without_numbers_is_refused(draw: Callable[[StudyResult], Figure]) -> None:
    with pytest.raises(ConfigError, match="holds no numbers for this figure"):
        draw(study_of(alone={"learned": ALONE}))


def test_every_number_is_drawn_at_its_bucket_in_its_colour() -> None:
    axes = study_positions(study_of(whole={"alibi": FLAT, "rope": UP})).axes[0]
    drawn = {line.get_color(): line for line in axes.lines if len(line.get_xdata()) == 7}
    for name, values in {"alibi": FLAT, "rope": UP}.items():
        line = drawn[encoding_style(name).color]
        assert list(line.get_ydata()) == list(values)
        assert list(line.get_xdata()) == [32.5, 96, 192, 384, 768, 1536, 3072.5]
        assert line.get_marker() == encoding_style(name).marker
    bands = [tuple(band.get_paths()[0].get_extents().extents) for band in axes.collections]
    assert bands[1] == pytest.approx((32.5, 3.05, 3072.5, 3.75))
    assert [line.get_xdata()[0] for line in axes.lines if line.is_dashed()] == [256]


def test_what_leaves_the_view_is_marked_and_told() -> None:
    figure = study_positions(full_study())
    axes = figure.axes[0]
    low, top = axes.get_ylim()
    assert low < 3.06 < 3.81 < top < 4.51
    assert "Above the axis: sinusoidal to 7.02, NoPE to 5.81, RoPE to 4.51." in note(figure)
    assert {"sinusoidal ↑ 7.02", "NoPE ↑ 5.81", "RoPE ↑ 4.51", "ALiBi 3.06"} < set(labels(figure))
    marks = [line for line in axes.lines if list(line.get_ydata()) == [top]]
    gone = {encoding_style(name).color for name in ("sinusoidal", "none", "rope")}
    assert {line.get_color() for line in marks} == gone


def test_a_view_that_holds_all_is_not_cut() -> None:
    figure = study_positions(study_of(whole={"alibi": FLAT, "rope": UP}))
    assert "Above the axis" not in note(figure)
    assert all("↑" not in text for text in labels(figure))
    assert figure.axes[0].get_ylim()[1] > 3.7


def test_the_view_holds_a_nat_and_all_that_is_within_the_trained_length() -> None:
    style = encoding_style("rope")

    def top(*points: tuple[float, float]) -> float | None:
        return view_top([Line(title="", style=style, points=points)], trained=16)

    assert top((8, 3.0), (32, 4.3)) is None  # little above a nat
    assert top((8, 3.0), (32, 4.5)) == 4.0
    assert top((8, 5.0), (16, 3.0), (32, 9.0)) == pytest.approx(5.0 + 0.06 * 2)  # not on the cut
    assert top((8, 3.0), (24, 3.99), (32, 9.0)) == pytest.approx(3.99 + 0.06)
    rising = Line(title="", style=style, points=((16, 3.0), (64, 5.0), (128, 3.0), (256, 4.5)))
    assert leavings(rising, 4.0) == pytest.approx([32.0, 128 * 2 ** (2 / 3)])


def test_encodings_that_were_not_read_whole_are_named() -> None:
    assert "Not read whole: learned." in note(study_positions(full_study()))
    assert "Not read whole" not in note(study_positions(study_of(whole=WHOLE)))


def test_windows_show_every_seed() -> None:
    figure = study_windows(study_of(windows={"rope": (3.1, 3.2)}, spread=0.2, seeds=(0, 1, 2)))
    (dots,) = figure.axes[0].collections
    across, up = zip(*dots.get_offsets(), strict=True)
    assert list(across) == [256, 256, 256, 512, 512, 512]
    assert list(up) == pytest.approx([3.0, 3.1, 3.2, 3.1, 3.2, 3.3])
    assert "dots are the 3 seeds" in note(figure)


def test_scalings_keep_their_methods_colours() -> None:
    figure = study_scalings(full_study())
    colors = {line.get_color() for line in figure.axes[0].lines if len(line.get_xdata()) == 7}
    assert colors == {method_style(name).color for name in ("none", *SCALED)}
    assert "plain RoPE 4.51" in labels(figure)


def test_memory_is_solid_and_segments_alone_are_dotted() -> None:
    axes = study_memory(full_study()).axes[0]
    solid, dotted = [line for line in axes.lines if len(line.get_xdata()) == 7]
    assert list(solid.get_ydata()) == list(RECURRENT)
    assert list(dotted.get_ydata()) == list(ALONE)
    assert (solid.get_linestyle(), dotted.get_linestyle()) == ("-", ":")


def test_every_encoding_has_a_title_a_colour_and_a_marker() -> None:
    assert set(ENCODING_STYLES) == set(ENCODINGS) == set(TITLES)
    assert len({style.color for style in ENCODING_STYLES.values()}) == len(ENCODINGS)
    assert len({style.marker for style in ENCODING_STYLES.values()}) == len(ENCODINGS)
    assert encoding_style("mine") == UNKNOWN
    assert encoding_style("rope").linestyle == "-"
    assert encoding_style("transformer_xl-memory").linestyle == "--"
    assert encoding_style("transformer_xl-memory").color == encoding_style("transformer_xl").color


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("paper", ["light", "dark"])
def test_every_encoding_has_its_own_colour_in_every_sight(sight: str, paper: str) -> None:
    shades = {color.light: getattr(color, paper) for color in theme()}
    seen = {
        name: lightness_and_hue(shades[style.color], SIGHTS[sight])
        for name, style in ENCODING_STYLES.items()
    }
    for one, other in itertools.combinations(seen, 2):
        assert float((seen[one] - seen[other]).norm()) > 15, (one, other)


# --- the terminal


def printed(made: StudyResult, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    print_study(made, console)
    return console.file.getvalue()


def test_tables_are_whole_at_80_columns() -> None:
    long = study_of(
        whole={**WHOLE, "transformer_xl-memory": UP},
        scaled=SCALED,
        windows=WINDOWS,
        memory={"transformer_xl": (ALONE, RECURRENT), "rope+memory": (ALONE, FLAT)},
    )
    text = printed(long)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["model", "1×", "2×", "4×", "8×", "16×", "all", "spread"] in rows
    yarn = ["3.21±.05", "3.17±.05", "3.19±.05", "3.23±.05", "3.31±.05", "3.27", "0.02"]
    assert ["rope", "·", "yarn", *yarn] in rows
    recurrent = ["3.17", "3.13", "3.12", "3.12", "3.11", "3.13", "0.02"]
    assert ["transformer_xl", "with", "memory", *recurrent] in rows
    assert ["alibi", "3.13", "3.09", "3.07", "3.06", "3.08"] in rows
    assert ["none", "1,234,567", "4,096,000", "3.05", "3.05,", "3.06", "123"] in rows


def test_a_single_seed_and_document_have_no_spread_and_no_interval() -> None:
    text = printed(study_of(whole={"rope": UP}, seeds=(7,), documents=1, half=None))
    rows = [line.split() for line in text.splitlines()]
    assert ["rope", "3.10", "3.20", "3.30", "3.40", "3.50", "3.42", "–"] in rows
    assert "1 seed, trained on 256 tokens" in text


def test_many_multiples_keep_the_first_and_the_last() -> None:
    text = printed(study_of(whole={"rope": UP}, reach=256 * 64))
    assert text.splitlines()[4].split()[:6] == ["model", "1×", "8×", "16×", "32×", "64×"]


def test_markup_in_names_is_printed_as_it_is() -> None:
    assert "[bold]x[/bold]" in printed(study_of(whole={"[bold]x[/bold]": UP}))


# --- the page and the folder

SMALL = study_of(windows={"rope": (3.1, 3.2)})


@lru_cache(maxsize=1)
def full_page() -> str:
    """The page of the full study, drawn once."""
    return study_page(full_study(), command="longspan study --steps 2000")


def test_headline_and_numbers() -> None:
    text = Page(full_page()).text
    for expected in (
        "Past the trained 256 tokens ALiBi and T5 hold to 4k; RoPE, Transformer-XL, sinusoidal",
        "plain RoPE rises to 4.51 nats at 2k–4k; YaRN rises to 3.31.",
        "Model 1–64 64–128 128–256 256–512 512–1k 1k–2k 2k–4k All by seed",
        "ALiBi 3.73 3.68–3.78 3.32 3.27–3.37 3.16 3.11–3.21 3.09 3.04–3.14",
        "Plain RoPE 3.72 3.67–3.77",
        "YaRN 3.78",
        "RoPE 3.12 3.11, 3.13 3.25",
        "Learned each alone 3.73",
        "Transformer-XL with memory 3.73",
        "Not read whole: learned; see the segments below.",
        "NoPE none 1,234,567 3.05 3.05, 3.06 123",
        "Each model read 4,096,000 tokens in 2,000 steps, 1 times the training text",
        "seeds 0, 1 of weights",
        "longspan study --steps 2000",
        "ab12" * 16,
    ):
        assert expected in text, expected


def test_the_page_leaves_out_what_was_not_measured() -> None:
    text = Page(study_page(study_of(windows=WINDOWS))).text
    for heading in ("Beyond the trained", "RoPE under scalings", "Segments and", "Reproduce"):
        assert heading not in text
    assert "Longer windows" in text
    only = Page(study_page(study_of(alone={"learned": ALONE})))
    assert "No reading reaches past the trained length" in only.text
    assert all(tag != "svg" for tag, _ in only.tags)
    assert "Learned" in only.text


def test_every_field_of_the_protocol_is_shown_and_explained() -> None:
    text = Page(full_page()).text
    assert set(MEANINGS) == {item.name for item in fields(StudyProtocol)}
    for name, meaning in MEANINGS.items():
        assert name in text
        assert meaning in text


def test_everything_is_escaped() -> None:
    made = full_study(texts=((HOSTILE, HOSTILE),), versions=((HOSTILE, HOSTILE),))
    models = tuple(replace(one, encoding=HOSTILE) for one in made.models)
    curves = tuple(
        replace(one, encoding=HOSTILE) if one.encoding == "alibi" else one for one in made.curves
    )
    hostile = replace(made, models=models, curves=curves)
    html = study_page(hostile, command=f'{HOSTILE} & "quotes"')
    assert "<script" not in html
    found = Page(html)
    assert all(tag != "script" for tag, _ in found.tags)
    assert found.text.count(HOSTILE) > 8
    assert f'{HOSTILE} & "quotes"' in found.text


def test_page_is_accessible_and_needs_nothing_else() -> None:
    found = Page(full_page())
    assert sum(tag == "h1" for tag, _ in found.tags) == 1
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in found.tags if tag == "th")
    figures = [attrs for tag, attrs in found.tags if tag == "svg"]
    assert len(figures) == sum(tag == "figcaption" for tag, _ in found.tags) == 4
    assert "ALiBi and T5 hold" in str(figures[0]["aria-label"])
    assert "memory of 256 tokens lowers" in str(figures[3]["aria-label"])
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attributes in found.tags:
        assert tag not in ("script", "iframe", "object", "embed", "img", "form")
        assert attributes.get("aria-labelledby") in (None, *ids)
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_page_follows_the_theme_in_every_colour() -> None:
    body = full_page().split("<body")[1]
    assert re.findall(r"#[0-9a-f]{6}\b", body) == []


def test_a_study_is_written_whole(tmp_path: Path) -> None:
    made = full_study()
    write_study(tmp_path / "out", made, command="longspan study --steps 2000")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "index.html", "memory.png", "positions.png", "scalings.png", "study.json", "windows.png",
    ]  # fmt: skip
    assert from_json((tmp_path / "out" / "study.json").read_text()) == made
    assert (tmp_path / "out" / "index.html").read_text() == full_page()
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_replaces_another_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    write_study(tmp_path, study_of(memory={"transformer_xl": (ALONE, RECURRENT)}))
    with pytest.raises(OutputError, match="--force"):
        write_study(tmp_path, SMALL)
    assert (tmp_path / "memory.png").exists()
    write_study(tmp_path, SMALL, force=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["index.html", "state", "study.json", "windows.png"]


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_study(tmp_path, SMALL)
    before = (tmp_path / "study.json").read_bytes()
    broken = replace(SMALL, models=(replace(SMALL.models[0], seconds=float("nan")),))
    with pytest.raises(NumericalError):
        write_study(tmp_path, broken, force=True)
    assert (tmp_path / "study.json").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_study(tmp_path / "file", SMALL)


def test_a_study_without_numbers_is_refused(tmp_path: Path) -> None:
    made = full_study()
    empty = replace(made, curves=())
    bare = replace(made, curves=(replace(made.curves[0], buckets=()),))
    refused: tuple[Callable[[StudyResult], Any], ...] = (
        study_page,
        study_figures,
        lambda result: write_study(tmp_path / "out", result),
        printed,
    )
    for show in refused:
        with pytest.raises(ConfigError, match="holds no curve"):
            show(empty)
        with pytest.raises(ConfigError, match="reading 'whole' of 'rope' holds no numbers"):
            show(bare)
    assert not (tmp_path / "out").exists()


def test_the_example_survives_json() -> None:
    assert from_json(to_json(full_study())) == full_study()
