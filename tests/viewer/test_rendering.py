"""What models write, as a reader sees it: Markdown, code in its language's colors, text that runs from
right to left, wide tables on a phone, and formulas. Nothing of it loads anything or becomes HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import Store
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from tests.viewer import golden
from tests.viewer.browser import AXE, NARROW, photograph, served, tab, violations
from tests.viewer.conftest import World

ROOT_SUMS = r"""First the sheets, as **one** table:

| sheet | sum |
|---|---:|
| 7 | 1414 |

```sql
SELECT sum(revenue) FROM sheets -- of all
```
```repl
sums = [int(llm_query(f"the sum of sheet {n}")) for n in (7, 8)]
print(sums)
FINAL(r"The share is $\frac{1414}{31164}$: sheet 7 has 1414, **sheet 8** has 31164.")
```"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose answer has returned values inside and outside of a formula."""
    store = Store(tmp_path_factory.mktemp("sums") / "store")

    def tell(messages: Any) -> str:
        if messages[0].role == "system":
            return ROOT_SUMS
        return "1414" if "7" in messages[-1].content else "31164"

    with golden.rlm(tell, store, golden.ALWAYS, ids=None) as made:
        return store.root, made.completion("sheets", "What share?").run_id or ""


def test_replies_and_answers_are_formatted_and_load_nothing(
    browser: Any, world: World, tmp_path: Path
) -> None:
    with served(world.store) as server, tab(browser, (1440, 900)) as shown:
        asked: list[str] = []
        shown.page.on("request", lambda request: asked.append(request.url))
        page = shown.open(f"{server.url}#/run/{world.markdown}")
        reply = page.locator(".turn .said.reply.formatted")
        reply.locator("td", has_text="Northern").wait_for()
        assert reply.locator(".md-heading").inner_text() == "Sums of the sheets"
        assert reply.locator("ol > li > ul > li").inner_text() == "inside of a list"
        reply.locator("math").first.wait_for()
        code = page.locator(".turn .code")
        assert code.first.locator(".c-keyword").first.inner_text() == "def"
        code.nth(1).locator(".c-attr", has_text='"sheet"').wait_for()
        answer = page.locator(".answer .said.formatted")
        answer.locator("pre .c-keyword", has_text="return").wait_for()
        answer.locator("pre .c-attr", has_text='"is_odd"').wait_for()
        ways = answer.locator("blockquote, td, pre code, p").evaluate_all(
            "(all) => all.map((it) => [it.innerText.slice(0, 5), getComputedStyle(it).direction])"
        )
        assert ["مجموع", "rtl"] in ways
        assert ["العرب", "rtl"] in ways
        assert ["South", "ltr"] in ways
        assert ["def t", "ltr"] in ways
        assert page.locator("main img, main a[href*='example']").count() == 0
        own = server.url.partition("?")[0]
        assert [url for url in asked if not url.startswith(own)] == []
        assert violations(page) == [] if AXE.is_file() else True
        photograph(page, "markdown-1440", tmp_path)


def test_wide_tables_scroll_on_a_phone_and_words_stay_whole(
    browser: Any, world: World, tmp_path: Path
) -> None:
    with served(world.store) as server, tab(browser, NARROW) as shown:
        page = shown.open(f"{server.url}#/run/{world.markdown}")
        table = page.locator(".turn .md-table")
        table.wait_for()
        assert table.evaluate("(it) => it.scrollWidth > it.clientWidth")
        lines = table.locator("th", has_text="difference").evaluate(
            """(it) => {
              const range = document.createRange();
              range.selectNodeContents(it);
              return range.getClientRects().length;
            }"""
        )
        assert lines == 1
        table.scroll_into_view_if_needed()
        photograph(page, "markdown-390", tmp_path)


@pytest.mark.parametrize("offline", [False, True], ids=["served", "exported"])
def test_values_are_linked_beside_formulas_and_never_in_them(
    browser: Any, sums: tuple[Path, str], tmp_path: Path, offline: bool
) -> None:
    root, run = sums
    file = tmp_path / "run.html"
    file.write_bytes(exported(RunCatalog([root]).find(run)))
    with served(root) as server, tab(browser) as shown:
        page = shown.open(file.as_uri() if offline else f"{server.url}#/run/{run}")
        answer = page.locator(".answer .said.formatted")
        answer.locator("math").wait_for()
        answer.locator("a.from", has_text="1414").wait_for()
        assert answer.locator("math a, .md-math a").count() == 0
        assert answer.locator("a.from").all_inner_texts() == ["1414", "31164"]
        assert answer.locator("math mn").all_text_contents() == ["1414", "31164"]
        assert page.locator("#turn-0 .said.reply strong").inner_text() == "one"
        page.locator("#turn-0 .code .c-keyword", has_text="SELECT").wait_for()
