"""A topic of a real Kafka: each message once and in order, whenever it is killed; and what is said of failures."""

import contextlib
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig, KafkaConfig
from hybridflow.data import kafka as kafka_module
from hybridflow.data import live
from hybridflow.data.kafka import KafkaTaker, topic_rows
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.problems import StoredProblems
from hybridflow.data.queues import open_queue
from hybridflow.data.shaping import Shape
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.sections import read_section, to_dict
from tests.e2e.commands import free_port
from tests.support.kafka_broker import OPTIONS, write
from tests.support.queues import Killed, kill_at, recipe_values

SHAPE = Shape(data=DataConfig(kafka=KafkaConfig(servers=("here:1",), topic="t"), held_out="none"), kind="problems")
SKIP = replace(SHAPE, data=replace(SHAPE.data, on_bad_row="skip"))
topics = (f"topic-{number}" for number in itertools.count())


def row(number):
    return json.dumps({"prompt": f"{number}", "answer": "a"}).encode()


def rows(*numbers, partition=0):
    return [(partition, row(number)) for number in numbers]


def at(broker, topic, **more):
    given = {"deadline_s": 60.0, "poll_s": 0.1, "options": OPTIONS, **more}
    return KafkaConfig(servers=(broker.server,), topic=topic, **given)


@contextlib.contextmanager
def taking(kafka, folder, shape=SHAPE, say=lambda text: None):
    """A taker whose client is closed in the end."""
    one = KafkaTaker(kafka, folder, shape, say)
    try:
        yield one
    finally:
        one.stop()


def take(kafka, folder, count, shape=SHAPE, say=lambda text: None):
    """Take so many messages, however many times it takes."""
    end_s = time.monotonic() + 60
    with taking(kafka, folder, shape, say) as one:
        while count > 0:
            assert time.monotonic() < end_s, f"{count} messages did not come"
            count -= one.take()
    assert count == 0


def drawn(kafka, folder, count):
    rows = topic_rows(folder, kafka)
    return [rows.stored(rows.place(prompt_index)) for prompt_index in range(count)]


def prompts(kafka, folder, count):
    return [each.row["prompt"] for each in drawn(kafka, folder, count)]


def test_messages_are_taken_in_order_with_their_places_by_each_run(broker, tmp_path):
    kafka = at(broker, next(topics))
    write(broker.server, kafka.topic, rows(0, 1, 2))
    take(kafka, tmp_path / "one", 3)
    write(broker.server, kafka.topic, rows(3, 4))
    take(kafka, tmp_path / "one", 2)
    take(kafka, tmp_path / "two", 5)
    for run in ("one", "two"):
        found = drawn(kafka, tmp_path / run, 5)
        assert [each.row["prompt"] for each in found] == ["0", "1", "2", "3", "4"]
        assert [each.place for each in found] == [f"{kafka.topic}[0]@{offset}" for offset in range(5)]
    tokens = [topic_rows(tmp_path / run, kafka).sha256 for run in ("one", "one", "two")]
    assert tokens[0] == tokens[1] != tokens[2]


def test_of_several_partitions_each_keeps_its_order(broker, tmp_path):
    kafka = at(broker, next(topics))
    write(broker.server, kafka.topic, [(number % 2, row(number)) for number in range(200)])
    take(kafka, tmp_path, 200)
    found = drawn(kafka, tmp_path, 200)
    for partition in range(2):
        here = [each for each in found if each.place.startswith(f"{kafka.topic}[{partition}]@")]
        assert [each.row["prompt"] for each in here] == [str(number) for number in range(partition, 200, 2)]
        assert [int(each.place.rpartition("@")[2]) for each in here] == list(range(100))


KILLS = ("none", "rows", "journal", "torn")


@pytest.fixture(scope="module")
def long_topic(broker):
    """A topic, and what was written to each of its partitions: the examples of a property share it."""
    return next(topics), ([], [])


@given(turns=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.sampled_from(KILLS)), max_size=6))
@settings(max_examples=6, deadline=None)
def test_wherever_it_is_killed_each_message_comes_once_and_in_order(broker, long_topic, turns):
    """Each turn writes some messages, begins anew and takes, until it is killed at one of its places."""
    topic, written = long_topic
    kafka = at(broker, topic, poll_s=0.05)
    write(broker.server, topic, rows("first"))
    written[0].append("first")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        seen: list[str] = []
        for turn, (partitions, kill) in enumerate(turns):
            new = [(partition, f"{turn}-{number}") for number, partition in enumerate(partitions)]
            write(broker.server, topic, [(partition, row(name)) for partition, name in new])
            for partition, name in new:
                written[partition].append(name)
            with pytest.MonkeyPatch.context() as patch:
                kill_at(patch, kill)
                with taking(kafka, folder) as one, contextlib.suppress(Killed):
                    one.take()
            if kill == "torn":
                with (folder / "journal.jsonl").open("ab") as file:
                    file.write(b'{"taken": [[0, 7')
            # What was drawn once stays what it is.
            known = sum(entry["num_rows"] for entry in live.Journal(folder, SHAPE, print, source=topic).entries)
            found = prompts(kafka, folder, known)
            assert found[: len(seen)] == seen
            seen = found
        total = sum(map(len, written))
        take(kafka, folder, total - len(seen))
        found = drawn(kafka, folder, total)
        for partition in range(2):
            here = [each.row["prompt"] for each in found if f"[{partition}]" in each.place]
            assert here == written[partition]


