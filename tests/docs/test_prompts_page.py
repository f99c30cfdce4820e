"""``docs/prompts.md`` shows the prompts as the engine makes them now."""

from __future__ import annotations

from tests.docs.pages import ROOT, script

PAGE = (ROOT / "docs/prompts.md").read_text(encoding="utf-8")
PAGE_SCRIPT = script("prompts_page")


def test_page_is_up_to_date() -> None:
    assert PAGE_SCRIPT.written(PAGE) == PAGE, "run: python scripts/prompts_page.py"


def test_each_situation_is_shown_in_the_format_of_its_model() -> None:
    shown = PAGE.partition("<!-- begin situations -->")[2].split("\n### ")[1:]
    assert len(shown) == 12
    first = {"Qwen3": "<|im_start|>", "Llama 3": "<|begin_of_text|>", "Gemma 3": "<bos>"}
    for text in shown:
        name = text.partition("template of ")[2].partition(".")[0]
        assert f"\n\n    {first[name]}" in text
