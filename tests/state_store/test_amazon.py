"""Endpoint, region and credentials, as two clients use them in one run: obstore for all objects, icechunk for rows."""

import json
import re
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import icechunk
import pytest

from thermopile.benchmarks.object_server import CREDENTIALS
from thermopile.state_store.icechunk_files import storage
from thermopile.storage import bucket
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_errors import ObjectStoreError

KEYS = {"AccessKeyId": "ROLE", "SecretAccessKey": "secret", "Token": "of-role"}
SIGNED = re.compile("Credential=([^/]+)/[0-9]{8}/([^/]+)/")


class Cloud(BaseHTTPRequestHandler):
    """An empty bucket, the services that give roles their credentials, and a record of who asked for what."""

    def answer(self):
        keys = KEYS | {"Expiration": f"{datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}", "Code": "Success"}
        length = int(self.headers.get("content-length") or 0)
        self.rfile.read(length)
        if self.path in ("/latest/api/token", "/latest/meta-data/iam/security-credentials/"):
            self.reply(200, b"role", ("x-aws-ec2-metadata-token-ttl-seconds", "600"))
        elif self.path in ("/latest/meta-data/iam/security-credentials/role", "/container"):
            self.reply(200, json.dumps(keys).encode())
        else:
            signed = SIGNED.search(self.headers.get("authorization", ""))
            who = signed.groups() if signed else ("nobody", "nowhere")
            path = self.path.split("/")[1]
            self.server.seen.append((*who, self.headers.get("x-amz-security-token"), path))
            self.reply(self.server.status, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_PUT = do_HEAD = answer  # noqa: N815  # the names that http.server calls

    def reply(self, status, body, *headers):
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def cloud(monkeypatch, tmp_path):
    """A Cloud at an endpoint that the test's `given` variables may name as {url}; nothing else is set."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Cloud) as server:
        server.seen, server.status, server.url = [], 404, f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in (*CREDENTIALS, "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 2.0)
        bucket._store.cache_clear()
        yield server
        server.shutdown()
    bucket._store.cache_clear()


def set_up(monkeypatch, cloud, folder, variables, config="", credentials=""):
    """Set variables, and write the two files of profiles."""
    (folder / ".aws").mkdir()
    (folder / "token").write_text("token")
    for file, text in (("config", config), ("credentials", credentials)):
        if text:
            (folder / ".aws" / file).write_text(text.format(url=cloud.url))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(url=cloud.url, folder=folder))


HERE = {"AWS_ENDPOINT_URL": "{url}"}
KEY = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "secret"}
A_PROFILE = "aws_access_key_id = PROFILE\naws_secret_access_key = sec%ret\n"


@pytest.mark.parametrize(
    ("variables", "config", "credentials", "who"),
    [
        (HERE | KEY, "", "", ("KEY", "us-east-1", None)),
        (HERE | KEY | {"AWS_REGION": "eu-west-1"}, "", "", ("KEY", "eu-west-1", None)),
        (HERE | KEY | {"AWS_DEFAULT_REGION": "eu-west-2"}, "", "", ("KEY", "eu-west-2", None)),
        (HERE | KEY | {"AWS_SESSION_TOKEN": "token"}, "", "", ("KEY", "us-east-1", "token")),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "{url}"} | KEY, "", "",
         ("KEY", "us-east-1", None)),
        (HERE, "", f"[default]\n{A_PROFILE}", ("PROFILE", "us-east-1", None)),
        (HERE | KEY, "[default]\nregion = eu-west-3", f"[default]\n{A_PROFILE}", ("KEY", "eu-west-3", None)),
        ({"AWS_PROFILE": "mine"}, "[profile mine]\nregion = eu-west-3\nendpoint_url = {url}\n",
         f"[default]\naws_access_key_id = OTHER\n[mine]\n{A_PROFILE}aws_session_token = token",
         ("PROFILE", "eu-west-3", "token")),
        (HERE | {"AWS_PROFILE": "mine"}, f"[profile mine]\n{A_PROFILE}", "", ("PROFILE", "us-east-1", None)),
        (HERE | {"AWS_SHARED_CREDENTIALS_FILE": "{folder}/.aws/config", "AWS_CONFIG_FILE": "{folder}/none"},
         f"[default]\n{A_PROFILE}", "", ("PROFILE", "us-east-1", None)),
        (HERE | {"AWS_SKIP_SIGNATURE": "true"}, "", f"[default]\n{A_PROFILE}", ("nobody", "nowhere", None)),
        (HERE | {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}/container",
                 "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{folder}/token"}, "", "",
         ("ROLE", "us-east-1", "of-role")),
        (HERE | {"AWS_METADATA_ENDPOINT": "{url}", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{url}",
                 "AWS_EC2_METADATA_DISABLED": "false"}, "", "", ("ROLE", "us-east-1", "of-role")),
    ],
    ids=["keys", "region", "default-region", "session", "endpoint-of-s3", "default-profile", "keys-before-profile",
         "named-profile", "keys-in-config", "other-files", "anonymous", "container", "machine"],
)  # fmt: skip
def test_both_clients_ask_the_same_endpoint_as_the_same_user(
    cloud, monkeypatch, tmp_path, variables, config, credentials, who
):
    set_up(monkeypatch, cloud, tmp_path, variables, config, credentials)
    place = Address("data.set", "run")
    assert not place.exists()
    of_obstore = {*cloud.seen}
    cloud.seen.clear()
    with suppress(icechunk.IcechunkError):
        icechunk.Repository.exists(storage(place))
    assert of_obstore == {*cloud.seen} == {(*who, "data.set")}


@pytest.mark.parametrize(
    ("variables", "config", "words"),
    [
        ({"AWS_PROFILE": "none"}, "", "AWS_PROFILE=none is in neither ~/.aws/config nor ~/.aws/credentials"),
        (
            {"AWS_PROFILE": "a"},
            "[profile a]\nrole_arn = x",
            "with role_arn is not supported; run `eval .*aws configure",
        ),
        ({"AWS_PROFILE": "a"}, "[profile a]\nservices = x", "`services`, .* set AWS_ENDPOINT_URL_S3"),
        ({}, "aws_secret_access_key = hidden", r"config cannot be parsed; fix it, or set AWS_CONFIG_FILE"),
    ],
    ids=["missing", "role", "services", "unparsed"],
)
def test_a_profile_that_cannot_be_used_is_refused_in_a_line_without_secrets(
    cloud, monkeypatch, tmp_path, variables, config, words
):
    set_up(monkeypatch, cloud, tmp_path, variables, config)
    with pytest.raises(PermissionError, match=words) as refused:
        Address("data", "run").read_bytes()
    assert not re.search(r"hidden|\n", str(refused.value))


def test_missing_credentials_are_named_at_once_with_the_switch_for_public_buckets(cloud, monkeypatch, tmp_path):
    set_up(monkeypatch, cloud, tmp_path, HERE | {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"})
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1000.0)
    with pytest.raises(PermissionError, match=r"s3://data/x: there are no credentials; set .*AWS_SKIP_SIGNATURE=true$"):
        Address("data", "x").read_bytes()


def test_a_bucket_of_another_region_is_told_at_once_with_the_cure(cloud, monkeypatch, tmp_path):
    set_up(monkeypatch, cloud, tmp_path, HERE | KEY)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1000.0)
    cloud.status = 301
    with pytest.raises(ObjectStoreError, match=r"s3://data/x: the bucket is in another region; set AWS_REGION to it$"):
        Address("data", "x").read_bytes()
