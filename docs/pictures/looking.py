"""Headless Chromium for tests and pictures of the report; nothing is downloaded, and nothing leaves this machine.

`chromium(profile)` starts it, `Looker(driver, page)` opens a page and waits for conditions, never for a fixed time.
"""

from __future__ import annotations

import base64
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 60
"""Seconds after which an unmet condition is a failure; no condition takes long."""

PLOT = "const plot = slipstream.page.plots.find((one) => one.name === arguments[0]);"

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


@contextmanager
def chromium(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """Open a browser with an empty profile, and close it at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the new way is not open to a local chromium
        options.ignore_local_proxy_environment_variables()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


class Looker:
    """One page in the browser."""

    def __init__(
        self, driver: Any, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        self.driver = driver
        self.may_complain = False
        wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features, "media": ""})
        self.resize(width, height, scale)
        driver.get(page if isinstance(page, str) else page.resolve().as_uri())
        self.until("performance.getEntriesByName('slipstream-drawn').length > 0")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)

    def ask(self, expression: str, *arguments: Any) -> Any:
        """Return the value of an expression in the page."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def until(self, expression: str, *arguments: Any) -> Any:
        """Wait until an expression is true, and return its value."""
        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.02).until(lambda _: self.ask(expression, *arguments))

    def until_it(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.02).until(lambda _: condition())

    def settle(self) -> None:
        """Wait two frames: the effect of the last key or mouse move has been drawn."""
        self.driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))")
        self.until("!slipstream.page.planned")

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def canvas(self, name: str) -> Any:
        """Return the canvas of a chart, visible and drawn."""
        found = self.until("[...document.querySelectorAll('figure.chart')].find((one) => one.dataset.name === arguments[0])", name)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        self.until(f"(() => {{ {PLOT} return plot.visible && !plot.dirty }})()", name)
        return found.find_element(By.CSS_SELECTOR, "canvas[role=img]")

    def model(self, name: str) -> Any:
        """Return the text description of a chart, after pending drawing."""
        self.settle()
        return self.ask("slipstream.model(arguments[0])", name)

    def at(self, name: str, part: float) -> tuple[Any, int]:
        """Return a position in a chart, given as a fraction of its width: the canvas, and pixels from its middle, for actions."""
        canvas = self.canvas(name)
        left, right, width = self.ask(f"(() => {{ {PLOT} return [plot.left, plot.right, plot.width] }})()", name)
        return canvas, round(left + part * (right - left) - width / 2)

    def hover(self, name: str, part: float, down: int = 0) -> None:
        canvas, right = self.at(name, part)
        ActionChains(self.driver, duration=0).move_to_element_with_offset(canvas, right, down).perform()

    def drag(self, name: str, start: float, end: float) -> None:
        canvas, first = self.at(name, start)
        _, last = self.at(name, end)
        chain = ActionChains(self.driver, duration=0).move_to_element_with_offset(canvas, first, 0).click_and_hold()
        chain.move_to_element_with_offset(canvas, last, 0).release().perform()

    def double_click(self, name: str) -> None:
        canvas, middle = self.at(name, 0.5)
        ActionChains(self.driver, duration=0).move_to_element_with_offset(canvas, middle, 0).double_click().perform()

    def click(self, selector: str) -> None:
        """Click on the first such element, after scrolling it to the middle of the window."""
        found = self.find(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def press(self, *keys: str, holding: str | None = None) -> None:
        """Send keys to the focused element."""
        chain = ActionChains(self.driver, duration=0)
        if holding:
            chain.key_down(holding)
        for key in keys:
            chain.key_down(key).key_up(key)
        if holding:
            chain.key_up(holding)
        chain.perform()

    def picture(self, path: Path, top: float, height: float, width: float) -> None:
        """Return a part of the page as a PNG, over its whole width."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))
