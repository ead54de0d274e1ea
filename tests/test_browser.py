"""The report in a real browser: Debian's Chromium, driven by playwright; without it these tests skip."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_made_up import run

import replearn
from replearn.experiments.report import serving
from replearn.experiments.report.page import build_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
QUIET = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"desktop": (1400, 900), "phone": (390, 844)}
SMALL = """() => [...document.querySelectorAll("svg text")].map((text) => {
  const svg = text.ownerSVGElement;
  return text.getAttribute("font-size") * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}).filter((pixels) => pixels > 0 && pixels < 12)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = json.loads(replearn.plan(replearn.models.resnet32(), interval=4).to_json())
    root = tmp_path_factory.mktemp("runs")
    for seed, wobble in enumerate((0.0, 0.2, -0.1)):
        for label, accuracy, memory in (("E2E", 92.0, 4e9), ("removal", 90.0, 3e9), ("RepL", 91.0, 3.2e9)):
            place = root / "cifar10" / label.lower() / f"seed-{seed}"
            place.mkdir(parents=True)
            held = {"plan": plan} if label == "RepL" else {}
            result = run(label, seed, accuracy + wobble, seconds=memory / 2e9, memory=int(memory), **held)
            (place / "result.json").write_text(result.to_json())
    for number in range(6):  # more sections than are open at first
        place = root / f"more-{number}" / "e2e" / "seed-0"
        place.mkdir(parents=True)
        (place / "result.json").write_text(run("E2E", 0, 80.0 + number, data=f"set{number}").to_json())
    return root


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    return build_report(folder, out).page.as_uri()


def opened(browser: Any, address: str, size: str = "desktop", scheme: str = "light") -> tuple[Any, list[str]]:
    """A page, and the list that its complaints go to."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.goto(address if "#" in address or "http:" in address else f"{address}#made-up-cifar10")
    return page, complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_opens_from_the_disk_without_a_complaint(
    browser: Any, address: str, size: str, scheme: str, tmp_path: Path
) -> None:
    page, complaints = opened(browser, address, size, scheme)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing hangs out sideways
    section = page.locator("#made-up-cifar10")
    for name in ("runs", "cost", "curves"):
        figure = section.locator(f"#made-up-cifar10-{name} svg")
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 60
    assert page.evaluate(SMALL) == []
    cells = section.locator(".scroll").first.locator("tbody tr").nth(2).locator(".verdict")
    assert cells.count() == 2  # against E2E and removal, both to be seen without scrolling
    assert all(box["x"] + box["width"] <= SIZES[size][0] for box in (cell.bounding_box() for cell in cells.all()))
    assert page.locator("#summary article").count() == 1
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 29)")
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
    page.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_hint_stays_inside_the_window(browser: Any, address: str, size: str) -> None:
    page, _ = opened(browser, address, size)
    page.locator("#made-up-cifar10-cost circle.f-e2e[data-tip]").first.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("E2E")
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= SIZES[size][0]
    page.locator("h1").hover()
    assert not tip.is_visible()
    page.context.close()


def test_marks_have_hints_by_pointer_and_keyboard_and_the_button_changes_the_colours(
    browser: Any, address: str
) -> None:
    page, _ = opened(browser, address)
    page.locator("#made-up-cifar10-cost circle.f-repl[data-tip]").hover()
    assert "memory 0.800" in page.locator("#tip").inner_text()
    page.locator("#made-up-cifar10-cost circle.s-repl[data-tip]").hover()  # a ring, which has nothing inside
    assert "RepL in the paper" in page.locator("#tip").inner_text()
    page.locator("#made-up-cifar10-curves rect[data-tip]").last.hover()
    assert "epoch 2" in page.locator("#tip").inner_text()
    page.locator("#made-up-cifar10-cost circle.f-repl[data-tip]").first.focus()  # by keyboard too
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    page.context.close()


def test_closed_sections_are_laid_out_when_opened_and_the_filter_hides_the_others(
    browser: Any, address: str
) -> None:
    page, complaints = opened(browser, address)
    last = page.locator("#made-up-set5")
    assert last.locator("svg").count() == 0
    last.locator("summary").first.click()
    last.locator("svg").first.wait_for(state="visible")  # a browser says later that something was opened
    page.fill("#filter", "set3")
    assert page.locator(".comparison:visible").count() == 1
    page.locator("#contents summary").click()
    assert page.locator("#contents li:visible a").all_inner_texts()[-1].startswith("made_up on set3")
    assert not page.locator("#nothing").is_visible()
    page.fill("#filter", "fitted")  # no method of these runs
    assert page.locator("#nothing").is_visible()
    page.fill("#filter", "repl")
    assert page.locator("#summary article:visible").count() == page.locator(".comparison:visible").count() == 1
    page.fill("#filter", "set3 nowhere")
    assert page.locator("#nothing").inner_text() == "No match."
    assert page.locator("section.card:visible").count() == 0
    page.fill("#filter", "")
    assert page.locator(".comparison:visible").count() == 7
    assert complaints == []
    page.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_benchmarks_have_tables(browser: Any, size: str, tmp_path: Path) -> None:
    results = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
    made = build_report(results, tmp_path / "r.html").page.as_uri()
    page, complaints = opened(browser, made, size)
    card = page.locator("#benchmarks")
    card.locator("summary").first.click()
    card.locator("table").first.wait_for(state="visible")
    claims = page.locator("#holds tr:has(.difference)").first.locator(".difference")  # seen without scrolling
    assert claims.count() == 2
    assert all(box["x"] + box["width"] <= SIZES[size][0] for box in (cell.bounding_box() for cell in claims.all()))
    if size == "desktop":
        page.locator("details").evaluate_all("all => all.forEach((fold) => { fold.open = true })")
        for table in page.locator("#summary .scroll, #holds .scroll").all():
            assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []
    page.context.close()


def test_the_live_page_changes_itself_and_keeps_ones_place(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FRESH", 0.0)
    with serving.make_server(folder, every=1) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        page, complaints = opened(browser, f"http://127.0.0.1:{server.server_address[1]}/", "phone")
        page.locator("#made-up-set5 summary").first.click()
        page.evaluate("scrollTo(0, 700)")
        place = folder / "cifar10" / "repl-first-2" / "seed-0"
        place.mkdir(parents=True)
        (place / "result.json").write_text(run("RepL first=2", 0, 77.77).to_json())
        page.get_by_text("77.77").first.wait_for(state="attached", timeout=10_000)
        assert page.evaluate("scrollY") == 700
        assert page.locator("#made-up-set5").get_attribute("open") is not None
        assert complaints == []
        page.context.close()
        server.shutdown()
    shutil.rmtree(place.parent)
