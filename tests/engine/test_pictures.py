"""Pictures in a run: direct calls, llm_query(images=…), budgets, the record, resume and reuse."""

import asyncio
import io
import struct
import zlib

import pytest
from PIL import Image

import ramify
from ramify.clients.base import Price
from ramify.clients.picture_token_costs import picture_tokens_upper_bound
from ramify.engine.question import make_question
from ramify.errors import ConfigError
from ramify.sources.load_sources import load
from ramify.store.folder_store import Store
from ramify.testing import ScriptedClient, refused, server_error
from ramify.types.picture import PictureBytes, picture_from_bytes

CHART = "What does this chart say?"


def png(width=320, height=200, color="navy"):
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def saved(folder, name="chart.png", **options):
    path = folder / name
    path.write_bytes(png(**options))
    return path


def in_cell(code):
    return f"```repl\n{code}\n```"


def requested(trajectory):
    """Pictures of each request of a run."""
    return [
        tuple(picture.name for message in turn.prompt for picture in message.pictures)
        for call in trajectory.calls
        for turn in call.turns
    ]


def test_a_question_about_a_picture_is_one_direct_call_that_shows_it(tmp_path):
    path = saved(tmp_path)
    client = ScriptedClient(["It says 42."])
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([path]), CHART)
    assert result.answer == "It says 42."
    (request,) = client.requests
    message = request.messages[-1]
    assert message.pictures == (picture_from_bytes(path.read_bytes(), "chart.png"),)
    assert request.read_picture(message.pictures[0].digest) == path.read_bytes()
    assert "[the picture chart.png, png, 320 × 200 pixels]" in message.content
    assert message.content.count(CHART) == 1


def test_a_text_and_a_picture_are_shown_together(tmp_path):
    (tmp_path / "notes.txt").write_text("Sales are in thousands.")
    client = ScriptedClient(["42,000"])
    with ramify.RLM(client) as rlm:
        rlm.completion(load([tmp_path / "notes.txt", saved(tmp_path)]), CHART)
    message = client.requests[0].messages[-1]
    assert "Sales are in thousands." in message.content
    assert [picture.name for picture in message.pictures] == ["chart.png"]


def test_a_session_shows_pictures_of_the_context_and_its_own_bytes(tmp_path):
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        saved(tmp_path, name, color=color)
    own = png(16, 16, "white")
    cell = in_cell(
        "one = llm_query('Which colour?', images=[context['a.png']])\n"
        "two = llm_query_batched(['x', 'y', 'z'],\n"
        f"    images=[context['b.png'], [context['a.png'], context['b.png']], {own!r}])\n"
        "FINAL([one, *two])"
    )

    def reply(messages):
        names = [f"{p.name}:{p.width}" for p in messages[-1].pictures]
        return cell if messages[0].role == "system" else " ".join(names)

    client = ScriptedClient(reply)
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([tmp_path]), "?", direct=False)
    assert result.answer == ["a.png:320", "b.png:320", "a.png:320 b.png:320", ":16"]
    system = client.requests[0].messages[0].content
    assert "images=None" in system
    assert "Pictures: a value such as" in system


@pytest.mark.parametrize(
    ("images", "error"),
    [
        (
            "[{**context, 'picture': '0' * 64}]",
            "ValueError: images[0][0] is not a picture of this run",
        ),
        ("[b'GIF89a']", "ValueError: images[0][0] is not a PNG, JPEG or WebP picture"),
        ("[3]", "TypeError: images[0][0] is a int: give a picture of the context"),
        ("[{'picture': context['picture']}]", "is a dict: give a picture of the context as it is"),
        ("7", "TypeError"),
        ("[context] * 21", "ValueError: images[0]: 21 pictures, and one request takes at most 20"),
    ],
)
def test_what_is_not_a_picture_is_an_error_in_the_cell(tmp_path, images, error):
    cell = in_cell(f"print(llm_query('?', images={images}))")
    client = ScriptedClient([cell, "FINAL(1)"])
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([saved(tmp_path)]), "?", direct=False)
    assert error in result.trajectory.calls[0].turns[0].cells[0].error
    assert len(client.requests) == 2


