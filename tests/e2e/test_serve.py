"""``hybridflow serve`` on a tiny model over real HTTP: many clients, streams, layouts, clients that leave, the end."""

import http.client
import json
import os
import re
import signal
import socket
import threading
import traceback
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

import hybridflow.serving.serve  # noqa: F401  # what ranks import, imported once, before they are forked
from hybridflow.exit_status import DONE, REQUEST
from hybridflow.serving.desk import Desk
from tests.e2e.commands import fork_ranks
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.plain_models import NEAR_TIE, greedy, token_log_probs
from tests.support.waiting import wait_until

ARGUMENTS = ["serve", "--model", "model", "--port", "0", "--max-concurrent", "4", "--seed", "5"]
JSON = {"Content-Type": "application/json"}
CHAT = "{% for m in messages %}{{ m.content }}+{% endfor %}1="


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve")
    write_model(path / "model", seed=3, num_key_value_heads=4, max_position_embeddings=512)
    write_tokenizer(path / "model", chat_template=CHAT)
    return path


class Client:
    """Speaks with the server of rank 0."""

    def __init__(self, port):
        self.port = port

    def post(self, path="/v1/completions", **body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, json.dumps(body), JSON)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, json.loads(content) if not body.get("stream") else content.decode()

    def text(self, **body):
        status, answer = self.post(**body)
        assert status == 200, answer
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]

    def leave(self, **body):
        """Ask and go away; gives what closes the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection.close


def serve(folder, client, *more, num_ranks=1):
    """Serve, call ``client`` in a thread of rank 0, then ask the last rank to end; what the client returned."""
    log, answer = folder / "out-0.log", folder / "answer.json"
    answer.unlink(missing_ok=True)

    def speak():
        try:
            wait_until(lambda: "serving" in log.read_text() and log.read_text().endswith("\n"), within_s=300)
            port = int(re.search(r"serving model at http://127.0.0.1:(\d+)/v1", log.read_text())[1])
            found = client(Client(port))
            answer.write_text(json.dumps(found))
        except BaseException:
            answer.write_text(json.dumps({"failed": traceback.format_exc()}))
        os.kill(int(Path("last.pid").read_text()), signal.SIGTERM)

    def hook(rank):
        if rank == num_ranks - 1:
            Path("last.pid").write_text(str(os.getpid()))
        if rank == 0:
            threading.Thread(target=speak, daemon=True).start()

    done = fork_ranks([*ARGUMENTS, *more], folder, num_ranks=num_ranks, hook=hook)
    assert done.codes == (DONE,) * num_ranks, done.err
    found = json.loads(answer.read_text())
    assert not isinstance(found, dict) or "failed" not in found, found["failed"]
    return found, done


def together(calls):
    """Call all at the same time; what they return, in their order."""
    found = [None] * len(calls)

    def one(place):
        found[place] = calls[place]()

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def seen_desks():
    """The desk, in a list, once the first request has come; for the process of rank 0."""
    desks, submit = [], Desk.submit

    def submitting(self, asked, tell):
        ticket = submit(self, asked, tell)
        desks.append(self)
        return ticket

    Desk.submit = submitting
    return desks


ASKED = [
    *({"prompt": f"{a}+{a}=", "max_tokens": 6 + a, "temperature": 0} for a in range(8)),
    *({"prompt": f"{a}+1=", "max_tokens": 8, "seed": a, "n": 3, "top_p": 0.9} for a in range(4)),
    {"prompt": ["1+1=", "2+2="], "max_tokens": 4, "seed": 1},
    {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "stop": ["1"]},
]


def ask_all(client):
    """Alone, one after the other; then all at the same time, as they come."""
    one = [client.text(**body) for body in ASKED]
    return {"alone": one, "together": together([lambda body=body: client.text(**body) for body in ASKED])}


@pytest.fixture(scope="module")
def alone(folder):
    found, done = serve(folder, ask_all)
    assert "hybridflow: ends, 0 samples run" in done.err
    return found


def test_answers_do_not_depend_on_who_else_asks_and_greedy_ones_are_those_of_transformers(folder, alone):
    assert alone["alone"] == alone["together"]
    texts = tokenizers.Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    num_compared = 0
    for body, [(text, finish)] in zip(ASKED[:8], alone["alone"], strict=False):
        expected, is_tie = greedy(
            lambda ids: model(ids).logits, texts.encode(body["prompt"]).ids, body["max_tokens"], 0
        )
        if not is_tie:
            assert text == texts.decode(expected, skip_special_tokens=True)
            assert finish == ("stop" if expected[-1] == 0 else "length")
            num_compared += 1
    assert num_compared >= 4
    (stopped,) = alone["alone"][-1]
    assert stopped[1] == "stop" and "1" not in stopped[0], "greedy, it begins with a 1 further on"
    assert len({text for text, _ in alone["alone"][8]}) > 1, "samples of a prompt are all alike"


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("tp2", "pp2"))]
)
def test_two_ranks_answer_the_same(folder, alone, layout):
    found, _ = serve(folder, ask_all, "--layout", layout, num_ranks=2)
    assert found == alone


def test_streams_chats_and_log_probs(folder):
    num_tokens = json.loads((folder / "model/config.json").read_text())["vocab_size"]

    def ask(client):
        body = {"prompt": "7+7=", "max_tokens": 24, "seed": 4}
        status, answer = client.post(**body, logprobs=0, echo=True)
        chat = {"messages": [{"role": "user", "content": "7"}], "max_tokens": 9, "temperature": 0}
        path = "/v1/chat/completions"
        # As harnesses ask for log-likelihoods; half of these prompts end with the likeliest tokens.
        texts = ["7+7=", "12+3=15", "1+1=2"]
        likely = client.post(prompt=texts, max_tokens=6, temperature=0, echo=True, ignore_eos=True)[1]["choices"]
        prompts = [each["token_ids"] for each in client.post(prompt=texts, max_tokens=0, echo=True)[1]["choices"]]
        evaluated = {"prompt": [*prompts, *(each["token_ids"] for each in likely)], "logprobs": 1, "echo": True}
        evaluated |= {"max_tokens": 1, "temperature": 0, "seed": 1234}
        return {
            "whole": client.text(**body),
            "stream": client.post(**body, logprobs=2, stream=True)[1],
            "stream scored": client.post(**body, logprobs=2)[1]["choices"][0]["logprobs"],
            "scored": answer["choices"][0],
            "chat": client.post(path, **chat, logprobs=True)[1]["choices"],
            "chat stream": client.post(path, **chat, logprobs=True, stream=True)[1],
            "plain": client.text(prompt="7+1=", max_tokens=9, temperature=0),
            "refused": client.post(prompt="1" * 2000, max_tokens=1)[0],
            "evaluated": client.post(**evaluated)[1]["choices"],
            "forbidden": client.post(prompt="1", stop_token_ids=[*range(num_tokens)], min_tokens=1, max_tokens=4),
        }

    found, _ = serve(folder, ask)

    def pieces(stream):
        return [json.loads(event[6:])["choices"][0] for event in stream.split("\n\n")[:-2]]

    assert len(pieces(found["stream"])) > 3
    assert "".join(each["text"] for each in pieces(found["stream"])) == found["whole"][0][0]
    assert pieces(found["stream"])[-1]["finish_reason"] == found["whole"][0][1]
    # A prompt that is in the cache is read in other parts: numbers are equal but for rounding.
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        told = [value for each in pieces(found["stream"]) for value in each["logprobs"][name]]
        for one, other in zip(told, found["stream scored"][name], strict=True):
            assert one == (other if name == "tokens" else pytest.approx(other, abs=1e-4))
    told = [value for each in pieces(found["chat stream"]) for value in each["logprobs"]["content"]]
    for one, other in zip(told, found["chat"][0]["logprobs"]["content"], strict=True):
        assert one == {**other, "logprob": pytest.approx(other["logprob"], abs=1e-4)}
    assert len(told) == 9
    assert found["chat"][0]["message"] == {"role": "assistant", "content": found["plain"][0][0]}
    assert len(found["chat"][0]["logprobs"]["content"]) > 0
    assert "".join(each["delta"].get("content", "") for each in pieces(found["chat stream"])) == found["plain"][0][0]
    assert found["refused"] == 400
    assert found["forbidden"][0] == 400 and "every token is forbidden" in found["forbidden"][1]["error"]["message"]
    check_evaluated(folder, found["evaluated"])
    # The log-probabilities of prompt and answer, by transformers, at temperature 1.
    tokens = torch.tensor(found["scored"]["token_ids"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        scores = token_log_probs(model(tokens[None]).logits[0], tokens)
    assert found["scored"]["logprobs"]["token_logprobs"][0] is None
    assert (scores - torch.tensor(found["scored"]["logprobs"]["token_logprobs"][1:])).abs().max() <= 1e-4


def check_evaluated(folder, choices):
    """Log-likelihoods, and whether each token is the likeliest, by ``transformers``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    flags = []
    for choice in choices:
        tokens, scores = torch.tensor(choice["token_ids"]), choice["logprobs"]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        expected = token_log_probs(logits, tokens)
        best = logits[:-1].topk(2).values
        assert (expected - torch.tensor(scores["token_logprobs"][1:])).abs().max() <= 1e-4
        assert scores["top_logprobs"][0] is None
        for place, (number, top) in enumerate(
            zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True)
        ):
            if best[place, 0] - best[place, 1] > NEAR_TIE:
                flags.append(number == max(top.values()))
                assert flags[-1] == (int(logits[place].argmax()) == int(tokens[place + 1]))
    assert 10 < sum(flags) < len(flags) - 5, "some are the likeliest, and some are not"


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_who_leaves_is_taken_from_the_batch_and_the_others_go_on(folder, alone, num_ranks):
    def ask(client):
        desks = seen_desks()
        long = {"prompt": "1+1=", "max_tokens": 500, "ignore_eos": True, "n": 6}
        for is_streamed in (False, True):
            leave = client.leave(**long, stream=is_streamed)
            wait_until(lambda: desks and desks[0].num_running == 6)
            leave()
            # There are 4 places: who comes now waits for those that leave.
            answers = together([lambda body=body: client.text(**body) for body in ASKED[:3]])
            wait_until(lambda: desks[0].num_running == 0, what="who has left is given up")
        return answers

    found, _ = serve(folder, ask, "--layout", "tp2" if num_ranks == 2 else "tp1", num_ranks=num_ranks)
    assert found == alone["alone"][:3]


