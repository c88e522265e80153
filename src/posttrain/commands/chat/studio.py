"""``posttrain studio``: a local Gradio page for chatting with models and browsing rollouts."""

from __future__ import annotations

import argparse
import html
import os
import secrets
import webbrowser
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from posttrain.commands.chat.conversation import ChatSession, Controls
from posttrain.commands.chat.fields import NOBODY, read_chat, read_text, read_whole
from posttrain.commands.interpret.steering import has_sae, read_steering
from posttrain.commands.options import refuse_open_host
from posttrain.errors import MissingExtra, PosttrainError, UsageError
from posttrain.evaluation.reward_models.scoring import RewardModel, open_reward_model
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.runs.directory import run_names
from posttrain.runs.models import find_source, read_run_recipe
from posttrain.runs.paths import every_run_name
from posttrain.sampling.models import OpenedModel, open_model
from posttrain.store.checkpoint_files import checkpoint_steps, step_folder
from posttrain.store.rollouts import RolloutStore
from posttrain.terminal.console import say_template
from posttrain.types import Example, Message
from posttrain.untrusted import fitting

if TYPE_CHECKING:
    from posttrain.commands.serve.access import Access

USER = "studio"
EXAMPLE = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"
TRAINING = "training"
SIDES = {"left": (0,), "right": (1,), "both": (0, 1)}
# Columns of the rollout table, with widths in pixels.
COLUMNS = {
    "step": 70,
    "prompt": 340,
    "answer": 340,
    "reward": 90,
    "advantage": 120,
    "finish": 90,
    "correct answer": 160,
}
MAX_ROLLOUTS = 200
CSS = ".talk .message-content .md { white-space: pre-wrap; }"  # keep original spaces and line breaks
NARROW = 300  # pixels; narrower pages use a single column
NEWEST = "the newest"
CHOOSE_RUN = "choose a run"
TOKENS_PER_UPDATE = 4  # per model, because rendering the page takes longer than sampling a token


