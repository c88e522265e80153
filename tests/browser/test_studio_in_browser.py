"""The studio as somebody clicks through it, and what the browser posts meanwhile."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from chromium import LONGEST_WAIT, picture
from serving import Served, serving_here
from studio_runs import MARKUP, POSTS, make_runs

pytestmark = pytest.mark.browser
expect.set_options(timeout=LONGEST_WAIT)
ODD = "**a**  b &amp; <i>c</i>\n    `d` $$x^2$$ <think>"
COUNTED = re.compile(r"^\d+ tokens, mean log-probability -\d")
NUMBERS = ("temperature (0: greedy)", "top p", "longest reply (0: as trained)", "seed")


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = make_runs(tmp_path_factory.mktemp("runs"))
    with serving_here("tiny", "--runs-dir", str(runs), command="studio") as served:
        yield served


@contextmanager
def plain_page() -> Iterator[int]:
    """Serve an empty page on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, format: str, *about: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Visitor:
    """Somebody at the studio's page. ``posts``: what the browser sent, by the name of what was done."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.posts, self.doing = page, list[dict[str, Any]](), "open"
        self.num_streams = 0
        page.on("request", self._note)
        page.on("requestfinished", self._count)
        page.on("requestfailed", self._count)
        with self.answered():
            page.goto(url)
        expect(self.question).to_be_visible()

    def _note(self, request: Any) -> None:
        if request.url.partition("?")[0].endswith("/queue/join"):
            post = json.loads(request.post_data)
            post.pop("session_hash")
            self.posts.append({"doing": self.doing, "post": post})

    def _count(self, request: Any) -> None:
        self.num_streams += "/queue/data" in request.url

    @property
    def question(self) -> Locator:
        return self.page.locator("#question textarea")

    def field(self, label: str) -> Locator:
        return self.page.get_by_label(label, exact=True).first

    def choose(self, label: str, option: str) -> None:
        self.field(label).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def facts(self, side: int = 0) -> Locator:
        return self.page.locator(f"#facts-{side} textarea")

    def ask(self, doing: str, text: str | None = None) -> None:
        """Send a message with Enter."""
        self.doing = doing
        if text is not None:
            self.question.fill(text)
        with self.answered():
            self.question.press("Enter")

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Wait until the server has said all that what is done here makes it say."""
        before = self.num_streams
        yield
        while self.num_streams == before:  # the page hangs up on some streams that have nothing more to say
            self.page.wait_for_timeout(20)

    @property
    def answers(self) -> Locator:
        return self.page.locator(".bot.message")

    def compare_posts(self, part: str) -> None:
        """The posts are those that the fast suite sends; ``POSTTRAIN_RECORD_POSTS=1`` records them anew."""
        recorded: dict[str, Any] = {}
        if POSTS.is_file():
            recorded = json.loads(POSTS.read_text(encoding="utf-8"))
        if os.environ.get("POSTTRAIN_RECORD_POSTS"):
            recorded[part] = self.posts
            POSTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        assert self.posts == recorded.get(part), "record them: POSTTRAIN_RECORD_POSTS=1 make test-browser"


