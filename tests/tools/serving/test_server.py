"""Who may ask the server, and what it answers."""

import http.client
import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.durable import Repository
from thermopile.tools.inspection.features.neighbours import find_neighbours
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.summary import share
from thermopile.tools.report.sheets import number
from thermopile.tools.serving.answers import PAGE_SAMPLES, Answers
from thermopile.tools.serving.catalogue import open_catalogue
from thermopile.tools.serving.server import HOST
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli
from support.programs import program
from support.written_runs import train_on, write_run, write_state


@pytest.fixture
def ask(server):
    """Return a function (place, …) -> status, headers and body; places are below the address with the token."""

    def ask(place, *, path=None, method="GET", body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request(method, f"/{server.token}/{place}" if path is None else path, body, headers or {})
        reply = connection.getresponse()
        found = reply.status, reply.headers, reply.read()
        connection.close()
        return found

    return ask


@pytest.fixture
def told(ask):
    """Return a function (place) -> the JSON that is answered, with its status if that is not 200."""

    def told(place, **more):
        status, _, body = ask(place, **more)
        return json.loads(body) if status == 200 else (status, json.loads(body)["error"])

    return told


def test_the_address_has_the_page_and_each_answer_forbids_all_else(ask):
    for place in ("", "page.js", "page.css", "about", "picture/0", "nowhere"):
        _, headers, _ = ask(place)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, body = ask("")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<script src" in body


@pytest.mark.parametrize("path", ["/", "/about", "/wrong/about", "//about", "/%2e%2e/about"])
def test_without_the_token_nothing_is_answered(ask, path):
    status, _, body = ask("", path=path)
    assert (status, json.loads(body)) == (
        403, {"error": "open the address that `thermopile inspect --serve` printed"}
    )  # fmt: skip


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_pages_are_refused_even_with_the_token(ask, headers, method):
    assert ask("about" if method == "GET" else "selection.parquet", method=method, headers=headers)[0] == 403


def test_the_page_itself_may_ask(ask, server):
    own = {"Origin": f"http://127.0.0.1:{server.server_port}", "Sec-Fetch-Site": "same-origin"}
    assert ask("about", headers=own)[0] == 200


@pytest.mark.parametrize(
    "place",
    ["../../etc/passwd", "picture/../../../etc/passwd", "picture/..%2f..%2fetc%2fpasswd", "texts.sqlite", "config.toml",
     "server.py", "page.html/..", "picture", "selection.parquet"],
)  # fmt: skip
def test_no_path_leads_to_a_file(ask, place):
    status, _, body = ask(place)
    assert status in (400, 404)
    assert b"root:" not in body
    assert "error" in json.loads(body)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(ask, method):
    assert ask("about", method=method)[0] == 501


def test_the_run_is_told_with_what_there_is_to_choose_from(told, hostile_dataset):
    about = told("about")
    assert about["samples"] == hostile_dataset.n
    assert about["sides"] == ["image", "text"]
    assert sum(about["kinds"].values()) == hostile_dataset.n
    assert about["kinds"] == {"too_few_visits": hostile_dataset.n}  # one visit each; kinds of no sample are left out
    assert (about["pairs"], about["negatives"]) == (True, hostile_dataset.n)
    assert about["classes"] == sorted({group for group in hostile_dataset.column("group").to_pylist() if group})


def test_all_samples_can_be_paged_through_each_once(told, hostile_dataset):
    pages = [told(f"samples?start={start}")["samples"] for start in (0, PAGE_SAMPLES)]
    assert [len(page) for page in pages] == [PAGE_SAMPLES, hostile_dataset.n - PAGE_SAMPLES]
    assert {card["id"] for page in pages for card in page} == set(range(hostile_dataset.n))
    assert told(f"samples?start={10**9}")["samples"] == []


def test_a_card_has_what_is_known_of_its_sample_in_visible_characters(told, hostile_dataset, tau_by_class_size):
    (card, *_) = told("samples?sort=id")["samples"]
    row = hostile_dataset.rows([0])[0]
    assert card["caption"].split()[0] == row["caption"].split()[0]
    assert not set(card["caption"]) & set("\u202e\x00\x1b")
    assert card["tau"]["image"] == pytest.approx(tau_by_class_size[0])
    assert card["class"].startswith(f"class {row['group'].split()[1]}")


def test_one_sample_has_its_state_its_texts_and_its_history(told, hostile_dataset):
    sample = told("sample/3")
    assert sample["state"]["visits"] == 1
    assert [at["tag"] for at in sample["history"]] == ["step-0", "step-5"]
    assert sample["table"]["key"] == hostile_dataset.rows([3])[0]["key"]
    assert told("sample/66") == (400, "no such sample: 66; the run has 66 samples, with ids 0 … 65")
    assert told("sample/-1") == (400, "'-1' is not a whole number")


def test_a_sample_is_shown_after_the_run_has_deleted_the_snapshot_served(pairs_dataset, tmp_path):
    n, tau = pairs_dataset.n, np.linspace(0.01, 0.1, pairs_dataset.n, dtype=np.float32)
    # Blocks beyond 512 bytes have a file of their own, which goes with the snapshot.
    run = write_state(tmp_path / "run", pairs_dataset, {"image/tau": tau}, np.ones(n, int), block_rows=1000)
    inspection = read_run(run)
    answers = Answers(inspection, open_catalogue(inspection, tmp_path, lambda *_: None), None, 5)
    train_on(run, dict.fromkeys(("image", "text"), tau), 9)
    Repository(run.state).retain(keep_last=1)
    sample = answers.sample(n - 1)
    assert sample["state"]["image/tau"] == pytest.approx(0.1)
    assert [at["tag"] for at in sample["history"]] == ["step-0", "step-9"]


def test_a_sample_has_the_nearest_and_the_hardest_with_their_figures(told, features, tau_by_class_size):
    lists = told("neighbours/3")["lists"]
    tau = {"image": tau_by_class_size[3], "text": 0.15 - tau_by_class_size[3]}
    found = find_neighbours(features, 3, 5, tau)
    rankings = [*found.nearest.values(), *found.negatives.values()]
    ids = [[card["id"] for card in listed["samples"]] for listed in lists]
    assert ids == [ranking.sample_ids.tolist() for ranking in rankings]
    assert lists[0]["samples"][0]["figures"] == f"similarity {rankings[0].similarity[0]:.3f}"
    for (side, ranking), listed in zip(found.negatives.items(), lists[2:], strict=True):
        figures = [f"p* {share(weight)}, similarity {cosine:.3f}"
                   for weight, cosine in zip(ranking.weights, ranking.similarity, strict=True)]  # fmt: skip
        assert [card["figures"] for card in listed["samples"]] == figures
        assert f"{side} tau {number(np.float32(tau[side]).item())}" in listed["words"]
    card = lists[2]["samples"][0]
    assert card["caption"] == told(f"samples?sort=id&start={card['id']}")["samples"][0]["caption"]


@pytest.mark.parametrize("id", ["66", "-1", "x", "9" * 30, "..%2f..%2fetc", "3/.."])
def test_neighbours_of_no_sample_are_refused(ask, id):
    status, _, body = ask(f"neighbours/{id}")
    assert status in (400, 404)
    assert "error" in json.loads(body)


def test_without_features_there_are_no_neighbours(server_without_features):
    answers = server_without_features.answers
    assert answers.about()["neighbours"] is False
    with pytest.raises(ConfigError, match="start again with --neighbours"):
        answers.neighbours(3)


def test_neighbours_asked_for_at_once_are_those_asked_for_one_by_one(told):
    one_by_one = [told(f"neighbours/{id}") for id in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda id: told(f"neighbours/{id}"), range(8))) == one_by_one


