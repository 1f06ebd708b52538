"""Uploads of exports, to a stub of the Hugging Face hub on this machine."""

import json
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_modules.export.options import ExportOptions
from lightning_modules.export.upload import check_upload, upload_export

TOKEN = "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """The answers of the hub to the requests of one upload."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        if self.path == "/api/repos/create":
            self.answer({"url": f"{self.server.address}/org/name"})
        elif "/preupload/" in self.path:
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer({"files": files}, 403 if self.server.failing else 200)
        elif "/commit/" in self.path:
            self.answer({"commitUrl": f"{self.server.address}/org/name/commit/1", "commitOid": "1", "success": True})
        else:
            self.answer({"errors": [], "warnings": []})  # the check of the model card

    def do_GET(self):
        if "/tree/" in self.path:
            names = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "notes.md", "README.md")
            self.answer([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names])
        else:
            facts = {"id": "org/name", "modelId": "org/name", "private": self.server.private, "sha": "0", "tags": []}
            self.answer(facts)

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.seen, server.private, server.failing = [], True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"ENDPOINT": server.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def export(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("A model.")
    return tmp_path


def upload(export, *, private=True):
    options = ExportOptions(push_to_hub="org/name", private=private)
    check_upload(options)
    upload_export(export, options)


def test_all_files_are_in_one_commit_of_a_private_repository(hub, export):
    upload(export)
    created = next(json.loads(body) for path, _, body in hub.seen if path == "/api/repos/create")
    assert created["visibility"] == "private"
    assert (created["organization"], created["name"]) == ("org", "name")
    commit = next(body for path, _, body in hub.seen if "/commit/" in path)
    lines = list(map(json.loads, commit.splitlines()))
    removed = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
    assert removed == {"model.safetensors.index.json", "model-00001-of-00002.safetensors"}  # of an earlier export
    written = [line["value"] for line in lines if line["key"] == "file"]
    files = {value["path"]: b64decode(value["content"]).decode() for value in written}
    assert files == {"config.json": "{}", "README.md": "A model."}
    assert {token for _, token, _ in hub.seen} <= {f"Bearer {TOKEN}", None}


@pytest.mark.parametrize("fault", ["public", "failing"])
def test_what_is_not_uploaded_is_kept_and_there_is_a_command_if_it_could_be(hub, export, fault):
    hub.private, hub.failing = fault != "public", fault == "failing"
    command = f"hf upload org/name {export} --private --delete 'model*.safetensors*'"
    with pytest.raises(ValueError, match="org/name") as error:
        upload(export)
    assert (command in str(error.value)) == hub.failing
    assert TOKEN not in str(error.value)
    assert (export / "config.json").is_file()
    assert not any("/commit/" in path for path, *_ in hub.seen)
    if fault == "public":
        upload(export, private=False)


@pytest.mark.parametrize(("offline", "named"), [(True, "HF_HUB_OFFLINE"), (False, "HF_TOKEN")])
def test_an_upload_needs_a_token_and_a_network(monkeypatch, offline, named):
    monkeypatch.setattr("lightning_modules.export.upload.is_offline_mode", lambda: offline)
    monkeypatch.setattr("lightning_modules.export.upload.get_token", lambda: None)
    with pytest.raises(ValueError, match=named):
        check_upload(ExportOptions(push_to_hub="org/name"))
    check_upload(ExportOptions())
