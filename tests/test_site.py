"""The site opens from disk, leads nowhere that is not there, and can be used with a keyboard, a screen reader and any screen."""

import html
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from helpers import ROOT

from common.errors import UserError
from common.packs.pack import all_packs, find
from common.publish import plot, site, timeline
from common.store import history

PACK = find("pack09")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def stored():
    return history.load(ROOT / "results", [PACK])


@pytest.fixture(scope="module")
def built(tmp_path_factory, stored):
    """The site of the stored receipts, with a second upstream and a stale receipt, so that there is something to filter."""
    odd = [
        replace(s, cell=replace(s.cell, dist="liger-kernel-nightly"), stale=True)
        for s in stored.of("pack09", PACK.package)
        if s.version == "0.8.5"
    ]
    output = tmp_path_factory.mktemp("built") / "site"
    site.build([PACK], history.History(runs=[*stored.runs, *odd]), output)
    return output


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.open = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.ids += [given["id"]] if "id" in given else []


class Stops(HTMLParser):
    """How many places the Tab key stops at: what lies in a closed <details> is none."""

    count = closed = 0

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        self.closed += tag == "details"
        reached = tag in ("a", "select", "input", "button", "summary") or told.get("tabindex") == "0"
        if reached and told.get("tabindex") != "-1" and (not self.closed or tag == "summary"):
            self.count += 1

    def handle_endtag(self, tag):
        self.closed -= tag == "details"


def test_a_cell_says_why_and_a_release_when(built):
    text = (built / "upstream-liger-kernel.html").read_text()
    assert "affected, fix validated, evidence" in text or "affected, evidence" in text
    why = PACK.expectation("0.7.0").why
    assert why in html.unescape(text)
    assert why in html.unescape((built / "release-liger-kernel-0.7.0.html").read_text())


def test_a_bug_that_is_in_no_release_leads_with_its_commit(tmp_path):
    pack = find("pack10")
    pages = dict(site._pages([pack], history.load(ROOT / "results", [pack]), None))
    assert "In no release; seen at d48bd6be0a" in pages["pack10.html"]


def test_every_link_leads_to_a_page_that_is_there(built):
    pages = list(built.glob("*.html"))
    assert len(pages) == 40, "overview, pack, two upstreams, 35 releases and a nightly"
    for path in pages:
        page = Page(path)
        assert len(page.ids) == len(set(page.ids)), path.name
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme == "https":
                assert parts.netloc == "github.com"
            elif parts.scheme != "data" and parts.path:
                assert (built / unquote(parts.path)).is_file(), f"{path.name}: {link}"


def test_nothing_is_fetched_from_elsewhere(built):
    for path in (p for p in built.rglob("*") if p.is_file()):
        text = path.read_text()
        assert not re.search(r"""(?:src=|@import|url\()\s*["']?(?:https?:)?//""", text), path
        for mark in (str(ROOT), "/home/", "/tmp/"):
            assert mark not in text, path


def test_peak_memory_is_drawn_from_a_run_that_measured_it():
    pack = find("pack02")
    runs = [s for s in history.load(ROOT / "results", [pack]).runs if s.version == "0.19.2"]
    drawn = dict(plot.curves(runs, "peaks"))["memory"]
    assert all(word in drawn for word in ("peak memory", "fused", "unfused", "32768", "prefers-color-scheme"))
    assert dict(plot.curves([s for s in runs if not s.cell.variant], "peaks")) == {}
    sweep = dict(plot.curves(history.load(ROOT / "results", [find("pack14")]).runs, "pack14"))
    assert len(sweep) == 8 and all("131072" in svg or "peaked" in name for name, svg in sweep.items())


def test_commits_are_said_that_are_in_no_release(tmp_path):
    pack = find("pack11")
    site.build([pack], history.load(ROOT / "results", [pack]), tmp_path / "site")
    text = (tmp_path / "site" / "pack11.html").read_text()
    assert "d48bd6be0a: BUG_REPRODUCED" in text
    assert "8a29fd5752: BUG_REPRODUCED" in text


