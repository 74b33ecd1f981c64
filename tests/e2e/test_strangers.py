"""Jobs whose ports others reach, and jobs that are ended while their ranks meet."""

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from hybridflow.exit_status import REQUEUE
from hybridflow.parallel import rendezvous
from tests.e2e.commands import fork_ranks, lasting_metrics, run_well, write_recipe
from tests.multi.test_strangers import listening
from tests.support.waiting import wait_until

RUN = ["train", "tiny.yaml"]


def test_a_stop_signal_ends_a_rank_that_waits_for_rank_0(tmp_path):
    write_recipe(tmp_path)

    open_store = rendezvous.open_store

    def opened(*args, **named):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return open_store(*args, **named)

    def hook(rank):
        rendezvous.open_store = opened

    done = fork_ranks([*RUN, "cluster.start_deadline_s=100"], tmp_path, start_only=[1], hook=hook)
    assert done.codes == (REQUEUE,) and not (tmp_path / "run").exists()
    done.complains_once("rank 1 on", "received SIGTERM before it met the others")


@pytest.mark.slow
def test_a_flood_of_connections_changes_nothing(tmp_path):
    folders = [tmp_path / name for name in ("quiet", "flooded")]
    for folder in folders:
        folder.mkdir()
        write_recipe(folder)
    run_well(RUN, folders[0])
    over, held = threading.Event(), []

    def flood():
        wait_until(lambda: (folders[1] / "pid-0").exists() or over.is_set(), within_s=60)
        while not over.wait(0.05) and len(held) < 2000:
            for rank in range(2):
                for port in ports_of(folders[1] / f"pid-{rank}"):
                    for _ in range(20):
                        connection = socket.socket()
                        held.append(connection)
                        connection.settimeout(1)
                        if connection.connect_ex(("127.0.0.1", port)) == 0:
                            connection.sendall(b"hflow 1\n" + bytes(len(held) % 64))

    def hook(rank):
        Path(f"pid-{rank}").write_text(str(os.getpid()))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        run_well(RUN, folders[1], hook=hook)
    finally:
        over.set()
        thread.join()
        for connection in held:
            connection.close()
    assert len(held) > 200
    quiet, flooded = (lasting_metrics(folder / "run") for folder in folders)
    assert flooded == quiet


def ports_of(path):
    try:
        return listening(int(path.read_text()))
    except (OSError, ValueError):
        return ()
