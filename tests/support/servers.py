"""Stubs of the servers of log-likelihoods, which can fail in many ways, or answer with the values of a model."""

import gzip
import json
import math
import socket
import struct
import threading
import time
import zlib
from collections import Counter, deque
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch

from lightning_modules.batch import pack_sequence

ENDLESS = ("trickle", "trickle_headers", "flood", "bomb")
"""Faults that are methods of the handler: replies that do not end, or fill the memory."""

PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}


def stub_values(ids, model="a"):
    """Log-likelihoods of a causal model of three tokens of context; the first is 0."""
    seeds = [hash((model, *ids[max(0, index - 3) : index + 1])) for index in range(len(ids))]
    return np.asarray([0.0, *(-(seed % 99_991) / 9999.1 for seed in seeds[1:])], dtype=np.float32)


def stub_tops(ids, values):
    """Id and log-likelihood of the likeliest token in each place: the token, an equally likely, or a likelier one."""
    steps = [(0, 1), (-1, 1), (1, 1), (1, 0.5)]
    return [
        (max(0, token + steps[index % 4][0]), value * steps[index % 4][1])
        for index, (token, value) in enumerate(zip(ids, values, strict=True))
    ]


def stub_greedy(ids, values):
    """The likeliest tokens, of equally likely ones the first."""
    tops = stub_tops(ids, values)
    return [min((-value, token), (-top[1], top[0]))[1] for token, value, top in zip(ids, values, tops, strict=True)]


