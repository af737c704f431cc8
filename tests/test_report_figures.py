"""Figures: what they claim, that nothing overlaps, and that the same data give the same file."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from longspan.errors import ConfigError, OutputError, ShapeError
from longspan.report.figures import (
    figure_svg,
    nll_by_position,
    passkey_grid,
    rescale_factors,
    save_figure,
    sink_heatmap,
)
from longspan.report.labels import spread
from longspan.report.style import FIXED, SPARE, UNKNOWN, method_style, method_styles, theme
from longspan.rotary.scaling import (
    METHODS,
    SCALINGS,
    DynamicNTK,
    Llama3,
    LongRope,
    NoScaling,
    NTKAware,
    NTKByParts,
    PositionInterpolation,
    Yarn,
)
from report_examples import EIGHT, PLAIN, TWO, YARN, evaluation, trial, trials

L = 8192
EXAMPLES = (
    NoScaling(),
    PositionInterpolation(factor=4.0),
    NTKAware(factor=4.0),
    DynamicNTK(original_max_position_embeddings=L),
    NTKByParts(factor=4.0, original_max_position_embeddings=L),
    Yarn(factor=4.0, original_max_position_embeddings=L),
    Llama3(
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=L,
    ),
    LongRope(
        short_factor=[1.0] * 32,
        long_factor=[1 + i / 10 for i in range(32)],
        factor=4.0,
        original_max_position_embeddings=L,
    ),
)
SETTING = dict(rotary_dim=64, rope_theta=100_000.0, trained_length=L)
GRID = trials({m: {4096: 5, 8192: 4, 12_288: 2, 16_384: 0} for m in EIGHT})


def title(figure: Figure) -> str:
    return figure.texts[0].get_text().replace("\n", " ")


def visible_texts(figure: Figure) -> list[Text]:
    """Every written text; the ticks outside their axis' limits are not drawn."""
    FigureCanvasAgg(figure).draw()
    found = [text for text in figure.texts if text.get_text()]
    for axes in figure.axes:
        found += [t for t in [axes.title, axes._left_title, *axes.texts] if t.get_text().strip()]
        found += [axes.xaxis.label, axes.yaxis.label]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in axis.get_major_ticks():
                if min(low, high) <= tick.get_loc() <= max(low, high):
                    found += [t for t in (tick.label1, tick.label2) if t.get_visible()]
    return [text for text in found if text.get_text().strip()]