def test_studio_every_control_of_the_chat_answers_or_says_what_is_wrong(page: Page, studio: Served) -> None:
    visitor = Visitor(page, studio.url)
    facts = visitor.facts()

    visitor.ask("Enter on the untouched page")
    expect(facts).to_have_value(COUNTED)
    expect(visitor.question).to_have_value("")
    expect(visitor.answers).to_have_count(1)
    picture(page, "chat")

    page.get_by_text("how replies are drawn").click()
    page.get_by_text("steered by features").click()
    visitor.ask("opened, but untouched", "What is 2 + 2?")
    expect(visitor.answers).to_have_count(2)
    expect(facts).to_have_value(COUNTED)

    for label in NUMBERS:
        visitor.field(label).fill("")
    visitor.ask("numbers cleared", "And 3 + 3?")
    expect(visitor.answers).to_have_count(3)
    expect(facts).to_have_value(COUNTED)

    for label, wrong in (("temperature (0: greedy)", "-1"), ("top p", "2"), ("seed", "1.5")):
        visitor.field(label).fill(wrong)
        visitor.ask(f"{label} is {wrong}", "And 4 + 4?")
        expect(facts).to_have_value(re.compile(f"^{re.escape(label.partition(' (')[0])}: '{wrong}' is not a"))
        expect(visitor.question).to_have_value("And 4 + 4?")
        visitor.field(label).fill("0")
        if label == "top p":
            visitor.field(label).fill("1")
    visitor.field("longest reply (0: as trained)").fill("3")
    visitor.field("system message").fill("Be brief.")
    visitor.ask("numbers typed", "And 5 + 5?")
    expect(facts).to_have_value(re.compile(r"^3 tokens, mean"))
    visitor.field("system message").fill("")
    visitor.ask("texts emptied after typing", "And 6 + 6?")
    expect(visitor.answers).to_have_count(5)

    visitor.ask("nothing to send", "")
    expect(facts).to_have_value("a message needs some text")
    expect(visitor.answers).to_have_count(5)

    visitor.field("features").fill(MARKUP)
    visitor.ask("features without a dictionary", MARKUP)
    expect(facts).to_have_value(re.compile("^name the dictionary"))
    visitor.choose("sparse autoencoder", "sae")
    visitor.ask("features that are none")
    expect(facts).to_have_value(re.compile("^steering: needs FEATURE=STRENGTH"))
    visitor.field("features").fill("3=60, 4=off")
    page.get_by_label("both", exact=True).check()
    visitor.ask("steered")
    expect(visitor.answers).to_have_count(6)
    expect(page.locator("#evil")).to_have_count(0)
    picture(page, "chat-opened")

    visitor.ask("a message that could be taken for markup", ODD)
    asked = page.locator(".user.message .message-content").last
    assert asked.inner_text().strip() == ODD

    visitor.doing = "new conversation"
    page.get_by_role("button", name="New conversation").click()
    expect(visitor.answers).to_have_count(0)
    visitor.compare_posts("chat")


def test_studio_two_models_with_a_reward_answer_side_by_side_and_stop(page: Page, studio: Served) -> None:
    visitor = Visitor(page, studio.url)
    visitor.doing = "second model chosen"
    visitor.choose("second model", "rl, step 2")
    expect(visitor.facts(1)).to_be_visible()
    visitor.doing = "reward model chosen"
    visitor.choose("reward model", "judge")
    visitor.doing = "Send"
    with visitor.answered():
        page.get_by_role("button", name="Send").click()
    for side in (0, 1):
        expect(visitor.facts(side)).to_have_value(re.compile(r"^\d+ tokens, .*, reward -?\d+\.\d{3}$"))
    expect(visitor.answers).to_have_count(2)
    picture(page, "chat-two-models")

    page.get_by_text("how replies are drawn").click()
    visitor.field("temperature (0: greedy)").fill("50")
    visitor.field("longest reply (0: as trained)").fill("900")
    visitor.doing = "a long reply"
    visitor.question.fill("Tell me a story.")
    visitor.question.press("Enter")
    expect(visitor.answers).to_have_count(4)
    expect(visitor.answers.last).not_to_have_text("")
    with visitor.answered():
        page.get_by_role("button", name="Stop").click()
    visitor.field("longest reply (0: as trained)").fill("2")
    visitor.ask("after a stop", "Go on.")
    expect(visitor.facts()).to_have_value(re.compile("^2 tokens"))

    visitor.doing = "conversation thrown away"
    page.get_by_role("button", name="Clear").first.click()
    expect(visitor.answers).to_have_count(0)
    visitor.doing = "second model gone"
    visitor.choose("second model", "(none)")
    expect(visitor.facts(1)).to_be_hidden()
    visitor.compare_posts("two models")


