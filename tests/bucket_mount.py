"""Mounts ROOT at PLACE as mounts of buckets behave: no folder can be renamed.

python bucket_mount.py ROOT PLACE
"""

import errno
import os
import sys

import mfusepy


class Bucket(mfusepy.Operations):
    """Passes all else to the file system below."""

    use_ns = True

    def __init__(self, root: str):
        self._root = root

    def _below(self, path: str) -> str:
        return f"{self._root}{path}"

    def getattr(self, path, fh=None):
        found = os.lstat(self._below(path))
        names = "st_mode st_nlink st_size st_uid st_gid".split()
        times = {
            x: getattr(found, f"{x}_ns") for x in ("st_atime", "st_mtime", "st_ctime")
        }
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._below(path))]

    def statfs(self, path):
        found = os.statvfs(self._below(path))
        return {x: getattr(found, x) for x in dir(found) if x.startswith("f_")}

    def mkdir(self, path, mode):
        os.mkdir(self._below(path), mode)

    def rmdir(self, path):
        os.rmdir(self._below(path))

    def unlink(self, path):
        os.unlink(self._below(path))

    def rename(self, old, new, flags=0):
        source = self._below(old)
        if os.path.isdir(source):
            raise mfusepy.FuseOSError(errno.ENOTSUP)
        os.rename(source, self._below(new))

    def create(self, path, mode, fi=None):
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        return os.open(self._below(path), flags, mode)

    def open(self, path, flags):
        return os.open(self._below(path), flags & ~os.O_APPEND)  # the kernel says where

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._below(path), length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)

    def utimens(self, path, times=None):
        os.utime(self._below(path))

    def chmod(self, path, mode):
        os.chmod(self._below(path), mode)


if __name__ == "__main__":
    mfusepy.FUSE(Bucket(sys.argv[1]), sys.argv[2], foreground=True)