class StubServer(ThreadingHTTPServer):
    """Answers like a server of the dialect; each of ``faults`` spoils one answer, and ``fault`` all of them."""

    daemon_threads = True

    def __init__(self, dialect, port=0, backbone=None):
        self.dialect, self.model, self.name, self.key = dialect, "a", "tiny", None
        self.owner, self.shift, self.limit = dialect, 0, 4096
        self.faults, self.fault, self.seen = deque(), None, []
        self.refusals = math.inf  # requests that a server which is down refuses until it is back
        self.gate = threading.Event()  # while it is closed, prompts wait for their answers
        self.gate.set()
        self._connections, self.poison = [], None
        self.backbone, self._one_at_a_time = backbone, threading.Lock()  # a model instead of the stub's values
        self.counts = Counter()
        super().__init__(("127.0.0.1", port), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def process_request(self, request, client_address):
        self._connections.append(request)
        super().process_request(request, client_address)

    def end(self):
        """Close all connections as well, like a process that ends."""
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @torch.no_grad()
    def log_likelihoods(self, ids):
        """Values of the model, and id and log-likelihood of the likeliest token in each place."""
        batch = pack_sequence([torch.tensor(ids)])
        with self._one_at_a_time:
            values = self.backbone(batch)[0].tolist()
            logits = self.backbone.base_model(batch["input_ids"]).logits[0, :-1].log_softmax(-1)
        return values, [(0, 0.0), *((int(row.argmax()), float(row.max())) for row in logits)]

    def handle_error(self, request, client_address):
        """Connections that break are what is tested."""

    def models(self):
        return [{"id": self.name, "owned_by": self.owner, "max_model_len": self.limit}]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.server.fault == "down":
            return self.refuse()
        if self.server.fault in ENDLESS:
            return getattr(self, self.server.fault)()
        if self.server.fault == "hello":
            return self.answer(b"<html>hello</html>")
        return self.answer(json.dumps({"data": self.server.models()}).encode())

    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.seen.append((self.path, self.headers.get("Authorization")))
        fault = server.fault or (server.faults.popleft() if server.faults else None)
        fault = "500" if server.poison is not None and server.poison in body else fault
        server.gate.wait()
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.answer(f"wrong key {self.headers.get('Authorization')}".encode(), 401)
        if fault == "down":
            return self.refuse()
        if fault == "reset":
            return self.reset()
        if fault in ENDLESS:
            return getattr(self, fault)()
        status = "404" if self.path != PATHS[server.dialect] else str(fault)
        if status.isdecimal():
            return self.answer(
                f"no {self.headers.get('Authorization')}".encode(),
                int(status),
                {"Retry-After": "0", "Location": "http://127.0.0.1:1/"},
            )
        return self.answer_prompt(json.loads(body), fault)

    def answer_prompt(self, request, fault):
        headers = {}
        content = getattr(self, f"answer_{self.server.dialect}")(request, fault)
        if fault == "truncated":
            headers["Content-Length"] = str(len(content))
            content = content[: len(content) // 2]
            self.close_connection = True
        if fault == "huge":
            content = bytes(4_000_000)
        if fault == "slow":
            self.connection.recv(1)  # until the client has given up and closes it
        if fault == "gzip":  # by a proxy that ignores what was asked for
            content, headers = gzip.compress(content), {"Content-Encoding": "gzip"}
        return self.answer(content, 200, headers)

    def tops(self, ids):
        if self.server.backbone is not None:
            return self.server.log_likelihoods(ids)[1]
        return stub_tops(ids, stub_values(ids, self.server.model).astype(float))

    def values(self, ids, fault):
        self.server.counts.update(requests=1, tokens=len(ids))
        if self.server.backbone is not None:
            return self.server.log_likelihoods(ids)[0]
        values = stub_values(ids, self.server.model).astype(float)
        values = [*values[self.server.shift :], *([-1.0] * self.server.shift)]
        spoiled = {"nan": float("nan"), "positive": 0.5, "clamped": -9999.0, "text": "much"}
        if fault in spoiled:
            values[-2] = spoiled[fault]
        if fault == "short":
            values = values[:-1]
        return values

    def answer_vllm(self, request, fault):
        """The shape of vLLM 0.32, with the text of each token and all fields of a completion."""
        ids = request["prompt"]
        ids = [*ids[:-1], ids[-1] + 1] if fault == "other_ids" else ids
        entries = [
            {str(token): {"logprob": value, "rank": 7, "decoded_token": f"<{token}>"}}
            for token, value in zip(ids, self.values(ids, fault), strict=False)
        ]
        if request["prompt_logprobs"] and fault != "greedy":  # as there: the token may be the likeliest one
            for entry, (token, value) in zip(entries, self.tops(ids), strict=False):
                entry[str(token)] = {"logprob": value, "rank": 1, "decoded_token": f"<{token}>"}
        choice = {
            "index": 0,
            "text": " a",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None if fault == "ignored" else [None, *entries[1:]],
            "prompt_token_ids": None,
        }
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1}
        whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": request["model"]}
        content = json.dumps({**whole, "choices": [choice], "usage": usage, "kv_transfer_params": None}).encode()
        return content.replace(b'"logprob": -', b'"logprob": x', 1) if fault == "damaged" else content

    def answer_sglang(self, request, fault):
        ids, start = request["input_ids"], request["logprob_start_len"]
        sent = [*ids[:-1], ids[-1] + 1] if fault == "other_ids" else ids
        entries = [[value, token, None] for value, token in zip(self.values(ids, fault), sent, strict=False)][start:]
        entries[0][0] = None
        meta = {"id": "1", "prompt_tokens": len(ids), "completion_tokens": 1, "input_token_logprobs": entries}
        if request["top_logprobs_num"] and fault != "greedy":
            meta["input_top_logprobs"] = [
                None,
                *([[value, token, None]] for token, value in self.tops(ids)[start + 1 :]),
            ]
        content = json.dumps({"text": "a", "meta_info": {} if fault == "ignored" else meta}).encode()
        return content[:-1] if fault == "damaged" else content

    def answer(self, content, status=200, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def trickle(self):
        """A reply of one byte at a time, each within the time for a read."""
        self.begin_without_length()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.05)

    def trickle_headers(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            self.wfile.write(b"X: y\r\n")
            time.sleep(0.05)

    def flood(self):
        self.begin_without_length()
        while True:
            self.wfile.write(bytes(2**20))

    def bomb(self):
        """A gigabyte of zeros in a megabyte."""
        self.begin_without_length({"Content-Encoding": "gzip"})
        compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        for _ in range(1024):
            self.wfile.write(compressor.compress(bytes(2**20)))
        self.wfile.write(compressor.flush())

    def begin_without_length(self, headers=None):
        self.close_connection = True
        self.send_response(200)
        for name, value in {"Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self):
        self.server.refusals -= 1
        if self.server.refusals <= 0:
            self.server.fault, self.server.refusals = None, math.inf
        self.reset()

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@contextmanager
def stub_server(dialect="vllm", port=0, backbone=None):
    """A `StubServer` for a block."""
    server = StubServer(dialect, port, backbone)
    try:
        yield server
    finally:
        server.end()