def test_studio_rollouts_are_found_by_run_kind_step_and_text(page: Page, studio: Served) -> None:
    visitor = Visitor(page, studio.url)
    page.get_by_role("tab", name="Rollouts").click()
    about, cells = page.locator("#about-rollouts textarea"), page.locator("[data-testid^=cell-]")
    step, text = visitor.field("step"), visitor.field("containing")
    expect(about).to_have_value("choose a run")

    visitor.doing = "run chosen"
    visitor.choose("run", "rl")
    expect(about).to_have_value("12 rollouts")
    expect(cells.first).to_have_text("2")
    picture(page, "rollouts")
    visitor.doing = "step typed"
    step.fill("1")
    step.press("Enter")
    expect(about).to_have_value("6 rollouts")
    visitor.doing = "no such step"
    step.fill("7")
    step.press("Enter")
    expect(about).to_have_value("no such rollouts")
    visitor.doing = "step is no number"
    step.fill("first")
    step.press("Enter")
    expect(about).to_have_value("step: 'first' is not a whole number, 0 or more")
    visitor.doing = "step emptied"
    step.fill("")
    step.press("Enter")
    expect(about).to_have_value("12 rollouts")
    visitor.doing = "evaluation"
    page.get_by_label("evaluation", exact=True).check()
    expect(about).to_have_value("8 rollouts")
    visitor.doing = "text typed"
    text.fill(MARKUP)
    text.press("Enter")
    expect(about).to_have_value("no such rollouts")
    visitor.doing = "text emptied"
    text.fill("")
    text.press("Enter")
    expect(about).to_have_value("8 rollouts")
    visitor.doing = "run without rollouts"
    visitor.choose("run", "sft")
    expect(about).to_have_value(re.compile("^run 'sft' has no rollouts"))
    expect(cells).to_have_count(0)
    visitor.doing = "run with markup in its texts"
    visitor.choose("run", "odd")
    expect(about).to_have_value("8 rollouts")
    page.get_by_label("training", exact=True).check()
    expect(about).to_have_value("6 rollouts")
    expect(cells.nth(1)).to_contain_text(MARKUP)
    expect(page.locator("#evil")).to_have_count(0)
    visitor.compare_posts("rollouts")


def test_studio_behind_a_login_is_used_after_it(page: Page, tmp_path: Path) -> None:
    token = "a-token-that-nobody-guesses"
    with serving_here("tiny", "--runs-dir", str(tmp_path), "--token", token, command="studio") as served:
        page.goto(served.url)
        page.get_by_label("username").fill("studio")
        page.get_by_label("password").fill(token)
        page.get_by_role("button", name="Login").click()
        expect(page.locator("#question textarea")).to_be_visible()
        page.locator("#question textarea").press("Enter")
        expect(page.locator("#facts-0 textarea")).to_have_value(COUNTED)


def test_studio_page_of_another_site_cannot_read_or_post(page: Page, studio: Served) -> None:
    """A page under a name that points to this machine, as DNS rebinding does it, and one of another port."""
    page.goto(f"http://evil.localhost:{studio.port}/")
    expect(page.locator("body")).to_contain_text("Host does not match this server")
    with plain_page() as port:
        page.goto(f"http://127.0.0.1:{port}/")
        script = "(url) => fetch(url, {method: 'POST', body: '{}'}).then(r => r.status + ' read', () => 'refused')"
        assert page.evaluate(script, f"{studio.url}/gradio_api/queue/join") == "refused"
        assert page.evaluate(script.replace("method: 'POST', body: '{}'", ""), f"{studio.url}/config") == "refused"
        page.goto(f"http://127.0.0.1:{port}/link?{studio.port}")
        page.set_content(f"<a href='{studio.url}'>studio</a>")
        page.get_by_text("studio").click()  # a link is followed
        expect(page.locator("#question textarea")).to_be_visible()
