"""Azurite, Microsoft's emulator of Azure's store, which is a package of npm."""

import base64
import hashlib
import hmac
import shutil
import urllib.request
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from thermopile.benchmarks.object_server import Server, free_port

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The same for everyone: the emulator's own."""


@contextmanager
def azure_server(folder):
    """Serve an empty container, az://bucket; yield variables that lead to it."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs azurite-blob in PATH: npm install --global azurite")
    port = free_port()
    options = ("--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port))
    server = Server([program, *options, "--location", str(folder)], port)
    try:
        make_container(f"{server.url}/{ACCOUNT}/bucket?restype=container")
        emulator = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": server.url}
        yield emulator | {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT}
    finally:
        server.stop()


def make_container(url):
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "\n".join(["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())])
    signed += f"\n/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}", "Content-Length": "0"}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
