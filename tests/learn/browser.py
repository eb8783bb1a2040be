"""Headless Chromium through its driver, for tests of the page; `unavailable()` says why there is none."""

from __future__ import annotations

import base64
import importlib.util
import shutil

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
