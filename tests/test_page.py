"""The pages as people read them: built as Ray's documentation is, seen in a browser.

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
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import render_readme

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.ipynb", "docs/guide.md", "benchmarks/README.md", "CONTRIBUTING.md"]
PAGES += ["docs/upstream.md"]
SOURCES = [ROOT / page.replace(".ipynb", ".md") for page in PAGES]  # as on GitHub
PHONE, DESKTOP = (390, 844), (1280, 900)

# What the browser tells of a page, without the marks that the theme adds.
READ_PAGE = """
const article = document.querySelector("article");
const all = selector => [...article.querySelectorAll(selector)];
const bare = (element, marks) => {
  const copy = element.cloneNode(true);
  copy.querySelectorAll(marks).forEach(mark => mark.remove());
  return copy.textContent.trim();
};
const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
const prose = [];
while (walker.nextNode()) {
  const [text, parent] = [walker.currentNode.data, walker.currentNode.parentElement];
  if (!parent.closest("pre, code, script, style"))
    prose.push(parent.closest("td") ? text.replace(/^- /, "") : text);  // no list there
}
return {
  headings: all("h1, h2, h3, h4, h5, h6")
    .map(h => [h.tagName.toLowerCase(), bare(h, ".headerlink")]),
  code: all("div[class*=highlight-]").map(block => ({
    language: block.className.match(/highlight-(\\S+)/)[1],
    text: block.querySelector("pre").textContent.trim(),
    colors: [...block.querySelectorAll("pre span[class]")]
      .filter(span => span.textContent.trim())
      .map(span => getComputedStyle(span).color),
    copies: block.querySelectorAll("button.copybtn").length,
  })),
  tables: all("table").map(table =>
    [...table.rows].map(row => [...row.cells].map(cell => cell.textContent.trim()))),
  images: all("img").map(i => ({src: i.getAttribute("src"), alt: i.alt,
    loaded: i.complete && i.naturalWidth > 0, width: i.clientWidth})),
  broken: all("a[href^='#']").map(a => a.getAttribute("href").slice(1))
    .filter(id => !document.getElementById(id)),
  files: all("a[href]").map(a => a.getAttribute("href"))
    .filter(href => !/^([a-z]+:|#)/.test(href)),
  outside: [...document.querySelectorAll("[src], link[href]")]
    .map(e => e.src || e.href).filter(url => /^https?:/.test(url)),
  prose: prose,
};
"""

# Where the header's links lead that can be clicked, once they all can.
READ_HEADER = """
const [header, done] = arguments;
const links = [...document.querySelectorAll(header + " .navbar-nav a.nav-link")];
const seen = link => {
  const {left, top, width, height} = link.getBoundingClientRect();
  return link.contains(document.elementFromPoint(left + width / 2, top + height / 2));
};
const end = performance.now() + 3000;
const poll = () => {
  const shown = links.filter(seen);
  if (shown.length === links.length || performance.now() > end)
    done(shown.map(link => link.href.split("#")[0]));
  else setTimeout(poll, 50);
};
poll();
"""

# Elements of the article that are cut off, or that make the page itself scroll sideways.
READ_WIDTHS = """
const article = document.querySelector("article");
const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const inside = e => e !== article && (scrolls(e) || inside(e.parentElement));
const all = [...article.querySelectorAll("*")].filter(e => e.checkVisibility());
const name = e => e.tagName + " " + e.textContent.trim().slice(0, 60);
return {
  window: window.innerWidth,
  page: document.documentElement.scrollWidth,
  out: all.filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
    .filter(e => !inside(e.parentElement) && !scrolls(e)).map(name),
  narrow: all.filter(e => e.matches("p, li, pre") && !e.closest("table"))
    .filter(e => e.getBoundingClientRect().width < window.innerWidth / 2).map(name),
  scrolling: all.filter(e => scrolls(e) && e.scrollWidth > e.clientWidth)
    .map(e => e.tagName),
};
"""

# The contrast of every piece of text with what is behind it, by WCAG 2.
READ_CONTRASTS = """
const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const cache = {};
const rgba = color => cache[color] ??= (() => {
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = color;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data];
})();
const behind = e => {
  if (!e) return rgba("white");
  const [r, g, b, a] = rgba(getComputedStyle(e).backgroundColor);
  if (a === 255) return [r, g, b];
  const below = behind(e.parentElement);
  return [r, g, b].map((c, i) => (c * a + below[i] * (255 - a)) / 255);
};
const luminance = color => [0.2126, 0.7152, 0.0722]
  .map((weight, i) => [weight, color[i] / 255])
  .map(([weight, c]) => weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((a, b) => a + b);
const article = document.querySelector("article");
const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
const contrasts = [];
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  const text = walker.currentNode.data.trim();
  if (!text || e.closest(".headerlink, button, script, style")) continue;
  const [light, dark] = [rgba(getComputedStyle(e).color), behind(e)]
    .map(luminance).sort((a, b) => b - a);
  contrasts.push([(light + 0.05) / (dark + 0.05), e.tagName, text.slice(0, 40)]);
}
return {
  theme: document.documentElement.dataset.theme,
  background: luminance(behind(article)),
  contrasts: contrasts,
};
"""


def need(found: bool, what: str) -> None:
    """Skip the test if something isn't installed; in CI, where it should be, fail."""
    if not found:
        message = f"needs {what}, which `bash ci/test.sh` installs"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def need_packages() -> None:
    for name in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton"):
        need(
            bool(importlib.util.find_spec(name)), f"{name} of ci/test-requirements.txt"
        )


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess:
    """Build the pages of the repository `root` into `folder`."""
    need_packages()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(root / "ci/docs.sh"), str(folder)],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the pages, built without a warning."""
    folder = tmp_path_factory.mktemp("pages") / "html"
    result = build(folder)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium, without its calls home."""
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    need(all(paths.values()), "Debian's chromium and chromium-driver")
    need(bool(importlib.util.find_spec("selenium")), "selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-quic "
        "disable-background-networking disable-component-update disable-sync "
        f"user-data-dir={profile}"
    ).split():
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService(paths["chromedriver"])
    with webdriver.Chrome(options, service) as driver:
        yield driver


