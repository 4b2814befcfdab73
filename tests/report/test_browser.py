"""The page in a real browser: it draws, answers, and asks nobody for anything."""

import os
import shutil

import pytest

from heal.report.collect import read_run
from heal.report.page import make_page
from tests.report.journals import (
    act,
    calm_metrics,
    long_metrics,
    metrics,
    postmortem,
    sick_run,
    started,
    trouble,
    write,
)
from tests.report.test_page import hostile_run

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
)
BROWSER = os.environ.get("HEAL_TEST_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no browser: `make browser` or `apt-get install chromium`, or set HEAL_TEST_BROWSER",
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a run; at the end no error was logged and nothing was asked for."""
    contexts, complaints, requests = [], [], []

    def opened(folder, **options):
        path = tmp_path / "page.html"
        path.write_text(make_page(read_run(folder)), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: complaints.append("dialog") or dialog.dismiss())
        page.goto(path.as_uri())
        page.wait_for_selector("svg.panel .axis", state="attached")
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        page.evaluate("document.getElementById('charts-section').scrollIntoView()")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(url.startswith("file://") for url in requests)
    assert len(requests) == len(contexts)


def view_range(page):
    return [float(x) for x in page.locator("#charts").get_attribute("data-range").split()]


def visible_rows(page):
    return page.locator("[data-incident-row]:visible").count()


def glyphs(page):
    return page.locator("svg.panel .glyph").count()


def place(page, share):
    """Where a share of the x axis is, in the middle of the panel of the loss."""
    box = page.locator(LOSS).bounding_box()
    left, right = 92, 14  # margins of a panel
    return box["x"] + left + (box["width"] - left - right) * share, box["y"] + box["height"] / 2


LOSS = ".panel-box:nth-of-type(2) svg.panel"


def test_curves_events_bands_and_ranks_are_drawn(show, tmp_path):
    page = show(sick_run(tmp_path / "run", ranks=2))
    assert page.locator(f"{LOSS} path.curve").count() == 2
    assert page.locator(f"{LOSS} path.ghost").count() == 2
    assert page.locator(f"{LOSS} path.nan").count() == 2
    for thing in (".band", ".limit", "path.lr", "path.micro", "rect.heat"):
        assert page.locator(f"svg.panel {thing}").count() > 0, thing
    assert page.locator(f"{LOSS} line.event").count() == 6  # a start, two refused and more
    assert page.locator(LOSS).get_attribute("aria-label") == "Loss over steps, from 3 to 1.5"


def test_hover_shows_the_values_of_the_step_under_the_pointer(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    page.mouse.move(*place(page, 57 / 99))
    told = page.locator("#tooltip").inner_text()
    assert "step\t57" in told
    assert "loss\t1.8" in told
    assert "loss before the rollback\tNaN" in told
    assert "The loss was NaN or Inf (rolled back, step 57)" in told
    assert page.locator("line.cross").count() == 6
    page.mouse.move(5, 5)
    assert page.locator("#tooltip").is_hidden()


def test_drag_zooms_double_click_and_buttons_show_all(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    assert view_range(page) == [0, 99]
    page.mouse.move(*place(page, 0.2))
    page.mouse.down()
    page.mouse.move(*place(page, 0.5), steps=3)
    assert page.locator("rect.drag").count() == 6
    page.mouse.up()
    assert view_range(page) == pytest.approx([19.8, 49.5], abs=0.3)
    assert page.locator("rect.drag").count() == 0
    page.mouse.dblclick(*place(page, 0.5))
    assert view_range(page) == [0, 99]
    page.get_by_role("button", name="Zoom in").click()
    low, high = view_range(page)
    assert high - low == pytest.approx(99 / 2, abs=0.1)
    page.get_by_role("button", name="Show all").click()
    assert view_range(page) == [0, 99]
    assert page.get_by_role("button", name="Show all").is_disabled()


def test_the_keyboard_moves_zooms_and_is_told_aloud(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    page.locator("#charts").focus()
    page.keyboard.press("End")
    assert "step 99" in page.locator("#live").inner_text()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert "step 96" in page.locator("#live").inner_text()
    page.keyboard.press("+")
    low, high = view_range(page)
    assert (high - low, high) == (pytest.approx(49.5), pytest.approx(97.5, abs=1))
    page.keyboard.press("0")
    assert view_range(page) == [0, 99]


def test_kinds_of_events_can_be_left_out(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    assert (visible_rows(page), glyphs(page)) == (3, 6)
    page.get_by_text("step skipped 3").click()
    assert (visible_rows(page), glyphs(page)) == (2, 3)
    assert page.locator("#incident-count").inner_text() == "2 of 3"
    assert page.locator(f"{LOSS} line.event.refused").count() == 0
    page.get_by_text("step skipped 3").click()
    assert (visible_rows(page), glyphs(page)) == (3, 6)


def test_ranks_can_be_chosen(show, tmp_path):
    run = sick_run(tmp_path / "run", ranks=2)
    write(run / "events.rank1.jsonl", [trouble("oom", 95, rank=1)])
    page = show(run)
    assert (visible_rows(page), page.locator(f"{LOSS} path.curve").count()) == (4, 2)
    page.select_option("#rank", "0")
    assert (visible_rows(page), page.locator(f"{LOSS} path.curve").count()) == (3, 1)
    page.select_option("#rank", "1")
    assert visible_rows(page) == 4
    assert page.locator("svg.panel text", has_text="rank").all_text_contents() == ["rank 1"]


def test_a_click_on_an_incident_zooms_to_it_and_on_its_mark_chooses_it(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    page.get_by_role("button", name="Show step 55 to 57 on the charts").click()
    low, high = view_range(page)
    assert low < 40 < 57 < high < 99
    assert page.locator("li.selected").get_attribute("data-incident-row") == "1"
    assert page.locator("rect.chosen").count() == 6
    page.locator("#reset").click()
    page.locator("svg.panel .glyph.alert").click()
    assert page.locator("li.selected").get_attribute("data-incident-row") == "2"


def test_the_axis_can_be_time_and_the_scale_linear(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    page.locator(".segmented label", has_text="time").click()
    assert view_range(page) == pytest.approx([0, 11.9], abs=0.2)
    before = page.locator(f"{LOSS} path.curve").get_attribute("d")
    page.locator(".panel-box:nth-of-type(2) .log input").click()
    assert page.locator(f"{LOSS} path.curve").get_attribute("d") != before


def test_a_rank_that_was_silent_has_a_gap(show, tmp_path):
    write(tmp_path / "run/metrics.jsonl", calm_metrics(400))
    late = [metrics(s, [1.0] * 10, ended=s / 10 + 20) for s in range(109, 200, 10)]
    write(tmp_path / "run/metrics.rank1.jsonl", [*calm_metrics(100), *late])
    page = show(tmp_path / "run")
    page.locator(".segmented label", has_text="time").click()
    rows = page.locator("rect.heat").evaluate_all("e => e.map((r) => Number(r.getAttribute('y')))")
    whole, broken = rows.count(min(rows)), rows.count(max(rows))
    assert whole > 200
    assert broken == pytest.approx(0.5 * whole, abs=4)


def test_dark_follows_the_system_and_the_button(show, tmp_path):
    page = show(sick_run(tmp_path / "run"), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(18, 21, 26)"
    page.get_by_role("button", name="Colour theme: automatic").click()
    assert page.evaluate(background) == "rgb(250, 250, 248)"
    page.get_by_role("button", name="Colour theme: light").click()
    assert page.evaluate(background) == "rgb(18, 21, 26)"


def test_it_prints_light_and_without_controls(show, tmp_path):
    page = show(sick_run(tmp_path / "run"), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".toolbar").is_hidden()
    assert page.locator(".incidents").is_visible()
    color = page.evaluate("getComputedStyle(document.querySelector('.story')).color")
    assert color == "rgb(29, 33, 41)"


def test_a_hostile_journal_runs_nothing_in_the_browser(show, tmp_path):
    page = show(hostile_run(tmp_path / "run"))
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    page.locator("svg.panel .glyph.halt").first.hover()
    assert "alert(1)" in page.locator(".incidents").inner_text()


def test_a_run_without_curves_and_one_on_a_phone_are_readable(show, tmp_path):
    postmortem(tmp_path / "bare")
    page = show(tmp_path / "bare")
    assert "no data" in page.locator(LOSS).get_attribute("aria-label")
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_a_long_run_is_drawn_with_its_spike(show, tmp_path):
    (tmp_path / "run").mkdir()
    long_metrics(tmp_path / "run" / "metrics.jsonl", 40_000, spike=23_456)
    write(tmp_path / "run" / "events.jsonl", [started()])
    page = show(tmp_path / "run")
    path = page.locator(f"{LOSS} path.curve").get_attribute("d")
    assert path.count("L") < 5000
    lane = page.locator("rect.heat").evaluate_all("e => e.map((r) => +r.getAttribute('x')).sort()")
    assert len(lane) > 200  # cells of four pixels: rows that were thinned out leave no gap
    highest = min(float(point.split(",")[1]) for point in path[1:].split("L"))
    assert highest < 30


def test_a_phone_shows_cause_action_and_outcome_without_sideways_scrolling(show, tmp_path):
    run = sick_run(tmp_path / "run", ranks=2)
    name = "transformer.h.11.attn.a_very_long_name_without_any_blank.c_attn.weight" * 3
    more = {"evidence": {"tensor": name}, "diagnosis": f"NaN. Tensor: {name}."}
    write(run / "events.jsonl", [trouble("nonfinite_gradient", 95, act("Refuse"), **more)])
    page = show(run)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = """() => [...document.querySelectorAll("main *")]
      .filter((e) => !e.closest("svg, .visually-hidden") && e.getBoundingClientRect().right > 390)
      .map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []
    for fact in page.locator(".facts dt", has_text="cause").all():
        size = fact.evaluate("e => getComputedStyle(e).fontSize")
        assert float(size.removesuffix("px")) >= 12
    boxes = [picture.bounding_box() for picture in page.locator(".thumbnail").all()]
    assert len(boxes) == 4
    assert all(box["width"] > 280 and box["height"] > 50 for box in boxes)


def test_incidents_can_be_reached_and_chosen_by_keyboard(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    wanted = "Show step 55 to 57 on the charts"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.ariaLabel") == wanted:
            break
    page.keyboard.press("Enter")
    assert page.locator("[aria-current=true]").get_attribute("data-incident-row") == "1"
    assert page.get_by_role("heading", level=3, name="The loss was NaN or Inf").count() == 1


def test_a_phone_reaches_the_incidents_with_one_tap(show, tmp_path):
    page = show(sick_run(tmp_path / "run"))
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="Incidents (").click()
    title = page.locator("#incidents-title").bounding_box()
    assert 0 <= title["y"] < 844
    for link in page.locator("nav.jumps a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
