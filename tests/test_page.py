"""The pages as people read them: built as documentation, seen in a browser, and on GitHub.

The browser is Debian's Chromium; `bash ci/test.sh` installs it, and Sphinx. Where
one of them is missing, these tests are skipped, except in CI.
"""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accidents import missing
from conftest import ROOT

PAGES = ["README.ipynb", "docs/guide.md", "benchmarks/README.md", "CONTRIBUTING.md"]
PAGES += ["docs/upstream.md"]
SOURCES = [ROOT / page.replace(".ipynb", ".md") for page in PAGES]  # as on GitHub
PHONE, DESKTOP = (390, 844), (1280, 900)

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


def need(*names: str) -> None:
    """Skip a test without these packages and programs, which `bash ci/test.sh` installs."""
    for name in names:
        if not (importlib.util.find_spec(name) or shutil.which(name)):
            missing(f"{name}, which `bash ci/test.sh` installs")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the pages, built without a warning."""
    need("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton")
    folder = tmp_path_factory.mktemp("pages") / "html"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"capture_output": True, "text": True, "timeout": 300}
    options["env"] = os.environ | {"PATH": path}
    result = subprocess.run(["bash", ROOT / "ci/docs.sh", folder], **options)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium, without its calls home."""
    need("selenium", "chromium", "chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-quic "
        "disable-background-networking disable-component-update disable-sync "
        f"user-data-dir={profile}"
    ).split():
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options, service) as driver:
        yield driver


@pytest.fixture(scope="module", params=PAGES)
def source(request) -> Path:
    """What a page is made from."""
    return ROOT / request.param


@pytest.fixture(scope="module", params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def seen(request, browser, source, built) -> dict:
    """What the browser shows of the page."""
    width, height = request.param
    screen = {"width": width, "height": height, "deviceScaleFactor": 1}
    screen["mobile"] = request.param == PHONE
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get((built / source.relative_to(ROOT)).with_suffix(".html").as_uri())
    return browser.execute_script(READ_PAGE)


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)


def headings(markdown: str) -> list[str]:
    return [
        h.replace("`", "") for h in re.findall(r"(?m)^#+ (.*)", without_code(markdown))
    ]


def test_page_shows_what_its_source_says(source, built):
    page = (built / source.relative_to(ROOT)).with_suffix(".html").read_text()
    shown = html.unescape(re.sub("<[^>]+>", "", page)).replace("’", "'")
    written = source.with_suffix(".md").read_text()  # as on GitHub
    code = re.findall(r"(?ms)^```\w*\n(.*?)^```", written)
    assert [x for x in (*code, *headings(written)) if x.strip() not in shown] == []
    assert len(re.findall("<h1", page)) == 1


def test_every_picture_is_shown_and_described(seen, source):
    """And nothing is wider than the page, which never scrolls sideways, or from elsewhere.

    That links lead somewhere, Sphinx sees to, whose warnings are errors.
    """
    shown = [(image["alt"], Path(image["src"]).name) for image in seen["images"]]
    text = source.with_suffix(".md").read_text()
    assert shown == re.findall(r"!\[([^\]]+)\]\((?:\S*/)?([^/\s]+)\)", text)
    for image in seen["images"]:
        assert image["loaded"] and 100 < image["width"] <= seen["window"], image
        assert len(image["alt"]) > 20, f"{image['src']} needs a describing alt text"
    assert not seen["outside"], "loaded from elsewhere"
    assert not seen["out"], "wider than the page"
    assert seen["width"] <= seen["window"]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a file's headings."""
    lower = map(str.lower, headings(path.read_text()))
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in lower}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_on_github(path):
    text = without_code(path.read_text())
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if re.match("https?:", link):
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", link), link
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for file in re.findall(r"`((?:configs|ci|trainkit|tests)/[\w./-]+\.\w+)`", text):
        own = file in ("configs/books.yaml", "configs/mesh.yaml", "configs/mine.yaml")
        assert own or (ROOT / file).exists(), file  # a reader makes these


def test_each_promise_is_held_by_a_test():
    table = (ROOT / "tests/README.md").read_text()
    for file, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", table):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text() or not name
