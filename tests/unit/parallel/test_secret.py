"""Where the job's secret comes from, and keys of a user that others could know."""

import os
import stat
import threading

import pytest

from hybridflow.errors import LayoutError
from hybridflow.parallel import secret


@pytest.fixture(autouse=True)
def without_variable(monkeypatch, tmp_path):
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    secret._from_environment.cache_clear()
    yield
    secret._from_environment.cache_clear()


def test_the_variable_counts_once_and_is_not_handed_on(monkeypatch, tmp_path):
    monkeypatch.setenv(secret.VARIABLE, "a value of a launcher")
    found = secret.find_secret()
    assert secret.VARIABLE not in os.environ and secret.find_secret() == found and len(found) == 32
    assert secret.find_secret(b"of MPI") != found and not list(tmp_path.iterdir())
    assert secret.secret_source() == secret.VARIABLE


def test_a_variable_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "abc")
    with pytest.raises(LayoutError, match="HYBRIDFLOW_SECRET has 3 characters, .*of 16 characters or more, for all"):
        secret.find_secret()


def test_the_first_of_many_ranks_makes_a_key_that_all_read(tmp_path):
    found = []
    ranks = [threading.Thread(target=lambda: found.append(secret.find_secret())) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 8 and len(set(found)) == 1
    folder = tmp_path / ".hybridflow"
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "secret")] == [0o700, 0o600]
    assert secret.secret_source() == str(folder / "secret")


@pytest.mark.parametrize("home", ["file", "file/home", "gone"])
def test_a_home_without_room_for_a_key_is_told_before_a_start_needs_one(monkeypatch, tmp_path, home):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / home))
    with pytest.raises(LayoutError, match=rf"made: \S+/{home} is no directory .* export HYBRIDFLOW_SECRET"):
        secret.secret_source()
    with pytest.raises(LayoutError, match="cannot be used"):
        secret.find_secret()


def spoil(folder, how):
    key = folder / "secret"
    if how == "readable":
        key.chmod(0o644)
    elif how == "open folder":
        folder.chmod(0o777)
    elif how == "link":
        key.rename(folder / "elsewhere")
        key.symlink_to("elsewhere")
    elif how == "pipe":
        key.unlink()
        os.mkfifo(key, 0o600)
    elif how == "short":
        key.write_text("abc")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("readable", "secret has mode 0644, so that others get at it: chmod 0600"),
        ("open folder", "hybridflow has mode 0777, so that others get at it: chmod 0700"),
        ("link", "Too many levels of symbolic links"),
        ("pipe", "secret is no file"),
        ("short", "secret has 3 bytes, which can be guessed: remove it"),
    ],
)
def test_a_key_that_others_could_know_is_refused(tmp_path, how, says):
    secret.find_secret()
    spoil(tmp_path / ".hybridflow", how)
    with pytest.raises(LayoutError, match=f"{says}.*; export HYBRIDFLOW_SECRET"):
        secret.find_secret()


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    secret.find_secret()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LayoutError, match="belongs to user"):
        secret.find_secret()