def test_a_picture_is_the_stored_one(ask, hostile_dataset):
    status, headers, body = ask("picture/7")
    assert (status, headers["Content-Type"], body) == (200, "image/jpeg", hostile_dataset.jpeg(7))
    assert ask("picture/66")[0] == 400


def test_views_are_drawn_as_in_training_and_change_with_the_epoch(ask):
    drawn = [ask(f"views/7?epoch={epoch}") for epoch in (0, 0, 5)]
    assert {headers["Content-Type"] for _, headers, _ in drawn} == {"image/png"}
    first, again, later = (body for *_, body in drawn)
    assert first == again != later


def test_a_selection_is_given_back_as_parquet_in_the_order_of_ids(ask, hostile_dataset, tmp_path):
    body = json.dumps({"ids": [40, 2, 7], "tags": ["b", "<script>", "a"]})
    status, headers, given = ask("selection.parquet", method="POST", body=body)
    assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="selection.parquet"')
    (tmp_path / "file").write_bytes(given)
    found = pq.read_table(tmp_path / "file")
    fingerprint = hostile_dataset.index.fingerprint
    tagged = {"sample_id": [2, 7, 40], "tag": ["<script>", "a", "b"]}
    assert found.to_pydict() == tagged | {"dataset_fingerprint": [fingerprint] * 3}
    assert found.schema.metadata == {b"thermopile.dataset_fingerprint": fingerprint.encode()}


