"""tandem push, against a stand-in of the hub that keeps what it is sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants  # before HF_ENDPOINT is set, which it keeps

from tandem.checkpoint.folder import MANIFEST, Entry, Manifest
from tandem.cli import main
from tandem.files import sha256
from tandem.serve.push import files_of

# The hub's client uploads large files in a way that its HTTP library advises against.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>'")


_ROUTES = ("/api/repos/create", "/api/validate-yaml", "/api/models/you/model", "/you/model")
"""What an upload asks for. What else the client asks, once a day, is none of the upload's."""
_REGISTRY = "huggingface_hub.utils._detect_agent"
"""Where newer clients ask for a list, without a token, if their cache has none of the last day."""


class Hub:
    """What a small server has heard and holds."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.refuses = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                self.reply(*hub.answer(self.path, self.body(), self.headers))

            def do_GET(self) -> None:
                self.reply(*hub.answer(self.path, b"", self.headers))

            def do_PUT(self) -> None:
                hub.objects[self.path.rsplit("/", 1)[1]] = self.body()
                self.reply(200, {})

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def reply(self, code: int, said: Any) -> None:
                text = json.dumps(said).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if not path.startswith(_ROUTES):
            return 404, {"error": "not found"}
        self.tokens.add(str(headers.get("Authorization")))
        if self.refuses:
            return 403, {"error": "no rights"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/you/model"}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            return 200, {"files": [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": mode[f["path"].endswith(".safetensors")]} for f in files
            ]}  # fmt: skip
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{self.url}/put/{o['oid']}"}}}
                for o in objects
            ]}  # fmt: skip
        if "/commit/main" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.objects[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/you/model/commit/1", "commitOid": "1" * 40}
        return 200, {"id": "you/model", "siblings": [], "sha": "0" * 40}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    if find_spec(_REGISTRY):  # as in a home folder that is new
        monkeypatch.setattr(f"{_REGISTRY}._registry", None)
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "cache" / "list"))
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What push looks at of a model: its files."""
    model = tmp_path / "model"
    (model / "adapter").mkdir(parents=True)
    texts = {
        "config.json": "{}",
        "README.md": "# Card",
        "model.safetensors": "weights",
        ".tmp": "x",
        "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "/mine/base"}),
        "adapter/adapter_model.safetensors": "adapter",
        "adapter/README.md": "# Adapter",
    }
    for name, text in texts.items():
        (model / name).write_text(text, "utf-8")
    return model


def visibility(repo: dict[str, Any]) -> str:
    """What a new repository shall be, in the words of old and new clients."""
    return str(repo.get("visibility") or ("private" if repo.get("private") else "public"))


def test_a_folder_is_pushed_whole_and_private(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(folder), "you/model"]) == 0
    assert list(map(visibility, hub.created)) == ["private"]
    assert hub.tokens == {"Bearer hf_test"}
    assert hub.files["model.safetensors"] == b"weights"
    assert sorted(hub.files) == [
        "README.md", "adapter/README.md", "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors", "config.json", "model.safetensors",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "uploading 6 files" in out
    assert "names a base on this machine, /mine/base" in out
    assert f"uploaded: {hub.url}/you/model/commit/1" in out


def test_large_files_are_named_while_they_are_hashed(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once to compare them with the manifest, if there is one, and once for the hub."""
    monkeypatch.setattr("tandem.serve.push._LARGE_BYTES", 7)
    weights = folder / "model.safetensors"
    entries = {"model.safetensors": Entry(weights.stat().st_size, sha256(weights))}
    (folder / MANIFEST).write_text(Manifest(entries, {}).text(), "utf-8")
    assert main(["push", str(folder), "you/model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = sum(file.num_bytes for file in files_of(folder))
    compared = lines.index(f"comparing 6 files, {total:,} bytes, with their manifest ...")
    begun = next(at for at, line in enumerate(lines) if line.startswith("uploading 6 files"))
    hashed = lines.index("  hashing model.safetensors, 7 bytes ...")
    assert compared < begun < hashed
    assert "  hashing config.json, 2 bytes ..." not in lines


def test_an_adapter_alone_and_a_listing(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(folder), "you/model", "--adapter", "--public"]) == 0
    assert list(map(visibility, hub.created)) == ["public"]
    assert sorted(hub.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    hub.files.clear()
    assert main(["push", str(folder), "you/model", "--dry-run"]) == 0
    assert "7 bytes  model.safetensors" in capsys.readouterr().out
    assert not hub.files


def test_paths_of_this_machine_in_a_card_are_named(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, gone = folder.parent / "base", folder.parent / "gone"
    base.mkdir()
    rewards, data = folder.parent / "rewards.py", folder.parent / "data.jsonl"
    rewards.touch()
    data.touch()
    (folder / "README.md").write_text(
        f"Trained from `{base}` and {base}, by\n```\ntandem sft --data={folder} "
        f"--output-dir {gone} https://x{base} --eval-data {data}::prompt=q\n```\n"
        f"| d: 1 of 2 rows; rewarded by {rewards}:short; taught by {folder}; by {rewards}:long |\n",
        "utf-8",
    )
    assert main(["push", str(folder), "you/model", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "README.md names" in line]
    assert line == (
        "note: README.md names paths of this machine, which others will read: "
        f"{base}, {folder}, {data}, {rewards}; edit it before you upload, if they should not"
    )


def test_what_is_wrong_is_one_line(
    hub: Hub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*args: str) -> str:
        assert main(["push", *args]) == 2
        heard = capsys.readouterr()
        assert len(heard.err.splitlines()) == 1
        assert "uploading" not in heard.out or hub.refuses
        return heard.err

    assert "REPO must be OWNER/NAME; got 'a/b/c'" in told(str(folder), "a/b/c")
    assert "REPO must be OWNER/NAME; got 'model': it has no owner" in told(str(folder), "model")
    assert "must be a folder with config.json" in told(str(tmp_path), "you/model")
    assert f"got no such folder. Did you mean {folder}?" in told(f"{folder}s", "you/model")
    assert "got no such folder. Check the spelling." in told("/nowhere", "you/model")
    assert "trained with --lora-rank" in told(str(tmp_path), "you/model", "--adapter")
    hub.refuses = True
    assert "the hub must accept you/model; got" in told(str(folder), "you/model")
    hub.refuses = False
    monkeypatch.setattr("tandem.serve.push.get_token", lambda: None)
    assert "must have a token of the hub" in told(str(folder), "you/model")
    assert main(["push", str(folder), "you/model", "--dry-run"]) == 0  # needs none
