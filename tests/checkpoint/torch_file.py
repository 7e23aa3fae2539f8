"""The Python side of torch_file_test: reads files of save_torch with torch.load, and their zip archives with zipfile;
writes each anew as FILE.python with torch.save.

torch_file.py FILE ENTRY... [-- FILE ENTRY...]   ENTRY is NAME:DTYPE:SIZE,SIZE,... as in torch_file_test.cpp, or NAME=VALUE (Python)
"""
import ast
import sys
import zipfile

import torch


def expected(dtype, sizes):
    numbers = torch.arange(torch.Size(sizes).numel()) % (2 if dtype == torch.bool else 120)
    numbers = torch.complex(numbers.float(), -numbers.float()) if dtype.is_complex else numbers
    return numbers.reshape(sizes).to(dtype)


def same(a, b):
    def raw(t):
        return t.contiguous().view(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and raw(a).equal(raw(b))


def check(path, entries, **options):
    state = torch.load(path, **options)
    assert type(state).__name__ == "OrderedDict", type(state)
    assert set(state) == {entry.split(":")[0].split("=")[0] for entry in entries}, list(state)
    for entry in entries:
        if "=" in entry:
            name, value = entry.split("=")
            assert repr(state[name]) == repr(ast.literal_eval(value)), (name, state[name])
        else:
            name, dtype, sizes = entry.split(":")
            tensor = expected(getattr(torch, dtype), [int(n) for n in sizes.split(",") if n])
            assert same(state[name], tensor), name
    if "tied" in state:
        assert state["tied"].data_ptr() == state["also.tied"].data_ptr()


def split(arguments):
    files = [[]]
    for argument in arguments:
        if argument == "--":
            files.append([])
        else:
            files[-1].append(argument)
    return files


def main():
    count = 0
    for path, *entries in split(sys.argv[1:]):
        check(path, entries, weights_only=True)
        check(path, entries, weights_only=False)
        torch.save(torch.load(path, weights_only=True), path + ".python")
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, archive.testzip()  # every CRC
            assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        count += len(entries)
    print(f"{count} entries: the same in Python")


if __name__ == "__main__":
    main()