FIGURES = {
    "nll of one method": lambda: nll_by_position(evaluation({"none": PLAIN})),
    "nll of two": lambda: nll_by_position(evaluation(TWO, half=0.1)),
    "nll of eight": lambda: nll_by_position(evaluation(EIGHT)),
    "nll far apart": lambda: nll_by_position(
        evaluation({**EIGHT, "linear": (3.4, 9.1, 9.9, 10.7, 11.0, 11.25)})
    ),
    "nll within trained": lambda: nll_by_position(
        evaluation({"none": (3.2,)}, bucket=4096, length=4096)
    ),
    "nll by 1k": lambda: nll_by_position(
        evaluation({"none": [3.0 + i / 10 for i in range(24)]}, bucket=1024, length=24_576)
    ),
    "passkeys of one": lambda: passkey_grid(evaluation(TWO, passkey=trials({"yarn": {4096: 3}}))),
    "passkeys of eight": lambda: passkey_grid(evaluation(EIGHT, passkey=GRID)),
    "factors": lambda: rescale_factors(EXAMPLES, **SETTING),
    "factors of one": lambda: rescale_factors(EXAMPLES[1:2], **SETTING),
    "sinks": lambda: sink_heatmap([[0.7] * 9] * 30, 4, 0.02),
    "sinks of many": lambda: sink_heatmap([[0.1] * 64] * 80, 1, 0.01),
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    figure = FIGURES[name]()
    boxes = [(text.get_text(), text.get_window_extent()) for text in visible_texts(figure)]
    page = figure.bbox
    for text, box in boxes:
        assert box.x0 >= page.x0, text
        assert box.y0 >= page.y0, text
        assert box.x1 <= page.x1, text
        assert box.y1 <= page.y1, text
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(another.padded(-1)), (one, other)


@pytest.mark.parametrize("name", ["nll of two", "passkeys of one", "factors", "sinks"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_data_give_the_same_file(name: str, suffix: str, tmp_path: Path) -> None:
    first = save_figure(FIGURES[name](), tmp_path / f"first.{suffix}").read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "axes.facecolor": "red"}):
        second = save_figure(FIGURES[name](), tmp_path / f"second.{suffix}").read_bytes()
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_settings_of_the_caller_come_back(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_figure(nll_by_position(evaluation(TWO)), tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before


def test_nll_figure_claims_what_the_data_say() -> None:
    assert title(nll_by_position(evaluation(TWO))).endswith("rises to 3.67 nats at 10k–12k; "
                                                            "YaRN falls to 3.16")  # fmt: skip
    turned = evaluation({"none": YARN, "yarn": PLAIN})
    assert "plain RoPE falls to 3.16" in title(nll_by_position(turned))


def test_nll_figure_draws_every_number_at_its_bucket() -> None:
    axes = nll_by_position(evaluation(TWO, half=0.1)).axes[0]
    lines = {line.get_color(): line for line in axes.lines if len(line.get_xdata()) == len(PLAIN)}
    for method, values in TWO.items():
        line = lines[method_style(method).color]
        assert list(line.get_ydata()) == list(values)
        assert list(line.get_xdata()) == [1024, 3072, 5120, 7168, 9216, 11_264]
        assert line.get_marker() == method_style(method).marker
    bands = [tuple(band.get_paths()[0].get_extents().extents) for band in axes.collections]
    assert bands[0] == pytest.approx((1024, min(PLAIN) - 0.1, 11_264, max(PLAIN) + 0.1))


def test_trained_length_is_dashed_except_in_windows() -> None:
    def dashed(**protocol: int) -> list[float]:
        axes = nll_by_position(evaluation(TWO, **protocol)).axes[0]
        return [line.get_xdata()[0] for line in axes.lines if line.is_dashed()]

    assert dashed() == [8192]
    assert dashed(trained_length=4096) == [4096]
    assert dashed(trained_length=131_072) == [131_072]
    assert dashed(window=4096, stride=512) == []


def test_nll_figure_has_token_ticks_and_both_units() -> None:
    figure = nll_by_position(evaluation(TWO))
    written = [text.get_text() for text in visible_texts(figure)]
    assert [tick for tick in written if tick in ("1k", "2k", "4k", "8k", "16k")] == [
        "1k", "2k", "4k", "8k",
    ]  # fmt: skip
    assert "3.4 (30)" in written  # exp(3.4) = 29.96
    assert "YaRN 3.16" in written
    assert "plain RoPE 3.67" in written


def test_lone_intervals_are_whiskers() -> None:
    alone = nll_by_position(evaluation({"none": (3.2,)}, half=0.1, bucket=4096, length=4096))
    assert len(alone.axes[0].collections) == 2  # the band without width, and the whisker
    whisker = alone.axes[0].collections[1].get_segments()[0]
    assert whisker[:, 1] == pytest.approx([3.1, 3.3])


def test_passkey_figure_says_rates_and_tells_three_kinds_apart() -> None:
    figure = passkey_grid(evaluation(EIGHT, passkey=GRID))
    assert title(figure) == (
        "Plain RoPE finds 2 of 5 keys past the trained 8k tokens; no method finds more"
    )
    axes = figure.axes[1]
    assert axes._left_title.get_text() == "YaRN\n11 of 15 found"
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["4k\n5/5", "8k\n4/5", "12k\n2/5", "16k\n–"]
    blue = matplotlib.colors.to_rgba(method_style("yarn").color)
    wide = [p for p in axes.patches if p.get_width() > 0]
    assert sum(p.get_facecolor() == blue for p in wide) == 11
    assert sum(line.get_marker() == "x" for line in axes.lines) == 4
    assert sum(bool(p.get_hatch()) for p in axes.patches) == 5
    assert [line.get_xdata()[0] for line in axes.lines if line.is_dashed()] == [2]


def test_passkey_cells_tried_more_than_once_show_their_rate() -> None:
    repeated = [trial("yarn", 4096, 0.5, s, L) for s in ("found", "found", "missed")]
    axes = passkey_grid(evaluation(TWO, passkey=repeated)).axes[0]
    assert "2/3" in [text.get_text() for text in axes.texts]
    empty, filled = axes.patches
    assert filled.get_width() / empty.get_width() == pytest.approx(2 / 3)


def test_passkey_grid_without_trials_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no passkey trials"):
        passkey_grid(evaluation(TWO))


def test_rescale_figure_draws_every_method_once() -> None:
    assert {type(example) for example in EXAMPLES} == set(SCALINGS)
    axes = rescale_factors(EXAMPLES, **SETTING, seq_len=32_768).axes[0]
    theta = torch.tensor([100_000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    drawn = {line.get_color(): line for line in axes.lines if len(line.get_xdata()) == 32}
    assert len(drawn) == len(SCALINGS)
    for line in drawn.values():
        assert list(line.get_xdata()) == pytest.approx((2 * math.pi / theta).tolist())
    ntk = [4 ** (2 * i / 62) for i in range(32)]
    assert list(drawn[method_style("ntk").color].get_ydata()) == pytest.approx(ntk)
    assert list(drawn[method_style("dynamic").color].get_ydata()) == pytest.approx(ntk)
    long = list(drawn[method_style("longrope").color].get_ydata())
    assert long == pytest.approx([1 + i / 10 for i in range(32)])


def test_rescale_figure_claims_follow_the_factors() -> None:
    yarn, linear = EXAMPLES[5], EXAMPLES[1]
    kept = sum(abs(f - 1) <= 0.01 for f in yarn.rescale_factors(64, 100_000.0).tolist())
    both = title(rescale_factors([linear, yarn], **SETTING))
    assert both == f"YaRN keeps {kept} of 32 pairs as trained; Position Interpolation keeps none"
    assert title(rescale_factors([linear], **SETTING)) == (
        "Position Interpolation keeps none of 32 pairs as trained"
    )
    assert title(rescale_factors([NoScaling()], **SETTING)) == (
        "Plain RoPE keeps all 32 pairs as trained"
    )
    with pytest.raises(ConfigError, match="at least one method"):
        rescale_factors([], **SETTING)


def test_equal_ends_are_named_in_the_order_of_their_lines() -> None:
    axes = rescale_factors(EXAMPLES[:7], **SETTING, seq_len=32_768).axes[0]
    names = [text for text in axes.texts if text.get_text() not in ("", "trained")]
    names.sort(key=lambda text: text.xy[1], reverse=True)
    assert names[0].get_text() == "Position Interpolation 4×"  # λ = 4 everywhere
    assert names[-2].get_text() == "Llama-3 4×"  # rises last
    assert names[-1].get_text() == "plain RoPE"


def test_rescale_figure_uses_the_declared_length() -> None:
    def last(seq_len: int | None) -> float:
        axes = rescale_factors([EXAMPLES[3]], **SETTING, seq_len=seq_len).axes[0]
        return next(line for line in axes.lines if len(line.get_xdata()) == 32).get_ydata()[-1]

    assert last(L) == pytest.approx(1.0)
    assert last(8 * L) == pytest.approx(8.0)
    assert last(None) == pytest.approx(2.0)


def test_sink_figure_draws_heads_down_and_layers_across() -> None:
    figure = sink_heatmap([[0.9, 0.1], [0.2]], 4, 0.05, layers=[3, 7])
    assert title(figure) == (
        "The first 4 tokens take 40 % of attention, where an equal share is 5 %; "
        "more than half in 1 of 3 heads"
    )
    array = figure.axes[0].images[0].get_array()
    assert array is not None
    assert array.filled(-1.0).tolist() == [[0.9, 0.2], [0.1, -1.0]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["3", "7"]


def test_sink_claims_follow_the_matrix() -> None:
    low = title(sink_heatmap([[0.004, 0.006]], 1, [0.005]))
    assert low == (
        "The first token takes 0.5 % of attention, where an equal share is 0.5 %; "
        "in no head more than half"
    )


@pytest.mark.parametrize("matrix", [[[1.2]], [[-0.1]], [[]], [[math.nan]], []])
def test_sink_figure_refuses_what_is_no_mass(matrix: list[list[float]]) -> None:
    with pytest.raises(ShapeError):
        sink_heatmap(matrix, 4, 0.1)


def test_sink_figure_refuses_layers_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="one entry a layer of the matrix, 1, got 2 and 1"):
        sink_heatmap([[0.5]], 4, 0.1, layers=[0, 1])
    with pytest.raises(ShapeError, match="got 1 and 3"):
        sink_heatmap([[0.5]], 4, [0.1, 0.1, 0.1])


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHTS = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
    "full colour": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
}


def lightness_and_hue(color: str, sight: list[list[float]]) -> torch.Tensor:
    """CIE L*a*b* of a colour as it is seen."""
    srgb = torch.tensor(matplotlib.colors.to_rgb(color), dtype=torch.float64)
    linear = torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = (torch.tensor(sight, dtype=torch.float64) @ linear).clamp(0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    white = torch.tensor([0.9505, 1.0, 1.089], dtype=torch.float64)
    ratio = (torch.tensor(to_xyz, dtype=torch.float64) @ seen) / white
    f = torch.where(ratio > 0.008856, ratio.pow(1 / 3), 7.787 * ratio + 16 / 116)
    return torch.stack((116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("paper", ["light", "dark"])
def test_every_method_has_its_own_colour_in_every_sight(sight: str, paper: str) -> None:
    shades = {color.light: getattr(color, paper) for color in theme()}
    seen = {
        method: lightness_and_hue(shades[method_styles()[method].color], SIGHTS[sight])
        for method in METHODS
    }
    for one, other in itertools.combinations(seen, 2):
        difference = float((seen[one] - seen[other]).norm())
        assert difference > 12, (one, other)  # about 2 is just noticeable


def test_every_method_has_its_own_colour_and_marker() -> None:
    styles = [method_styles()[method] for method in METHODS]
    assert len({style.color for style in styles}) == len(METHODS)
    assert len({style.marker for style in styles}) == len(METHODS)
    assert UNKNOWN not in styles


def test_new_methods_take_the_spare_styles_in_order() -> None:
    styles = method_styles([*METHODS, "first", "second", "third"])
    assert (styles["first"], styles["second"]) == SPARE
    assert "third" not in styles
    assert {name: styles[name] for name in FIXED} == FIXED
    assert method_style("third") == UNKNOWN
    everything = [*FIXED.values(), *SPARE, UNKNOWN]
    assert len({style.color for style in everything}) == len(everything)
    assert len({style.marker for style in everything}) == len(everything)


@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_labels_spread_apart_and_keep_their_order(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    wanted = torch.rand(count, generator=generator).round(decimals=1).tolist()
    places = spread(wanted, gap=0.05, low=0.0, high=1.0)
    gap = min(0.05, 1 / max(1, count - 1))
    ordered = sorted(places)
    assert ordered[0] >= 0
    assert ordered[-1] <= 1 + 1e-9
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(ordered))
    by_place = [wanted[i] for i in sorted(range(count), key=lambda i: places[i])]
    assert by_place == sorted(wanted)


def test_labels_far_apart_stay_where_they_are() -> None:
    assert spread([0.9, 0.1, 0.5], gap=0.1, low=0.0, high=1.0) == [0.9, 0.1, 0.5]
    assert spread([], gap=0.1, low=0.0, high=1.0) == []
    assert spread([1.0, 1.0], gap=0.1, low=0.0, high=1.0) == [0.9, 1.0]


def test_a_failed_save_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        save_figure(nll_by_position(evaluation(TWO)), path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]


def test_a_save_replaces_an_older_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    path.write_text("old")
    assert save_figure(nll_by_position(evaluation(TWO)), str(path)) == path
    assert "<svg" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.svg"]


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"must end in \.png or \.svg, got '.*figure\.jpg'"):
        save_figure(nll_by_position(evaluation(TWO)), tmp_path / "figure.jpg")
    assert list(tmp_path.iterdir()) == []


def test_png_has_150_dots_an_inch(tmp_path: Path) -> None:
    figure = nll_by_position(evaluation(TWO))
    header = save_figure(figure, tmp_path / "a.PNG").read_bytes()[16:24]
    width = int.from_bytes(header[:4], "big")
    assert width == round(150 * figure.get_figwidth())


def test_inline_svg_stands_alone_in_a_page() -> None:
    figure = nll_by_position(evaluation(TWO))
    ink = method_style("none").color
    text = str(figure_svg(figure, 'Say "<b>"', "nll", {ink: "var(--ink)"}))
    assert text.startswith('<svg role="img" aria-label="Say &#34;&lt;b&gt;&#34;" ')
    assert ink not in text
    assert "var(--ink)" in text
    assert "<!--" not in text
    assert 'id="nll-figure_1"' in text
    for reference in text.split('xlink:href="#')[1:]:
        assert f'id="{reference.split(chr(34))[0]}"' in text
