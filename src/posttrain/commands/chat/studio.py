"""``posttrain studio``: a page on this machine to talk to models and to look into runs."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from posttrain.commands.chat.conversation import Controls
from posttrain.commands.chat.studio_chat import NOBODY, Session, Stage
from posttrain.commands.chat.studio_records import (
    COLOURINGS,
    TRAINING,
    Archive,
    Offers,
    check_offered,
    draw_conversation,
    draw_note,
    draw_problem,
    stylesheet,
)
from posttrain.commands.interpret.steering import read_steering
from posttrain.commands.serve.doorway import (
    TEXT,
    Application,
    Doorway,
    Headers,
    Scope,
    Send,
    choose_token,
    is_loopback,
    is_same,
    open_door,
    reply,
    serve,
    show_address,
)
from posttrain.engines.models import open_model
from posttrain.errors import MissingExtra, PosttrainError, UsageError
from posttrain.reward_models.scoring import open_reward_model
from posttrain.runs.models import find_source

# Who may ask the studio's server: the doorway of its page.
#
# Beyond what every server here checks (``serve/doorway.py``), the ``Gate`` lets a request pass if its path is one that
# the page itself asks for, and it knows the token where there is one; a route that a later Gradio brings is closed
# until it is named here.

# What the page asks for by itself: no API by name, no upload, no file, no proxy, no recording.
_READ = re.compile(
    r"/|/config|/theme\.css|/favicon\.ico|/(static|assets)/[\w./@+-]+|/gradio_api/(queue/data|heartbeat/\w+|app_id)"
)
_WRITE = re.compile(r"/gradio_api/queue/join")


class Gate(Doorway):
    """The page behind its checks.

    Args:
        application, host, port: see ``Doorway``.
        token: what a visitor must know; the page's link brings it once (``/?token=``), a cookie after that.
    """

    def __init__(self, application: Application, host: str, port: int, token: str | None = None) -> None:
        super().__init__(application, host, port)
        self.token = token
        self.cookie = f"posttrain-studio-{port}"
        self.pass_word = hashlib.sha256(f"cookie {token}".encode()).hexdigest()

    def problem(self, scope: Scope, headers: Headers) -> str:
        """Why a request may not pass; empty if it may."""
        foreign = super().problem(scope, headers)
        if foreign:
            return foreign
        method, path = scope["method"], scope["path"]
        is_read = method in ("GET", "HEAD")
        if "origin" not in headers and not is_read:
            return "it would change something and has no Origin"
        sent_by = headers.get("sec-fetch-site", "none")
        is_opened = path == "/" and is_read and headers.get("sec-fetch-mode") == "navigate"
        if sent_by not in ("none", "same-origin") and not is_opened:
            return "another page sent it"
        known = _READ if is_read else _WRITE
        if method not in ("GET", "HEAD", "POST") or not known.fullmatch(path) or ".." in path:
            return "the page has no use for this path"
        return ""

    async def refuse(self, send: Send, problem: str) -> None:
        """Say that the request may not pass."""
        await reply(send, 403, f"posttrain studio refuses this request: {problem}\n".encode(), [TEXT])

    async def admit(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Whether the visitor knows the token; that of the link is taken into a cookie."""
        if self.token is None or self._is_known(headers):
            return True
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if scope["path"] != "/" or scope["method"] != "GET" or len(tokens) != 1 or not is_same(tokens[0], self.token):
            await reply(send, 403, b"posttrain studio: open the link that it printed, with its token\n", [TEXT])
            return False
        cookie = f"{self.cookie}={self.pass_word}; Path=/; HttpOnly; SameSite=Lax".encode()
        await reply(send, 303, b"", [(b"location", b"/"), (b"set-cookie", cookie), (b"cache-control", b"no-store")])
        return False

    def _is_known(self, headers: Headers) -> bool:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and is_same(value, self.pass_word) for name, _, value in pairs)


ANY_STEP = "any"
SIDES = {"left": (0,), "right": (1,), "both": (0, 1)}


