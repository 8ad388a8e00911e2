"""The live page in a real Chromium, fed by a real API server whose state the test changes."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from swarmnode.api import ApiServer, feed
from tests.unit.api.example_state import START, example_state, node_row

pytestmark = [pytest.mark.browser]

TOKEN = "correct-horse-battery"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>x</b>"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A server with a state to change, a page that follows it, and what the browser complained about."""

    server: ApiServer
    page: Page
    state: dict[str, Any] = field(default_factory=example_state)
    failure: Exception | None = None
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def get_state(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return dict(self.state)

    def open(self, path: str = "/") -> None:
        self.page.goto(f"http://127.0.0.1:{self.server.port}{path}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def row(self, name: str) -> list[str]:
        line = self.page.locator("table.nodes tbody tr").filter(has_text=name)
        return [" ".join(cell.split()) for cell in line.locator("th, td").all_inner_texts()]


@pytest.fixture
def watched(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(feed, "PUSH_INTERVAL_S", 0.05)
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(10_000)
    watched = Watched(ApiServer("127.0.0.1", 0, None, lambda: watched.get_state()), page)
    page.on("console", lambda said: watched.complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("request", lambda request: watched.hosts.add(urlsplit(request.url).netloc))
    watched.server.start()
    yield watched
    page.close()
    watched.server.stop()


def test_the_page_shows_what_the_state_says(watched: Watched) -> None:
    watched.open()
    expect(watched.page.locator("#accuracy-now")).to_have_text(
        "83.6 %"
    )  # 0.87 − (0.87 − 0.328125)·e^(−50/18)
    assert watched.text("#accuracy-note") == "32.8 % at start, +50.8 points"
    assert watched.text("#version-now") == "v58"
    assert watched.text("#version-note") == "58 updates, 58 published"
    assert watched.text("#groups-now") == "928"
    assert watched.text("#groups-note") == "5 refused, 850 trained on"
    assert watched.text("#nodes-now") == "4"
    assert watched.text("#nodes-note") == "1 learner, 2 workers, 1 relay"
    assert watched.text("#run-name") == "demo"
    assert watched.page.title() == "83.6 % · demo"
    cedar = watched.row("cedar-worker")
    assert cedar[1:5] == ["worker", "live", "fleet", "v57 1 behind"]
    assert cedar[5:] == ["41.6", "884", "408", "3", "0", "–", "612 MB"]
    assert watched.page.locator("table.nodes tbody th").first.inner_text().startswith("amber-learner")
    assert watched.page.locator("#accuracy-chart circle.point").count() == 6
    assert watched.page.locator("#reward-chart circle.raw").count() == 59
    assert watched.page.locator("#reward-chart path.line").count() == 1
    assert watched.page.locator("#staleness-chart .bar-value").all_text_contents() == [
        "310",
        "402",
        "121",
        "17",
    ]
    assert watched.text("#staleness-note") == "Largest 3, bound S = 4: no group was staler."
    assert watched.page.locator("#refused .reason-name").all_inner_texts() == ["too stale", "replayed"]
    assert watched.page.locator("#events li").count() == 4
    assert "the rollout process ended" in watched.page.locator("#events li").first.inner_text()
    assert watched.text("#invite") == f"swarmnode join {watched.state['node']['invite']}"
    assert "sent no groups" in watched.text("#contribution")
    assert not watched.page.locator("#banner").is_visible()
    assert watched.complaints == []
    assert watched.hosts == {f"127.0.0.1:{watched.server.port}"}


def test_the_page_follows_a_changing_state(watched: Watched) -> None:
    watched.open()
    expect(watched.page.locator("#version-now")).to_have_text("v58")
    state = example_state()
    state["policy"]["version"] = 59
    state["nodes"][1] |= {"state": "gone", "last_seen_s": 14.0}
    state["nodes"].append(node_row("elm-worker", "worker"))
    state["series"]["reward"].append({"t": START + 118, "version": 59, "value": 0.9, "policy": "fleet"})
    state["refused"] = {}
    state["my_contribution"] = {
        "accepted": 7,
        "refused": {"no_credit": 2},
        "last_accepted_s": 3.0,
        "last_refusal": "no_credit: version 31 is served",
    }
    watched.state = state
    expect(watched.page.locator("#version-now")).to_have_text("v59")
    assert watched.row("birch-worker")[2] == "gone seen 14 s ago"
    assert watched.page.locator("table.nodes tbody th").last.inner_text().startswith("birch-worker")
    assert watched.text("#nodes-note") == "1 learner, 2 workers, 1 relay, 1 gone"
    assert watched.page.locator("table.nodes tbody tr").count() == 5
    assert watched.page.locator("#reward-chart circle.raw").count() == 60
    assert "Nothing was refused." in watched.text("#refused")
    assert watched.text("#contribution").split("\n")[0] == "7 groups accepted, 2 refused"
    watched.state = example_state()
    expect(watched.page.locator("table.nodes tbody tr")).to_have_count(4)
    assert watched.complaints == []


def test_the_last_update_is_shown_by_the_age_of_its_tokens_and_a_halt_in_red(watched: Watched) -> None:
    watched.open()
    rows = watched.page.locator("#ages-rows tr")
    expect(rows).to_have_count(3)
    assert rows.nth(2).locator("th, td").all_inner_texts() == [
        *("3–4", "420", "1.310", "3.930", "0.155", "76.3 %", "1.0 %", "0.0 %", "0.550"),
    ]
    assert watched.page.locator("#ages-heads th").count() == 9
    reason = "training halted: the policy has collapsed, entropy was below 0.001 for 5 updates"
    watched.state["learner"] |= {"state": reason, "halted": reason}
    expect(watched.page.locator("#doing.bad")).to_have_text(f" · {reason}")
    watched.state["learner"] |= {"state": "training", "halted": None, "by_age": {}}
    expect(watched.page.locator("#ages")).to_be_hidden()
    assert not watched.page.locator("#doing.bad").count()
    assert watched.complaints == []


def test_an_empty_state_and_a_missing_policy_are_shown_calmly(watched: Watched) -> None:
    watched.state |= {
        "policy": None,
        "learner": None,
        "series": {"reward": [], "accuracy": []},
        "staleness": {},
        "refused": {},
        "events": [],
        "nodes": watched.state["nodes"][3:],
    }
    watched.state["node"] |= {"invite": None}
    watched.open()
    expect(watched.page.locator("#accuracy-note")).to_have_text("not evaluated yet")
    assert watched.text("#version-note") == "no policy here"
    assert "No update yet" in watched.text("#reward-chart")
    assert watched.page.locator("#invite-none").is_visible()
    assert watched.complaints == []


def test_a_worker_shows_how_far_the_weights_have_come(watched: Watched) -> None:
    fetched = {"what": "snapshot of version 3", "done_bytes": 96_600_000, "total_bytes": 269_000_000}
    watched.state |= {
        "learner": None,
        "policy": watched.state["policy"] | {"version": None, "swarm_version": 3, "lag": None},
        "transfer": {**fetched, "percent": 35.9, "bytes_per_s": 12_100_000.0},
    }
    watched.open()
    assert watched.text("#version-note") == "fetching the snapshot of version 3: 35 % of 269 MB, 12.1 MB/s"
    watched.state["transfer"] = None
    expect(watched.page.locator("#version-note")).to_have_text("the newest known")
    assert watched.complaints == []


def test_what_peers_say_is_never_taken_for_html(watched: Watched) -> None:
    state = watched.state
    state["nodes"].append(node_row(HOSTILE, HOSTILE, policy=HOSTILE, state="gone"))
    state["run"] |= {"name": HOSTILE, "model": HOSTILE}
    state["node"] |= {"name": HOSTILE, "invite": HOSTILE}
    state["refused"] = {HOSTILE: 4}
    state["groups"]["external_consumed"] = {HOSTILE: 4}
    state["my_contribution"] |= {"accepted": 1, "last_refusal": HOSTILE}
    state["events"].append({"t": START, "level": HOSTILE, "text": HOSTILE})
    state["series"]["reward"].append({"t": START + 9, "version": 1, "value": 0.1, "policy": HOSTILE})
    watched.open()
    expect(watched.page.locator("#run-name")).to_have_text(HOSTILE)
    assert watched.row(HOSTILE)[0].startswith(HOSTILE)
    assert HOSTILE in watched.text("#events")
    assert HOSTILE in watched.text("#reward-chart .legend")
    watched.page.locator("#reward-chart svg").hover()
    assert HOSTILE in watched.text("#reward-chart .readout")
    assert watched.page.locator("img, #page b b, script:not([src])").count() == 0
    assert watched.page.title() == f"83.6 % · {HOSTILE}"
    assert watched.complaints == []


def test_pointer_and_arrow_keys_read_single_points(watched: Watched) -> None:
    watched.open()
    chart = watched.page.locator("#accuracy-chart svg")
    chart.hover(position={"x": 50, "y": 120})
    assert re.search(r"fleet v0\s*32\.8 %", watched.text("#accuracy-chart .readout"))
    watched.page.mouse.move(0, 0)
    assert not watched.page.locator("#accuracy-chart .readout").is_visible()
    chart.focus()
    watched.page.keyboard.press("ArrowLeft")
    assert re.search(r"fleet v50\s*83\.6 %", watched.text("#accuracy-chart .readout"))
    watched.page.keyboard.press("ArrowLeft")
    assert "fleet v40" in watched.text("#accuracy-chart .readout")
    assert (chart.get_attribute("aria-label") or "").startswith(
        "Held-out accuracy over time: fleet from 32.8 % to 83.6 % over 6 points"
    )


def test_a_lost_connection_is_announced_and_found_again(watched: Watched) -> None:
    watched.open()
    banner = watched.page.locator("#banner")
    expect(watched.page.locator("#version-now")).to_have_text("v58")
    assert watched.complaints == []
    watched.server.stop()
    expect(banner).to_be_visible()
    expect(banner).to_contain_text(re.compile(r"Connection lost since \d\d:\d\d:\d\d: "))
    expect(watched.page.locator("#link-text")).to_have_text("not connected")
    assert watched.text("#version-now") == "v58"
    state = example_state()
    state["policy"]["version"] = 60
    watched.state = state
    again = ApiServer("127.0.0.1", watched.server.port, None, watched.get_state)
    again.start()
    try:
        expect(banner).to_be_hidden()
        expect(watched.page.locator("#version-now")).to_have_text("v60")
        expect(watched.page.locator("#link-text")).to_have_text("live")
    finally:
        again.stop()


def test_a_node_that_cannot_tell_its_state_says_so(watched: Watched) -> None:
    watched.open()
    expect(watched.page.locator("#version-now")).to_have_text("v58")
    watched.failure = KeyError("ledger")
    expect(watched.page.locator("#banner")).to_contain_text(
        "the node cannot tell its state (KeyError: 'ledger')"
    )
    watched.failure = None
    expect(watched.page.locator("#banner")).to_be_hidden()
    assert watched.complaints == []


def test_the_invite_can_be_copied(watched: Watched) -> None:
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched.open()
    watched.page.get_by_role("button", name="Copy").click()
    expect(watched.page.locator("#copied")).to_have_text("Copied.")
    copied = watched.page.evaluate("navigator.clipboard.readText()")
    assert copied == f"swarmnode join {watched.state['node']['invite']}"


def test_a_token_is_taken_from_the_address_or_asked_for(watched: Watched) -> None:
    watched.server.stop()
    watched.server = ApiServer("0.0.0.0", 0, TOKEN, watched.get_state)
    watched.server.start()
    page = watched.page
    watched.open()
    expect(page.get_by_label("Token")).to_be_visible()
    assert not page.locator("#page").is_visible()
    page.get_by_label("Token").fill("wrong-wrong-wrong-wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-wrong")).to_be_visible()
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#version-now")).to_have_text("v58")
    page.evaluate("sessionStorage.clear()")
    watched.open(f"/?token={TOKEN}")
    expect(page.locator("#version-now")).to_have_text("v58")
    assert page.url == f"http://127.0.0.1:{watched.server.port}/"
    page.reload()
    expect(page.locator("#version-now")).to_have_text("v58")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_cut_off(watched: Watched, width: int, scheme: str) -> None:
    watched.state["nodes"][2] |= {
        "name": "n" * 64,
        "state": "gone",
        "last_seen_s": 40_000.0,
        "policy": "p" * 64,
    }
    watched.state["node"]["listen_addrs"] = ["/ip4/203.0.113.77/tcp/40123/p2p/" + "Q" * 52]
    watched.page.set_viewport_size({"width": width, "height": 900})
    watched.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    watched.open()
    expect(watched.page.locator("#version-now")).to_have_text("v58")
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    table = watched.page.locator("#nodes-table")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    assert watched.page.locator("#nodes-table").get_by_role("row").count() == 5
    colours = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours == ("rgb(18, 21, 26)" if scheme == "dark" else "rgb(245, 246, 248)")
    assert watched.complaints == []