def test_a_session_has_no_bytes_of_a_picture(tmp_path):
    cell = in_cell("FINAL(sorted(context))")
    client = ScriptedClient([cell])
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([saved(tmp_path)]), "?", direct=False)
    assert result.answer == ["bytes", "height", "kind", "name", "picture", "width"]


def test_a_model_without_vision_refuses_before_anything_is_sent(tmp_path):
    client = ScriptedClient(["no"], name="scripted:blind", vision=False)
    with (
        ramify.RLM(client) as rlm,
        pytest.raises(
            ConfigError,
            match=r"the context has pictures, and scripted:blind reads no pictures: name a model "
            r"that does; if it does, say so: ramify\.Model",
        ),
    ):
        rlm.completion(load([saved(tmp_path)]), CHART)
    assert not client.requests


def test_the_context_of_a_load_without_its_pictures_is_refused(tmp_path):
    client = ScriptedClient(["no"])
    with ramify.RLM(client) as rlm, pytest.raises(ConfigError, match="pictures without their byt"):
        rlm.completion(load([saved(tmp_path)]).context, CHART)
    assert not client.requests


def test_a_row_with_a_field_picture_is_no_picture():
    rows = [{"picture": "0" * 64, "name": "a row of a table"}]
    client = ScriptedClient(["a row"])
    with ramify.RLM(client) as rlm:
        assert rlm.completion(rows, "What is it?").answer == "a row"
    assert "a row of a table" in client.requests[0].messages[-1].content


def test_a_picture_beside_a_text_that_stays_in_its_file(tmp_path):
    (tmp_path / "big.log").write_text("error\n" * 50_000)
    cell = in_cell(
        "FINAL([len(context['big.log']), llm_query('?', images=[context['chart.png']])])"
    )
    client = ScriptedClient([cell, "a chart"])
    loaded = load([tmp_path / "big.log", saved(tmp_path)], mapped_bytes=100_000)
    with ramify.RLM(client) as rlm:
        assert rlm.completion(loaded, "?").answer == [300_000, "a chart"]


def test_a_plain_call_outside_of_a_run_does_not_drop_a_picture(tmp_path):
    async def can_answer(context):
        async with ramify.RLM(ScriptedClient([])).direct_calls(ramify.Limits()) as calls:
            return calls.can_answer(make_question(context, "?", None, False))

    loaded = load([saved(tmp_path)])
    assert not asyncio.run(can_answer(loaded))
    assert not asyncio.run(can_answer(loaded.context))
    assert asyncio.run(can_answer("a text"))


def test_a_client_that_cannot_send_pictures_gets_none(tmp_path):
    class Plain:
        name, window, price = "plain:model", 10_000, None

        async def complete(self, request):
            raise AssertionError("it would drop the picture")

        async def close(self):
            pass

    with ramify.RLM(Plain()) as rlm, pytest.raises(ConfigError, match="plain:model reads no pict"):
        rlm.completion(load([saved(tmp_path)]), CHART)


def test_a_blind_root_asks_a_model_that_sees(tmp_path):
    cell = in_cell(
        "try:\n    llm_query('?', model='blind', images=[context])\n"
        "except SubcallError as error:\n    why = str(error)\n"
        "FINAL([why, llm_query('?', images=[context])])"
    )
    root = ScriptedClient([cell], name="scripted:blind", vision=False)
    eyes = ScriptedClient(["a chart"], name="scripted:eyes")
    with ramify.RLM(root, sub_model=eyes) as rlm:
        why, seen = rlm.completion(load([saved(tmp_path)]), CHART).answer
    assert why.startswith("scripted:blind reads no pictures: name one that does: eyes")
    assert seen == "a chart"
    assert not any(message.pictures for r in root.requests for message in r.messages)


