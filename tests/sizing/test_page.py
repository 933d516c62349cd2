"""The page of a report."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from kvroute.sizing.assemble import report_of
from kvroute.sizing.capacity import Budget, Parallel, conversations_on
from kvroute.sizing.hardware import gpu
from kvroute.sizing.page import _fit_lines, page_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.report import Wishes


def page(name):
    """Make the page of a preset on two GPUs."""
    model = preset(name)
    return page_of(report_of(model, [gpu("h100"), gpu("h200")], Wishes()), model)


class Balance(HTMLParser):
    """Counts elements that were opened and not closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_pages_are_self_contained():
    """Nothing is loaded from elsewhere, no script runs, every element is closed, and three plots are drawn."""
    for name in ("llama-3.1-8b", "gpt-oss-120b", "qwen3-next-80b", "llama-3.1-405b"):
        text = page(name)
        assert not re.findall(r"<script|<link|\bsrc=|\bhref=|@import|url\(", text)
        balance = Balance()
        balance.feed(text.removeprefix("<!doctype html>"))
        assert balance.open == []
        for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            ElementTree.fromstring(drawing)


def test_the_page_has_the_figures():
    """Bytes a token, both ways, and conversations of each machine."""
    text = page("gpt-oss-120b")
    assert "36,864 (36 KiB)" in text
    assert "73,728 (72 KiB)" in text
    assert text.count("<svg") == 3
    assert "1 x h200" in text


def test_names_cannot_carry_markup():
    """A model's name is text, wherever it comes from."""
    from kvroute.sizing.model import model_of

    model = model_of(PRESETS["llama-3-8b"].config, "<script>x</script>")
    assert "<script" not in page_of(report_of(model, [gpu("h100")], Wishes()), model)


def test_the_curve_of_what_fits_counts_every_gpus_copy():
    """The plot's curve starts from the same figures as the table, where GPUs repeat the cache too."""
    model, spread = preset("deepseek-v3"), Parallel(tp=16)
    report = report_of(model, [gpu("h200")], Wishes(parallel=spread, lengths=(8_000,)))
    (line,) = _fit_lines(report, model)
    most = int(line.points[-1][0])
    assert line.points[-1][1] == conversations_on(
        Budget(
            gpu_bytes=gpu("h200").memory_bytes, weights_bytes=report.weights_bytes, parallel=spread, utilisation=0.92
        ),
        model,
        most,
    )
