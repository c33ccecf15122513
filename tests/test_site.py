"""The built site in a browser, on a desk and on a phone. `make test-site`."""

import functools
import json
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = pytest.mark.site
SITE = Path(os.environ.get("SITE", "out/site")).resolve()
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html"))
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
BROKEN_IMAGES = (
    "return [...document.images].filter(i => !i.complete || i.naturalWidth == 0).map(i => i.src)"
)
# What is too wide the theme hides, or it scrolls all of the text: the page itself never looks wide.
# The column of the text does. Tables and code scroll by themselves.
OVERFLOW = """
const found = []
for (let box = document.querySelector(".content"); box; box = box.parentElement)
    if (box.scrollWidth > box.clientWidth)
        found.push(`${box.tagName}.${box.className}: ${box.scrollWidth} in ${box.clientWidth}`)
return found
"""


class Files(SimpleHTTPRequestHandler):
    """The site's."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    """Where the site is served: relative to a host, as it will be."""
    files = functools.partial(Files, directory=SITE)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Named, because selenium would download what it does not find.
    options.binary_location = shutil.which("chromium")
    driver = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options, driver)
    yield browser
    browser.quit()


def requested_hosts(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    return {urlsplit(url).netloc for url in urls if not url.startswith("data:")}


def show(browser, url, width):
    """Opens a page in a window of that width, without what the last page has logged."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(url)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page(page, width, browser, address):
    show(browser, f"{address}/{page}", width)
    assert browser.execute_script(OVERFLOW) == []
    assert browser.execute_script(BROKEN_IMAGES) == []
    assert browser.get_log("browser") == []
    assert requested_hosts(browser) == {urlsplit(address).netloc}


def test_the_search(browser, address):
    show(browser, f"{address}/search.html?q=norm_group", 1280)
    result = By.CSS_SELECTOR, 'ul.search a[href*="training.html"]'  # they come one by one
    WebDriverWait(browser, 10).until(lambda browser: browser.find_elements(*result))
    assert requested_hosts(browser) == {urlsplit(address).netloc}
