"""A page as a person gets it, in a real headless Chromium."""

import shutil

import pytest

from coca_hf.report import write_report
from tests.report.made import full_run

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def write_page(run, out, paper=()):
    """The HTML page of a run, whose PNGs are empty files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coca_hf.report.write.to_png", lambda figure: b"")
        return write_report([run], out, paper)


@pytest.fixture(scope="session")
def report_html(tmp_path_factory):
    """The page of rows of every task, with published curves."""
    directory = tmp_path_factory.mktemp("report")
    return write_page(full_run(directory / "run"), directory / "page", ["llama-7b"])


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