def run_studio(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        UsageError: a public host without ``--token``, or an unusable port.
        MissingExtra: gradio is not installed.
    """
    host = arguments.host
    port = arguments.port
    token = arguments.token
    refuse_open_host(host, token is not None, "--token")
    _import_gradio()
    from posttrain.commands.serve.listening import address_of, answer_requests, listen

    if token == "":
        token = secrets.token_urlsafe(16)
    with listen(host, port) as listener:
        page = build_studio(arguments.models, arguments.runs_dir, arguments.sae)
        application = guard_studio(page, host, token)
        address = address_of(host, port)
        print(f"studio at {address}  (Ctrl-C ends it)", flush=True)
        if token is not None:
            print(f"user: {USER}, password: {token}", flush=True)
        if arguments.browser:
            webbrowser.open(address)
        answer_requests(application, listener)
    return 0


def guard_studio(page: Any, host: str, token: str | None = None) -> Access:
    """Wrap the page as an ASGI application that rejects cross-origin requests.

    Args:
        page: result of ``build_studio``.
        host: listening address.
        token: login password; None disables the login.
    """
    gradio = _import_gradio()
    from fastapi import FastAPI

    from posttrain.commands.serve.access import Access

    login = None
    if token is not None:
        login = (USER, token)
    application = gradio.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        auth=login,
        allowed_paths=[],
        show_error=False,
        max_file_size=0,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        css=CSS,
        theme=gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )
    return Access(application, host, command="posttrain studio")


def _import_gradio() -> ModuleType:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        return import_module("gradio")
    except ImportError:
        raise MissingExtra("gradio", "studio", "posttrain studio") from None


class Library:
    """Models, reward models, dictionaries and runs offered on the page. Other names are rejected.

    Args:
        models, saes: extra names from the command line, in addition to runs.
    """

    def __init__(self, models: Sequence[str], runs_dir: str | Path, saes: Sequence[str] = ()) -> None:
        self.named_models = models
        self.runs_dir = Path(runs_dir)
        self.named_saes = saes
        self.model = cache(self._open_model)
        self.reward_model = cache(self._open_reward_model)

    def snapshots(self, *, trains_scorer: bool) -> dict[str, str]:
        """List runs (``grpo``) and checkpoints (``grpo, step 40``), mapped to a run name or path.

        Args:
            trains_scorer: list reward models if True, otherwise all other runs.
        """
        kept: dict[str, str] = {}
        for name in every_run_name(self.runs_dir):
            folder = self.runs_dir / name / "checkpoints"
            with suppress(PosttrainError):  # a recipe that cannot be read
                if read_run_recipe(self.runs_dir / name).trains_scorer != trains_scorer:
                    continue
                steps = checkpoint_steps(folder)
                if steps:
                    kept[name] = name
                for step in steps:
                    kept[f"{name}, step {step}"] = str(step_folder(folder, step))
        return kept

    def models(self) -> dict[str, str]:
        """List generative models, mapped to a name or path."""
        own = self.snapshots(trains_scorer=False)
        return {name: name for name in self.named_models} | own | {name: name for name in EMBEDDED_MODELS}

    def dictionaries(self) -> list[str]:
        """List sparse autoencoders."""
        trained = [name for name in run_names(self.runs_dir) if has_sae(self.runs_dir / name)]
        return list(dict.fromkeys([*self.named_saes, *trained]))

    def rollouts(self, run: str, kind: str, step: int | None, text: str) -> list[list[object]]:
        """Load the newest rollouts from a run as table rows (``COLUMNS``)."""
        path = self.runs_dir / check_offered(run, every_run_name(self.runs_dir), "run") / "rollouts.db"
        if not path.is_file():
            raise UsageError(
                f"run {run!r} has no rollouts: training used fixed data, and no evaluation sampled answers"
            )
        wanted: dict[str, Any] = {"text": text or None, "limit": MAX_ROLLOUTS, "newest_first": step is None}
        with RolloutStore(path, read_only=True) as store:
            if kind == TRAINING:
                rows = store.training(step, **wanted)
            else:
                rows = store.evaluations(None, step, **wanted)
        texts = []
        for row in rows:
            texts += [row.prompt, row.transcript, row.answer or ""]
        fit = fitting(texts)
        lines: list[list[object]] = []
        for row in rows:
            prompt = fit(row.prompt)
            transcript = fit(row.transcript)
            gold = fit(row.answer or "")
            lines.append([row.step, prompt, transcript, row.reward, row.advantage, row.finish, gold])
        return lines

    def _open_model(self, name: str) -> OpenedModel:
        offered = self.models()
        source = find_source(offered[check_offered(name, offered, "model")], self.runs_dir)
        say_template(source)
        return open_model(source)

    def _open_reward_model(self, name: str) -> RewardModel:
        offered = self.snapshots(trains_scorer=True)
        return open_reward_model(find_source(offered[check_offered(name, offered, "reward model")], self.runs_dir))


def check_offered(name: str, offered: Collection[str], kind: str) -> str:
    """Check that the page offers a name.

    Raises:
        UsageError: unknown name.
    """
    if name not in offered:
        raise UsageError(f"{name!r}: unknown {kind} on this page; pass it when starting the studio")
    return name


@dataclass
class Side:
    """One chat column: conversation, displayed history, and facts about the latest reply."""

    conversation: ChatSession
    history: list[dict[str, str]] = field(default_factory=list)
    info: str = ""

    def speak(self, question: str) -> Iterator[None]:
        """Stream a reply into the history. If the model cannot reply, ``info`` holds the reason."""
        self.info = ""
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
        try:
            for _ in self.conversation.reply(question):
                self.history[-1]["content"] = self.conversation.text
                yield
            self.info = self.conversation.info
        except PosttrainError as error:
            self.info = str(error)


def stream_replies(
    library: Library,
    sides: Sequence[Side] | None,
    question: str,
    models: Sequence[str],
    controls: Controls,
    system: str = "",
    judge: str = NOBODY,
    steering: tuple[str, str, str] = (NOBODY, "", "left"),
) -> Iterator[list[Side]]:
    """Stream replies on all sides, yielding after updates. Changing models starts new conversations.

    ``steering``: dictionary, feature strengths (``12=8, 40=off``), and the steered side.

    Raises:
        PosttrainError: failed to load a model, reward model or dictionary.
    """
    if not question.strip():
        raise UsageError("a message needs some text")
    opened = [library.model(name) for name in models if name != NOBODY]
    if not opened:
        raise UsageError("model: choose who answers")
    current: list[Side] = []
    if sides is not None:
        current = list(sides)
    if [side.conversation.sampler for side in current] != opened:
        current = [Side(ChatSession(model, controls)) for model in opened]
    sae, features, steered = steering
    chosen = ""
    if sae != NOBODY:
        chosen = check_offered(sae, library.dictionaries(), "dictionary")
    for number, side in enumerate(current):
        conversation = side.conversation
        conversation.controls = controls
        conversation.set_system(system)
        conversation.steering = None
        if number in SIDES[steered]:
            conversation.steering = read_steering(features, chosen, conversation.sampler.model, library.runs_dir)
    if judge == NOBODY:
        scorer = None
    else:
        scorer = library.reward_model(judge)
    replies = [side.speak(question) for side in current]
    while replies:  # a reply that ends grows by less than it could
        replies = [r for r in replies if len(list(islice(r, TOKENS_PER_UPDATE))) == TOKENS_PER_UPDATE]
        yield current
    if scorer is None:
        return
    for side in current:
        answered = side.conversation
        if answered.logprobs and answered.messages:
            turns = tuple(Message(one["role"], one["content"]) for one in side.history[:-1])
            (reward,) = scorer.score([Example("chat", turns)], [answered.text], [answered.finish])
            if reward is None:
                side.info += ", no reward"
            else:
                side.info += f", reward {reward:.3f}"
            yield current


def build_studio(models: Sequence[str], runs_dir: str | Path, saes: Sequence[str] = ()) -> Any:
    """Build the Gradio page without serving it.

    Raises:
        MissingExtra: gradio is not installed.
    """
    gradio = _import_gradio()
    library = Library(models, runs_dir, saes)
    for name in models:
        library.model(name)  # fail before the page opens
    with gradio.Blocks(title="posttrain studio", analytics_enabled=False) as page:
        gradio.Markdown("# posttrain studio")
        with gradio.Tab("Chat"):
            _build_chat(gradio, library)
        with gradio.Tab("Rollouts"):
            _build_rollouts(gradio, page, library)
    for listener in page.fns.values():
        listener.api_visibility = "private"
    return page.queue(api_open=False, default_concurrency_limit=1)


def _build_chat(gradio: ModuleType, library: Library) -> None:
    state = gradio.State(None)
    offered = list(library.models())
    first, second, *_ = [*(library.named_models or offered[:1]), NOBODY, NOBODY]
    with gradio.Row():
        left = gradio.Dropdown(offered, value=first, label="model")
        right = gradio.Dropdown([NOBODY, *offered], value=second, label="second model")
        judges = [NOBODY, *library.snapshots(trains_scorer=True)]
        judge = gradio.Dropdown(judges, value=NOBODY, label="reward model")
    with gradio.Row():
        # Plain text only. Default buttons are disabled: they upload conversations and copy escaped text.
        plain = {
            "render_markdown": False,
            "latex_delimiters": [],
            "elem_classes": "talk",
            "buttons": [],
            "min_width": 300,
        }
        talks = [gradio.Chatbot(**heading(side, name), **plain) for side, name in (("left", first), ("right", second))]
    with gradio.Row():
        facts = {"show_label": False, "interactive": False, "min_width": NARROW}
        info = [gradio.Textbox(**facts, elem_id=f"facts-{n}", visible=n == 0 or second != NOBODY) for n in range(2)]
    question = gradio.Textbox(EXAMPLE, label="your message (Enter sends it)", lines=1, elem_id="question")
    with gradio.Row():
        send, stop, clear = (gradio.Button(text) for text in ("Send", "Stop", "New conversation"))
    with gradio.Accordion("how replies are drawn", open=False):
        system = gradio.Textbox(label="system message")
        with gradio.Row():
            temperature = gradio.Number(0.7, step=0.05, label="temperature (0: greedy)")
            top_p = gradio.Number(1.0, step=0.05, label="top p")
            longest = gradio.Number(0, label="longest reply (0: as trained)")
            seed = gradio.Number(0, label="seed")
    with gradio.Accordion("steered by features of a sparse autoencoder", open=False):
        sae = gradio.Dropdown([NOBODY, *library.dictionaries()], value=NOBODY, label="sparse autoencoder")
        features = gradio.Textbox(label="features", placeholder="12=8, 40=off")
        steered = gradio.Radio(list(SIDES), value="left", label="side")

    def respond(sides: list[Side] | None, *values: object) -> Iterator[tuple[object, ...]]:
        keep = gradio.skip()
        try:
            form = read_chat(values)
            about = (form.system, form.judge, (form.sae, form.features, form.side))
            for current in stream_replies(library, sides, form.question, form.models, form.controls, *about):
                yield current, *page_contents(current), ""
        except PosttrainError as error:  # the message stays, to be sent again
            yield keep, keep, keep, str(error), keep, keep

    for chosen, side, talk, fact in zip((left, right), ("left", "right"), talks, info, strict=True):
        chosen.change(
            lambda name, side=side: (gradio.update(**heading(side, name)), gradio.update(visible=name != NOBODY)),
            chosen,
            [talk, fact],
        )
    inputs = [state, question, left, right, judge, system, temperature, top_p, longest, seed]
    inputs += [sae, features, steered]
    outputs = [state, *talks, *info, question]
    events = [listen(respond, inputs, outputs, concurrency_id="model") for listen in (send.click, question.submit)]
    stop.click(None, cancels=events)
    for listen in (clear.click, *(talk.clear for talk in talks)):
        listen(lambda: (None, None, None, "", "", ""), None, outputs)


def page_contents(sides: Sequence[Side]) -> list[object]:
    """Collect histories and facts for both columns."""
    histories: list[object] = [None, None]
    facts: list[object] = ["", ""]
    for n, side in enumerate(sides):
        histories[n] = [{"role": turn["role"], "content": as_written(turn["content"])} for turn in side.history]
        facts[n] = side.info
    return [*histories, *facts]


def as_written(text: str) -> list[dict[str, str]]:
    """Convert a text to a form that the page displays verbatim.

    Gradio strips indentation from plain strings, and renders them as HTML if Markdown is disabled.
    """
    return [{"type": "text", "text": html.escape(text, quote=False)}]


def heading(side: str, name: str) -> dict[str, str | bool]:
    """Build a column heading with the model name; columns without a model are hidden."""
    return {"label": f"{side}: {name}", "visible": name != NOBODY}


def _build_rollouts(gradio: ModuleType, page: Any, library: Library) -> None:
    with gradio.Row():
        run = gradio.Dropdown(every_run_name(library.runs_dir), value=None, label="run")
        kind = gradio.Radio([TRAINING, "evaluation"], value=TRAINING, label="sampled in")
        step = gradio.Textbox(placeholder=NEWEST, label="step")  # an empty number would be sent as 0
        text = gradio.Textbox(label="containing")
    about = gradio.Textbox(CHOOSE_RUN, show_label=False, interactive=False, elem_id="about-rollouts")
    table = gradio.Dataframe(
        headers=list(COLUMNS),
        datatype="str",
        interactive=False,
        wrap=True,
        max_chars=2000,
        column_widths=list(COLUMNS.values()),
    )

    def read(*values: object) -> tuple[list[list[object]], str]:
        name, sampled, containing = (read_text(values[n]) for n in (0, 1, 3))
        if not name:
            return [], CHOOSE_RUN
        try:
            at = read_whole(values[2], "step", None)
            rows = library.rollouts(name, sampled, at, containing)
        except PosttrainError as error:
            return [], str(error)
        return [[as_shown(value) for value in row] for row in rows], count_rows(len(rows))

    wanted = [run, kind, step, text]
    for listen in (run.change, kind.change, step.submit, step.blur, text.submit, text.blur):
        listen(read, wanted, [table, about])
    page.load(lambda: gradio.update(choices=every_run_name(library.runs_dir)), None, run)


def as_shown(value: object) -> object:
    """Format a table value; floats keep four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def count_rows(num_rows: int) -> str:
    """Describe the number of rollouts shown."""
    if num_rows == 0:
        return "no such rollouts"
    if num_rows == MAX_ROLLOUTS:
        return f"the first {MAX_ROLLOUTS} rollouts; filter by step or text to see more"
    return f"{num_rows} rollouts"
