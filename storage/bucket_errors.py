"""Failures of an object store, and which of them may pass."""

import re

from obstore import exceptions

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or for a public one AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or for a public one GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or for a public one AZURE_SKIP_SIGNATURE=true",
}
_WRONG_REGION = "redirect without LOCATION"
_NO_CREDENTIALS = re.compile(
    r"Account must be specified|/(latest/api/token|computeMetadata|metadata/identity)\S* in \S+ - HTTP error"
)
"""obstore asks the machine for its role if nothing else gives credentials, and no machine answers."""


class AddressError(ValueError):
    """The text is not a valid object address."""


class MissingBucketError(FileNotFoundError):
    """The bucket does not exist."""


class ObjectStoreError(OSError):
    """The object store cannot be reached, or refuses the request."""


class ObjectTooLargeError(OSError):
    """The object exceeds the caller's size limit."""


def may_pass(error: Exception) -> bool:
    """Return whether retrying may succeed after this error."""
    # Only 408 and 429 ("slow down") are worth a retry among 4xx statuses.
    status = re.search(r"status code: (4\d\d)", str(error))
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return True  # `_written_if` raises these only to retry
    of_store = isinstance(error, exceptions.GenericError | exceptions.JoinError | ObjectStoreError)
    if _WRONG_REGION in str(error) or _NO_CREDENTIALS.search(str(error)):
        return False
    return of_store and (status is None or status[1] in ("408", "429"))


def without_credentials(text: str) -> str:
    """Return the text with user and password removed from its URLs: an endpoint may hold them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def as_os_error(address: object, error: Exception) -> OSError:
    """Return the error as an OSError with a one-line message."""
    if isinstance(error, OSError):
        return error
    reason = " ".join(str(error).partition("\n\nDebug source")[0].split())
    reason = without_credentials(re.sub(r"<\?xml.*?(?:<Message>(.*?)</Message>.*|$)", r"\1", reason))[:300]
    if _NO_CREDENTIALS.search(str(error)):
        return PermissionError(f"{address}: there are no credentials; set {_CREDENTIALS[str(address)[:2]]}")
    if _WRONG_REGION in str(error):
        return ObjectStoreError(f"{address}: the bucket is in another region; set AWS_REGION to it")
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if isinstance(error, denied) or "status code: 403" in str(error):  # a refused listing is a GenericError
        return PermissionError(
            f"{address}: access denied: {reason}. Check {_CREDENTIALS[str(address)[:2]]}, and the rights that they give"
        )
    check = "AWS_ENDPOINT_URL, AWS_REGION" if str(address).startswith("s3:") else "the credentials"
    return ObjectStoreError(f"{address} cannot be used: {reason}. Check {check} and the network")


def is_away(error: OSError) -> bool:
    """Return whether the store was unusable, which says nothing about the object."""
    return isinstance(error, ObjectStoreError | PermissionError)
