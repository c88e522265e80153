"""``posttrain studio``: a page on this machine to talk to models and to look into runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

from posttrain.commands.chat.conversation import Controls
from posttrain.commands.chat.studio_chat import NOBODY, Session, Stage
from posttrain.commands.chat.studio_gate import Gate, choose_token, is_loopback, show_address
from posttrain.commands.chat.studio_html import COLOURINGS, draw_conversation, draw_note, stylesheet
from posttrain.commands.chat.studio_records import TRAINING, Archive, check_offered
from posttrain.commands.interpret.steering import has_dictionary, read_steering
from posttrain.engines.models import open_model
from posttrain.errors import MissingExtra, PosttrainError, UsageError
from posttrain.reward_models.scoring import open_reward_model
from posttrain.runs.directory import find_run
from posttrain.runs.models import find_source, read_run_recipe

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
    page = build_studio(arguments.models, arguments.runs_dir, arguments.sae)
    link = show_address(host, arguments.port) + ("" if token is None else f"?token={token}")

    def announce() -> None:
        print(f"studio: {link}  (ready in {time.perf_counter() - started:.1f} s; Ctrl-C ends it)", flush=True)
        if arguments.browser:
            webbrowser.open(link)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, arguments.port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        where = f"--host {host}, port {arguments.port}"
        raise UsageError(f"{where}: cannot be served ({error}); give others with --host and --port") from error
    with door, suppress(KeyboardInterrupt):
        asyncio.run(_serve(Gate(mount(gradio, page), host, arguments.port, token), door, announce))
    return 0


async def _serve(gate: Gate, door: socket.socket, announce: Callable[[], None]) -> None:
    import uvicorn

    # No proxy is asked who the visitor is, and no line of a log holds the token.
    config = uvicorn.Config(
        gate, log_level="warning", access_log=False, proxy_headers=False, ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[door]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        announce()
    await serving


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
    policies, judges = sort_runs(archive)
    speakers = list(dict.fromkeys([*models, *policies, "tiny"]))
    known = [name for name in archive.names() if has_dictionary(archive.folder(name))]
    dictionaries = list(dict.fromkeys([*dictionaries, *known]))
    stage = Stage(
        lambda name: open_model(find_source(check_offered(name, speakers, "model"), runs_dir)),
        lambda name: open_reward_model(find_source(check_offered(name, judges, "reward model"), runs_dir)),
    )
    for name in models:
        stage.model(name)  # what was asked for is there when the page opens, or refused at once
    with gradio.Blocks(title="posttrain studio", analytics_enabled=False) as page:
        gradio.Markdown("# posttrain studio")
        with gradio.Tab("Chat"):
            _build_chat(gradio, stage, speakers, list(models), judges, dictionaries, runs_dir)
        with gradio.Tab("Runs"):
            _build_runs(gradio, archive)
        with gradio.Tab("Rollouts"):
            _build_rollouts(gradio, archive)
    for listener in page.fns.values():
        listener.api_visibility = "private"
    return page.queue(api_open=False)


def sort_runs(archive: Archive) -> tuple[list[str], list[str]]:
    """(runs whose model writes answers, runs that trained a reward model); those that cannot be read are neither."""
    policies: list[str] = []
    judges: list[str] = []
    for name in archive.names():
        try:
            recipe = read_run_recipe(find_run(archive.runs_dir, name))
        except PosttrainError:
            continue
        (judges if recipe.trains_scorer else policies).append(name)
    return policies, judges


def _build_chat(
    gradio: Any,
    stage: Stage,
    speakers: list[str],
    models: list[str],
    judges: list[str],
    dictionaries: list[str],
    runs_dir: str | Path,
) -> None:
    first = models[0] if models else speakers[0]
    second = models[1] if len(models) > 1 else NOBODY
    session = gradio.State(Session())
    with gradio.Row():
        left = gradio.Dropdown(speakers, value=first, label="model")
        right = gradio.Dropdown([NOBODY, *speakers], value=second, label="beside it")
        judge = gradio.Dropdown([NOBODY, *judges], value=NOBODY, label="judged by the reward model")
        colouring = gradio.Radio(list(COLOURINGS), value=COLOURINGS[0], label="colours show")
    with gradio.Row():
        pages = [gradio.HTML(draw_conversation([]), elem_id=f"talk-{side}") for side in ("left", "right")]
    question = gradio.Textbox(label="your message", placeholder="Enter sends it", lines=1, elem_id="question")
    with gradio.Row():
        send = gradio.Button("Send", variant="primary", elem_id="send")
        stop = gradio.Button("Stop", elem_id="stop")
        clear = gradio.Button("New conversation", elem_id="clear")
    with gradio.Accordion("how replies are drawn", open=False):
        system = gradio.Textbox(label="system message")
        with gradio.Row():
            temperature = gradio.Slider(0.0, 2.0, value=0.7, step=0.05, label="temperature (0: greedy)")
            top_p = gradio.Slider(0.05, 1.0, value=1.0, step=0.05, label="top p")
            top_k = gradio.Number(value=0, precision=0, minimum=0, label="top k (0: all)")
            max_tokens = gradio.Number(value=0, precision=0, minimum=0, label="longest reply (0: as in training)")
            seed = gradio.Number(value=0, precision=0, minimum=0, label="seed")
    steering = _build_steering(gradio, dictionaries)

    def answer(own: Session, asked: str, *values: Any) -> Iterator[tuple[Session, str, str, str]]:
        name, other, scorer, colours, instruction, warmth, nucleus, best, longest, number, where, what, who = values
        if not asked.strip():
            yield own, *_two([]), asked
            return
        controls = Controls(warmth, nucleus, int(best) or None, int(longest) or None, int(number))

        def steer(side: int, model: Any) -> Any:
            if side not in SIDES[who]:
                return None
            chosen = "" if where == NOBODY else check_offered(where, dictionaries, "dictionary")
            return read_steering(what or "", chosen, model, runs_dir)

        with _shown(gradio):
            for drawn in stage.answer(own, asked, [name, other], controls, instruction or "", scorer, colours, steer):
                yield own, *_two(drawn), ""

    inputs = [session, question, left, right, judge, colouring, system, temperature, top_p, top_k, max_tokens, seed]
    inputs += steering
    outputs = [session, *pages, question]
    send.click(answer, inputs, outputs)
    question.submit(answer, inputs, outputs)
    stop.click(_stop, session, None)
    clear.click(lambda: (Session(), *_two([])), None, [session, *pages])
    colouring.change(lambda own, colours: _two([s.draw(colours) for s in own.speakers]), [session, colouring], pages)


def _build_steering(gradio: Any, dictionaries: list[str]) -> list[Any]:
    with gradio.Accordion("steered by features of a dictionary", open=False), gradio.Row():
        first_dictionary = dictionaries[0] if dictionaries else NOBODY
        folder = gradio.Dropdown([NOBODY, *dictionaries], value=first_dictionary, label="dictionary", elem_id="sae")
        changes = gradio.Textbox(label="features", placeholder="12=8, 40=off", elem_id="steering")
        steered = gradio.Radio(list(SIDES), value="left", label="who is steered")
    return [folder, changes, steered]


def _stop(own: Session) -> None:
    own.is_stopped = True


def _two(drawn: Sequence[str]) -> tuple[str, str]:
    """One page for each side; an empty one where nobody speaks."""
    left, right, *_ = [*drawn, "", ""]
    return left or draw_conversation([]), right


def _build_runs(gradio: Any, archive: Archive) -> None:
    names = archive.names()
    with gradio.Row():
        runs = gradio.Dropdown(names, value=[], multiselect=True, label="runs", elem_id="runs")
        metrics = gradio.Dropdown([], value=[], multiselect=True, label="metrics (none: the usual ones)")
        again = gradio.Button("Read again", scale=0)
    curves = gradio.HTML(archive.draw_curves([], []), elem_id="curves")
    differences = gradio.HTML(archive.draw_differences([]), elem_id="differences")
    with gradio.Accordion("resolved recipe of the first run", open=False):
        recipe = gradio.Code("", language="yaml", interactive=False)

    def choose(chosen: list[str], wanted: list[str]) -> tuple[Any, str, str, str]:
        with _shown(gradio):
            known = archive.metrics(chosen)
            kept = [name for name in wanted if name in known]
            text = archive.recipe_text(chosen[0]) if chosen else ""
            drawn = archive.draw_curves(chosen, kept)
            return gradio.update(choices=known, value=kept), drawn, archive.draw_differences(chosen), text

    def read_again(chosen: list[str], wanted: list[str]) -> tuple[Any, Any, str, str, str]:
        kept = [name for name in chosen if name in archive.names()]
        return gradio.update(choices=archive.names(), value=kept), *choose(kept, wanted)

    runs.change(choose, [runs, metrics], [metrics, curves, differences, recipe])
    metrics.input(choose, [runs, metrics], [metrics, curves, differences, recipe])
    again.click(read_again, [runs, metrics], [runs, metrics, curves, differences, recipe])


def _build_rollouts(gradio: Any, archive: Archive) -> None:
    names = archive.names()
    with gradio.Row():
        run = gradio.Dropdown(names, value=None, label="run", elem_id="rollout-run")
        kind = gradio.Dropdown([TRAINING], value=TRAINING, label="sampled in")
        step = gradio.Dropdown([ANY_STEP], value=ANY_STEP, label="step")
        low = gradio.Textbox(label="reward at least", elem_id="rollout-low")
        high = gradio.Textbox(label="reward at most", elem_id="rollout-high")
        text = gradio.Textbox(label="containing", elem_id="rollout-text")
    page = gradio.HTML(draw_note("choose a run"), elem_id="rollouts")

    def enter(name: str) -> tuple[Any, Any, str]:
        with _shown(gradio):
            kinds = archive.evaluations(name)
            steps = archive.steps(name, kinds[0])
            chosen = str(steps[-1]) if steps else ANY_STEP
            shown = gradio.update(choices=[ANY_STEP, *map(str, steps)], value=chosen)
            return gradio.update(choices=kinds, value=kinds[0]), shown, browse(name, kinds[0], chosen, "", "", "")

    def switch(name: str, chosen: str) -> Any:
        with _shown(gradio):
            steps = archive.steps(name, chosen) if name else []
            return gradio.update(choices=[ANY_STEP, *map(str, steps)], value=str(steps[-1]) if steps else ANY_STEP)

    def browse(name: str, sampled: str, at: str, least: str, most: str, containing: str) -> str:
        if not name:
            return draw_note("choose a run")
        with _shown(gradio):
            number = None if at == ANY_STEP else int(at)
            bounds = _number(least, "reward at least"), _number(most, "reward at most")
            return archive.draw_rollouts(name, sampled, number, *bounds, containing)

    chosen = [run, kind, step, low, high, text]
    run.input(enter, run, [kind, step, page])
    kind.input(switch, [run, kind], step).then(browse, chosen, page)
    step.input(browse, chosen, page)
    for part in (low, high, text):
        part.submit(browse, chosen, page)
        part.blur(browse, chosen, page)


def _number(text: str, name: str) -> float | None:
    """What was typed as a number; None for nothing.

    Raises:
        UsageError: it is none.
    """
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise UsageError(f"{name}: a number is needed, not {text!r}") from None


@contextmanager
def _shown(gradio: Any) -> Iterator[None]:
    """What is wrong is shown on the page, which takes the message for HTML."""
    try:
        yield
    except PosttrainError as error:
        raise gradio.Error(escape(str(error)), duration=None, print_exception=False) from error