@pytest.fixture(scope="module", params=PAGES)
def source(request) -> Path:
    """What a page is made from."""
    return ROOT / request.param


@pytest.fixture(scope="module")
def page(source, built) -> Path:
    """The page made from it."""
    return (built / source.relative_to(ROOT)).with_suffix(".html")


def look(browser, page: Path, size: tuple[int, int], scheme: str = "light") -> None:
    """Open the page as on a screen of `size` whose owner prefers `scheme`."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    screen = dict(zip(("width", "height"), size), deviceScaleFactor=1)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", screen | {"mobile": size == PHONE}
    )
    browser.get(page.as_uri())


@pytest.fixture(scope="module")
def seen(browser, page) -> dict:
    """What the browser shows on a desktop."""
    look(browser, page, DESKTOP)
    return browser.execute_script(READ_PAGE)


def parse(markdown: str) -> list:
    """Tokens of Markdown with tables and with typographic quotes, as the page has."""
    need_packages()
    from markdown_it import MarkdownIt  # comes with myst-nb

    parser = MarkdownIt("commonmark", {"typographer": True})
    return parser.enable(["table", "replacements", "smartquotes"]).parse(markdown)


def plain(inline) -> str:
    """The text of an inline token, without marks."""
    return "".join(
        " " if token.type == "softbreak" else token.content for token in inline.children
    )


@pytest.fixture(scope="module")
def written(source) -> dict:
    """What the page's source says, in the form of `seen`."""
    if source.suffix == ".ipynb":
        notebook = nbformat.read(source, as_version=4)
        notebook = render_readme.with_outputs(notebook)
        cells, info = notebook.cells, notebook.metadata.language_info
    else:
        cells, info = [nbformat.v4.new_markdown_cell(source.read_text())], {}
    found = {"headings": [], "code": [], "tables": [], "images": []}
    for cell in cells:
        if cell.cell_type == "code":
            language = info.get("pygments_lexer", info.name)
            found["code"].append((language, cell.source.strip()))
            continue
        tokens = parse(cell.source)
        for token, following in zip(tokens, tokens[1:] + [None]):
            if token.type == "heading_open":
                found["headings"].append([token.tag, plain(following)])
            elif token.type == "fence":
                found["code"].append((token.info.strip(), token.content.strip()))
            elif token.type == "table_open":
                found["tables"].append([])
            elif token.type == "tr_open":
                found["tables"][-1].append([])
            elif token.type in ("th_open", "td_open"):
                found["tables"][-1][-1].append(plain(following))
            for part in [token, *(token.children or [])]:
                if part.type == "image":
                    source = part.attrs["src"]
                    found["images"].append((Path(source).name, part.content))
                elif part.type in ("html_block", "html_inline"):
                    assert "<img" not in part.content, "write ![alt text](file)"
    return found


def test_headings(seen, written):
    assert seen["headings"] == written["headings"]
    assert [level for level, _ in seen["headings"]].count("h1") == 1


def test_code_blocks(seen, written):
    shown = [(block["language"], block["text"]) for block in seen["code"]]
    assert shown == written["code"]
    assert all(block["copies"] == 1 for block in seen["code"]), "no button to copy"
    colors = {}
    for block in seen["code"]:
        colors.setdefault(block["language"], set()).update(block["colors"])
        if block["language"] in ("python", "ipython3", "yaml"):
            assert len(set(block["colors"])) > 1, f"not highlighted: {block['text']}"
    for language in set(colors) - {"text", "none"}:
        assert colors[language], f"{language} is not highlighted"


def test_tables(seen, written):
    assert seen["tables"] == written["tables"]


def test_images(seen, written):
    shown = [(Path(image["src"]).name, image["alt"]) for image in seen["images"]]
    assert shown == written["images"]
    for image in seen["images"]:
        assert image["loaded"] and image["width"] > 100, image
        assert len(image["alt"]) > 20, f"{image['src']} needs a describing alt text"