def test_asked_to_end_it_finishes_what_runs_and_refuses_what_comes(folder):
    def ask(client):
        desks = seen_desks()

        def end_while_it_runs():
            wait_until(lambda: desks and desks[0].num_running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: "ends, 1 samples run" in Path("err-0.log").read_text())
            return client.post(prompt="1+1=")[0]

        long = {"prompt": "1+1=", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        (status, answer), refused = together([lambda: client.post(**long), end_while_it_runs])
        return [status, answer["usage"]["completion_tokens"], refused]

    found, done = serve(folder, ask)
    assert found == [200, 400, 503]


def test_what_the_cache_has_no_room_for_is_the_clients_to_change(folder):
    def ask(client):
        long = {"prompt": "1+1=", "max_tokens": 400}
        chat = {"messages": [{"role": "user", "content": "7"}], "ignore_eos": True}
        answers = [
            *(client.post(**long), client.post(**long, stream=True), client.post(prompt="1+1=", max_tokens=4)),
            client.post("/v1/chat/completions", **chat),
        ]
        return [[status, str(answer)] for status, answer in answers], answers[-1][1]["usage"]["total_tokens"]

    ((whole, streamed, short, chat), num_tokens), done = serve(folder, ask, "--cache-memory", "50000")
    for status, answer in (whole, streamed):
        assert status == 400 and f"max_tokens=400 exceeds the context of {num_tokens} tokens" in answer
    assert short[0] == chat[0] == 200
    assert f"has room for {num_tokens} tokens of a sequence" in done.err and "raise --cache-memory" in done.err


def test_what_cannot_be_served_is_told_once(folder):
    for more, words in (
        (("--host", "0.0.0.0"), ("--token-env",)),
        (("--host", "192.0.2.1", "--token-env", "HOME"), ("192.0.2.1",)),
        (("--layout", "tp3"), ("--layout",)),
        (("--port", "70000"), ("--port 70000",)),
    ):
        done = fork_ranks([*ARGUMENTS, *more], folder, num_ranks=1)
        done.complains_once(*words)
        assert done.codes == (REQUEST,)
