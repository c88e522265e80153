"""The endpoints of ``posttrain serve --train``: Tinker's protocol, as the client ``tinker`` 0.38 speaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.commands.serve.endpoints import build_application, parse_json
from posttrain.commands.serve.limits import read_content
from posttrain.commands.serve.requests import BadRequest
from posttrain.commands.serve.tinker import bodies
from posttrain.commands.serve.tinker.samplers import SampleJob
from posttrain.commands.serve.tinker.service import Service
from posttrain.commands.serve.tinker.states import Kind
from posttrain.commands.serve.tinker.wire import PROTOBUF, read_loss_request
from posttrain.commands.serve.tinker.work import BodyMark, Failed, Promise, RequestResult, describe_body

MAX_JSON_BYTES = 4_000_000
MAX_ROWS_BYTES = 32_000_000
CHUNK_BYTES = 4_000_000  # bytes per request; clients send remaining rows separately
WAIT_SECONDS = 15.0  # before the client polls again; clients time out after 45 seconds
API = "/api/v1"
Make = Callable[[], Callable[[], RequestResult] | SampleJob]


class TinkerApi:
    """HTTP endpoints for a service. ``max_requests``: concurrent requests."""

    def __init__(self, service: Service, max_requests: int) -> None:
        self.service = service
        self.max_requests = max_requests
        self._reader = ThreadPoolExecutor(1, "reader")  # reads what may take long, while others are answered

    def application(self) -> Starlette:
        """Build the ASGI application."""
        return build_application(self._routes())

    def _routes(self) -> list[Route]:
        posts = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "unload_model": self.unload_model,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "load_weights": self.load_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve,
            "cancel_future": self.cancel,
            "weights_info": self.weights_info,
            "telemetry": self.telemetry,
        }
        gets = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.sampler,
            "training_runs/{model_id}": self.training_run,
            "training_runs/{model_id}/checkpoints": self.checkpoints,
        }
        routes = [Route(f"{API}/{path}", endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(f"{API}/{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        delete = f"{API}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}"
        return [*routes, Route(delete, self.delete_checkpoint, methods=["DELETE"])]

    async def client_config(self, request: Request) -> Response:
        """Configure the client: send rows in sequential requests, uncompressed."""
        await read_content(request, MAX_JSON_BYTES)
        return JSONResponse(
            {
                "parallel_fwdbwd_chunks": False,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
                "custom_loss_server_side": False,
                "sample_use_retrieve_futures": False,
                "sample_enable_stuck_detection": False,
                "sample_max_concurrent_requests": max(1, self.max_requests // 2),
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        """Tell clients that sampling requests can be cancelled."""
        await read_content(request, MAX_JSON_BYTES)
        return JSONResponse({"refresh_interval_sec": 3_600, "sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Accept and discard client telemetry."""
        await read_content(request, MAX_JSON_BYTES)
        return JSONResponse({"status": "accepted"})

    async def health(self, request: Request) -> Response:
        """Health check."""
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        """List base model names."""
        facts = {"max_context_length": self.service.context, "trainable": True, "sampleable": True}
        models = [{"model_name": name, **facts} for name in dict.fromkeys(self.service.names)]
        return JSONResponse({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        """Begin a session."""
        await self._read(request, bodies.CreateSession)
        return JSONResponse({"type": "create_session", "session_id": self.service.begin_session().id})

    async def heartbeat(self, request: Request) -> Response:
        """Record that a client is alive."""
        body, _ = await self._read(request, bodies.OfSession)
        self.service.session(body.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        """End a session."""
        await read_content(request, MAX_JSON_BYTES)
        self.service.finish_session(request.path_params["session_id"])
        return JSONResponse({})

    async def create_model(self, request: Request) -> Response:
        """Create a model, with a new adapter or with all weights trainable."""
        body, mark = await self._read(request, bodies.CreateModel)
        owner = f"session {body.session_id}"
        return self._promised(owner, body.model_seq_id, mark, lambda: self.service.create_model(body))

    async def get_info(self, request: Request) -> Response:
        """Describe a model."""
        body, _ = await self._read(request, bodies.OfModel)
        note = self.service.model(body.model_id).note
        data = {"arch": self.service.samplers.base.model.config.model_type, "model_name": note.base_model}
        info: dict[str, object] = {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": note.base_model,
            "model_data": data | {"tokenizer_id": self.service.tokenizer_path},
            "optimizer_config": {"type": "adamw"},
            "is_lora": not note.adapter.is_whole,
            "lora_rank": note.adapter.rank or None,
        }
        return JSONResponse(info)

    async def unload_model(self, request: Request) -> Response:
        """Release a model."""
        body, mark = await self._read(request, bodies.OfModel)
        return self._promised(body.model_id, body.seq_id, mark, lambda: self.service.unload(body))

    async def forward_backward(self, request: Request) -> Response:
        """Compute a loss over rows, and add its gradients unless only the forward pass is asked for."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("send the body uncompressed, as client/config says", None, "compressed", 415)
        if request.headers.get("content-type", "").partition(";")[0].strip() != PROTOBUF:
            raise BadRequest(f"the body of forward_backward is {PROTOBUF}, not JSON", None, "no_protobuf", 415)
        content = await read_content(request, MAX_ROWS_BYTES)
        mark = describe_body(content)

        def prepare() -> tuple[str, int, Callable[[], RequestResult]]:
            message = read_loss_request(content)
            return message.model_id, message.seq_id, self.service.evaluate(message)

        owner, number, work = await asyncio.get_running_loop().run_in_executor(self._reader, prepare)
        return self._promised(owner, number or None, mark, lambda: work)

    async def optim_step(self, request: Request) -> Response:
        """Run an optimizer step."""
        body, mark = await self._read(request, bodies.OptimStep)
        return self._promised(body.model_id, body.seq_id, mark, lambda: self.service.step(body))

    async def save_weights(self, request: Request) -> Response:
        """Save a checkpoint for continued training."""
        body, mark = await self._read(request, bodies.SaveWeights)
        return self._promised(body.model_id, body.seq_id, mark, lambda: self.service.save(body))

    async def save_for_sampler(self, request: Request) -> Response:
        """Save weights to sample from, under a name or for one sampling session."""
        body, mark = await self._read(request, bodies.SaveForSampler)
        return self._promised(body.model_id, body.seq_id, mark, lambda: self.service.save(body))

    async def load_weights(self, request: Request) -> Response:
        """Load a saved state into an existing or new model."""
        body, mark = await self._read(request, bodies.LoadWeights)
        owner = body.model_id or f"session {body.session_id}"
        number = body.seq_id
        if body.model_id is None:
            number = body.model_seq_id
        return self._promised(owner, number, mark, lambda: self.service.load(body))

    async def create_sampling_session(self, request: Request) -> Response:
        """Create a sampling session from base or saved weights."""
        body, _ = await self._read(request, bodies.CreateSamplingSession)
        session = self.service.sample_from(body)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": session.id})

    async def sampler(self, request: Request) -> Response:
        """Describe a sampling session."""
        session = self.service.sampling_session(request.path_params["sampler_id"])
        body = {"sampler_id": session.id, "base_model": session.base_model, "model_path": session.path}
        return JSONResponse(body)

    async def sample(self, request: Request) -> Response:
        """Sample answers to a prompt."""
        body, mark = await self._read(request, bodies.SampleRequest)
        promise = self._promise(body.sampling_session_id, body.seq_id, mark, lambda: self.service.sample(body))
        names = [f"{promise.id}:{number}" for number in range(body.num_samples)]
        return JSONResponse({"request_id": promise.id, "sample_sequence_ids": names})

    async def retrieve(self, request: Request) -> Response:
        """Return a result; if not ready in time, tell the client to poll again."""
        body, _ = await self._read(request, bodies.OfRequest)
        promise = self.service.promises.find(body.request_id)
        try:
            waiting = asyncio.shield(asyncio.wrap_future(promise.done))
            answer = await asyncio.wait_for(waiting, WAIT_SECONDS)
        except TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": promise.id, "queue_state": "active"}, 408)
        if isinstance(answer, Failed):
            return JSONResponse(answer.body)
        if isinstance(answer, bytes):
            return Response(answer, media_type=PROTOBUF)
        return JSONResponse(answer)

    async def cancel(self, request: Request) -> Response:
        """Cancel a pending request."""
        body, _ = await self._read(request, bodies.OfRequest)
        promise = self.service.promises.find(body.request_id)
        if not promise.is_sampling:
            raise BadRequest("request_id: only sampling requests can be cancelled", "request_id")
        promise.is_cancelled = True
        return JSONResponse({})

    async def weights_info(self, request: Request) -> Response:
        """Describe a saved state."""
        body, _ = await self._read(request, bodies.OfPath)
        note = self.service.states.find(body.tinker_path).note
        adapter = note.adapter
        info: dict[str, object] = {"base_model": note.base_model, "is_lora": not adapter.is_whole}
        if not adapter.is_whole:
            info["lora_rank"] = adapter.rank
            info |= adapter.model_dump(include={"train_unembed", "train_mlp", "train_attn"})
        return JSONResponse(info)

    async def training_run(self, request: Request) -> Response:
        """Describe a model, including models from earlier servers."""
        note = self.service.states.read_model(request.path_params["model_id"])
        states = self._states_of(note.model_id)
        newest: dict[Kind, dict[str, object]] = dict(states)
        body = {
            "training_run_id": note.model_id,
            "base_model": note.base_model,
            "model_owner": "local",
            "is_lora": not note.adapter.is_whole,
            "lora_rank": note.adapter.rank or None,
            "last_request_time": _time(note.created),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": {key: str(value) for key, value in note.user_metadata.items()},
        }
        return JSONResponse(body)

    async def checkpoints(self, request: Request) -> Response:
        """List saved states for a model."""
        note = self.service.states.read_model(request.path_params["model_id"])
        return JSONResponse({"checkpoints": [state for _, state in self._states_of(note.model_id)]})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a saved state."""
        place = request.path_params
        path = f"tinker://{place['model_id']}/{place['kind']}/{place['name']}"
        folder = self.service.states.find(path).folder
        self.service.states.remove(path)
        self.service.samplers.forget(folder)
        return Response(status_code=204)

    def _states_of(self, model_id: str) -> list[tuple[Kind, dict[str, object]]]:
        described: list[tuple[Kind, dict[str, object]]] = []
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        for kind, name, changed in self.service.states.names(model_id):
            place = f"{kind}/{name}"
            state: dict[str, object] = {"checkpoint_id": place, "checkpoint_type": kinds[kind], "time": _time(changed)}
            described.append((kind, state | {"tinker_path": f"tinker://{model_id}/{place}"}))
        return described

    def _promised(self, owner: str, number: int | None, mark: BodyMark, make: Make) -> Response:
        return JSONResponse({"request_id": self._promise(owner, number, mark, make).id})

    def _promise(self, owner: str, number: int | None, mark: BodyMark, make: Make) -> Promise:
        return self.service.promise(owner, number, mark, make)

    async def _read(self, request: Request, kind: type[bodies.BodyT]) -> tuple[bodies.BodyT, BodyMark]:
        """Parse a request and compute the mark of its body.

        Raises:
            BadRequest: an invalid body.
        """
        content = await read_content(request, MAX_JSON_BYTES)

        def parse() -> bodies.BodyT:
            return bodies.read_body(kind, parse_json(content))

        parsed = await asyncio.get_running_loop().run_in_executor(self._reader, parse)
        return parsed, describe_body(content)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