def test_links_lead_somewhere(seen, page):
    assert not seen["broken"], "anchors"
    for link in seen["files"]:
        file, _, anchor = link.partition("#")
        assert (page.parent / file).is_file(), link
        if anchor:
            assert f'id="{anchor}"' in (page.parent / file).read_text(), link


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_header_leads_to_every_page(browser, page, built, size):
    look(browser, page, size)
    header = ".bd-header"
    if size == PHONE:  # the links are in a drawer, which slides in
        browser.find_element("css selector", ".bd-header .primary-toggle").click()
        header = "#pst-primary-sidebar-modal"
    found = browser.execute_async_script(READ_HEADER, header)
    pages = [(built / name).with_suffix(".html") for name in PAGES]
    assert found == [page.as_uri() for page in pages]


def test_modules_are_shown(built):
    """A link to a module leads to a page with its code."""
    for module in (ROOT / "trainkit").glob("*.py"):
        shown = (built / f"trainkit/{module.stem}.html").read_text()
        (code,) = re.findall(r"<pre>(.*?)</pre>", shown, re.S)
        code = html.unescape(re.sub(r"<[^>]+>", "", code))
        assert code.strip() == module.read_text().strip(), module.name


def test_no_markup_shows(seen):
    markup = (
        r"`|\*\*|\]\(|!\[|\[!|\[\^|^#{1,6} |^[-*+] |^\||\|---|:::|^>|</?\w+[^>]*>|&\w+;"
    )
    shown = [t for t in seen["prose"] if re.search(markup, t.strip(" "), re.MULTILINE)]
    assert not shown


def test_page_is_quiet_and_asks_nobody(browser, seen):
    """No error in the browser's console, and nothing loaded from another host."""
    errors = [
        e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"
    ]
    assert not errors
    assert not seen["outside"]


@pytest.mark.parametrize("size", [PHONE, (768, 1024), DESKTOP])
def test_page_never_scrolls_sideways(browser, page, written, size):
    look(browser, page, size)
    widths = browser.execute_script(READ_WIDTHS)
    assert not widths["out"], "wider than the page"
    assert widths["page"] <= widths["window"] == size[0]
    if size == PHONE:
        assert not widths["narrow"]
        widest = [max(map(len, code.splitlines())) for _, code in written["code"]]
        long = sum(width > 60 for width in widest)
        assert widths["scrolling"].count("PRE") >= long, "lines that are too long"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(browser, page, scheme):
    look(browser, page, DESKTOP, scheme)
    found = browser.execute_script(READ_CONTRASTS)
    assert found["theme"] == scheme
    assert found["background"] < 0.05 if scheme == "dark" else found["background"] > 0.9
    faint = [text for text in found["contrasts"] if text[0] < 4.5]
    assert len(found["contrasts"]) > 100 and not faint


def test_theme_can_be_switched(browser, built):
    look(browser, built / "README.html", DESKTOP)
    themes = []
    for mode in ("dark", "light", "auto"):
        browser.find_element("css selector", ".bd-header .theme-switch-button").click()
        browser.find_element(
            "css selector", f".bd-header button[data-mode={mode}]"
        ).click()
        themes.append(browser.execute_script("return document.documentElement.dataset"))
    assert [(t["mode"], t["theme"]) for t in themes] == [
        ("dark", "dark"),
        ("light", "light"),
        ("auto", "light"),
    ]


@pytest.mark.slow
def test_build_refuses_faults(tmp_path):
    """Each fault is a warning of Sphinx, and warnings are errors."""
    faults = {
        "no-such-step": "[here](#no-such-step)",
        "images/none.png": "![a plot](images/none.png)",
        "pythn": "```pythn\nx = 1\n```",
        "Non-consecutive header level": "##### Too deep",
        "no-such-section": "[there](docs/guide.md#no-such-section)",
        "trainkit/none.py": "[a module](trainkit/none.py)",
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/guide.md").write_text("# Another page\n")
    shutil.copy(render_readme.OUTPUTS, tmp_path / "docs")
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    text = "\n\n".join(["# A page", *faults.values()])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    nbformat.write(notebook, tmp_path / "README.ipynb")
    result = build(tmp_path / "html", tmp_path)
    assert result.returncode != 0
    for message in faults:
        assert message in result.stderr


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a file's headings."""
    tokens = parse(path.read_text())
    headings = [
        plain(b) for a, b in zip(tokens, tokens[1:]) if a.type == "heading_open"
    ]
    slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
    counts, found = Counter(), set()
    for slug in slugs:
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_on_github(path):
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_image_is_used():
    text = "".join(path.read_text() for path in SOURCES)
    for path in (ROOT / "images").iterdir():
        assert f"images/{path.name}" in text, f"{path.name} is on no page"


def test_outside_links_are_listed(capsys):
    """Printed for a person to open; tests have no network to try them with."""
    text = "\n".join(path.read_text() for path in SOURCES)
    links = set(re.findall(r"https?://[^\s)>\]\"'`]+", text))
    links = sorted(link for link in links if "//127.0.0.1" not in link)
    with capsys.disabled():
        print("\nOutside links of the pages:", *links, sep="\n  ")
    for link in links:
        assert re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", link.rstrip(".,;")), link
