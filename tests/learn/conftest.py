"""The tests share simulator.py and browser.py, and the page in a browser."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import browser

from tilewise.lab.learn import page


@pytest.fixture(scope="module")
def driver():
    if browser.unavailable():
        pytest.skip(browser.unavailable())
    started = browser.start()
    yield started
    started.quit()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "learn.html"
    path.write_text(page.build())
    return path.as_uri()


@pytest.fixture
def shown(driver, url):
    """The page, fresh; afterwards nothing may have been logged or loaded."""
    browser.set_width(driver, None)
    browser.set_scheme(driver, "light")
    driver.get(url)
    yield browser.Page(driver)
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').map((x) => x.name)") == []