def test_a_model_says_whether_it_sees(tmp_path):
    models = ramify.Model("openai:gpt-oss-120b", api_key="sk-0123456789", vision=False)
    with ramify.RLM(models) as rlm, pytest.raises(ConfigError, match="reads no pictures"):
        rlm.completion(load([saved(tmp_path)]), CHART)


# --- budgets --------------------------------------------------------------------------------------


def test_tokens_of_pictures_are_reserved_before_and_settled_by_the_usage(tmp_path):
    path = saved(tmp_path, width=1024, height=1024)
    client = ScriptedClient(["42"], price=Price(1.0, 1.0))
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([path]), CHART)
    (request,) = client.requests
    text = sum(len(m.content.encode()) + 16 for m in request.messages) + 64
    picture = request.messages[-1].pictures[0]
    assert request.max_input_tokens() == text + picture_tokens_upper_bound("scripted:test", picture)
    assert result.usage.input_tokens == client.served.input_tokens  # 32 × 32 tokens of the picture
    assert result.usage.input_tokens > 1024
    assert result.cost == pytest.approx(client.served.total_tokens / 1e6)


def test_a_picture_beyond_the_budget_is_not_sent(tmp_path):
    path = saved(tmp_path, width=4000, height=4000)
    client = ScriptedClient(["42"], price=Price(1.0, 1.0))
    limits = ramify.Limits(max_cost=0.019)
    with ramify.RLM(client, limits=limits) as rlm:
        result = rlm.completion(load([path]), CHART)
        assert result.answer is None
        assert str(result.stop) == "max_cost"
        assert not client.requests
        # The same question about a smaller picture is within the budget.
        assert rlm.completion(load([saved(tmp_path)]), CHART).answer == "42"


def test_a_lost_reply_is_booked_with_its_picture_and_the_retry_shows_it_again(tmp_path):
    client = ScriptedClient([server_error(), "42"])
    with ramify.RLM(client) as rlm:
        result = rlm.completion(load([saved(tmp_path)]), CHART)
    assert result.answer == "42"
    first, second = client.requests
    assert first.messages == second.messages
    assert second.messages[-1].pictures


def test_a_repair_of_a_typed_answer_keeps_the_picture(tmp_path):
    client = ScriptedClient(["many", "42"])
    with ramify.RLM(client) as rlm:
        assert rlm.completion(load([saved(tmp_path)]), CHART, answer_type=int).answer == 42
    pictures = [[len(m.pictures) for m in r.messages] for r in client.requests]
    assert [sum(each) for each in pictures] == [1, 1]
    assert len(pictures[1]) == len(pictures[0]) + 2


# --- the record -----------------------------------------------------------------------------------


def test_the_journal_names_a_picture_by_hash_and_its_blob_is_stored_once(tmp_path):
    data = saved(tmp_path).read_bytes()
    store = Store(tmp_path / "store")
    client = ScriptedClient(["42", "43"])
    with ramify.RLM(client, store=store) as rlm:
        results = [rlm.completion(load([tmp_path / "chart.png"]), q) for q in ("one?", "two?")]
    digest = picture_from_bytes(data).digest
    for result in results:
        text = store.path(result.run_id).read_bytes()
        assert digest.encode() in text
        assert b"iVBOR" not in text  # base64 of a PNG file
        assert result.trajectory.context.pictures == (digest,)
    assert store.blobs.get(digest) == data
    assert len(list((tmp_path / "store/blobs").rglob(digest))) == 1
    store.remove(results[0].run_id)
    assert store.blobs.get(digest) == data  # the other run needs it
    assert requested(store.load(results[1].run_id)) == [("chart.png",)]


def test_a_suspended_run_resumes_without_the_file(tmp_path):
    path, store = saved(tmp_path), Store(tmp_path / "store")
    client = ScriptedClient([refused(401, "wrong key"), "42"])
    with ramify.RLM(client, store=store) as rlm:
        with pytest.raises(ramify.RunSuspendedError) as raised:
            rlm.completion(load([path]), CHART)
        path.unlink()
        assert rlm.resume(raised.value.run_id).answer == "42"
    request = client.requests[-1]
    assert request.read_picture(request.messages[-1].pictures[0].digest) == png()


