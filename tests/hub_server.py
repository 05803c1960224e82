"""A Hub on loopback: as much of its HTTP interface as huggingface_hub uses to publish a model and to fetch it."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hf_dflow import __version__

ROOT = Path(__file__).parent.parent


class Hub:
    """Repositories with their commits, and every request that came in."""

    def __init__(self):
        self.repositories: dict[str, list[tuple[str, dict[str, bytes]]]] = {}  # name -> (commit, files), oldest first
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()

    def commit(self, name: str, changes: dict[str, bytes | None]) -> str:
        """Add a commit; `None` deletes a file."""
        commits = self.repositories.setdefault(name, [])
        files = dict(commits[-1][1]) if commits else {}
        files |= {path: content for path, content in changes.items() if content is not None}
        for path in [path for path, content in changes.items() if content is None]:
            files.pop(path, None)
        digest = hashlib.sha1(json.dumps([name, len(commits), sorted(files)]).encode()).hexdigest()
        commits.append((digest, files))
        return digest

    def at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories.get(name, [])
        if revision == "main":
            return commits[-1] if commits else None
        return next((one for one in commits if one[0] == revision), None)

    def run(self, script: str, home: Path, *arguments: str, offline: bool = False) -> str:
        """Run a Python script in a process whose Hub is this one and whose cache is below `home`; its output."""
        unwanted = ("HF_", "HUGGING_FACE")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        environment |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(_installed(home))]),
            **({"HF_HUB_OFFLINE": "1"} if offline else {}),
        }
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _installed(home: Path) -> Path:
    """A folder that says hf-dflow is installed, for runs from a source tree: `requirements.txt` is checked by that."""
    folder = home / "site"
    record = folder / f"hf_dflow-{__version__}.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-dflow\nVersion: {__version__}\n")
    return folder


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, path))
        parts = path.split("/")
        if len(parts) > 4 and parts[2] == "resolve":
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        if parts[:2] == ["api", "whoami-v2"]:
            return self._json({"type": "user", "name": "org", "orgs": []})
        if parts[:2] == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[:3] == ["api", "repos", "create"]:
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'org'}/{wanted['name'].split('/')[-1]}"
            if name in self.hub.repositories:
                return self._json({"error": "exists"}, 409)
            self.hub.repositories[name] = []
            return self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            return self._model("/".join(parts[2:4]), parts[4:], body)
        return self._json({"error": path}, 404)

    def _model(self, name, rest, body):
        if name not in self.hub.repositories:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["preupload"]:
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            return self._json({"files": modes})
        if rest[:1] == ["commit"]:
            lines = [json.loads(line) for line in body.decode().splitlines()]
            changes = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            commit = self.hub.commit(name, changes)
            url = f"{self.hub.url}/{name}/commit/{commit}"
            return self._json({"success": True, "commitUrl": url, "commitOid": commit, "hookOutput": ""})
        found = self.hub.at(name, rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
        if found is None:
            return self._json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if rest[:1] == ["tree"]:
            return self._json([
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in sorted(files.items())
            ])  # fmt: skip
        siblings = [{"rfilename": path} for path in sorted(files)]
        return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False})

    def _file(self, name, revision, path):
        found = self.hub.at(name, revision)
        if found is None:
            code = "RevisionNotFound" if name in self.hub.repositories else "RepoNotFound"
            return self._json({"error": code}, 404, {"X-Error-Code": code})
        commit, files = found
        if path not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self._json({"error": "Entry not found"}, 404, headers)
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        return self._send(files[path], 200, {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"})

    def _json(self, value, status=200, headers=None):
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content, status, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
