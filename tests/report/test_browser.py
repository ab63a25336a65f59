"""The page as a person gets it: its files, and the HTML in a real headless Chromium, at the width of
a desk and of a telephone, in light and dark.
"""

import re
import shutil
from pathlib import Path

import pytest

from coca_hf.report import write_report
from tests.report.made import full_run, row, write_rows

RESULTS = Path(__file__).parents[2] / "docs/results/recovery"
COLORS_OF = {
    "light": ["rgb(255, 255, 255)", "rgb(27, 27, 27)"],
    "dark": ["rgb(22, 22, 22)", "rgb(236, 236, 236)"],
}
LOOK = """
() => ({
  overflow: Math.max(document.documentElement.scrollWidth - window.innerWidth, 0),
  colors: [
    getComputedStyle(document.body).backgroundColor,
    getComputedStyle(document.querySelector('text')).fill,
  ],
})
"""
# Contrast as WCAG 2 defines it, of every text and every drawn line against the nearest opaque
# colour behind it
CONTRASTS = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const known = {};
  const rgb = color => known[color] ??= (() => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  })();
  const light = color => rgb(color).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) =>
    (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (rgb(color)[3] === 255) return color;
    }
    return 'white';
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest('style')) continue;
    const inSvg = element.closest('svg');
    const style = getComputedStyle(element);
    const onHeatMap = ['rgb(0, 0, 0)', 'rgb(254, 254, 254)'].includes(style.fill);
    if (inSvg && onHeatMap) continue;
    const color = inSvg ? style.fill : style.color;
    found.push(['text', walker.currentNode.data.trim(), contrast(color, behind(element))]);
  }
  for (const path of document.querySelectorAll('.legend svg path')) {
    const style = getComputedStyle(path);
    if (style.stroke === 'none') continue;
    found.push(['line', style.stroke, contrast(style.stroke, behind(path))]);
  }
  return found;
}
"""
# Of each figure: its size, what is drawn, the markers and clips that are referred to and not inside
# this very drawing, the texts that stick out of it, and the smallest, in CSS pixels
FIGURES = """
() => [...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector(':scope > svg'), frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')];
  return {
    name: figure.id.replace('figure-', ''), words: svg.ariaLabel,
    width: frame.width, height: frame.height,
    drawn: [...svg.querySelectorAll('path, use')].filter(e => e.getBBox().width).length,
    lost: [...svg.querySelectorAll('use')].filter(e => !svg.querySelector(e.href.baseVal)).length,
    outside: texts.filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 4 || box.right > frame.right + 4;
    }).map(text => text.textContent),
    smallest: frame.width / svg.viewBox.baseVal.width
      * Math.min(...texts.map(e => parseFloat(getComputedStyle(e).fontSize))),
  };
})
"""
SHARED_IDS = """
(() => {
  const elements = [...document.querySelectorAll('[id]')].filter(e => !e.closest('.legend'));
  const ids = elements.map(e => e.id);
  return ids.filter((id, place) => ids.indexOf(id) !== place);
})()
"""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def write_page(run, out, paper=()):
    """The HTML page of a run, whose PNGs are empty files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coca_hf.report.write.to_png", lambda figure: b"")
        return write_report([run], out, paper)


@pytest.fixture(scope="module")
def report_html(tmp_path_factory):
    """The page of rows of every task, with published curves."""
    directory = tmp_path_factory.mktemp("report")
    return write_page(full_run(directory / "run"), directory / "page", ["llama-7b"])


