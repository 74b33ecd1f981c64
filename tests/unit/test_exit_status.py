"""Which exit status an error has, also where it is told on another rank than the one that met it."""

import errno
import os

import pytest

from hybridflow.errors import ConfigError, RewardError, StopError, WriteError
from hybridflow.exit_status import FAILURE, REQUEST, REQUEUE, TARGET, exit_status
from hybridflow.observe.files import writing


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
