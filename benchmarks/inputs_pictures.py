"""Pictures: whether they arrive at a model, what reading, bombs and the store cost, and how far the
reserved tokens are from those that providers publish.

    python benchmarks/inputs.py --part pictures

Pillow writes the pictures, and its own PDF writer the scan. A scripted server on loopback receives
the requests in OpenAI's format and compares the bytes. No provider is asked, so published figures
stand for theirs. Figures of time are quotients of CPU time within one run.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure

import ramify
from ramify.clients.picture_token_costs import picture_tokens_upper_bound
from ramify.sources.load_sources import load
from ramify.testing import ScriptedServer
from ramify.types.picture import Picture, picture_from_bytes

_PUBLISHED = (
    ("openai:gpt-4o", 1024, 1024, 765),
    ("openai:gpt-4o", 2048, 4096, 1105),
    ("openai:gpt-4.1-mini", 1024, 1024, 1659),
    ("openai:gpt-4o-mini", 512, 512, 8500),
    ("openai:o1", 512, 512, 225),
    ("openai:gpt-5", 512, 512, 210),
    ("anthropic:claude-sonnet-4-5", 1000, 1000, 1334),
    ("gemini:gemini-2.5-flash", 960, 540, 1548),
)
"""Model, width, height, tokens: examples of the providers' pages (2026)."""
_BOMB_KB = 20_000
"""Memory (kB) that reading the header of a bomb may take beside the import of Pillow's process."""


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield _arrival(folder)
        yield _reading(folder, 100 if quick else 400)
        yield _bomb(folder)
        yield _page(folder)
        yield from _tokens()
        yield _store(folder, 10 if quick else 40)


def _encoded(kind: str, size: tuple[int, int], seed: int = 0) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    image = Image.effect_noise(size, 40 + seed % 60).convert("RGB")
    image.save(file, kind)
    return file.getvalue()


def _arrival(folder: Path) -> Figure:
    """Share of pictures whose bytes arrive unchanged: PNG, JPEG, WebP and the pages of a scan."""
    from PIL import Image

    paths, digests = [], set()
    for suffix, kind in (("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP")):
        paths.append(folder / f"a.{suffix}")
        paths[-1].write_bytes(_encoded(kind, (640, 480)))
        digests.add(hashlib.sha256(paths[-1].read_bytes()).hexdigest())
    pages = [Image.new("RGB", (850, 1100), color) for color in ("white", "navy")]
    paths.append(folder / "scan.pdf")
    pages[0].save(paths[-1], "PDF", save_all=True, append_images=pages[1:])
    received: set[str] = set()

    def reply(messages: object) -> str:
        received.update(p.digest for p in messages[-1].pictures)  # type: ignore[index]
        return "seen"

    async def main() -> int:
        async with ScriptedServer(reply) as server:
            model = ramify.Model("openai:gpt-4o", api_key="sk-0123456789", base_url=server.url)
            loaded = load(paths)
            async with ramify.RLM(model) as rlm:
                await rlm.acompletion(loaded, "What do they show?")
            return len(set(loaded.pictures) | digests)

    num = asyncio.run(main())
    share = len(received) / num if digests <= received else 0.0
    return Figure("pictures that arrive unchanged", share, "share", {"pictures": num}, least=1.0)


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _reading(folder: Path, num: int) -> Figure:
    many = folder / "many"
    many.mkdir()
    data = _encoded("JPEG", (1600, 1200))
    for index in range(num):
        (many / f"{index:04}.jpg").write_bytes(data + bytes([index % 256, index // 256]))
    load([many])
    ours = min(_cpu(lambda: load([many])) for _ in range(3))

    def hashed() -> None:
        for path in sorted(many.iterdir()):
            hashlib.sha256(path.read_bytes()).hexdigest()

    alone = min(_cpu(hashed) for _ in range(3))
    return Figure(
        f"loading {num} pictures", round(ours / alone, 2), "× reading and hashing them",
        {"ms per picture": round(ours / num * 1000, 3)}, floor=3.0,
    )  # fmt: skip


_BOMB = """
import resource, sys
from ramify.errors import SourceError
from ramify.sources.load_sources import load
import ramify.sources.pictures
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load([sys.argv[1]])
except SourceError as error:
    assert "60,000 × 60,000 pixels" in str(error), error
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _bomb(folder: Path) -> Figure:
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 6, 0, 0, 0)
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    ]
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    command = [sys.executable, "-c", _BOMB, str(folder / "bomb.png")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Figure(
        "memory for a PNG of 14 GB in 100 bytes", grown, "kB", {"if decoded": 14_400_000},
        floor=_BOMB_KB,
    )  # fmt: skip


def _page(folder: Path) -> Figure:
    import pypdfium2

    path = folder / "scan.pdf"
    page_picture = load([path]).tools.get("page_picture")
    if page_picture is None:  # a short scan is pictures already: give it text
        from pypdf import PdfWriter

        long = folder / "long.pdf"
        writer = PdfWriter(clone_from=path)
        for _ in range(20):
            writer.add_page(writer.pages[0])
        writer.write(long)
        path, page_picture = long, load([long]).tools["page_picture"]
    data = path.read_bytes()
    page_picture(1)

    def alone() -> None:
        document = pypdfium2.PdfDocument(data)
        page = document[0]
        file = io.BytesIO()
        page.render(scale=1600 / page.get_size()[0]).to_pil().save(file, "PNG")
        document.close()

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    alone_s, ours_s = best(alone), best(lambda: page_picture(1))
    return Figure(
        "a page of a PDF as a picture, in its own process", round(ours_s / alone_s, 2),
        "× pypdfium2 alone", {"seconds": round(ours_s, 3)}, floor=2.0,
    )  # fmt: skip


def _tokens() -> Iterator[Figure]:
    bounds = [
        picture_tokens_upper_bound(model, Picture("0" * 64, "png", width, height, 1)) / tokens
        for model, width, height, tokens in _PUBLISHED
    ]
    examples: dict[str, float | str] = {"published examples": len(bounds)}
    low, high = round(min(bounds), 3), round(max(bounds), 3)
    yield Figure("reserved tokens, least", low, "× published", examples, least=1.0)
    yield Figure("reserved tokens, most", high, "× published", examples, floor=2.0)


def _store(folder: Path, num: int) -> Figure:
    """Bytes of pictures in a store after many runs over one picture, beside the picture itself."""
    path = folder / "one.png"
    path.write_bytes(_encoded("PNG", (1200, 900)))
    store = ramify.Store(folder / "store")
    with ramify.RLM(ramify.ScriptedClient(["seen"] * num), store=store) as rlm:
        for index in range(num):
            rlm.completion(load([path]), f"Question {index}?")
    picture = picture_from_bytes(path.read_bytes())
    blobs = [file for file in (folder / "store/blobs").rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in blobs)
    journals = sum(file.stat().st_size for file in (folder / "store/runs").glob("*.jsonl"))
    return Figure(
        f"a store after {num} runs over one picture", round(stored / picture.num_bytes, 3),
        "× the picture", {"kB of journals per run": round(journals / num / 1000, 1)}, floor=1.1,
    )  # fmt: skip
