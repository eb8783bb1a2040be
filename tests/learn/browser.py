"""Headless Chromium through its driver, for tests of the page; `unavailable()` says why there is none."""

from __future__ import annotations

import base64
import importlib.util
import shutil

from tilewise.lab.learn import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


def unavailable() -> str | None:
    if importlib.util.find_spec("selenium") is None:
        return "the package selenium is not installed"
    if CHROMIUM is None or DRIVER is None:
        return "no chromium with chromedriver here (Debian: apt-get install chromium chromium-driver)"
    return None


def start():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "hide-scrollbars",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    return driver


def set_scheme(driver, scheme: str, motion: str = "reduce") -> None:
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": motion},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def set_width(driver, width: int | None) -> None:
    """A phone's or tablet's width, with touch; None for the window's own."""
    if width is None:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        return
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})


def screenshot(driver, section: str) -> bytes:
    """A PNG of the whole of a section, however long it is."""
    place = "const r = document.getElementById(arguments[0]).getBoundingClientRect();"
    x, y, width, height = driver.execute_script(
        f"{place} return [r.x + scrollX, r.y + scrollY, r.width, r.height]", section
    )
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(found["data"])


class Page:
    """The page as a person has it: what is seen, and input with its events."""

    def __init__(self, driver):
        self.driver = driver

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str):
        return self.driver.find_elements("css selector", selector)

    def text(self, name: str) -> str:
        return self.driver.execute_script("return document.getElementById(arguments[0]).textContent", name)

    def set(self, name: str, value) -> None:
        """As a person's input would: the value and its event."""
        self.driver.execute_script(
            "const x = document.getElementById(arguments[0]); x.value = arguments[1];"
            "x.dispatchEvent(new Event('input', {bubbles: true}))",
            name,
            str(value),
        )

    def click(self, selector: str) -> None:
        self.driver.execute_script("arguments[0].click()", self.find(selector))

    def cells(self, selector: str) -> list[list[str]]:
        """Text of a table's body, without row headings."""
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
            ".map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))",
            selector,
        )

    def run(self, code: str, *arguments):
        """JavaScript with the page's own arithmetic at hand."""
        arithmetic = page._scoped("arithmetic", page._part("arithmetic.js"))
        return self.driver.execute_script(f"{arithmetic}\n{code}", *arguments)


def as_text(x: float, digits: int) -> str:
    """What the page writes for a number."""
    if x == float("-inf"):
        return "−∞"
    if abs(x) < 1e6 and x == round(x):
        return str(int(x)).replace("-", "−")
    small = abs(x) < 0.5 * 10.0**-digits
    if small:
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent):+d}".replace("-", "−")
    return f"{x:.{digits}f}".replace("-", "−")


def wait(shown, condition: str, seconds: float = 10) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(shown.driver, seconds, poll_frequency=0.1).until(lambda d: d.execute_script(condition))
