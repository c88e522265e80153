from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from closeness import approx
from posttrain.reports.charts import Panel, Series, axis_range
from posttrain.reports.curves import choose_panels
from posttrain.reports.page import fact_lines, render, write_html
from posttrain.reports.run_page import (
    Chapter,
    ReportStage,
    RunReport,
    Transcript,
    TranscriptAnswer,
    render_report,
    turns_of,
)
from posttrain.store.metric_names import REWARD, choose_primary_metric
from posttrain.store.metrics import MetricsRow

NASTY = "<script>alert('x')</script> & \"quoted\" <img src=x onerror=y>"


def rows() -> list[MetricsRow]:
    info = {"n": 50.0, "accuracy": 0.5, "accuracy_low": 0.37, "accuracy_high": 0.63, "shows_reasoning": 0.2}
    evaluation = MetricsRow(0, {f"eval/stories/validation/{name}": value for name, value in info.items()})
    steps = [
        MetricsRow(k, {"reward": 0.1 * k, "accuracy": 0.05 * k, "entropy": float("nan") if k == 3 else 1.0})
        for k in range(1, 5)
    ]
    return [evaluation, *steps]


class Page(HTMLParser):
    """Collects the tags of a page and checks that they are balanced."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)  # closed in itself, as in `<rect/>`
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def full_report() -> RunReport:
    results = {
        "n": 500.0,
        "accuracy": 0.25,
        "accuracy_low": 0.21,
        "accuracy_high": 0.29,
        "format": 0.99,
        "completion_length": 41.6,
    }
    answers = [
        TranscriptAnswer("base", NASTY, False, None, 40, is_cut=True),
        TranscriptAnswer("after GRPO", "<think> 1 + 1 = 2. </think> <answer> 2 </answer>", True, "2", 12),
        TranscriptAnswer("after SFT", "<answer> 3 </answer>", False, "3<b>", 9),
    ]
    return RunReport(
        title="Title & more",
        lead=NASTY,
        stages=[ReportStage("base", NASTY, results)],
        chapters=[Chapter("Chapter", NASTY, choose_panels(rows()), f"model: {NASTY}", [("steps", "4")])],
        transcripts=[Transcript(NASTY, "2", answers)],
        environment={"python": "3.11", "versions": {"torch": NASTY}},
        commands=[("ask it", "posttrain generate runs/x '<y>'")],
    )


def test_a_report_is_whole_escaped_and_loads_nothing_from_outside() -> None:
    text = render_report(full_report())
    page = Page(text)
    assert page.open == []
    assert {"script", "img"}.isdisjoint(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    # lead, stage, question, answer, chapter, recipe, versions
    assert page.words.count("<script>alert('x')</script>") == 7
    assert re.search(r"https?://|url\((?!#)|@import|<link|src=[\"']", text) is None
    assert "prefers-color-scheme: dark" in text
    assert "25.0% [21.0%, 29.0%]" in page.words
    assert "99.0%" in page.words
    verdicts = re.findall(r'class="verdict">([^<]*)<', text)
    assert verdicts == ["no answer", "right", "wrong: 3&lt;b&gt;"]
    assert text.count("cut off</span>") == 1
    assert '<span class="tag">&lt;think&gt;</span> 1 + 1 = 2.' in text
    headings = [
        "<h1>",
        "How they do on problems",
        "Chapter",
        "<figure",
        "Side by side",
        "What to type next",
        "Where it ran",
    ]
    body = text[text.index("<body") :]
    assert [body.index(heading) for heading in headings] == sorted(body.index(heading) for heading in headings)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert body.count("<table") == body.count('scroll" tabindex="0"><table')
    bar = text.partition('class="bar"')[2]  # 25 % of 160, from 21 % to 29 %
    assert 'width="40.0"' in bar
    assert 'x1="33.6" x2="46.4"' in bar


def test_report_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_html(render_report(RunReport("New", "lead")), path) == path
    assert "<h1>New</h1>" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_panels_are_those_with_numbers() -> None:
    panels = {panel.title: panel for panel in choose_panels(rows())}
    assert list(panels) == ["Accuracy", "Reward", "Shows reasoning", "Entropy"]
    training, held_out = panels["Accuracy"].series
    assert training.xs == [1.0, 2.0, 3.0, 4.0]
    assert training.ys == approx([0.05, 0.10, 0.15, 0.20])
    assert (held_out.xs, held_out.ys, held_out.low, held_out.high) == ([0.0], [0.5], [0.37], [0.63])
    assert panels["Entropy"].series[0].xs == [1.0, 2.0, 4.0]  # the NaN is no point


def test_axis_holds_every_value_and_interval() -> None:
    wide = Series("a", [1.0, 2.0], [5.0, 6.0], [4.0, 5.5], [5.5, 9.0], is_points=True)
    low, high = axis_range(Panel("x", "", [wide]))
    assert low <= 4.0
    assert high >= 9.0
    low, high = axis_range(Panel("x", "", [replace(wide, is_points=False)]))  # a band may be cut
    assert low <= 4.0
    assert 7.0 < high < 9.0
    assert axis_range(Panel("x", "", [Series("a", [1.0], [0.9])], is_share=True)) == (0.0, 1.0)
    assert axis_range(Panel("x", "", [Series("a", [1.0], [0.02])], is_share=True)) == approx((0.0, 0.023))


def evaluated(step: int, **results: float) -> MetricsRow:
    return MetricsRow(step, {f"eval/hh/validation/{name}": value for name, value in results.items()})


def test_what_has_no_gold_answer_is_neither_right_nor_wrong() -> None:
    answers = [
        TranscriptAnswer("before", "No.", None, "No.", 2, reward=-0.25),
        TranscriptAnswer("after", "Yes.", None, None, 2),
    ]
    dialogue = "user: Hello <b>.\n\nassistant: Good day.\n\nuser: user: is no turn"
    results = {"n": 8.0, "reward": 0.7, "reward_low": 0.6, "reward_high": 0.8, "kl_initial": 2.31}
    report = RunReport(
        "HH",
        "lead",
        primary=REWARD,
        stages=[ReportStage("after", "hh/validation, n = 8", results), ReportStage("before", "", {"reward": -0.1})],
        transcripts=[Transcript(dialogue, None, answers, turns_of(dialogue))],
    )
    text = render_report(report)
    body = text[text.index("<body") :]
    assert re.findall(r'class="verdict">([^<]*)<', body) == ["reward -0.250", ""]
    assert body.count('class="answer open"') == 2
    assert re.search(r"\b(right|wrong)\b", Page(text).words.partition("How they do")[2]) is None
    assert "<svg" not in body  # a reward is no share of a bar
    words = Page(text).words
    assert "reward, with 95 % interval" in words
    assert "0.700 [0.600, 0.800]" in words
    assert "KL from initial model" in words
    assert "2.310" in words
    assert "How they do on prompts" in words
    assert re.findall(r'question turn"><b>(\w+)</b>', body) == ["user", "assistant", "user"]
    assert "Hello &lt;b&gt;." in body


def test_turns_of_a_recorded_dialogue() -> None:
    assert turns_of("user: a\n\nassistant: b: c\n\nuser: d") == [("user", "a"), ("assistant", "b: c"), ("user", "d")]
    assert turns_of("How many?\n\nuser: no turn of a single message") == []


def test_the_reward_and_the_kl_come_first_where_they_are_the_primary_metric() -> None:
    steps = [MetricsRow(k, {"reward": 0.1 * k, "format": 1.0, "uniform_groups": 0.0, "loss": 0.1}) for k in (1, 2)]
    measured = [evaluated(k, reward=0.2 * k, reward_low=0.0, reward_high=1.0, kl_initial=1.0 * k) for k in (0, 2)]
    panels = choose_panels([*steps, *measured], REWARD)
    assert [panel.title for panel in panels] == ["Reward", "KL from initial model", "Format", "Uniform groups"]
    held_out = panels[0].series[1]
    assert (held_out.label, held_out.ys, held_out.low) == ("held-out", [0.0, 0.4], [0.0, 0.0])
    assert panels[1].series[0].ys == [0.0, 2.0]
    # of a run with gold answers the reward on held-out prompts is no curve, as ever
    assert len({p.title: p for p in choose_panels([*steps, *measured])}["Reward"].series) == 1


def test_a_reward_model_has_a_loss_curve() -> None:
    steps = [
        MetricsRow(
            k, {"loss": 0.7 / k, "margin": 0.1, "pair_accuracy": 0.6, "chosen_score": 0.1, "rejected_score": 0.0}
        )
        for k in (1, 2)
    ]
    measured = [evaluated(k, pair_accuracy=0.5, loss=0.69, margin=0.0) for k in (0, 2)]
    primary = choose_primary_metric({"hh": {"pair_accuracy": 0.5, "loss": 0.69}}, named=None, samples=False)
    assert primary is not None
    panels = {panel.title: panel for panel in choose_panels([*steps, *measured], primary)}
    assert list(panels) == ["Pair accuracy", "Loss", "Margin", "Chosen score"]
    assert [(s.label, s.ys) for s in panels["Loss"].series] == [("training", [0.7, 0.35]), ("held-out", [0.69, 0.69])]


def test_parts_of_a_mixture_have_lines_of_their_own() -> None:
    def step(k: int) -> MetricsRow:
        parts = {"small:accuracy": 0.9, "large:accuracy": 0.1 * k, "small:num_calls": 0.0, "large:num_calls": 1.0}
        return MetricsRow(k, {"accuracy": 0.5, **parts})

    even = {panel.title: panel for panel in choose_panels([step(k) for k in (1, 2, 3)])}
    assert [(s.label, s.ys) for s in even["Accuracy by part"].series] == [
        ("small", [0.9, 0.9, 0.9]),
        ("large", [0.1, 0.2, approx(0.3)]),
    ]
    assert [s.label for s in even["Calls by part"].series] == ["small", "large"]
    held_out = {"n": 50.0, "small:accuracy": 0.9, "small:accuracy_low": 0.8, "small:accuracy_high": 0.95}
    measured = MetricsRow(0, {f"eval/mixture/validation/{name}": value for name, value in held_out.items()})
    output = {panel.title: panel for panel in choose_panels([measured, step(1)])}["Accuracy by part"].series
    assert [(s.label, s.ys) for s in output] == [("small", [0.9]), ("large", [0.1]), ("small, held-out", [0.9])]
    assert "Accuracy by part" not in {panel.title for panel in choose_panels(rows())}


def test_a_machine_is_reported_in_units() -> None:
    hardware = {"memory_bytes": 24 * 2**30, "gpus": [], "of": ["a", "b"], "no": None}
    output = [("hardware: memory", "24.0 GiB"), ("hardware: gpus", "none"), ("hardware: of", "a, b")]
    assert fact_lines({"hardware": hardware}) == output


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio of two colours ``#rrggbb``."""

    def luminance(color: str) -> float:
        shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_can_be_read_on_every_ground() -> None:
    assert contrast("#000000", "#ffffff") == 21.0
    blocks = re.findall(r":root \{(.*?)\}", render("style.css"), flags=re.DOTALL)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks)
    for colors in (light, light | dark):
        for ground in ("paper", "card"):
            for words in ("ink", "soft", "good", "bad", "c3"):
                assert contrast(colors[words], colors[ground]) >= 4.5, (words, ground)
        # The deepest a token is coloured (differences.jinja, features.js): 68 % of the heat over the card.
        pairs = zip(bytes.fromhex(colors["heat"][1:]), bytes.fromhex(colors["card"][1:]), strict=True)
        deepest = "#" + "".join(f"{round(0.68 * heat + 0.32 * card):02x}" for heat, card in pairs)
        assert contrast(colors["ink"], deepest) >= 4.5
