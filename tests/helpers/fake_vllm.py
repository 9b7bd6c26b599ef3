"""A server that answers as vLLM did when its answers were recorded, and fails when it is told to.

`vllm_answers.json` holds answers of vLLM 0.32.0 on a CPU; completions are these with other tokens.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vllm_answers.json").read_text(encoding="utf-8")
)
MODEL = RECORDED["request"]["model"]

Fault = str | float | Callable[[dict[str, Any]], object]
"""What becomes of a completion: "500", "cut" (closed in its midst), "torn" (half of the JSON),
"end" (of the server), seconds that it takes, or a change of the answer."""


class FakeVllm:
    """The server, in threads of this process.

    Args:
        faults: of the first completions, one each; None for none.

    Attributes:
        url: its address.
        max_model_len: as vLLM says it.
        has_control: whether it was started with VLLM_SERVER_DEV_MODE=1.
        sees_weights: whether it has the folder of the run.
        version: of the weights, as it was told.
        weights: that it read, one after another.
        requests: of completions.
    """

    def __init__(self, faults: Sequence[Fault | None] = ()) -> None:
        self.faults: Sequence[Fault | None] = faults
        self.max_model_len = 64
        self.has_control = True
        self.sees_weights = True
        self.version = "default"
        self.weights: list[dict[str, Any]] = []
        self.folders: list[Path] = []
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._http = self._listen(0)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        """As a process that is killed."""
        self._http.shutdown()
        self._http.server_close()

    def start_again(self) -> None:
        """At the same address, with its first weights."""
        self.version = "default"
        self._http = self._listen(self.port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*fake._get(self.path))

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                fault = None
                if self.path == "/v1/completions":
                    with fake._lock:
                        fault, *rest = fake.faults or (None,)
                        fake.faults = rest
                        fake.requests.append(body)
                status, answer = fake._post(self.path, body)
                if callable(fault):
                    fault(answer)
                elif isinstance(fault, float):
                    time.sleep(fault)
                elif fault == "500":
                    status, answer = 500, {"error": {"message": "EngineCore encountered an issue."}}
                elif fault == "end":
                    threading.Thread(target=fake.end).start()
                    return
                self._send(status, answer, fault if isinstance(fault, str) else "")

            def _send(self, status: int, answer: Any, fault: str = "") -> None:
                content = json.dumps(answer).encode()
                sent = content[: len(content) // 2] if fault in ("cut", "torn") else content
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content if fault == "cut" else sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Of a client that left."""

        http = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        return http

    def _get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            status, answer = deepcopy(RECORDED["answers"][path])
            answer["data"][0]["max_model_len"] = self.max_model_len
            return status, answer
        if path == "/weight_info" and self.has_control:
            return 200, {"weight_version": self.version}
        is_control = path in ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
        if is_control and self.has_control:
            return 405, {"detail": "Method Not Allowed"}
        return tuple(RECORDED["errors"]["no path"])

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            return self._completions(body)
        if path == "/collective_rpc":
            if not self.sees_weights:
                return 500, {"error": {"message": "Call to collective_rpc method failed"}}
            folder = Path(body["kwargs"]["weights_path"])
            assert body["method"] == "reload_weights"
            self.folders.append(folder)
            self.weights.append(load_file(folder / "model.safetensors"))
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        assert path == "/reset_prefix_cache"
        return 200, {"success": True}

    def _completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] != MODEL:
            return tuple(RECORDED["errors"]["other model"])
        status, answer = deepcopy(RECORDED["answers"]["/v1/completions"])
        (choice, *_), answer["choices"] = answer["choices"], []
        draw = random.Random(body["seed"])
        for index in range(body["n"]):
            tokens: list[int] = []
            while len(tokens) < body["max_tokens"]:
                tokens.append(draw.randrange(15))
                if tokens[-1] in body["stop_token_ids"]:
                    break
            ended = tokens[-1] in body["stop_token_ids"]
            made = deepcopy(choice) | {"index": index, "token_ids": tokens}
            made["prompt_token_ids"] = body["prompt"]
            made["finish_reason"] = "stop" if ended else "length"
            made["logprobs"]["token_logprobs"] = [-2.5 - draw.random() for _ in tokens]
            answer["choices"].append(made)
        return status, answer