@pytest.mark.slow
def test_a_partition_that_comes_later_is_read_from_its_beginning(broker, tmp_path, monkeypatch):
    monkeypatch.setattr(kafka_module, "_LOOK_S", 0.2)
    kafka = at(broker, next(topics))
    write(broker.server, kafka.topic, rows(0))
    with taking(kafka, tmp_path) as one:
        one.start()
        assert prompts(kafka, tmp_path, 1) == ["0"]
        broker.widen(kafka.topic, 3)
        write(broker.server, kafka.topic, [(2, row(1)), (2, row(2))])
        write(broker.server, kafka.topic, rows(3))
        assert set(prompts(kafka, tmp_path, 4)) == {"0", "1", "2", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("renew_s", [30.0, 0.5])
def test_a_broker_that_goes_away_is_waited_for(broker, tmp_path, monkeypatch, renew_s):
    """By the client that it had, or by another one."""
    monkeypatch.setattr(kafka_module, "_RENEW_S", renew_s)
    kafka, said = at(broker, next(topics)), []
    write(broker.server, kafka.topic, rows(0))
    with taking(kafka, tmp_path, say=said.append) as one:
        one.start()
        assert prompts(kafka, tmp_path, 1) == ["0"]
        first = one._topic
        broker.kill()
        # Who waits in vain is told what is in the way.
        with pytest.raises(DataError, match=rf"prompt 1 did not come within .*_s=4; .*{broker.port}"):
            prompts(replace(kafka, deadline_s=4.0), tmp_path, 2)
        broker.start()
        write(broker.server, kafka.topic, rows(1))
        assert prompts(kafka, tmp_path, 2) == ["0", "1"]
        end_s = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < end_s:
            time.sleep(0.05)
        assert (one._topic is first) == (renew_s == 30.0)
    assert "refused" in said[0] and said[0].endswith("waiting for it") and said[1].endswith("is there again")
    with pytest.raises(DataError, match=r"deadline_s=0\.1; 2 rows were taken so far: write more messages to it and"):
        prompts(replace(kafka, deadline_s=0.1), tmp_path, 3)


@pytest.mark.slow
def test_messages_that_the_broker_has_dropped_are_counted(broker, tmp_path):
    topic, said = next(topics), []
    broker.create(topic, 1, segment_bytes=300)
    kafka = at(broker, topic)
    write(broker.server, topic, rows(0))
    take(kafka, tmp_path, 1)
    # A segment ends where messages that are written together begin, after four of these.
    for number in range(1, 14):
        write(broker.server, topic, rows(number))
    oldest = broker.drop(topic, 0)
    assert oldest > 2
    # A broker of this age that has just begun may still tell offsets of before, until it has taken a message.
    write(broker.server, topic, rows(14))
    with pytest.raises(DataError) as caught:
        KafkaTaker(kafka, tmp_path, SHAPE, print)
    lost = f"{oldest - 1} messages of partition 0 were dropped before they were taken"
    assert f"{lost}, offsets 1 to {oldest - 1}; set data.kafka.on_lost=skip and resume" in str(caught.value)
    take(replace(kafka, on_lost="skip"), tmp_path, 15 - oldest, say=said.append)
    assert prompts(kafka, tmp_path, 16 - oldest) == [str(number) for number in (0, *range(oldest, 15))]
    assert len(said) == 1 and f"{lost}; going on without them" in said[0]
    # While it runs too: as of one that was slow, and asks for what was there a moment ago.
    with taking(kafka, tmp_path / "slow") as one:
        one._next[0] = 1
        one._topic.begin(one._next)
        with pytest.raises(DataError, match=f"{lost}, offsets 1 to {oldest - 1}"):
            for _ in range(50):
                one.take()


BAD = {
    "broken": (b'{"prompt": "1", "answer"', "not valid JSON"),
    "two rows": (row(1) + b"\n" + row(2), "not valid JSON"),
    "a list": (b'["1", "a"]', "expected a JSON object, found list"),
    "a number": (b"17", "expected a JSON object, found int"),
    "no UTF-8": (b'{"prompt": "\xff", "answer": "a"}', "not UTF-8: invalid start byte at byte 12"),
    "no field": (b'{"prompt": "1", "anwser": "a"}', "no field 'answer'"),
    "another type": (b'{"prompt": 1, "answer": "a"}', "field 'prompt': expected text, found 1"),
    "tombstone": (None, "has no value (a tombstone)"),
    "empty": (b"", "is empty"),
    "blanks": (b" \n", "is empty"),
    "huge": (json.dumps({"prompt": "1" * 2_000_000, "answer": "a"}).encode(), "longer than data.max_row_bytes=1000000"),
    "deep": (b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["broken", "tombstone", "huge"], id="some"),
        # What a row may be is shown of files, too.
        pytest.param(sorted(BAD.keys() - {"broken", "tombstone", "huge"}), id="others", marks=pytest.mark.slow),
    ],
)
def test_a_bad_message_stops_the_run_or_is_skipped(broker, tmp_path, names):
    least = replace(SHAPE, data=replace(SHAPE.data, max_row_bytes=1_000_000))
    for name in names:
        number, (value, problem) = list(BAD).index(name), BAD[name]
        kafka, folder, said = at(broker, f"bad-{number}", poll_s=0.1), tmp_path / name, []
        write(broker.server, kafka.topic, [*rows(0, 1), (0, value), *rows(2)])
        with taking(kafka, folder, least) as one:
            one.start()
            # What comes before it can be used.
            assert prompts(kafka, folder, 2) == ["0", "1"], name
            with pytest.raises(DataError) as caught:
                prompts(kafka, folder, 3)
        assert f"bad-{number}[0]@2: {problem}" in str(caught.value), name
        assert "; set data.on_bad_row=skip and resume to go on without it" in str(caught.value), name
        skipping = replace(least, data=replace(least.data, on_bad_row="skip"))
        take(kafka, folder, 2, skipping, said.append)
        assert prompts(kafka, folder, 3) == ["0", "1", "2"], name
        assert len(said) == 1 and "1 bad rows skipped; the first: " in said[0] and problem in said[0], name


