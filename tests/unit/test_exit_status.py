"""Which exit status an error has, also where it is told on another rank than the one that met it."""

import errno
import json
import os
import sys

import pytest

import hybridflow.__main__
from hybridflow import cli
from hybridflow.errors import ConfigError, DeadlineError, RewardError, StopError, WriteError
from hybridflow.exit_status import FAILURE, REQUEST, REQUEUE, SOURCE, TARGET, exit_status, pack_error, unpack_error
from hybridflow.observe.files import writing
from hybridflow.parallel.cause import cause_of
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.parallel.mpi import NoMpiError


def refused(number, path):
    with pytest.raises(WriteError) as caught, writing(path):
        raise OSError(number, os.strerror(number), str(path))
    return caught.value


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_what_a_file_server_says_while_it_is_away_may_pass(number, tmp_path):
    error = refused(number, tmp_path)
    assert exit_status(error) == FAILURE
    assert str(error).endswith(f"{os.strerror(number)}; start again once the file system answers")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_any_other_refusal_of_a_write_stays(number, tmp_path):
    assert exit_status(refused(number, tmp_path)) == TARGET


def test_causes_are_found_where_they_are_hidden_and_where_they_are_a_circle():
    with pytest.raises(ConfigError) as hidden:
        try:
            raise OSError(errno.ESTALE, "stale")
        except OSError:
            raise ConfigError("model.path: cannot be read") from None
    assert exit_status(hidden.value) == FAILURE
    one, other = RewardError("one"), RewardError("other")
    one.__cause__, other.__cause__ = other, one
    assert exit_status(one) == REQUEST
    stopped = StopError("asked to stop")
    stopped.__cause__ = OSError(errno.ESTALE, "stale")
    assert exit_status(stopped) == REQUEUE


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), OSError),
        (OSError(errno.EACCES, "Permission denied", "runs/x"), PermissionError),
        (OSError(errno.ESTALE, "Stale file handle", "runs/x", None, "runs/y"), OSError),
        (OSError("a library's"), OSError),
        (WriteError("runs/x: cannot be written"), WriteError),
        (ConfigError("trainer.step: unknown key"), ConfigError),
        (NoMpiError("MPI does not start"), Exception),
    ],
)
def test_an_error_of_the_lead_has_its_status_on_every_rank(error, kind):
    def work():
        raise error

    with pytest.raises(kind) as caught:
        Coordinator(0, (0,), None).on_lead("work", work)
    assert str(caught.value) == str(error)
    assert cause_of(caught.value, 1, "n").status == cause_of(error, 0, "n").status


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (WriteError("the disk is full"), TARGET),
        (OSError(errno.ENOSPC, "full"), TARGET),
        (OSError(errno.ECONNREFUSED, "refused"), FAILURE),
        (ValueError("a bug"), FAILURE),
        (None, FAILURE),
    ],
)
def test_a_wait_in_vain_has_the_status_of_what_ended_the_other(cause, status):
    error = DeadlineError("waited")
    error.__cause__ = cause
    assert exit_status(error) == status


def test_a_passing_cause_stays_with_an_error_that_is_sent(tmp_path):
    sent = json.loads(json.dumps(pack_error(refused(errno.ESTALE, tmp_path))))
    error = unpack_error(*sent)
    assert isinstance(error, WriteError) and str(error).startswith(f"{tmp_path}: cannot be written")
    assert exit_status(error) == FAILURE
    assert str(unpack_error(*pack_error(OSError(errno.EIO, "bad", "f")))) == "[Errno 5] bad: 'f'"
    assert exit_status(OSError(errno.ENOENT, "missing")) == SOURCE


@pytest.mark.parametrize(("number", "status"), [(errno.EPIPE, 141), (errno.ESHUTDOWN, FAILURE)])
def test_only_a_reader_that_has_left_ends_a_command_in_silence(number, status, monkeypatch, capsys):
    def fail(*_):
        raise OSError(number, "gone", "recipe.yaml")

    monkeypatch.setattr(cli, "load_recipe", fail)
    assert cli.main(["plan", "job", "quickstart"]) == status
    assert ("recipe.yaml" in capsys.readouterr().err) == (status == FAILURE)


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(capsys, monkeypatch):
    class Interrupted:
        def find_spec(self, name, path, target=None):
            if name == "hybridflow.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hybridflow.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert hybridflow.__main__.main() == 130
    # Behind the ^C that the terminal shows.
    assert capsys.readouterr() == ("", "\n")
