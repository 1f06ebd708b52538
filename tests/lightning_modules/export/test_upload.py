"""Uploads of exports, to a stub of the Hugging Face hub on this machine."""

import json
import os
import subprocess
import sys
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightning_modules.export.options import ExportOptions
from lightning_modules.export.upload import check_upload

ROOT = Path(__file__).parents[4]
TOKEN = "hf_secret"
UPLOAD = """
import sys
from pathlib import Path
from lightning_modules.export.options import ExportOptions
from lightning_modules.export.upload import check_upload, upload_export
options = ExportOptions(push_to_hub="org/name", private=sys.argv[2] == "private")
check_upload(options)
try:
    upload_export(Path(sys.argv[1]), options)
except ValueError as error:
    sys.exit(str(error))
"""


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
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.seen, server.private, server.failing = [], True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("A model.")
    return folder


def upload(hub, export, private="private"):
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    command = [sys.executable, "-c", UPLOAD, str(export), private]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert TOKEN not in result.stdout + result.stderr
    assert (export / "config.json").is_file()
    return result


@pytest.mark.limit(4)  # a process of its own, because the address of the hub is read at import
def test_all_files_are_in_one_commit_of_a_private_repository(hub, export):
    result = upload(hub, export)
    assert result.returncode == 0, result.stderr
    created = next(json.loads(body) for path, _, body in hub.seen if path == "/api/repos/create")
    assert created["visibility"] == "private"
    assert (created["organization"], created["name"]) == ("org", "name")
    commit = next(body for path, _, body in hub.seen if "/commit/" in path)
    lines = list(map(json.loads, commit.splitlines()))
    removed = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
    assert removed == {"model.safetensors.index.json", "model-00001-of-00002.safetensors"}  # of an earlier export
    files = {
        line["value"]["path"]: b64decode(line["value"]["content"]).decode() for line in lines if line["key"] == "file"
    }
    assert files == {"config.json": "{}", "README.md": "A model."}
    assert {token for _, token, _ in hub.seen} <= {f"Bearer {TOKEN}", None}


@pytest.mark.limit(4)
def test_a_public_repository_gets_no_private_export(hub, export):
    hub.private = False
    result = upload(hub, export)
    assert result.returncode == 1
    assert "'org/name' is public" in result.stderr
    assert "hf upload" not in result.stderr
    assert not any("/commit/" in path for path, *_ in hub.seen)
    assert upload(hub, export, "public").returncode == 0


@pytest.mark.limit(4)
def test_a_failure_has_the_command_that_repeats_the_upload(hub, export):
    hub.failing = True
    assert f"hf upload org/name {export} --private --delete 'model*.safetensors*'" in upload(hub, export).stderr


@pytest.mark.parametrize("name", ["name", "org/name/more", "org/na me", "https://huggingface.co/org/name", ""])
def test_names_that_are_not_of_a_repository(name):
    with pytest.raises(ValueError, match="must be `organization/name`"):
        ExportOptions(push_to_hub=name)


def test_an_upload_needs_a_token_and_a_network(monkeypatch):
    options = ExportOptions(push_to_hub="org/name")
    monkeypatch.setattr("lightning_modules.export.upload.is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        check_upload(options)
    monkeypatch.setattr("lightning_modules.export.upload.is_offline_mode", lambda: False)
    monkeypatch.setattr("lightning_modules.export.upload.get_token", lambda: None)
    with pytest.raises(ValueError, match="hf auth login"):
        check_upload(options)
    check_upload(ExportOptions())