def test_a_topic_that_is_another_is_not_gone_on_with(broker, tmp_path):
    one, other = at(broker, next(topics)), at(broker, next(topics))
    write(broker.server, one.topic, rows(0, 1, 2))
    write(broker.server, other.topic, rows(0))
    take(one, tmp_path, 3)
    with pytest.raises(DataError, match=f"holds what was taken from '{one.topic}', not from '{other.topic}';"):
        KafkaTaker(other, tmp_path, SHAPE, print)
    # As after the topic was removed and made again.
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text().replace(one.topic, other.topic))
    with pytest.raises(DataError, match=r"ends at offset 1 of partition 0, of which .* up to 2: it is another topic"):
        KafkaTaker(other, tmp_path, SHAPE, print)


def test_brokers_that_are_not_there_are_named_in_time(tmp_path):
    pytest.importorskip("confluent_kafka")
    port, begin_s = free_port(), time.monotonic()
    kafka = KafkaConfig(servers=(f"127.0.0.1:{port}",), topic="t", deadline_s=1.0)
    with pytest.raises(DataError) as caught:
        KafkaTaker(kafka, tmp_path, SHAPE, print)
    assert time.monotonic() - begin_s < 50
    assert f"topic t of 127.0.0.1:{port}: not reached within 1 s: " in str(caught.value)
    assert "Connection refused" in str(caught.value) and "check data.kafka.servers" in str(caught.value)


def test_settings_of_the_client_are_refused_by_name_and_secrets_are_not_told(tmp_path, monkeypatch):
    pytest.importorskip("confluent_kafka")
    monkeypatch.delenv("SECRET", raising=False)
    kafka = KafkaConfig(servers=("127.0.0.1:1",), topic="t", deadline_s=1.0, options_env={"sasl.password": "SECRET"})
    with pytest.raises(DataError, match="sasl.password is in the environment variable SECRET, which is not set"):
        KafkaTaker(kafka, tmp_path, SHAPE, print)
    monkeypatch.setenv("SECRET", "swordfish")
    for options, says in (
        ({"nonsense": "1"}, 'No such configuration property: "nonsense"; give settings of librdkafka'),
        ({"fetch.min.bytes": "few"}, 'Invalid value for configuration property "fetch.min.bytes"'),
    ):
        with pytest.raises(DataError) as caught:
            KafkaTaker(replace(kafka, options=options), tmp_path, SHAPE, print)
        assert says in str(caught.value)
    wrong = replace(kafka, options_env={"security.protocol": "SECRET"})
    with pytest.raises(DataError) as caught:
        KafkaTaker(wrong, tmp_path, SHAPE, print)
    assert "swordfish" not in str(caught.value)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(DataError, match=r"pip install 'hybridflow\[kafka\]'"):
        KafkaTaker(KafkaConfig(servers=("127.0.0.1:1",), topic="t"), tmp_path, SHAPE, print)


