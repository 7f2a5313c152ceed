"""The report in a real browser: curves are drawn, zoom and the choice of runs work with mouse and keyboard, and no text becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from looking import PLOT
from made_up import make_run
from selenium.webdriver.common.keys import Keys

from slipstream.observability.report import write
from slipstream.observability.report.page import render_page

LOSS = "train/loss"
STEPS = 600
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("project")
    first = make_run(folder / "runs" / "first", steps=STEPS)
    second = make_run(folder / "runs" / "second", steps=STEPS, seed=1, rate=1e-3)
    return {
        "one": write(first),
        "two": write([first, second], folder / "two.html"),
        "hostile": write(hostile_run(folder / "runs" / "third")),
    }


def hostile_run(folder: Path) -> Path:
    """A run whose every text is markup, and whose every text is long."""
    make_run(folder, steps=60, ranks=2)
    bad = HOSTILE + "x" * 100
    lines = [{"step": step, "time": 100.0 + step, "values": {f"{bad}/{bad}": step / 2, bad: "text" + bad}} for step in range(20)]
    lines += [{"step": 20, "time": 120.0, "table": {"name": bad, "columns": [bad], "rows": [[bad]]}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"time": 110.0, "kind": "guard", "step": 10, "rank": 0, "text": bad, "remedy": bad}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "project": bad, "command": [bad], "started": 100.0, "versions": {bad: bad}}))
    config = {"settings": {bad: {bad: bad}}, "options": {bad: {"value": bad, "origin": bad}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({bad: bad}))
    return folder


def a_page(path: Path, *views: dict[str, Any], **options: Any) -> Path:
    path.write_text(render_page(views, **options), encoding="utf-8")
    return path


def a_view(name: str = "first", **values: list[float | None]) -> dict[str, Any]:
    return {
        "name": name,
        "series": {key: {"steps": range(len(value)), "times": range(len(value)), "values": value} for key, value in values.items()},
    }


def pixels(looker: Any, name: str, color: str) -> int:
    """How many pixels of a chart have a colour."""
    looker.canvas(name)
    looker.settle()
    counting = """
        const data = plot.canvas.getContext("2d").getImageData(0, 0, plot.canvas.width, plot.canvas.height).data;
        const wanted = [1, 3, 5].map((at) => parseInt(arguments[1].slice(at, at + 2), 16));
        const alike = (at) => wanted.every((one, which) => Math.abs(data[at + which] - one) < 8) && data[at + 3] > 200;
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += alike(at);
        return count;"""
    return int(looker.ask(f"(() => {{ {PLOT} {counting} }})()", name, color))


def test_curves_offline(look, pages):
    """Curves are drawn without asking anybody for anything."""
    page = look(pages["one"])
    model = page.model(LOSS)
    assert model["x"] == [1, STEPS]
    assert model["lines"][0]["points"] == STEPS
    assert pixels(page, LOSS, model["lines"][0]["color"]) > 100
    assert pixels(page, LOSS, "#123456") == 0
    assert page.ask("performance.getEntriesByType('resource').map((one) => one.name).filter((name) => !name.startsWith('data:'))") == []
    page.may_complain = True  # about the next line, which the policy of the page refuses
    sent = page.driver.execute_async_script("const done = arguments[0]; fetch('data:,x').then(() => done(true), () => done(false))")
    assert sent is False


def test_gaps(look, pages):
    """What is no number is a gap and is told."""
    page = look(pages["one"])
    told = page.canvas(LOSS).get_attribute("aria-label")
    assert "1 value that is no number" in told
    page.driver.execute_script("slipstream.page.state.set({range: [arguments[0] - 10, arguments[0] + 10]})", STEPS * 3 // 5)
    page.hover(LOSS, 0.5)
    assert page.until_it(lambda: "no number" in page.find(f'figure[data-name="{LOSS}"] .legend').text)


def test_drag_zoom(look, pages):
    """Dragging zooms all charts and a double click shows everything."""
    page = look(pages["two"])
    page.drag(LOSS, 0.25, 0.5)
    low, high = page.model(LOSS)["x"]
    assert low == pytest.approx(1 + 0.25 * (STEPS - 1), abs=4)
    assert high == pytest.approx(1 + 0.5 * (STEPS - 1), abs=4)
    page.canvas("Time of a step")
    assert page.model("Time of a step")["x"] == [low, high]
    assert page.find("#reset").is_enabled()
    page.double_click(LOSS)
    assert page.model(LOSS)["x"] == [1, STEPS]
    page.drag(LOSS, 0.9, 0.1)  # from right to left does the same
    assert page.model(LOSS)["x"][0] > 1
    page.click("#reset")
    assert page.model(LOSS)["x"] == [1, STEPS]


def test_keyboard(look, pages):
    """The keyboard zooms moves and reads."""
    page = look(pages["one"])
    page.driver.execute_script("arguments[0].focus()", page.canvas(LOSS))
    page.press("+")
    low, high = page.model(LOSS)["x"]
    assert high - low == pytest.approx((STEPS - 1) / 2)
    page.press(Keys.ARROW_RIGHT, holding=Keys.SHIFT)
    assert page.model(LOSS)["x"] == [pytest.approx(low + (STEPS - 1) / 8), pytest.approx(high + (STEPS - 1) / 8)]
    page.press("-")
    assert page.model(LOSS)["x"] == [pytest.approx(low + (STEPS - 1) / 8 - (STEPS - 1) / 4), STEPS]
    page.press("+", "+", "0")
    assert page.model(LOSS)["x"] == [1, STEPS]
    page.press(Keys.HOME)
    assert page.until("slipstream.page.spoken.textContent").startswith("step 1,")
    before = page.ask("slipstream.page.state.hover")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.settle()
    assert page.ask("slipstream.page.state.hover") > before
    page.press(Keys.END)
    assert page.until_it(lambda: page.ask("slipstream.page.spoken.textContent").startswith(f"step {STEPS},"))
    page.press(Keys.ESCAPE)
    page.settle()
    assert page.ask("slipstream.page.state.hover") is None


@pytest.mark.parametrize("name", ["Time of a step", "Work of each rank, without waiting"])
def test_keyboard_in_areas(look, pages, name):
    """The keyboard works in the areas and in the ranks."""
    page = look(pages["one"])
    page.driver.execute_script("arguments[0].focus()", page.canvas(name))
    page.press(Keys.ARROW_RIGHT)
    assert page.until("slipstream.page.spoken.textContent").startswith("step ")
    low, high = page.model(name)["x"]
    page.press("+")
    zoomed = page.model(name)["x"]
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 2, rel=0.05)
    page.press("0")
    assert page.model(name)["x"] == [low, high]


def test_choose_runs(look, pages):
    """Runs are chosen by mouse and by keyboard."""
    page = look(pages["two"])
    assert [line["run"] for line in page.model(LOSS)["lines"]] == ["first", "second"]
    color = page.model(LOSS)["lines"][0]["color"]
    page.click('.run[data-run="first"] input')
    assert [line["run"] for line in page.model(LOSS)["lines"]] == ["second"]
    assert pixels(page, LOSS, color) == 0
    page.driver.execute_script("document.querySelector('.run[data-run=\"first\"] input').focus()")
    page.press(Keys.SPACE)
    assert [line["run"] for line in page.model(LOSS)["lines"]] == ["first", "second"]
    page.click('.run[data-run="second"] button')
    assert [line["run"] for line in page.model(LOSS)["lines"]] == ["second"]
    assert page.ask("slipstream.page.focused().label") == "second"


def test_smoothing_logarithm_and_axis(look, pages):
    page = look(pages["one"])
    changes = "plot.lines()[0].y.reduce((sum, one, at, all) => sum + (Math.abs(one - all[at - 1]) || 0), 0)"
    rough = f"(() => {{ {PLOT} return {changes} }})()"
    before = page.ask(rough, LOSS)
    page.driver.execute_script("document.getElementById('smoothing').focus()")
    page.press(Keys.END)
    page.settle()
    assert page.ask("slipstream.page.state.smoothing") == pytest.approx(0.995)
    assert page.ask(rough, LOSS) < before / 5
    assert page.model(LOSS)["y"][1] > 2  # the scale is still that of what was logged
    next(entry for entry in page.all(".toggle") if entry.text == "Log scale").click()
    assert page.model(LOSS)["log"]
    assert page.model(LOSS)["y"][0] > 0
    page.driver.execute_script("document.querySelector('.choices input').focus()")
    page.press(Keys.ARROW_RIGHT)
    seconds = page.model(LOSS)["x"]
    assert 0 <= seconds[0] < seconds[1] < STEPS
    page.press(Keys.ARROW_RIGHT)
    assert page.model(LOSS)["x"][0] > 1.7e9


def test_average_of_constant(look, pages):
    """The average of a constant is that constant from the first point on."""
    page = look(pages["one"])
    assert page.ask("(() => { const [line] = slipstream.page.plots[0].lines(); return line.y.length })()") > 0
    page.driver.execute_script("slipstream.page.state.set({smoothing: 0.9})")
    series = {"steps": [0, 1, 5, 6, 100], "times": [0, 1, 2, 3, 4], "values": [2, 2, None, 2, 2]}
    page.driver.execute_script("slipstream.page.runs[0].append({series: {constant: arguments[0]}}); slipstream.page.build()", series)
    values = page.ask("Array.from(slipstream.page.plots.find((one) => one.name === 'constant').lines()[0].y)")
    assert values == [pytest.approx(2), pytest.approx(2), None, pytest.approx(2), pytest.approx(2)]


def test_nearly_equal_numbers(look, tmp_path):
    """Numbers that differ by next to nothing are drawn as one."""
    steps = range(300)
    values = {"constant": [3e-4] * 300, "noise": [1e8 + step * 1e-6 for step in steps], "far": [(-1) ** step * 1e308 for step in steps]}
    page = look(a_page(tmp_path / "page.html", a_view(**values)))
    page.driver.set_script_timeout(30)
    page.driver.execute_script("slipstream.page.state.set({smoothing: 0.6})")
    assert page.model("constant")["y"] == [pytest.approx(2.7e-4), pytest.approx(3.3e-4)]
    assert page.ask("slipstream.page.plots[0].lines()[0].y.every((one) => one === 3e-4)")
    assert page.model("noise")["y"] == [pytest.approx(0.9e8), pytest.approx(1.1e8)]
    page.driver.execute_script("slipstream.page.state.set({log: true})")
    assert page.model("far")["log"]


def test_large_counters(look, tmp_path):
    """Large counters and slow ramps keep their digits."""
    values = {"tokens": [100_000_000 + 3 * step for step in range(50)], "ramp": [1e6 + 0.01 * step for step in range(50)]}
    page = look(a_page(tmp_path / "page.html", a_view(**values)))
    page.canvas("tokens")
    assert page.find('figure[data-name="tokens"] .legend').text.split() == ["last", "100,000,147"]
    assert page.find('figure[data-name="ramp"] .legend').text.split() == ["last", "1000000.49"]
    page.driver.execute_script("for (const one of document.querySelectorAll('figure .tools button:last-child')) one.click()")
    cells = "[...document.querySelectorAll(`figure[data-name=${arguments[0]}] td:last-child`)].map((one) => one.textContent)"
    assert page.ask(cells, "tokens") == [f"{value:,}" for value in values["tokens"]]
    assert page.ask(cells, "ramp")[:2] == ["1,000,000", "1000000.01"]
    assert page.ask("new Set(slipstream.page.plots[1].yTicks().map((one) => one.text)).size") >= 3


def test_steps_after_restart(look, tmp_path):
    """Steps done again after a restart replace the first ones."""
    steps = [*range(51), *range(40, 81)]
    series = {"steps": steps, "times": range(92), "values": [float(step + 100 * (place > 50)) for place, step in enumerate(steps)]}
    events = [{"kind": "restart", "time": 50.5, "step": 40}]
    page = look(a_page(tmp_path / "page.html", {"name": "first", "series": {"loss": series}, "events": events}))
    (line,) = page.model("loss")["lines"]
    assert (line["points"], line["old"]) == (81, 11)
    assert page.ask("Array.from(slipstream.page.plots[0].lines()[0].y.slice(39, 42))") == [39, 140, 141]
    assert page.all(".returns") == []


def test_steps_begin_anew(look, tmp_path):
    """Steps that begin anew without a restart are told and stay in order over time."""
    series = {"steps": [*range(10)] * 3, "times": range(30), "values": [*range(100, 130)]}
    page = look(a_page(tmp_path / "page.html", {"name": "first", "series": {"loss": series}}))
    assert "go back 2 times without a restart: log with a step that counts on" in page.find(".returns").text
    low, high = page.model("loss")["y"]
    assert low < 100  # the earlier passes are in sight
    assert high > 129
    page.driver.execute_script("slipstream.page.state.set({axis: 'relative'})")
    assert page.model("loss")["lines"][0]["points"] == 30


def test_crosshair(look, tmp_path):
    """The cross hair says nothing beyond the end and whole steps."""
    page = look(a_page(tmp_path / "page.html", a_view("long", loss=[2.0] * 1000), a_view("short", loss=[*range(11)])))
    page.driver.execute_script("slipstream.page.state.set({hover: 598.38})")
    page.settle()
    legend = page.find("figure .legend")
    assert legend.text.split() == ["long", "2", "short", "\u2013", "step", "598"]
    page.driver.execute_script("slipstream.page.state.set({hover: 4.2, smoothing: 0.995})")
    page.settle()
    assert re.search(r"short\s+4 \(smoothed [0-3]\.", legend.text)
    page.driver.execute_script("slipstream.page.state.set({hover: null})")
    page.settle()
    assert legend.text.split() == ["long", "2", "short", "10"]  # the last that was logged, not its average


def test_no_logarithm(look, tmp_path):
    """A chart that cannot be logarithmic says so."""
    page = look(a_page(tmp_path / "page.html", a_view(negative=[-1.0, -2.0], positive=[1.0, 2.0])))
    page.driver.execute_script("slipstream.page.state.set({log: true})")
    page.settle()
    assert [("linear: nothing above 0" in entry.text) for entry in page.all("figure .legend")] == [True, False]


def test_thousands_of_names(look, tmp_path):
    """A page of thousands of names furnishes what is in sight."""
    names = {f"layer{number // 100}/weight{number}": [0.0, float(number)] for number in range(2000)}
    view = {**a_view(**names), "skipped": {"metrics.jsonl: points of too many names, such as 'last'": 3}}
    page = look(a_page(tmp_path / "page.html", view))
    assert "such as 'last'" in page.find(".left-out").text
    assert page.ask("slipstream.page.plots.length") == 2000
    assert 0 < page.ask("document.querySelectorAll('canvas[role=img]').length") < 100
    assert page.ask("document.querySelectorAll('details.group[open]').length") == 1
    page.find("#filter").send_keys("weight1999")
    page.canvas("layer19/weight1999")
    assert page.model("layer19/weight1999")["lines"][0]["last"] == 1999


def test_empty_run_and_direction_marks(look, tmp_path):
    """A run without points is drawn too and names cannot turn the text."""
    page = look(a_page(tmp_path / "page.html", {"name": "a\u202etxt.exe"}, left_out=[("runs/broken", "it has no run.json")]))
    assert page.find(".run-name").text == "a\\u202etxt.exe"
    assert page.driver.title == "a\\u202etxt.exe"
    assert "runs/broken" in page.find(".left-out").text
    assert "it has no run.json" in page.find("#skipped").text


def test_dashed_lines(look, tmp_path):
    """Lines beyond the eighth are dashed in the legend too."""
    page = look(a_page(tmp_path / "page.html", *(a_view(f"run{number}", loss=[float(number), 1.0]) for number in range(9))))
    dashed = "[...document.querySelectorAll(arguments[0])].map((one) => one.classList.contains('dash-1'))"
    for place in (".run .swatch", "figure .legend .swatch"):
        assert page.ask(dashed, place) == [False] * 8 + [True]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(look, pages, dark):
    """Light and dark as the system says and the other by a button."""
    def brightness() -> int:
        return sum(map(int, re.findall(r"\d+", page.ask("getComputedStyle(document.body).backgroundColor"))[:3]))

    page = look(pages["one"], dark=dark)
    page.driver.execute_script("localStorage.clear()")
    first = brightness(), page.model(LOSS)["lines"][0]["color"]
    assert (first[0] < 200) is dark
    page.find("#theme").click()
    assert (brightness() < 200) is not dark
    assert page.model(LOSS)["lines"][0]["color"] != first[1]
    page.find("#theme").click()
    assert (brightness(), page.model(LOSS)["lines"][0]["color"]) == first
    page.driver.execute_script("localStorage.clear()")


def test_user_text_escaped(look, pages):
    """Text of users stays text."""
    page = look(pages["hostile"])
    name = f"{HOSTILE}{'x' * 100}"
    canvas = page.canvas(f"{name}/{name}")
    assert canvas.get_attribute("aria-label").startswith(name)
    page.hover(f"{name}/{name}", 10 / 19)
    assert page.until_it(lambda: HOSTILE in page.find(".tip").text)
    assert page.ask("window.hacked") is None
    assert page.all("img, body script:not([id]) ~ script, iframe") == []
    assert page.find("#config").text.count(HOSTILE) >= 3
    for section in ("media", "events", "runs"):
        assert HOSTILE in page.find(f"#{section}").text


@pytest.mark.parametrize("which", ["one", "two", "hostile"])
def test_phone_width(look, pages, which):
    """Nothing is wider than a phone."""
    page = look(pages[which], width=400, height=800)
    page.driver.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    for button in page.all("figure:first-of-type .tools button:last-child")[:1]:
        page.driver.execute_script("arguments[0].click()", button)
    assert page.ask("innerWidth") == 400
    wide = """[...document.querySelectorAll("body *")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.right > innerWidth + 1 && box.width && !one.closest(".scroll, .unseen, .skip");
    }).map((one) => one.outerHTML.slice(0, 80))"""
    assert page.ask(wide) == []
    assert page.ask("document.documentElement.scrollWidth") <= 400


def test_accessibility(look, pages):
    """Everything has a name and the keyboard reaches it in order."""
    page = look(pages["two"])
    nameless = """[...document.querySelectorAll("button, input, select, canvas[role], [tabindex], a")].filter((one) => {
        const labels = [...(one.labels || [])].map((label) => label.textContent).join("");
        return !(one.getAttribute("aria-label") || one.textContent.trim() || labels.trim());
    }).map((one) => one.outerHTML)"""
    assert page.ask(nameless) == []
    assert page.ask("[...document.querySelectorAll('[tabindex]')].every((one) => one.tabIndex === 0)")
    reached = []
    for _ in range(24):
        page.press(Keys.TAB)
        here = "document.activeElement"
        reached.append(page.ask(f"[{here}.className, {here}.tagName, {here}.id].join(' ')"))
        assert page.ask(f"getComputedStyle({here}).outlineStyle !== 'none' || {here}.matches('.choices input')")
    assert reached[0].startswith("skip")
    order = [next(place for place, entry in enumerate(reached) if word in entry) for word in ("theme", "smoothing", "filter", "CANVAS")]
    assert order == sorted(order)


def test_data_table(look, pages):
    """A chart has its data as a table."""
    page = look(pages["two"])
    figure = page.find(f'figure[data-name="{LOSS}"]')
    button = figure.find_element("css selector", ".tools button:last-child")
    page.driver.execute_script("arguments[0].focus()", button)
    page.press(Keys.ENTER)
    heads = [element.text for element in figure.find_elements("css selector", "th")]
    assert heads == ["Step", "first", "second"]
    assert 100 < len(figure.find_elements("css selector", "tbody tr")) <= 400
    assert button.get_attribute("aria-pressed") == "true"


def test_ledger_and_ranks(look, pages):
    """The ledger and the ranks."""
    page = look(pages["one"])
    page.canvas("Time of a step")
    model = page.model("Time of a step")
    assert model["bars"] == STEPS // 2
    assert "waiting" in model["names"]
    assert model["y"][1] < 1
    assert page.find("#time .verdicts").text.count("Rank 2 was the last in") == 1
    page.driver.execute_script("[...document.querySelectorAll('#time .choices input')].find((one) => one.value === 'share').click()")
    assert page.model("Time of a step")["y"] == [0, 1]
    name = "Work of each rank, without waiting"
    page.canvas(name)
    assert page.model(name)["ranks"] == 4
    page.hover(name, 0.6, 8)
    told = page.until_it(lambda: page.find(".tip").text)
    assert re.search(r"rank 2\b.*\d ms of its own for each step.*slower than the median", told, re.DOTALL)


def test_area_labels(look, pages):
    """The name of an area stands in that area."""
    page = look(pages["one"])
    page.canvas("Time of a step")
    page.settle()
    inside = """(() => {
        const plot = slipstream.page.plots.find((one) => one.name === "Time of a step");
        return plot.model().labels.map(({ name, x, y }) => {
            const bar = plot.at(plot.fromX(x));
            const place = plot.names.indexOf(name);
            const floor = bar.parts.slice(0, place).reduce((sum, one) => sum + one, 0);
            return [name, plot.toY(floor) - y, y - plot.toY(floor + bar.parts[place])];
        });
    })()"""
    found = page.ask(inside)
    assert {"forward", "backward"} <= {name for name, *_ in found}
    assert all(below >= 6 and above >= 6 for _, below, above in found)


def test_events_on_charts(look, pages):
    """Events stand on every chart and say what they are."""
    page = look(pages["one"])
    kinds = [mark["kind"] for mark in page.model(LOSS)["marks"]]
    assert kinds == ["checkpoint", "restart", "checkpoint", "guard", "warning", "checkpoint"]
    page.hover(LOSS, (STEPS * 3 // 5 - 1) / (STEPS - 1))
    told = page.until_it(lambda: page.find(".tip").text)
    assert "The loss is no number." in told
    assert "Lower the learning rate" in told
    next(entry for entry in page.all(".controls .toggle") if entry.text == "Events").click()
    assert page.model(LOSS)["marks"] == []


def test_settings_and_origins(look, pages):
    """Settings have their origins and differences stand out."""
    page = look(pages["two"])
    rows = [entry.text for entry in page.all("#config tr.differs")]
    assert len(rows) == 2
    assert rows[0].split() == ["learning_rate", "0.0003", "0.001"]
    assert "from --num_processes" in page.find("#config").text
    next(entry for entry in page.all("#config .toggle") if entry.text == "Only differences").click()
    assert len(page.find("#config .comparison").find_elements("css selector", "tbody tr")) == 1


def test_images_and_tables_shown(look, pages):
    """Pictures and tables are in the page."""
    page = look(pages["one"])
    page.driver.execute_script("document.getElementById('media').scrollIntoView()")
    page.until("document.querySelector('.pictures img').naturalWidth === 96")
    assert "between" in page.find("#media table").text


def test_metric_search(look, pages):
    """A metric is found by its name."""
    page = look(pages["one"])
    page.find("#filter").send_keys("norm")
    page.settle()
    shown = page.ask("[...document.querySelectorAll('#curves figure:not([hidden])')].map((one) => one.dataset.name)")
    assert shown == ["train/gradient norm"]


def test_print_layout(look, pages):
    """On paper there are no controls."""
    page = look(pages["one"], dark=True)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    assert page.until("document.documentElement.dataset.theme === 'light'")
    assert page.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"