@pytest.fixture(scope="module")
def results_html(tmp_path_factory):
    return write_page(RESULTS, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def chromium():
    """The browser, which `.ci/run` installs."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if not path:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Open a file at a width in a colour scheme, and record its console output and requests."""
    pages = []

    def open_(path, width=1280, scheme="light"):
        viewport = {"width": width, "height": 844}
        page = chromium.new_page(viewport=viewport, color_scheme=scheme)
        pages.append(page)
        page.said, page.requests = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_
    for page in pages:
        page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_page_is_whole_at_any_width_in_light_and_dark_and_asks_nobody_for_anything(
    open_page, report_html, results_html, width, scheme
):
    """Every PNG beside the page is a figure on it, with lines and words inside its frame, that can
    be read on a telephone (the marks of trained lengths are smallest; the axes have 10.5 pixels),
    and words for those who cannot see it.
    """
    for html in (report_html, results_html):
        page = open_page(html, width, scheme)
        assert page.said == []
        assert page.requests == [html.as_uri()]
        assert page.title() == "Evaluation – coca_hf"  # noqa: RUF001
        assert page.evaluate(LOOK) == {"overflow": 0, "colors": COLORS_OF[scheme]}
        found = page.evaluate(CONTRASTS)
        assert sum(kind == "line" for kind, _, _ in found) > 10
        assert sum(kind == "text" for kind, _, _ in found) > 300
        assert [one for one in found if one[2] < (3 if one[0] == "line" else 4.5)] == []
        figures = page.evaluate(FIGURES)
        names = sorted(path.stem for path in html.parent.glob("*.png"))
        assert sorted(figure["name"] for figure in figures) == names != []
        for figure in figures:
            assert figure["width"] > 300, figure
            assert figure["height"] > 100, figure
            assert figure["drawn"] > 10, figure
            assert (figure["lost"], figure["outside"]) == (0, []), figure
            assert figure["smallest"] > 8, figure
            assert len(figure["words"]) > 30, figure
        if html is report_html:
            words = "LLaMA-7B: 8.00 at 512, none at 8192."
            assert any(words in figure["words"] for figure in figures)
            assert page.evaluate(SHARED_IDS) == []


OOM = {"value": None, "error": "OOM: at batch size 1"}
EDGES = {
    "one model, one length, one number": [row()],
    "no number at all": [row(**OOM), row(length=1024, **OOM)],
    "twelve models": [
        row(f"model {n}", length=length, value=7.0 + n) for n in range(12) for length in (512, 1024)
    ],
    "hostile names": [row("</svg><script>alert(1)</script>&\"'"), row("$x_1$ \\frac{")],
    "a name without end": [row("a" * 300, value=8.0), row("b" * 300, value=9.0)],
    "values near and far": [
        row(value=1.0),
        row(length=1024, value=1e300),
        row(length=4096, value=1.0001),
    ],
}


@pytest.mark.parametrize("edge", EDGES)
def test_rows_at_the_edge_make_a_page_that_holds(open_page, tmp_path, edge):
    html = write_report([write_rows(tmp_path / "run", *EDGES[edge])], tmp_path / "page")
    page = open_page(html, 390)
    assert page.said == []
    assert page.evaluate(LOOK)["overflow"] == 0
    (figure,) = page.evaluate(FIGURES)
    assert figure["height"] > 100
    names = dict.fromkeys(row["model"] for row in EDGES[edge])
    assert len(page.query_selector_all(".legend li")) == (len(names) if len(names) > 1 else 0)
    heads = page.query_selector_all("#perplexity tbody tr th")
    assert [head.inner_text() for head in heads] == [*names]


def test_nothing_in_the_file_could_be_fetched(report_html):
    text = report_html.read_text()
    assert set(re.findall(r"https?://[\w./]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)


def test_every_figure_is_a_png_for_a_paper_and_stands_in_the_markdown(report_html):
    directory = report_html.parent
    page = (directory / "report.md").read_text()
    pngs = sorted(path.stem for path in directory.glob("*.png"))
    depths = [f"depth-of-{number}" for number in (1, 2, 3, 4)]
    assert pngs == sorted(
        ["perplexity", "position-loss", "passkey", "speed", "speed-2"]
        + [f"passkey-{which}" for which in ("inside", "beyond", "distance", *depths)]
        + [f"boundary-{which}" for which in ("angle", "tau", "decay", "layers-of-1", "layers-of-2")]
    )
    assert all(page.count(f"]({name}.png)") == 1 for name in pngs)
