"""The page of the server in a real browser."""

import shutil

import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from tests.helpers import serving
from tests.helpers.common import BACKEND

CHROMIUM, DRIVER = map(shutil.which, ("chromium", "chromedriver"))
FLAGS = (
    "--headless",
    "--no-sandbox",  # root may not have one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,900",
)
pytestmark = [
    pytest.mark.skipif(
        BACKEND != "tensorflow",
        reason="the page does not know which backend wrote the export",
    ),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs Chromium: apt-get install chromium chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    profile = tmp_path_factory.mktemp("profile")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    with webdriver.Chrome(options=options, service=service) as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = serving.export(tmp_path_factory.mktemp("serve") / "exported")
    with serving.running(folder) as (port, _):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def page(browser, address):
    page = Page(browser, address)
    yield page
    # Nothing was refused or broken that a visitor would not see.
    assert [x["message"] for x in browser.get_log("browser")] == []


class Page:
    """A visitor's hands and eyes, in a tab of its own."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.switch_to.new_window("tab")
        self.tab = browser.current_window_handle
        browser.get(address)

    def find(self, name):
        self.browser.switch_to.window(self.tab)
        return self.browser.find_element("id", name)

    def fill(self, **values):
        for name, value in values.items():
            box = self.find(name)
            box.clear()
            box.send_keys(str(value))

    def press(self, name):
        self.find(name).click()

    @property
    def status(self):
        return self.find("status").text

    @property
    def text(self):
        return self.find("text").get_property("textContent")

    @property
    def columns(self):
        return int(self.find("map").get_attribute("data-columns") or 0)

    def wait_for(self, condition, seconds=30):
        from selenium.webdriver.support.wait import WebDriverWait

        wait = WebDriverWait(self.browser, seconds, poll_frequency=0.05)
        wait.until(lambda _: condition())

    def on_growth(self, action):
        """Let the page itself act, in time, when its map has grown.

        A short text may be complete before a command from here arrives.
        """
        self.browser.execute_script(
            f"""
            window.seen = [];
            new MutationObserver(() => {{
              const columns = Number(element("map").dataset.columns || 0);
              {action}
            }}).observe(element("map"), {{attributes: true}});
            """
        )

    def painted_rows(self):
        """In how many rows of the map's first column there is colour."""
        return self.browser.execute_script(
            """
            const canvas = document.querySelector("#map canvas");
            const pen = canvas.getContext("2d");
            const scale = canvas.width / parseFloat(canvas.style.width);
            const {data} = pen.getImageData(
              (MARGIN + 4) * scale, 0, 1, 3 * CELL * scale);
            return [0, 1, 2].filter((slot) => {
              const at = 4 * Math.round((slot + .5) * CELL * scale);
              const rgb = data.slice(at, at + 3);
              return Math.max(...rgb) - Math.min(...rgb) > 40;
            }).length;
            """
        )


def test_text_and_map_grow_while_it_writes(page):
    page.fill(prompt="abc", length=3000, temperature=1, seed=3)
    page.on_growth(
        "window.seen.push([columns, element('text').textContent.length,"
        " element('status').textContent]);"
    )
    page.press("generate")
    page.wait_for(lambda: page.status == "done")
    seen = page.browser.execute_script("return window.seen")

    columns, lengths, words = zip(*(row for row in seen if row[0] > 0))
    assert len(set(columns)) > 2
    assert list(columns) == sorted(columns)
    assert list(lengths) == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert words[0].startswith("writing")
    assert page.text.startswith("abc")
    assert page.columns == 3 + 3000
    assert page.painted_rows() == 1
    assert "slot " in page.find("legend").text


def test_the_trained_model_writes_when_the_page_opens(browser, tmp_path):
    with serving.running(tmp_path, "--host", "127.0.0.1") as (port, _):
        page = Page(browser, f"http://127.0.0.1:{port}/")
        page.wait_for(lambda: page.status == "done")

        assert page.text.startswith("def ")
        assert page.columns == 4 + 400


def test_stop_stops(page):
    page.fill(prompt="abc", length=5000)
    page.on_growth("if (columns > 10) element('stop').click();")
    page.press("generate")
    page.wait_for(lambda: page.status == "stopped")
    assert page.columns < 5000
    assert page.find("generate").is_enabled()


def test_two_tabs_write_what_each_would_alone(browser, address, page):
    other = Page(browser, address)
    page.fill(prompt="a", length=800, seed=1)
    other.fill(prompt="b", length=800, seed=2)
    page.press("generate")
    other.press("generate")
    for tab in (page, other):
        tab.wait_for(lambda tab=tab: tab.status == "done")
    port = int(address.rstrip("/").rsplit(":")[-1])
    order = {"length": 800, "temperature": 0.7}

    assert page.text == serving.text(port, prompt="a", seed=1, **order)
    assert other.text == serving.text(port, prompt="b", seed=2, **order)


@pytest.mark.slow("tensorflow")
def test_a_refusal_is_shown(browser, page):
    page.fill(prompt="aX")
    page.press("generate")
    page.wait_for(lambda: "'X' (U+0058)" in page.status)
    assert page.find("status").get_attribute("class") == "wrong"
    assert page.find("generate").is_enabled()
    (log,) = browser.get_log("browser")  # of the answer's status
    assert "400" in log["message"]
