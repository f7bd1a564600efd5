"""The built site (site/, which `make docs` makes), served below /gradus/ as a code host would serve it: every link of every page leads
somewhere, every fragment is there, and nothing is loaded from another host; in Chromium equations are whole, code fits its column, and the
search finds what a user looks for. And what every page of docs/ keeps to."""

from __future__ import annotations

import http.client
import re
import threading
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus, unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"), key=str)
BASE = "/gradus/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_is_short_and_names_things_by_what_they_are(page):
    text = page.read_text(encoding="utf-8")
    lines, written = text.splitlines(), len(text.splitlines())
    if page.parent.name == "learn":  # a quarter of an hour: what its code prints and empty lines do not count, words do
        own = re.sub(r"^```(?:output|measured)\n.*?^```$", "", text, flags=re.M | re.S)
        written = sum(bool(line.strip()) and not re.match(r"</?(details|summary)\b", line) for line in own.splitlines())
        assert len(re.sub(r"^```.*?^```$", "", own, flags=re.M | re.S).split()) <= 1150, f"{page.name} has too many words"
        shown = [line for block in re.findall(r"^```(?!math)\w+\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
        assert max(map(len, shown), default=0) <= 105, f"{page.name}: a page is 105 columns of code wide"
        assert '<details markdown="1">' in text or page.name == "index.md", f"{page.name}: the answer of the exercise is folded"
    assert written <= 200, f"{page.name} has {written} lines: split it"
    for number, line in enumerate(lines, 1):
        assert not re.search(r"\bS[1-5]\b", line), f"{page.name}:{number}: say what the source is, not its number: {line}"


def test_every_page_is_in_the_index():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


class Page(HTMLParser):
    """A page's links, each with whether it is loaded with the page, and its fragments."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[tuple[str, bool]] = []
        self.ids = {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        said = dict(attributes)
        self.ids |= {said[name] for name in ("id", "name") if said.get(name)}
        loaded = tag != "a" and said.get("rel") not in ("next", "prev", "canonical")
        self.links += [(said[name], loaded) for name in ("href", "src", "poster", "data") if said.get(name)]


class Below(SimpleHTTPRequestHandler):
    """The folder below BASE, and nothing beside it."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self):
        if not self.path.startswith(BASE):
            self.send_error(404)
            return
        self.path = "/" + self.path.removeprefix(BASE)
        super().do_GET()

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def server():
    """The site, served."""
    assert (ROOT / "site" / "index.html").is_file(), "no site/: make docs builds it"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Below, directory=str(ROOT / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def get(server):
    """address below BASE -> (status, text), by HTTP, each once."""
    connection, known = http.client.HTTPConnection(*server.server_address), {}

    def get(path: str) -> tuple[int, str]:
        if path not in known:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            known[path] = answer.status, text
        return known[path]

    yield get
    connection.close()


@pytest.fixture
def visit(chromium, server):
    """visit(path, width) → the page of the site."""
    context = chromium.new_context(reduced_motion="reduce")
    context.set_default_timeout(60_000)
    page = context.new_page()

    def go(path, width=1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("http://{}:{}".format(*server.server_address) + BASE + path)
        return page

    yield go
    context.close()


@pytest.mark.docs
def test_every_link_of_the_site_leads_somewhere(get, record_property):
    site = ROOT / "site"
    paths = [BASE + str(file.relative_to(site)).removesuffix("index.html") for file in sorted(site.rglob("*.html")) if file.name != "404.html"]
    assert {BASE, BASE + "errata/", BASE + "experiments/"} < set(paths)
    parse = cache(lambda path: Page(get(path)[1]))
    wrong, checked = [], 0
    for path in paths:
        for link, loaded in parse(path).links:
            checked += 1
            target = urlsplit(urljoin(f"http://site{path}", link))
            if target.scheme in ("mailto", "data"):
                continue
            if target.netloc != "site":
                wrong += [f"{path} loads {link}"] if loaded else []
                continue
            if link.startswith("/") or not target.path.startswith(BASE):
                wrong.append(f"{path}: {link} leaves {BASE}")
                continue
            status, _ = get(target.path)
            if status != 200:
                wrong.append(f"{path}: {link} is not there ({status})")
            elif target.fragment and unquote(target.fragment) not in parse(target.path).ids:
                wrong.append(f"{path}: {link}: no such heading")
    for style in site.rglob("*.css"):
        wrong += [f"{style.name} loads {url}" for url in re.findall(r"url\(['\"]?(https?:[^)]+|//[^)]+)\)", style.read_text(encoding="utf-8"))]
    assert not wrong, f"{len(wrong)} of {checked} links\n" + "\n".join(sorted(set(wrong)))
    record_property("pages of the site", len(paths))
    record_property("links checked", checked)


LESSONS = [f"learn/{page.stem}/" for page in PAGES if page.parent.name == "learn" and page.stem != "index"]
NO_FONT = 'math { font-family: "DejaVu Sans", sans-serif !important }'  # none for mathematics: brackets are not stretched in it


@pytest.mark.docs
@pytest.mark.parametrize(("width", "font"), [(420, NO_FONT), (1280, "")], ids=["phone, no font", "laptop"])
def test_equations_are_whole(visit, width, font):
    """Nothing that an equation draws is cut off above or below, and brackets are as high as what they hold; all equations on one page."""
    built = "".join((ROOT / "site" / path / "index.html").read_text(encoding="utf-8") for path in LESSONS)
    equations = re.findall(r'<div class="equation">.*?</div>', built, re.S)
    assert len(equations) == sum(page.read_text(encoding="utf-8").count("\n```math\n") for page in PAGES)
    page = visit(LESSONS[0], width)
    page.add_style_tag(content=f"/* */ {font}")
    article = page.locator("article")
    article.evaluate("(e, equations) => { e.innerHTML = equations }", "".join(equations))
    shown = article.screenshot()
    page.add_style_tag(content=".md-typeset .equation { overflow: visible }")
    assert article.screenshot() == shown, "an equation is cut off"
    heights = page.eval_on_selector_all("mpadded > mo", """all => all.map(mo => [mo.getBoundingClientRect().height, Math.max(
        ...[...mo.parentElement.parentElement.children].filter(e => e.matches('mfrac, mtable')).map(e => e.getBoundingClientRect().height))])""")
    assert len(heights) > 8 and all(bracket > 0.7 * held for bracket, held in heights)


@pytest.mark.docs
def test_code_fits_its_column(visit):
    """On a laptop's screen no block of a page to learn from scrolls; all blocks on one page."""
    built = "".join((ROOT / "site" / path / "index.html").read_text(encoding="utf-8") for path in LESSONS)
    blocks = re.findall(r"<pre\b.*?</pre>", built, re.S)
    page = visit(LESSONS[0])
    page.locator("article").evaluate("(e, blocks) => { e.innerHTML = blocks }", "".join(blocks))
    wide = page.eval_on_selector_all("article pre > code", "all => all.map(e => [e.scrollWidth - e.clientWidth, e.innerText])")
    assert len(wide) == len(blocks) > 150 and [text for more, text in wide if more > 0] == []


@pytest.mark.docs
def test_why_is_not_squeezed_in_the_errata(visit):
    for width, least in ((1280, 300), (420, 300)):
        page = visit("errata/", width)
        assert min(page.eval_on_selector_all("tbody td:nth-child(3)", "all => all.map(e => e.clientWidth)")) >= least
        assert page.eval_on_selector_all("article table", "all => all.every(e => e.scrollWidth <= e.clientWidth)"), f"a table scrolls at {width}"


QUERIES = {
    "LoRA": "adapters/", "out of memory": "ladder/#out-of-memory", "Slurm": "launch/#slurm", "resume": "layouts/#checkpoints-start-stop-resume",
    "learning rate": "train/#the-learning-rate", "mixed precision": "ladder/#mixed-precision-bf16-fp16",
    "checkpoint": "layouts/#checkpoints-start-stop-resume", "export ONNX": "export/", "own data": "your-data/",
    "quantize": "inference/#quantized-models",
}


@pytest.mark.docs
def test_the_search_finds_how_to_do_it_first(visit):
    """Typed into the site's own search: the first of its results."""
    page, found = visit(""), {}
    page.click(".md-search__button")
    for query in QUERIES:
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        results = page.locator('a[href*="?h="]')
        results.first.wait_for(state="detached")  # of the query before
        page.keyboard.insert_text(query)
        marked = f"?h={quote_plus(query)}"
        first = page.locator(f'a[href*="{marked}"]').first
        first.wait_for()
        found[query] = first.get_attribute("href").replace(marked, "").split(BASE)[1]
    assert found == QUERIES
