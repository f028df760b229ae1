"""Certificates of an authority that only the tests trust."""

import os
import subprocess

CERTIFY = """
new="openssl req -x509 -newkey rsa:2048 -nodes -days 2"
$new -subj /CN=tests -keyout authority.key -out authority.pem
$new -subj /CN=server -keyout server.key -out server.pem -CA authority.pem -CAkey authority.key \\
    -addext basicConstraints=critical,CA:FALSE -addext "subjectAltName=$NAMES"
"""


def certified(folder, *names):
    """Write a certificate for names such as DNS:a.example; return the files of it, its key and its authority."""
    environment = os.environ | {"NAMES": ",".join(names)}
    subprocess.run(["sh", "-ec", CERTIFY], cwd=folder, env=environment, check=True, stderr=subprocess.DEVNULL)
    return folder / "server.pem", folder / "server.key", folder / "authority.pem"
