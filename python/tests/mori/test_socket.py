"""The folder and the socket of a host, which another user may have put there."""

import os
import socket
import stat

import pytest

from kvferry._native import Link, socket_folder

STRANGER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
WORKER = '{"rank": 0, "pid": 1, "regions": [], "tensors": []}'


def test_the_folder_is_made_for_this_user_alone(tmp_path):
    folder = tmp_path / "kvferry-0"
    for _ in range(2):
        socket_folder(folder)
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{folder} .*mode 0777.*remove it, or set XDG_RUNTIME_DIR"):
        socket_folder(folder)


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kvferry-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link .*remove it"):
        socket_folder(tmp_path / "kvferry-0")


@AS_ROOT
def test_the_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "kvferry-0"
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, -1)
    with pytest.raises(PermissionError, match=f"{folder} belongs to user {STRANGER} with mode 0700"):
        socket_folder(folder)


def connect(path):
    """A worker, which says at once who it is."""
    return Link.worker(path, WORKER)


@AS_ROOT
def test_a_host_of_another_user_is_told_nothing(tmp_path):
    path = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0)
        os.chown(path, STRANGER, -1)
        with pytest.raises(PermissionError, match=f"{path}.* belongs to user {STRANGER}"):
            connect(path)
        with pytest.raises(BlockingIOError):
            listener.accept()
        os.chown(path, 0, -1)
        line = connect(path)
        heard, _ = listener.accept()
        with heard:
            assert heard.recv(1)
        line.close()
