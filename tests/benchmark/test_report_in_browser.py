"""The report in a real browser: it opens, shows its pictures, fits a phone and sorts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hddm.benchmark.report import REPORT_FILE, write_report
from hddm.evaluation.scores import SHOWN
from tests.benchmark_files import Finished
from tests.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium, or a Chrome"
)

PHONE, DESKTOP = 390, 1280
_COLUMN = (
    "[...document.querySelectorAll('.sortable')[0].tBodies[0].rows].map(row => row.cells[%d].textContent)"
)


@pytest.fixture(scope="module")
def report(miniature: Finished) -> Path:
    write_report(miniature.out, miniature.results)
    return miniature.out / REPORT_FILE


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def _numbers(browser: Browser, column: int) -> list[float]:
    return [float(text.split(" ")[0]) for text in browser.evaluate(_COLUMN % column)]


@pytest.mark.integration
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_it_opens_without_a_complaint_and_nothing_but_tables_is_wider_than_the_page(
    width: int, browser: Browser, report: Path
) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(report, width)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    sizes = browser.evaluate(
        "Promise.all([...document.images].map(one => one.decode().then(() => one.naturalWidth)))"
    )
    # A sheet of real images and of each of three rows, and the first samples of each row one by one.
    assert len(sizes) == 4 + 3 * SHOWN
    assert all(size > 0 for size in sizes)
    assert browser.complaints == []
    assert browser.requests == [report.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wide = browser.evaluate(
        f"[...document.body.querySelectorAll('*')].filter(one => !one.closest('.scroll, pre') && "
        f"one.getBoundingClientRect().right > {width} + 1).map(one => one.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_a_column_sorts_up_down_and_back(browser: Browser, report: Path) -> None:
    browser.open(report, DESKTOP)
    as_written = _numbers(browser, 1)
    head = "document.querySelectorAll('.sortable')[0].tHead.rows[0].cells[1]"
    for expected, said in (
        (sorted(as_written), "ascending"),
        (sorted(as_written, reverse=True), "descending"),
        (as_written, "none"),
    ):
        browser.evaluate(f"{head}.querySelector('button').click()")
        assert _numbers(browser, 1) == expected
        assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == said
