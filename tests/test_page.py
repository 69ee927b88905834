"""The pages as people read them: built as documentation, and seen in a browser."""

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

READ_PAGE = """
const images = [...document.querySelectorAll("article img")];
const files = [...document.querySelectorAll("[src], link[href]")];
return {
  images: images.map(i => [i.alt, i.getAttribute("src").split("/").pop()]),
  hidden: images.filter(i => !i.naturalWidth || i.clientWidth < 100).map(i => i.src),
  outside: files.map(e => e.src || e.href).filter(url => /^https?:/.test(url)),
  width: document.documentElement.scrollWidth,
};
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the pages, without a warning, such as of a link to nothing."""
    folder = tmp_path_factory.mktemp("pages") / "html"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", ROOT / "ci/docs.sh", folder]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        missing("Chromium and its driver, which `bash ci/test.sh` installs")
    options = webdriver.ChromeOptions()
    for name in ("headless", "no-sandbox", "disable-dev-shm-usage"):
        options.add_argument(f"--{name}")
    with webdriver.Chrome(options) as driver:
        yield driver


@pytest.mark.parametrize("width", [390, 1280])  # of a phone, and of a desktop
@pytest.mark.parametrize("page", PAGES)
def test_every_picture_is_shown_and_described(page, width, built, browser):
    """And nothing comes from elsewhere, or makes the page scroll sideways."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get((built / f"{page}.html").as_uri())
    seen = browser.execute_script(READ_PAGE)
    text = (ROOT / f"{page}.md").read_text()
    expected = re.findall(r"!\[([^\]]+)\]\((?:\S*/)?([^/\s]+)\)", text)
    assert seen["images"] == [[*image] for image in expected]
    assert seen["hidden"] == seen["outside"] == []
    assert seen["width"] <= width