def test_what_is_for_machines(built):
    assert msgspec.json.decode((built / "timeline.json").read_bytes(), type=timeline.Timeline).packs
    assert json.loads((built / "osv" / "x_REPRODUCER-PACK09.json").read_text())["affected"]
    assert ET.fromstring((built / "feed.xml").read_text()).tag.endswith("feed")
    for path in [*built.glob("plots/*.svg"), *built.glob("badges/*.svg")]:
        assert ET.fromstring(path.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    assert "#0a0001" not in (built / "plots" / "pack09-liger-kernel-linux-x86_64-cpu.svg").read_text()


def test_a_pack_page_says_what_one_looks_for(built):
    text = (built / "pack09.html").read_text()
    for words in (
        "First bad 0.5.3",
        "Scope NOT claimed",
        "commit/9ac26bb8",
        "issues/968",
        "nox -s pack09",
        "linkedin/Liger-Kernel",
    ):
        assert words in text
    assert PACK.script.read_text().splitlines()[5][:20] in text


def test_what_a_receipt_says_is_never_markup(tmp_path, stored):
    evil = '<script>alert(1)</script>"&'
    run = stored.of("pack09", PACK.package)[0]
    verdict = replace(run.verdict, outcome="CHANGED", reason=evil)
    pack = replace(PACK, title=evil)
    site.build([pack], history.History(runs=[replace(run, verdict=verdict, cell=run.cell.on("unpatched"))]), tmp_path / "site")
    for path in tmp_path.rglob("*.html"):
        assert "<script>alert" not in path.read_text(), path.name


def test_a_folder_of_somebody_else_is_not_touched(tmp_path, stored):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a site made by this command"):
        site.build([PACK], stored, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").is_file()
    site.build([PACK], history.History(), tmp_path / "site")
    assert "There is no receipt yet" in (tmp_path / "site" / "index.html").read_text()
    (tmp_path / "site" / "old.html").write_text("")
    site.build([PACK], stored, tmp_path / "site")
    assert not (tmp_path / "site" / "old.html").exists(), "a page that is no more is gone"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []


def test_the_command(cli, tmp_path):
    # All of pack09, and of the others what they pin: all 3,500 receipts take half a minute.
    chosen = [*(ROOT / "results").glob("*/machine.json"), *(ROOT / "results").glob("*/pack09/*")]
    for pack in all_packs():
        for path in (ROOT / "results" / "linux-x86_64-cpu" / pack.name).glob("*"):
            chosen += [path] if any(name in path.name for name in (*pack.pinned, *pack.variants)) else []
    for path in chosen:
        there = tmp_path / "some" / path.relative_to(ROOT / "results")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    words = ["site", "--output", tmp_path / "site", "--results", tmp_path / "some"]
    done = cli(*words, "--base-url", "https://github.com/me/packs/blob/main")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ pages\. Open ", done.stdout, re.MULTILINE)
    for pack in all_packs():
        assert (tmp_path / "site" / f"{pack.name}.html").is_file() == (pack.kind != "selftest")
    stops = Stops()
    stops.feed((tmp_path / "site" / "index.html").read_text())
    assert 40 < stops.count < 100, "one for each row, not one for each cell"
    for name in ("index", "pack09", "upstream-liger-kernel", "release-liger-kernel-0.8.5"):
        text = (tmp_path / "site" / f"{name}.html").read_text()
        for said in ("description", "og:title", "og:description"):
            assert re.search(rf'<meta (?:name|property)="{said}" content="[^"\n]{{10,}}">', text), (name, said)
    page = (tmp_path / "site" / "pack09.html").read_text()
    links = re.findall(r'href="(receipts/linux-x86_64-cpu/pack09/[^"]+)"', page)
    assert {link.rpartition(".")[2] for link in links} == {"json", "txt"}
    for link in links:
        assert (tmp_path / "site" / unquote(link)).is_file()
    assert "https://github.com/me/packs/blob/main/packs/pack09_liger_reduction_none/" in page
    assert "<dd>2.19.0</dd>" in (tmp_path / "site" / "pack26.html").read_text().replace("\n", "")
    assert "d48bd6be0a" in (tmp_path / "site" / "pack10.html").read_text().partition("Variants and commits")[2]
    for arguments, said in (
        (["--output", ROOT / "docs"], "is not a site made by this command"),
        (["--base-url", "here", "--output", tmp_path / "x"], "is not a URL"),
    ):
        done = cli("site", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]) as found,
    ):
        yield found


