"""Endpoint, region and credentials of S3, found as Amazon's own tools find them: in variables, or else in a profile.

A wrong profile is a PermissionError, which is not retried.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from configparser import ConfigParser, Error
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import S3Credential

_UNREAD = {"role_arn", "sso_session", "sso_start_url", "credential_process", "login_session"}
"""Settings of a profile that get its keys from elsewhere: icechunk would follow them, obstore cannot."""


def endpoint_url() -> str | None:
    """Return the store's endpoint; None means Amazon's."""
    return _setting("endpoint_url", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def region() -> str:
    return _setting("region", "AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"


def has_own_host(bucket: str) -> bool:
    """Return whether the host is the bucket's, as Amazon prefers; its certificates cover no name with a dot."""
    return endpoint_url() is None and "." not in bucket


def is_anonymous() -> bool:
    """Return whether requests are not signed; obstore reads this variable by itself."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y")


def profile_credentials() -> Callable[[], S3Credential] | None:
    """Return the keys of the profile, which obstore does not read; None: it finds them, in variables or by a role."""
    profile = {} if os.environ.get("AWS_ACCESS_KEY_ID") or is_anonymous() else _profile()
    if unread := _UNREAD & {*profile}:
        raise PermissionError(
            f"an AWS profile with {unread.pop()} is not supported; "
            'run `eval "$(aws configure export-credentials --format env)"` first'
        )
    keys = tuple(profile.get(f"aws_{name}", "") for name in ("access_key_id", "secret_access_key", "session_token"))
    if not keys[0]:
        return None
    return lambda: {
        "access_key_id": keys[0], "secret_access_key": keys[1], "token": keys[2] or None, "expires_at": None
    }  # fmt: skip


def _setting(name: str, *variables: str) -> str | None:
    return next(filter(None, map(os.environ.get, variables)), None) or _profile().get(name)


def _profile() -> dict[str, str]:
    """Return the settings of AWS_PROFILE, or else of the profile `default`, which may be missing."""
    name, found = os.environ.get("AWS_PROFILE") or "default", dict[str, str]()
    in_config = name if name == "default" else f"profile {name}"
    files = (("AWS_CONFIG_FILE", "config", in_config), ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name))
    for variable, file, section in files:
        path, parsed = Path(os.environ.get(variable) or f"~/.aws/{file}").expanduser(), ConfigParser(interpolation=None)
        try:
            parsed.read(path, "utf-8")
        except (Error, ValueError):  # their text may show a secret
            raise PermissionError(f"{path} cannot be parsed; fix it, or set {variable} to another file") from None
        found |= parsed[section] if parsed.has_section(section) else {}
    if not found and name != "default":
        raise PermissionError(f"AWS_PROFILE={name} is in neither ~/.aws/config nor ~/.aws/credentials")
    if "services" in found:
        raise PermissionError(f"the AWS profile {name} has `services`, which is not supported; set AWS_ENDPOINT_URL_S3")
    return found
