"""A disk that can lose power: records what is done to a folder and tells what would be left.

The system may keep names and bytes in memory until they are flushed, and write them in any order.
After a crash a file surely has the bytes of its last fsync, and a folder the names of its last;
what came later may be there or not.
"""

import contextlib
import os
import shutil
from pathlib import Path


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.data, self.flushed = data, data


class Folder:
    def __init__(self) -> None:
        self.names: dict[str, object] = {}
        self.flushed: dict[str, object] = {}


class RecordingDisk:
    """Stands between a program and one folder of the real disk.

    ``after_each`` is called after every operation, and may look at what a crash would leave.
    A flush of what it is ``deaf_to``, File or Folder, has no effect.
    """

    PATCHED = ("open", "close", "writev", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, root: Path, after_each, deaf_to: type | tuple = ()) -> None:
        self.root = root
        self.deaf_to = deaf_to
        self.after_each = after_each
        self.operations = 0
        self.real = {name: getattr(os, name) for name in self.PATCHED}
        self.open_files: dict[int, object] = {}
        self.top = self._scan(root)

    def _scan(self, path: Path) -> Folder:
        folder = Folder()
        for entry in path.iterdir():
            child = self._scan(entry) if entry.is_dir() else File(entry.read_bytes())
            folder.names[entry.name] = folder.flushed[entry.name] = child
        return folder

    def _at(self, path) -> object:
        here: object = self.top
        for part in Path(path).relative_to(self.root).parts:
            here = here.names[part]
        return here

    @contextlib.contextmanager
    def watching(self):
        for name in self.PATCHED:
            setattr(os, name, self._watched(name))
        try:
            yield
        finally:
            for name in self.PATCHED:
                setattr(os, name, self.real[name])

    def _watched(self, name):
        def call(*args, **kwargs):
            result = self.real[name](*args, **kwargs)
            watched = getattr(self, f"_{name}")(result, *args)
            if watched:
                self.operations += 1
                self._unpatched(self.after_each)
            return result

        return call

    def _unpatched(self, action) -> None:
        for name in self.PATCHED:
            setattr(os, name, self.real[name])
        action()
        for name in self.PATCHED:
            setattr(os, name, self._watched(name))

    def _is_inside(self, path) -> bool:
        return isinstance(path, (str, Path)) and Path(path).is_relative_to(self.root)

    def _open(self, descriptor, path, flags=0, *mode, **options) -> bool:
        if not self._is_inside(path):
            return False
        if flags & os.O_CREAT:
            names = self._at(Path(path).parent).names
            made = names.setdefault(Path(path).name, File())
            if flags & os.O_TRUNC:
                made.data = b""
        self.open_files[descriptor] = self._at(path)
        return bool(flags & os.O_CREAT)

    def _close(self, result, descriptor) -> bool:
        self.open_files.pop(descriptor, None)
        return False

    def _writev(self, count, descriptor, views) -> bool:
        file = self.open_files.get(descriptor)
        if file is not None:
            file.data += b"".join(bytes(view) for view in views)[:count]
        return file is not None

    def _fsync(self, result, descriptor) -> bool:
        there = self.open_files.get(descriptor)
        if isinstance(there, self.deaf_to):
            return False
        if isinstance(there, File):
            there.flushed = there.data
        elif there is not None:
            there.flushed = dict(there.names)
        return there is not None

    def _replace(self, result, source, target) -> bool:
        if not self._is_inside(source):
            return False
        moved = self._at(Path(source).parent).names.pop(Path(source).name)
        self._at(Path(target).parent).names[Path(target).name] = moved
        return True

    _rename = _replace

    def _mkdir(self, result, path, *mode) -> bool:
        if self._is_inside(path):
            self._at(Path(path).parent).names[Path(path).name] = Folder()
        return self._is_inside(path)

    def _unlink(self, result, path, **options) -> bool:
        if self._is_inside(path):
            del self._at(Path(path).parent).names[Path(path).name]
        return self._is_inside(path)

    _rmdir = _unlink

    def left_after_a_crash(self, target: Path, *, names: str, data: str) -> None:
        """Write to ``target`` what a crash now could leave.

        Args:
            target: a folder to be made.
            names: "kept": all names that were given; "lost": those flushed only.
            data: the same for the bytes of files; what is lost leaves an empty or shorter file.
        """
        shutil.rmtree(target, ignore_errors=True)
        self._write(self.top, target, names == "kept", data == "kept")

    def _write(self, folder: Folder, target: Path, keep_names: bool, keep_data: bool) -> None:
        target.mkdir()
        for name, child in (folder.names if keep_names else folder.flushed).items():
            if isinstance(child, Folder):
                self._write(child, target / name, keep_names, keep_data)
            else:
                (target / name).write_bytes(child.data if keep_data else child.flushed)