@pytest.fixture
def visit(browser, built):
    """Opens a page from disk; whatever the console complains of, or is asked of a network, is an error."""
    wrong, contexts = [], []

    def go(name, *, width=1280, scheme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url))
        page.goto(f"file://{built}/{name}")
        return page

    yield go
    for context in contexts:
        context.close()
    assert wrong == []


PAGES = ["index.html", "pack09.html", "upstream-liger-kernel.html", "release-liger-kernel-0.7.0.html"]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 2560])
@pytest.mark.parametrize("name", PAGES)
def test_accessible_on_any_screen(visit, name, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(name, width=width, scheme=scheme)
    # Not preloaded: for one rule, on rotation, axe would ask for the style sheet in a way that no page opened from disk may.
    found = Axe().run(page, options={"preload": False})
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"


@pytest.mark.browser
def test_from_the_overview_to_a_release_and_back(visit):
    page = visit("index.html")
    page.get_by_role("link", name="pack09, liger-kernel 0.8.1: affected, fix validated, evidence device:sm_90").click()
    assert page.title() == "liger-kernel 0.8.1 · Reproducer packs"
    page.get_by_role("link", name="0.8.2", exact=True).click()
    assert page.get_by_role("heading", level=1).inner_text() == "liger-kernel 0.8.2"
    page.get_by_role("link", name="pack09").first.click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("pack09:")
    assert page.locator("img.plot").first.evaluate("image => image.complete && image.naturalWidth > 0")
    page.get_by_text("Upstreams").click()
    page.get_by_role("navigation").get_by_role("link", name="liger-kernel", exact=True).click()
    assert "Pin liger-kernel==" in page.locator("main").inner_text()


@pytest.mark.browser
def test_filters_narrow_the_overview_and_stay_in_the_address(visit):
    page = visit("index.html")
    shown = page.locator("tr[data-upstream]:visible")
    assert shown.count() == 2
    page.locator("select[name=upstream]").select_option("liger-kernel-nightly")
    assert shown.count() == 1
    assert page.locator("#shown").inner_text() == "1 of 2 packs"
    assert page.get_by_role("heading", name="liger-kernel", exact=True).count() == 0
    page.reload()
    assert shown.count() == 1, "the address keeps the choice"
    search = page.get_by_label("Pack, package, release, issue")
    for words in ("liger_kernel", "0.8.5", "https://github.com/linkedin/Liger-Kernel/issues/968", "liger-kernel#968 none"):
        search.fill(words)
        assert shown.count() == 1, words
    search.fill("nothing is called so")
    assert shown.count() == 0
    assert page.get_by_text("No pack is like that.").is_visible()
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.getElementById('shown').textContent === '2 of 2 packs'")
    page.locator("select[name=verdict]").select_option("not affected")
    assert shown.count() == 2
    assert page.locator("select[name=kind] option").all_inner_texts() == ["all", "wrong-result"]


@pytest.mark.browser
def test_with_the_keyboard_alone(visit):
    page = visit("index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name=re.compile(r"^pack09, liger-kernel 0\.8\.5")).first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("pack09, liger-kernel 0.8.4")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.textContent") == "0.8.4"
    page.keyboard.press("Enter")
    page.wait_for_url("**/release-liger-kernel-0.8.4.html")


@pytest.mark.browser
def test_without_javascript_everything_is_there_but_the_filters(visit):
    page = visit("index.html", java_script_enabled=False)
    assert page.locator("tr[data-upstream]:visible").count() == 2
    assert not page.locator("#filters").is_visible()


def test_what_a_script_measured_is_drawn_over_releases():
    pack = find("pack31")
    runs = history.load(ROOT / "results", [pack]).of("pack31", pack.package)
    drawn = dict(plot.metrics(runs, "pack31"))
    assert set(drawn) == {"MiB", "seconds"}
    assert all(name in drawn["seconds"] for name in ("mamba_mimo_fwd", "mamba_mimo_bwd_bwd", "0.1.15"))
    assert dict(plot.metrics(runs[:1], "pack31")) == {}
