"""What is written is there whole or not at all, file or folder, and with ordinary permissions."""

import pytest

from ds_tileoverlap.appearing import appearing


def put(path, is_folder, text):
    if is_folder:
        path.mkdir()
    (path / "file" if is_folder else path).write_text(text)


@pytest.mark.parametrize("is_folder", [False, True])
def test_it_appears_at_the_end(tmp_path, is_folder):
    path, ordinary = tmp_path / "path", tmp_path / "ordinary"
    put(ordinary, is_folder, "")
    with appearing(path) as part:
        put(part, is_folder, "new")
        assert part.parent == tmp_path and not path.exists()
    assert sorted(tmp_path.iterdir()) == [ordinary, path] and path.stat().st_mode == ordinary.stat().st_mode
    assert (path / "file" if is_folder else path).read_text() == "new"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_failure_leaves_nothing(tmp_path, is_folder, error):
    with pytest.raises(error), appearing(tmp_path / "path") as part:
        put(part, is_folder, "half")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "path"
    path.write_text("old")
    with pytest.raises(OSError), appearing(path) as part:
        part.write_text("half")
        raise OSError
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


def test_nothing_was_begun(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"), appearing(tmp_path / "none" / "path") as part:
        part.write_text("")
