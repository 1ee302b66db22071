"""A real browser for the stories of the live page: Debian's Chromium without a window, and what it shows."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_DEADLINE: Final = 60.0  # seconds
_NEEDED: Final = ("chromium", "chromedriver")
_OPTIONS: Final = (
    "--headless=new",
    "--no-sandbox",  # as root it starts without only; it sees no page but ours
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-proxy-server",
    "--hide-scrollbars",
)

# A page's clock at another speed.
_CLOCK: Final = """
const now = performance.now.bind(performance), later = setTimeout;
performance.now = () => %d * now();
window.setTimeout = (what, ms) => later(what, ms / %d);
"""

# The contrast of every text with what is painted under it, the least first: [[ratio, text], …].
_CONTRASTS: Final = """
const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (colour) => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = colour.slice(0, 3).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const under = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgba(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest("svg, noscript")) continue;
  const [one, other] = [light(rgba(getComputedStyle(element).color)), light(under(element))].sort((a, b) => b - a);
  found.push([(one + 0.05) / (other + 0.05), texts.currentNode.data]);
}
return found.sort((a, b) => a[0] - b[0]);
"""


def missing() -> str:
    """What there is no browser for; empty where all is there."""
    absent = [command for command in _NEEDED if shutil.which(command) is None]
    return f"no {' and no '.join(absent)} here: `make test` installs them as root" if absent else ""


class Browser:
    """One window. What waits does so until it is true, or fails with what the page says then."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, speed: int = 1) -> None:
        """Go there, with nothing of the console left from before. The page's clock runs `speed` times as fast."""
        made = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _CLOCK % (speed, speed)})
        self.driver.get(url)
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)

    @property
    def text(self) -> str:
        """All that is to be read."""
        return str(self.run("return document.body.innerText"))

    def card(self, title: str) -> str:
        """What the card of that title says, in one line; empty where there is none."""
        find = (
            "return [...document.querySelectorAll('.card')].find((card) => "
            "card.querySelector('h2, h3').textContent === arguments[0])?.innerText ?? ''"
        )
        return " ".join(str(self.run(find, title)).split())

    def run(self, script: str, *arguments: object) -> Any:
        """The value of a script's `return`."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, *parts: str, card: str | None = None) -> None:
        """Until every part can be read on the page, or in a card."""
        shown = ""
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end:
            shown = self.text if card is None else self.card(card)
            if all(part in shown for part in parts):
                return
            time.sleep(0.1)
        raise AssertionError(f"{parts} not shown within {_DEADLINE:g} s: {shown}")

    def complaints(self) -> list[str]:
        """What its console has said since this was asked last."""
        said = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [f"{entry['level']}: {entry['message']}" for entry in said]

    def contrasts(self) -> list[tuple[float, str]]:
        """The contrast of every text with its ground, the least first."""
        return [(float(ratio), str(text)) for ratio, text in self.run(_CONTRASTS)]

    def be(self, *, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """Of that size, on a system of that colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def browser() -> Iterator[Browser]:
    """A window, until the end of the block. Only where nothing is `missing`."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        made = Browser(driver)
        made.be()
        yield made
    finally:
        driver.quit()
