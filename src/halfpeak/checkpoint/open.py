"""Opens a file, or a folder of files, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from halfpeak.checkpoint.read import Content, StrPath, as_path, open_regular, read_file
from halfpeak.core.errors import CheckpointError

_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors")
_RUN_FILE: Final = "checkpoint.pt"  # of ``halfpeak train``


class Folder(dict[str, Any]):
    """The contents of the files in a folder, by file name; ``left_out`` has the reasons why others cannot be read."""

    left_out: dict[str, str]


def find_files(path: StrPath) -> tuple[Path, list[Path]]:
    """The file or folder that a path means, and the files to read.

    Raises:
        CheckpointError: there is no such file or folder, or it cannot be opened.
    """
    target = as_path(path)
    try:
        if (target / ".metadata").is_file():
            raise CheckpointError(
                f"{target} is a folder of torch.distributed.checkpoint, and torch runs what its .metadata says",
                "if you trust it, write torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'all.pt'), and "
                "take all.pt",
            )
        if (target / _RUN_FILE).is_file():
            target /= _RUN_FILE
        if target.is_dir():
            return target, sorted(
                one for one in target.iterdir() if one.is_file() and one.suffix in _SUFFIXES
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(target)!r} cannot be opened: {error}") from error
    with open_regular(target):
        return target, [target]


def read_files(target: Path, files: list[Path]) -> Content:
    """Read what :func:`find_files` gave; from a folder, a :class:`Folder`.

    Raises:
        CheckpointError: a file is damaged, or cannot be read as data. In a folder, only damage is an error.
    """
    if files == [target]:
        return read_file(target, as_data=True)
    if not files:
        raise CheckpointError(f"no file in {target} ends in {', '.join(_SUFFIXES)}")
    tree, wants = Folder(), dict[str, None]()
    tree.left_out = {}
    for one in files:
        try:
            found = read_file(one, as_data=True)
        except CheckpointError as error:
            if error.damaged:
                raise
            tree.left_out[one.name] = str(error)
        else:
            tree[one.name] = found.tree
            wants |= dict.fromkeys(found.wants)
    return Content(tree, "a folder", tuple(wants))