@pytest.mark.parametrize(
    "body", ["", "[]", '{"ids": [1]}', '{"ids": [1], "tags": []}', '{"ids": [-1], "tags": ["a"]}',
             '{"ids": [1e400], "tags": ["a"]}', '{"ids": ["x"], "tags": ["a"]}', "[" * 100_000,
             '{"ids": [1.5], "tags": ["a"]}', '{"ids": ["7"], "tags": ["a"]}', '{"ids": [true], "tags": ["a"]}',
             '{"ids": [66], "tags": ["a"]}', '{"ids": [7, 3, 7], "tags": ["a", "b", "c"]}',
             '{"ids": [7], "tags": [1]}', '{"ids": [7], "tags": ["\\ud800"]}'],
)  # fmt: skip
def test_what_is_no_selection_is_refused(ask, body):
    status, _, said = ask("selection.parquet", method="POST", body=body)
    assert status == 400
    assert json.loads(said)["error"].startswith("not a selection: ")


def test_why_ids_are_refused_is_said(ask):
    def said(body):
        return json.loads(ask("selection.parquet", method="POST", body=json.dumps(body))[2])["error"]

    assert said({"ids": [65, 66], "tags": ["a", "b"]}) == "not a selection: 66 is no id; ids are integers, 0 … 65"
    assert said({"ids": [7, 3, 7], "tags": ["a", "b", "c"]}) == "not a selection: an id is there twice"


@pytest.mark.parametrize(
    "line", [b"GET http://[ HTTP/1.1", b"GET http://[x]/ HTTP/1.1", b"GET /\xed\xa0\x80 HTTP/1.1", b"GET",
             b"GET / HTTP/x", b"\xff\xfe"],
)  # fmt: skip
def test_a_bad_request_line_is_answered_as_one(server, line):
    with socket.create_connection((HOST, server.server_port), timeout=60) as connection:
        connection.sendall(line + f"\r\nHost: {HOST}:{server.server_port}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"400" in answer


def test_a_selection_of_a_length_beyond_all_numbers_is_answered(ask):
    assert ask("selection.parquet", method="POST", body="{}", headers={"Content-Length": "9" * 5000})[0] == 404


@pytest.mark.wide  # a process of its own
def test_ctrl_c_ends_the_server_also_while_a_question_never_ends(hostile_run, tmp_path):
    with subprocess.Popen(program("endless_question", hostile_run.path, tmp_path),
                          stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        try:
            address = process.stdout.readline().strip()
            with socket.create_connection((HOST, int(urlsplit(address).port))) as asking:
                host = urlsplit(address).netloc
                asking.sendall(f"GET {address}samples?words=a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                while process.stdout.readline() != "endless\n":
                    assert process.poll() is None
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
        finally:
            process.kill()


def test_all_that_a_query_finds_can_be_downloaded(ask, told, tmp_path):
    (tmp_path / "file").write_bytes(ask("found.parquet?sort=hottest&low=0.05")[2])
    ids = pq.read_table(tmp_path / "file")["sample_id"].to_pylist()
    assert ids == sorted(card["id"] for card in told("samples?sort=hottest&low=0.05")["samples"])


def test_the_command_says_the_address_and_a_port_that_is_taken_is_one_line(hostile_run, server):
    asked = ["inspect", str(hostile_run.path), "--serve", "--port", str(server.server_port)]
    assert_one_line(cli(*asked), 1, f"port {server.server_port}", "--port")


def test_other_options_have_no_effect_with_it(hostile_run):
    served = ["inspect", str(hostile_run.path), "--serve"]
    assert_one_line(cli(*served, "--map"), 2, "--map has no effect with --serve")
    alone = ["inspect", str(hostile_run.path), "--port", "80"]
    assert_one_line(cli(*alone), 2, "--port has no effect")


def test_a_run_without_a_snapshot_has_nothing_to_serve(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {}, snapshot=False)
    assert_one_line(cli("inspect", run.path, "--serve"), 1, "has no snapshot of its state")
    assert not RunDirectory(run.path).report.exists()