def run_studio(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, on 127.0.0.1 or where ``--host`` says.

    Raises:
        UsageError: another host than this machine without ``--token``; a port that cannot be served.
        MissingExtra: gradio is not installed.
    """
    started = time.perf_counter()
    host, token = arguments.host, choose_token(arguments.token)
    if not host or (token is None and not is_loopback(host)):
        raise UsageError(
            f"--host {host!r}: others than this machine could read every run; add --token, or leave --host out"
        )
    gradio = _import_gradio()
    with open_door(host, arguments.port) as door:  # before models are loaded, which may take long
        page = build_studio(arguments.models, arguments.runs_dir, arguments.sae)
        link = show_address(host, arguments.port) + ("" if token is None else f"?token={token}")

        def announce() -> None:
            seconds = time.perf_counter() - started
            print(f"studio: {link}  (ready in {seconds:.1f} s; Ctrl-C ends it)", flush=True)
            if arguments.browser:
                webbrowser.open(link)

        with suppress(KeyboardInterrupt):
            asyncio.run(serve(Gate(mount(gradio, page), host, arguments.port, token), door, announce))
    return 0


def _import_gradio() -> Any:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import gradio
    except ImportError:
        raise MissingExtra("gradio", "studio", "posttrain studio") from None
    return gradio


def mount(gradio: Any, page: Any) -> Any:
    """The page as an ASGI application without the parts of Gradio that it has no use for."""
    import fastapi

    application = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    closed = {"run_history": False, "ssr_mode": False, "enable_monitoring": False, "mcp_server": False, "pwa": False}
    plain = {"footer_links": [], "show_error": False, "max_file_size": 0, "css": stylesheet(), "theme": theme}
    return gradio.mount_gradio_app(application, page, "/", **closed, **plain)


def build_studio(models: Sequence[str], runs_dir: str | Path, dictionaries: Sequence[str] = ()) -> Any:
    """The page as a Gradio application that is not served yet.

    It offers ``models``, ``tiny``, the runs below ``runs_dir`` and ``dictionaries``; no other name is opened, whatever
    a request says.

    Raises:
        MissingExtra: gradio is not installed.
    """
    gradio = _import_gradio()
    archive = Archive(runs_dir)
    offers = Offers(archive, models, dictionaries)
    stage = Stage(
        lambda name: open_model(find_source(check_offered(name, offers.speakers(), "model"), runs_dir)),
        lambda name: open_reward_model(find_source(check_offered(name, offers.judges(), "reward model"), runs_dir)),
    )
    for name in models:
        stage.model(name)  # what was asked for is there when the page opens, or refused at once
    with gradio.Blocks(title="posttrain studio", analytics_enabled=False) as page:
        gradio.Markdown("# posttrain studio")
        with gradio.Tab("Chat"):
            _build_chat(gradio, stage, offers, list(models), runs_dir)
        with gradio.Tab("Runs"):
            _build_runs(gradio, page, archive)
        with gradio.Tab("Rollouts"):
            _build_rollouts(gradio, page, archive)
    for listener in page.fns.values():
        listener.api_visibility = "private"
    return page.queue(api_open=False)


def _menu(gradio: Any, read: Callable[[], list[str]], above: Sequence[str] = (), **options: Any) -> Any:
    """A menu whose entries are read again whenever it is opened."""
    menu = gradio.Dropdown([*above, *read()], **options)
    menu.focus(lambda: gradio.update(choices=[*above, *read()]), None, menu, show_progress="hidden")
    return menu


def _build_chat(gradio: Any, stage: Stage, offers: Offers, models: list[str], runs_dir: str | Path) -> None:
    session = gradio.State(Session())
    first, second, *_ = [*(models or offers.speakers()[:1]), NOBODY, NOBODY]
    with gradio.Row():
        left = _menu(gradio, offers.speakers, value=first, label="model", elem_id="left")
        right = _menu(gradio, offers.speakers, [NOBODY], value=second, label="beside it")
        judge = _menu(gradio, offers.judges, [NOBODY], value=NOBODY, label="judged by the reward model")
        colouring = gradio.Radio(list(COLOURINGS), value=COLOURINGS[0], label="colours show")
    with gradio.Row():
        pages = [gradio.HTML(draw_conversation([]), elem_id=f"talk-{side}") for side in ("left", "right")]
    problem = gradio.HTML("", elem_id="problem")  # below the conversation, which it leaves to be read
    question = gradio.Textbox(label="your message", placeholder="Enter sends it", lines=1, elem_id="question")
    with gradio.Row():
        send = gradio.Button("Send", variant="primary", elem_id="send")
        stop = gradio.Button("Stop", elem_id="stop")
        clear = gradio.Button("New conversation", elem_id="clear")
    inputs = [session, question, left, right, judge, colouring, *_build_controls(gradio)]
    inputs += _build_steering(gradio, offers)

    def answer(own: Session, asked: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        name, other, scorer, colours, instruction, warmth, nucleus, best, longest, number, where, what, who = values
        if not asked.strip():
            yield own, gradio.update(), gradio.update(), asked, ""
            return

        def steer(side: int, model: Any) -> Any:
            if side not in SIDES[who]:
                return None
            chosen = "" if where == NOBODY else check_offered(where, offers.dictionaries(), "dictionary")
            return read_steering(what or "", chosen, model, runs_dir)

        try:
            controls = Controls(warmth, nucleus, int(best) or None, int(longest) or None, int(number))
            for drawn in stage.answer(own, asked, [name, other], controls, instruction or "", scorer, colours, steer):
                yield own, *_two(drawn), "", ""
        except PosttrainError as error:  # what was typed stays, to be sent again
            yield own, gradio.update(), gradio.update(), asked, draw_problem(str(error))

    outputs = [session, *pages, question, problem]
    send.click(answer, inputs, outputs)
    question.submit(answer, inputs, outputs)
    stop.click(_stop, session, None)
    clear.click(lambda: (Session(), *_two([]), ""), None, [session, *pages, problem])
    colouring.change(lambda own, colours: _two([s.draw(colours) for s in own.speakers]), [session, colouring], pages)


def _build_controls(gradio: Any) -> list[Any]:
    with gradio.Accordion("how replies are drawn", open=False):
        system = gradio.Textbox(label="system message")
        with gradio.Row():
            temperature = gradio.Slider(0.0, 2.0, value=0.7, step=0.05, label="temperature (0: greedy)")
            top_p = gradio.Slider(0.05, 1.0, value=1.0, step=0.05, label="top p")
            top_k = gradio.Number(value=0, precision=0, minimum=0, label="top k (0: all)")
            max_tokens = gradio.Number(value=0, precision=0, minimum=0, label="longest reply (0: as in training)")
            seed = gradio.Number(value=0, precision=0, minimum=0, label="seed")
    return [system, temperature, top_p, top_k, max_tokens, seed]


def _build_steering(gradio: Any, offers: Offers) -> list[Any]:
    with gradio.Accordion("steered by features of a dictionary", open=False), gradio.Row():
        first, *_ = [*offers.dictionaries(), NOBODY]
        folder = _menu(gradio, offers.dictionaries, [NOBODY], value=first, label="dictionary", elem_id="sae")
        changes = gradio.Textbox(label="features", placeholder="12=8, 40=off", elem_id="steering")
        steered = gradio.Radio(list(SIDES), value="left", label="who is steered")
    return [folder, changes, steered]


def _stop(own: Session) -> None:
    own.is_stopped = True


def _two(drawn: Sequence[str]) -> tuple[str, str]:
    """One page for each side; an empty one where nobody speaks."""
    left, right, *_ = [*drawn, "", ""]
    return left or draw_conversation([]), right


def _build_runs(gradio: Any, page: Any, archive: Archive) -> None:
    with gradio.Row():
        runs = _menu(gradio, archive.names, value=[], multiselect=True, label="runs", elem_id="runs")
        metrics = gradio.Dropdown([], value=[], multiselect=True, label="metrics (none: the usual ones)")
        again = gradio.Button("Read again", scale=0)
    curves = gradio.HTML(archive.draw_curves([], []), elem_id="curves")
    with gradio.Accordion("resolved recipe of the first run", open=False):
        recipe = gradio.Code("", language="yaml", interactive=False)

    def choose(chosen: list[str], wanted: list[str]) -> tuple[Any, str, str]:
        try:
            known = archive.metrics(chosen)
            kept = [name for name in wanted if name in known]
            text = archive.recipe_text(chosen[0]) if chosen else ""
            drawn = archive.draw_curves(chosen, kept)
            return gradio.update(choices=known, value=kept), drawn, text
        except PosttrainError as error:
            return gradio.update(), draw_problem(str(error)), ""

    def read_again(chosen: list[str], wanted: list[str]) -> tuple[Any, Any, str, str]:
        names = archive.names()
        kept = [name for name in chosen if name in names]
        return gradio.update(choices=names, value=kept), *choose(kept, wanted)

    shown = [metrics, curves, recipe]
    runs.change(choose, [runs, metrics], shown)
    metrics.input(choose, [runs, metrics], shown)
    again.click(read_again, [runs, metrics], [runs, *shown])
    page.load(lambda: read_again(archive.names()[:1], []), None, [runs, *shown])


def _build_rollouts(gradio: Any, page: Any, archive: Archive) -> None:
    with gradio.Row():
        run = _menu(gradio, archive.names, value=None, label="run", elem_id="rollout-run")
        kind = gradio.Dropdown([TRAINING], value=TRAINING, label="sampled in")
        step = gradio.Dropdown([ANY_STEP], value=ANY_STEP, label="step")
        low = gradio.Textbox(label="reward at least", elem_id="rollout-low")
        high = gradio.Textbox(label="reward at most", elem_id="rollout-high")
        text = gradio.Textbox(label="containing", elem_id="rollout-text")
    drawing = gradio.HTML(draw_note("choose a run"), elem_id="rollouts")

    def enter(name: str | None) -> tuple[Any, Any, str]:
        try:
            kinds = archive.evaluations(name) if name else [TRAINING]
            kind, *_ = [own for own in kinds if name and archive.steps(name, own)] or kinds
            steps = archive.steps(name, kind) if name else []
        except PosttrainError as error:
            return gradio.update(), gradio.update(), draw_problem(str(error))
        at = str(steps[-1]) if steps else ANY_STEP
        shown = gradio.update(choices=[ANY_STEP, *map(str, steps)], value=at)
        return gradio.update(choices=kinds, value=kind), shown, browse(name, kind, at, "", "", "")

    def switch(name: str | None, chosen: str) -> Any:
        try:
            steps = archive.steps(name, chosen) if name else []
        except PosttrainError:  # said where the rollouts would be
            steps = []
        return gradio.update(choices=[ANY_STEP, *map(str, steps)], value=str(steps[-1]) if steps else ANY_STEP)

    def browse(name: str | None, sampled: str, at: str, least: str, most: str, containing: str) -> str:
        if not name:
            return draw_note("choose a run")
        try:
            number = None if at == ANY_STEP else int(at)
            bounds = _number(least, "reward at least"), _number(most, "reward at most")
            return archive.draw_rollouts(name, sampled, number, *bounds, containing)
        except PosttrainError as error:
            return draw_problem(str(error))

    def open_newest() -> tuple[Any, ...]:
        newest = archive.newest_with_rollouts()
        return gradio.update(choices=archive.names(), value=newest), *enter(newest)

    chosen = [run, kind, step, low, high, text]
    run.input(enter, run, [kind, step, drawing])
    kind.input(switch, [run, kind], step).then(browse, chosen, drawing)
    step.input(browse, chosen, drawing)
    for part in (low, high, text):
        part.submit(browse, chosen, drawing)
        part.blur(browse, chosen, drawing)
    page.load(open_newest, None, [run, kind, step, drawing])


def _number(text: str, name: str) -> float | None:
    """What was typed as a number; None for nothing.

    Raises:
        UsageError: it is none.
    """
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise UsageError(f"{name}: a number is needed, not {text!r}") from None
