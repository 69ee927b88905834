"""The pages as people read them: built as documentation, and seen in a browser.

That links lead somewhere, Sphinx sees to, whose warnings are errors. The browser is Debian's
Chromium, which `bash ci/test.sh` installs. Where it is missing, its tests are skipped, except
in CI.
"""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accidents import missing
from conftest import ROOT
from selenium import webdriver

PAGES = ["README", "docs/guide", "benchmarks/README", "CONTRIBUTING", "docs/upstream"]

# What the browser shows of a page; what is cut off, or makes the page scroll sideways.
READ_PAGE = """
const article = document.querySelector("article");
const all = selector => [...article.querySelectorAll(selector)];
const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const inside = e => e !== article && (scrolls(e) || inside(e.parentElement));
const right = e => e.getBoundingClientRect().right;
return {
  images: all("img").map(i => ({src: i.getAttribute("src"), alt: i.alt,
    loaded: i.complete && i.naturalWidth > 0, width: i.clientWidth})),
  outside: [...document.querySelectorAll("[src], link[href]")]
    .map(e => e.src || e.href).filter(url => /^https?:/.test(url)),
  window: window.innerWidth,
  width: document.documentElement.scrollWidth,
  out: all("*").filter(e => e.checkVisibility() && right(e) > window.innerWidth + 1)
    .filter(e => !inside(e.parentElement) && !scrolls(e))
    .map(e => e.tagName + " " + e.textContent.trim().slice(0, 60)),
};
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the pages, built without a warning."""
    folder = tmp_path_factory.mktemp("pages") / "html"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"capture_output": True, "text": True, "env": os.environ | {"PATH": path}}
    result = subprocess.run(["bash", ROOT / "ci/docs.sh", folder], **options)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium, without its calls home."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        missing("Chromium and its driver, which `bash ci/test.sh` installs")
    options = webdriver.ChromeOptions()
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run "
        f"disable-background-networking disable-component-update user-data-dir={profile}"
    ).split():
        options.add_argument(f"--{argument}")
    with webdriver.Chrome(options) as driver:
        yield driver


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_what_its_source_says(page, built):
    shown = html.unescape(re.sub("<[^>]+>", "", (built / f"{page}.html").read_text()))
    text = (ROOT / f"{page}.md").read_text()  # as on GitHub
    code = re.findall(r"(?ms)^```\w*\n(.*?)^```", text)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = [h.replace("`", "") for h in re.findall(r"(?m)^#+ (.*)", prose)]
    shown = shown.replace("’", "'")
    assert [x for x in (*code, *headings) if x.strip() not in shown] == []
    for file in re.findall(r"`((?:configs|ci|trainkit|tests)/[\w./-]+\.\w+)`", prose):
        own = ("configs/books.yaml", "configs/mesh.yaml", "configs/mine.yaml")
        assert file in own or (ROOT / file).exists(), file  # a reader makes these


@pytest.mark.parametrize("width", [390, 1280])  # of a phone, and of a desktop
@pytest.mark.parametrize("page", PAGES)
def test_every_picture_is_shown_and_described(page, width, built, browser):
    """And nothing is wider than the page, which never scrolls sideways, or from elsewhere."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1}
    screen["mobile"] = width < 500
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get((built / f"{page}.html").as_uri())
    seen = browser.execute_script(READ_PAGE)
    shown = [(image["alt"], Path(image["src"]).name) for image in seen["images"]]
    text = (ROOT / f"{page}.md").read_text()
    assert shown == re.findall(r"!\[([^\]]+)\]\((?:\S*/)?([^/\s]+)\)", text)
    for image in seen["images"]:
        assert image["loaded"] and 100 < image["width"] <= seen["window"], image
        assert len(image["alt"]) > 20, f"{image['src']} needs a describing alt text"
    assert not seen["outside"], "loaded from elsewhere"
    assert not seen["out"], "wider than the page"
    assert seen["width"] <= seen["window"]