def test_a_replay_reads_no_picture_and_asks_nothing(tmp_path):
    store = Store(tmp_path / "store")
    own = png(16, 16)
    cell = in_cell(f"FINAL([llm_query('?', images=[context]), llm_query('!', images=[{own!r}])])")
    client = ScriptedClient([cell, "a", "b"])
    with ramify.RLM(client, store=store) as rlm:
        result = rlm.completion(load([saved(tmp_path)]), "?", direct=False)
        assert result.answer == ["a", "b"]
        again = rlm.replay(result.run_id)
    assert again.answer == ["a", "b"]
    assert len(client.requests) == 3


def test_a_picture_is_part_of_a_request_s_identity(tmp_path):
    store = Store(tmp_path / "store")
    client = ScriptedClient(["red", "blue"])
    with ramify.RLM(client, store=store) as rlm:

        def ask(color):
            return rlm.completion(load([saved(tmp_path, color=color)]), CHART, cache=True).answer

        assert [ask("red"), ask("blue"), ask("red"), ask("blue")] == ["red", "blue", "red", "blue"]
    assert len(client.requests) == 2


def test_a_file_that_changed_after_it_was_read_is_named(tmp_path):
    path = saved(tmp_path)
    loaded = load([path])
    path.write_bytes(png(color="red"))
    client = ScriptedClient(["42"])
    with ramify.RLM(client) as rlm, pytest.raises(ConfigError, match=r"chart\.png has changed"):
        rlm.completion(loaded, CHART)
    assert not client.requests


# --- tools and children ---------------------------------------------------------------------------


def test_a_tool_may_return_a_picture(tmp_path):
    def camera():
        """Take a picture."""
        return PictureBytes(png(48, 48), "camera.png")

    cell = in_cell("shot = camera()\nFINAL([shot['name'], llm_query('?', images=[shot])])")
    client = ScriptedClient([cell, "a cat"])
    store = Store(tmp_path / "store")
    with ramify.RLM(client, tools={"camera": camera}, store=store) as rlm:
        result = rlm.completion("What is in front of the camera?")
        assert result.answer == ["camera.png", "a cat"]
        assert rlm.replay(result.run_id).answer == ["camera.png", "a cat"]
    assert store.blobs.get(picture_from_bytes(png(48, 48)).digest) == png(48, 48)


def test_a_child_at_the_depth_limit_sees_the_picture_that_it_is_given(tmp_path):
    for name in ("a.png", "b.png"):
        saved(tmp_path, name, color="red" if name == "a.png" else "blue")
    cell = in_cell("FINAL(rlm_query('Which?', context['b.png']))")
    client = ScriptedClient([cell, "b"])
    limits = ramify.Limits(max_depth=0)
    with ramify.RLM(client, limits=limits) as rlm:
        result = rlm.completion(load([tmp_path]), "?", direct=False)
    assert result.answer == "b"
    assert [p.name for p in client.requests[1].messages[-1].pictures] == ["b.png"]


def test_more_pictures_than_one_request_takes_are_answered_in_a_session(tmp_path):
    for index in range(21):
        saved(tmp_path, f"{index:02}.png", color=(index, 0, 0))
    client = ScriptedClient(["FINAL(21)"])
    with ramify.RLM(client) as rlm:
        assert rlm.completion(load([tmp_path]), "How many?").answer == 21
    assert client.requests[0].messages[0].role == "system"
    assert not any(message.pictures for message in client.requests[0].messages)


def bomb():
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + bytes(4)


def test_a_bomb_from_a_session_is_refused_by_its_header():
    cell = in_cell(f"llm_query('?', images=[{bomb()!r}])")
    client = ScriptedClient([cell, "FINAL(1)"])
    with ramify.RLM(client) as rlm:
        result = rlm.completion("a text", "?", direct=False)
    error = result.trajectory.calls[0].turns[0].cells[0].error
    assert "has 50,000 × 50,000 pixels, and at most 8,000 × 8,000 are sent" in error
