"""Objects in a store, against a real server: what is written is read, conflicts are seen, outages are waited for."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from obstore.exceptions import PreconditionError

from thermopile.benchmarks.object_server import CREDENTIALS
from thermopile.storage import bucket
from thermopile.storage.bucket import Address, is_address
from thermopile.storage.bucket_errors import AddressError, MissingBucketError, ObjectStoreError

wide = pytest.mark.wide


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [("s3://data/cc12m", "data", "cc12m"), ("s3://data/a/b/", "data", "a/b"), ("s3://my.data", "my.data", "")],
)
def test_an_address_names_a_bucket_and_a_key_without_slashes_at_its_ends(text, bucket, key):
    assert Address.parse(text) == Address(bucket, key)


@pytest.mark.parametrize(
    "text", ["s3:/data/x", "ftp://data/x", "s3://", "s3://data/../x", "s3://data/a//b", "s3://data/a\n"]
)
def test_what_is_not_an_address_is_refused_with_the_form_of_one(text):
    with pytest.raises(AddressError, match="write s3://bucket/path"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["s3://AKIA:hidden@data/x", "s3://AKIA:hid/den@data/x", "s3://AKIA:hidden/@data"])
def test_credentials_in_an_address_are_refused_and_not_repeated(text):
    with pytest.raises(AddressError, match="must not hold credentials") as refused:
        Address.parse(text)
    assert "hid" not in str(refused.value)
    assert "AKIA" not in str(refused.value)


def test_credentials_of_an_endpoint_are_in_no_error(monkeypatch):
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 0)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://someone:hidden@127.0.0.1:1")
    with pytest.raises(ObjectStoreError, match=r"http://127\.0\.0\.1:1/") as refused:
        Address("no-bucket-of-tests", "x").read_bytes()
    assert "hidden" not in str(refused.value)


@wide
def test_a_conditional_write_is_repeated_while_the_object_is_what_it_was(folder, monkeypatch):
    first = (folder / "x").create(b"1")
    write, refusals = obstore.put, iter([PreconditionError("409 Conflict: another request is under way")])

    def put(*arguments, **options):
        for refusal in refusals:
            raise refusal
        return write(*arguments, **options)

    monkeypatch.setattr(obstore, "put", put)
    (folder / "x").replace(b"2", first)
    assert (folder / "x").read_bytes() == b"2"


def test_addresses_are_joined_as_paths_are():
    address = Address.parse("s3://data/runs") / "a" / "config.toml"
    assert str(address) == "s3://data/runs/a/config.toml"
    assert (address.name, address.parent.name, str(address.with_name("b"))) == (
        "config.toml",
        "a",
        "s3://data/runs/a/b",
    )


def test_only_what_has_a_scheme_is_meant_as_an_address():
    assert is_address("s3://bucket/x")
    assert is_address("gs://bucket/x")
    assert not is_address("data/s3")


@pytest.fixture
def folder(s3, request):
    return Address("bucket", request.node.name)


@wide
def test_a_download_is_the_object_byte_for_byte(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "RANGE_BYTES", 1000)
    data = os.urandom(12_345)
    (folder / "x").write(data)
    with (tmp_path / "x").open("wb") as file:
        assert (folder / "x").download(file) == len(data)
    assert (tmp_path / "x").read_bytes() == data


@wide
def test_what_is_missing_is_said_in_one_line(folder):
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/.*/none does not exist$"):
        (folder / "none").read_bytes()
    for reading in (Address("elsewhere", "x").read_bytes, lambda: list(Address("elsewhere", "x").listing())):
        with pytest.raises(MissingBucketError, match="there is no bucket elsewhere"):
            reading()


@wide
def test_a_server_that_fails_every_fifth_request_changes_nothing_but_the_time(folder, s3, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "RANGE_BYTES", 10_000)
    data = os.urandom(500_000)
    with s3.gateway(failing=0.2) as gateway:
        (folder / "x").write(data)
        versions = [(folder / f"{number}").create(b"%d" % number) for number in range(10)]
        for number, version in enumerate(versions):
            (folder / f"{number}").replace(b"%d again" % number, version)
        with (tmp_path / "x").open("wb") as file:
            (folder / "x").download(file)
        assert [name for name, _, _ in folder.listing()] == sorted([*map(str, range(10)), "x"])
        assert gateway.stats()["failed"] > 5
    assert (tmp_path / "x").read_bytes() == data
    again = [(folder / f"{number}").read_bytes() for number in range(10)]
    assert again == [b"%d again" % number for number in range(10)]


@wide
def test_a_server_that_goes_away_for_a_while_is_waited_for(folder, s3, caplog, monkeypatch):
    monkeypatch.setattr(bucket, "_TOLD_AFTER_SECONDS", 0.5)
    (folder / "x").write(b"content")
    with s3.gateway() as gateway:
        gateway.stop()
        timer = threading.Timer(2.0, gateway.start)
        timer.start()
        with ThreadPoolExecutor(8) as threads:  # which all wait, and of which one tells
            assert list(threads.map(lambda _: (folder / "x").read_bytes(), range(8))) == [b"content"] * 8
        timer.join()
    assert len([record for record in caplog.records if "trying again" in record.message]) == 1


@wide
def test_a_server_that_stays_away_is_an_error_of_one_line_that_says_where_to_look(folder, s3, monkeypatch):
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1.0)
    with s3.gateway() as gateway:
        gateway.stop()
        started = time.monotonic()
        with pytest.raises(ObjectStoreError, match=r"^[^\n]*AWS_ENDPOINT_URL[^\n]*$"):
            (folder / "x").read_bytes()
        assert time.monotonic() - started < 20
