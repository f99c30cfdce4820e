"""Reads PNG, JPEG and WebP files.

The context represents each picture by a dict.

    chart.png  ->  {"picture": sha256, "name": "chart.png", "kind": "png", "width": 640, …}

Only the header of the file is read. A picture that is larger than models accept is scaled down by
Pillow (extra ``inputs``), in a process with limits on memory and time; without Pillow it is refused
with an error that gives its size. Pictures in a folder are left out if the folder also has texts,
since most of them would be icons. Pages of PDFs are handled by ``pdf_page_pictures.py``.
"""

from __future__ import annotations

import importlib.util

from ramify.pip_install_command import install_command
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import SourceCollector, UnreadableSourceError
from ramify.sources.picture_process import (
    MAX_PIXELS,
    MAX_SOURCE_BYTES,
    PictureProcessingError,
    scaled,
)
from ramify.types.picture import (
    MAX_PICTURE_BYTES,
    MAX_SIDE,
    InvalidPictureError,
    Picture,
    PictureTooLarge,
    picture_from_bytes,
    size_of,
)


def read(file: InputFile, loading: SourceCollector) -> None:
    name = file.name.rpartition("/")[2]
    try:
        picture, data = picture_from_bytes(file.data, name), file.data
        note, source = "", file.path
    except PictureTooLarge as error:
        picture, data = _scale_down(file, name, str(error), loading.max_file_s)
        size = size_of(file.data)
        note, source = f", scaled down from {size.width:,} × {size.height:,}", None
    except InvalidPictureError as error:
        raise UnreadableSourceError(
            str(error), "save it again with the program that made it"
        ) from None
    loading.add_picture(
        file.name, picture, data if source is None else source, f"{picture}{note}", len(file.data)
    )


def _scale_down(file: InputFile, name: str, why: str, limit_s: float) -> tuple[Picture, bytes]:
    """Scale down the picture in a file, and return the new picture and its bytes.

    Raises UnreadableSourceError on failure. Its message includes ``why``, the reason why the
    original picture cannot be sent as it is.
    """
    size, num_bytes = size_of(file.data), len(file.data)
    if size.width * size.height > MAX_PIXELS or num_bytes > MAX_SOURCE_BYTES:
        raise UnreadableSourceError(
            why,
            f"scale it down; Ramify does so only up to {MAX_PIXELS:,} pixels and "
            f"{MAX_SOURCE_BYTES:,} bytes",
        )
    if importlib.util.find_spec("PIL") is None:
        raise UnreadableSourceError(
            why,
            f"scale it down, or run {install_command('inputs')}, so that Ramify can do so",
        )
    try:
        data = scaled(file.data, MAX_SIDE // 4, MAX_PICTURE_BYTES, limit_s)
        return picture_from_bytes(data, name), data
    except (PictureProcessingError, InvalidPictureError) as error:
        raise UnreadableSourceError(f"{why}, and it cannot be scaled down", str(error)) from None