def test_parts_that_were_read_do_not_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_MOST_OPEN", 6)
    journal = live.Journal(tmp_path, SHAPE, print, source="t")
    for number in range(20):
        row = {"prompt": f"{number}", "answer": "a"}
        journal.add([live.ReadRows([row], str)], "t", {"taken": [[0, number, 1]]})
    found = topic_rows(tmp_path, KafkaConfig(servers=("127.0.0.1:1",), topic="t", deadline_s=1.0))
    most = 0
    for prompt_index in [*range(20), *range(20)]:
        assert found.stored((0, prompt_index)).row["prompt"] == str(prompt_index)
        most = max(most, found._files.num_open)
    assert most <= 8


def test_all_that_read_have_the_failure_of_who_takes(broker, tmp_path):
    """Two readers, as two ranks are; ranks themselves are forked from here, which the client does not survive."""
    kafka = at(broker, next(topics))
    write(broker.server, kafka.topic, [*rows(0, 1), (0, b"{")])
    train_tokenizer(["0123456789"], path=tmp_path / "tokenizer.model", vocab_size=64)
    tokenizer = open_tokenizer(tmp_path / "tokenizer.model")
    lead = open_queue(kafka, SHAPE, tokenizer, tmp_path)
    other = StoredProblems(topic_rows(tmp_path / "kafka", kafka), SHAPE, tokenizer)
    assert lead.sha256 == other.sha256
    for problems in (lead, other):
        assert [problems.example(prompt_index).prompt for prompt_index in range(2)] == ["0", "1"]
        with pytest.raises(DataError, match=r"\[0\]@2: not valid JSON"):
            problems.example(2)


KAFKA = {"servers": ["one:9092", "two:9092"], "topic": "prompts"}


@pytest.mark.parametrize(
    ("kafka", "says"),
    [
        ({"deadline_s": 1800}, "lower the first or raise the second"),
        ({"servers": []}, "data.kafka.servers: is empty; give at least one broker"),
        ({"servers": ["one two"]}, "data.kafka.servers[0]: expected"),
        ({"topic": "a b"}, "data.kafka.topic: expected"),
        ({"options": {"sasl.password": "x"}}, "options_env={sasl.password: KAFKA_SECRET}"),
        ({"options": {"ssl": {"key": {"password": "x"}}}}, "options_env={ssl.key.password: KAFKA_SECRET}"),
        ({"options": {"ssl.key.pem": "x"}}, "ssl.key.pem is secret"),
        ({"options": {"group.id": "x"}}, "data.kafka.options: group.id is not for the recipe"),
        ({"options": {"bootstrap.servers": "x"}}, "name brokers by data.kafka.servers"),
        ({"options": {"enable.auto.commit": True}}, "enable.auto.commit is not for the recipe"),
        (
            {"options_env": {"auto.offset.reset": "X"}},
            "options_env: auto.offset.reset is not for the recipe",
        ),
        ({"options": {"plugin.library.paths": "x"}}, "plugin.library.paths would run a program"),
        ({"options_env": {"sasl.password": "not a name"}}, "data.kafka.options_env.sasl.password: expected text like"),
        ({"options": {"client.id": "x"}, "options_env": {"client.id": "X"}}, "is in data.kafka.options_env too"),
        ({"options": {"client.id": ["x"]}}, "data.kafka.options.client.id: expected text, found"),
        ({"options": "x"}, "data.kafka.options: expected a mapping of names to text"),
        ({"on_lost": "wait"}, "data.kafka.on_lost: expected one of error, skip"),
    ],
)
def test_settings_that_are_refused(kafka, says):
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(recipe_values(kafka={**KAFKA, **kafka}))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("data", "file_format", "parquet", "data.kafka takes JSONL"),
        ("tokenizer", "path", None, "data.kafka has no text yet"),
        ("data", "spool", {"path": "s"}, "there are data.spool and data.kafka; give one of data.train"),
    ],
)
def test_settings_that_do_not_go_with_a_topic(section, key, value, says):
    values = recipe_values(kafka=KAFKA)
    values[section][key] = value
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(values)
    assert says in str(caught.value)


def test_options_are_text_by_their_dotted_names():
    options = {"security.protocol": "SASL_SSL", "sasl": {"mechanism": "PLAIN"}, "fetch.min.bytes": 5, "x.y": True}
    recipe = recipe_from_dict(recipe_values(kafka={**KAFKA, "options": options}))
    expected = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "fetch.min.bytes": "5", "x.y": "true"}
    assert recipe.data.kafka.options == expected and recipe.data.title == "topic prompts"
    assert read_section(DataConfig, to_dict(recipe.data), source="again") == recipe.data
