"""Measures whether words on a page are cut off or lie over each other, from the boxes of the browser.

    faults(page)    one line for each word that is cut off without an ellipsis and a way to see it,
                    that reaches beyond the page, or that lies over another text or control
    gallery(world)  the addresses of every page, and what to wait for

A way to see a text that is cut is a title, a scrollable box, a summary that opens, or a button that
unfolds it. What is drawn on a canvas has no boxes, so it is not measured. Not here: which widths
are measured (see test_layout.py and benchmarks/faces_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from tests.viewer.conftest import World

WIDTHS = range(360, 1921, 20)
SOME_WIDTHS = (360, 400, 560, 720, 800, 1020, 1040, 1300, 1440, 1920)
"""The smallest, the largest, and those around which the page changes its arrangement."""
HEIGHT = 1800
"""High enough that parts which are only laid out in sight are laid out."""

MEASURE = r"""
() => {
  const faults = [], wide = document.documentElement.clientWidth;
  const LAYERS = "dialog, .tip, #toast, .vrow";
  const styles = new Map(), boxes = new Map(), chains = new Map();
  const styleOf = (it) => styles.get(it) || (styles.set(it, getComputedStyle(it)), styles.get(it));
  const boxOf = (it) => {
    if (!boxes.has(it)) {
      const { left, top } = it.getBoundingClientRect(),
        [x, y] = [left + it.clientLeft, top + it.clientTop];
      boxes.set(it, { left: x, top: y, right: x + it.clientWidth, bottom: y + it.clientHeight });
    }
    return boxes.get(it);
  };
  // The ancestors that clip an element, and how.
  const clipsOf = (start) => {
    if (chains.has(start)) return chains.get(start);
    const found = [];
    let position = "static";
    for (let it = start; it && it !== document.documentElement; it = it.parentElement) {
      const style = styleOf(it), isHolder = style.position !== "static" || style.transform !== "none"
        || /paint|strict|content|layout/.test(style.contain);
      if (it === start || position !== "absolute" || isHolder) {
        if (it !== document.body && it.clientWidth && style.display !== "inline"
          && (style.overflowX !== "visible" || style.overflowY !== "visible"))
          found.push({ it, style, x: style.overflowX, y: style.overflowY });
        position = style.position;
      }
      if (position === "fixed") break;
    }
    chains.set(start, found);
    return found;
  };
  const scrolls = (how) => how === "auto" || how === "scroll";
  const nameOf = (it) => {
    const parts = [];
    for (; it && it !== document.body && parts.length < 3; it = it.parentElement)
      parts.unshift(it.tagName.toLowerCase() + [...it.classList].slice(0, 2).map((c) => `.${c}`).join(""));
    return parts.join(" > ");
  };
  const say = (kind, it, words) => faults.push(`${kind}: “${words.trim().slice(0, 50)}” in ${nameOf(it)}`);
  // A title may come when its text is pointed at.
  const canBeSeen = (it) => {
    it.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
    const fold = it.closest(".folded, .cut");
    return it.closest("[title], summary") || fold?.parentElement.querySelector(".unfold:not([hidden])");
  };
  const widthOf = (it, words) => {
    const pen = (window.layoutPen ||= document.createElement("canvas").getContext("2d")),
      style = styleOf(it);
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    return pen.measureText(words).width;
  };
  // The part of a box that is in sight; says if a part of it is cut off.
  const visible = (it, rect, words) => {
    const box = { left: rect.left, top: rect.top, right: rect.right, bottom: rect.bottom };
    const slack = 0.3 * rect.height;
    let isCut = false;
    for (const { it: by, style, x, y } of clipsOf(it)) {
      const edge = boxOf(by);
      if (x !== "visible" && words && !isCut && (box.right > edge.right + 1 || box.left < edge.left - 1)
        && !scrolls(x)) {
        isCut = true;
        if (style.textOverflow !== "ellipsis") say("cut off without an ellipsis", it, words);
        else if (!canBeSeen(it)) say("cut off without a way to see it", it, words);
      }
      if (y !== "visible" && words && !isCut && (box.bottom > edge.bottom + slack || box.top < edge.top - slack)
        && !scrolls(y)) {
        isCut = true;
        if (!canBeSeen(it)) say("cut off below", it, words);
      }
      if (x !== "visible") [box.left, box.right] = [Math.max(box.left, edge.left), Math.min(box.right, edge.right)];
      if (y !== "visible") [box.top, box.bottom] = [Math.max(box.top, edge.top), Math.min(box.bottom, edge.bottom)];
    }
    if (words && !isCut && box.right > box.left && box.right > wide + 1) say("beyond the page", it, words);
    return box.right - box.left > 1.5 && box.bottom - box.top > 3 ? box : null;
  };
  const isShown = (it) => it.checkVisibility({ opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true })
    && !it.closest(".offscreen");
  const layerOf = (it) => {
    for (; it && it !== document.body; it = it.parentElement)
      if (it.matches(LAYERS) || styleOf(it).position === "fixed" || styleOf(it).position === "sticky") return it;
    return document.body;
  };
  const pieces = [];
  const add = (it, box, words, isControl) => {
    const inset = isControl ? 1 : 0.22 * (box.bottom - box.top);
    pieces.push({ it, words, isControl, layer: layerOf(it), left: box.left + 1, right: box.right - 1,
      top: box.top + inset, bottom: box.bottom - inset });
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node; (node = walker.nextNode()); ) {
    const it = node.parentElement;
    if (!node.data.trim() || it.closest("script, style, noscript, option, textarea, math") || !isShown(it)) continue;
    range.selectNodeContents(node);
    let isSaid = 0;
    for (const rect of range.getClientRects()) {
      if (rect.width < 1) continue;
      const before = faults.length, box = visible(it, rect, node.data);
      if (faults.length > before && isSaid++) faults.pop();
      if (box) add(it, box, node.data, false);
    }
  }
  for (const it of document.querySelectorAll("button, input, select, a.small, textarea")) {
    if (!isShown(it)) continue;
    for (const rect of it.getClientRects()) {
      const box = visible(it, rect, "");
      if (box) add(it, box, it.getAttribute("aria-label") || it.textContent || it.placeholder || "", true);
    }
    const style = styleOf(it),
      room = it.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const words = it.matches("select") ? (it.selectedOptions[0]?.text ?? "") : it.matches("input") && !it.value ? it.placeholder : "";
    if (words && widthOf(it, words) > room + 2 && !(style.textOverflow === "ellipsis" && canBeSeen(it)))
      say("cut off in its control", it, words);
  }
  pieces.sort((a, b) => a.top - b.top);
  for (let at = 0; at < pieces.length; at++)
    for (let next = at + 1; next < pieces.length && pieces[next].top < pieces[at].bottom; next++) {
      const [a, b] = [pieces[at], pieces[next]];
      if (a.layer !== b.layer || a.it === b.it || a.it.contains(b.it) || b.it.contains(a.it)) continue;
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) <= 0) continue;
      say(`over “${b.words.trim().slice(0, 40)}” (${nameOf(b.it)})`, a.it, a.words);
    }
  if (document.documentElement.scrollWidth > wide) faults.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
  return [...new Set(faults)];
}
"""
_DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def faults(page: Any) -> list[str]:
    """What is cut off, and what lies over something else, on the page as it is now."""
    page.evaluate(_DRAWN)
    return [str(each) for each in page.evaluate(MEASURE)]


class GalleryPage(NamedTuple):
    """One page, or one state of it."""

    name: str
    address: str
    """After the ``#``."""
    ready: str
    """Selector of an element that the drawn page has."""
    prepare: Callable[[Any], None] = lambda page: None
    """Brings the page into its state."""


def gallery(world: World) -> Iterator[GalleryPage]:
    """Every page, for a server of ``world.places``."""
    tree, evaluation = world.tree, quote(f"p1/evaluations/{world.evaluation}.jsonl", safe="")
    yield GalleryPage("runs", "/", ".run-row .question")
    yield GalleryPage("runs in groups", "/runs/group%3Amodel", ".group-row")
    yield GalleryPage("runs, wrong filter", "/runs/stpo%3Aerror", ".filter-fix button")
    yield GalleryPage("runs, no match", "/runs/nothing-has-this-word", ".empty button")
    yield GalleryPage("run", f"/run/{tree}", "canvas[data-drawn]", _until(".turn .code"))
    yield GalleryPage("run, a call", f"/run/{tree}/call/0.24", ".turn .code")
    yield GalleryPage("run, its report", f"/run/{tree}/report", ".report")
    yield GalleryPage("run, hostile", f"/run/{world.hostile}", ".turn .code", _unfold)
    yield GalleryPage("run, scored", f"/run/p1%3A{world.scored}", ".turn .code")
    yield GalleryPage("run, Markdown", f"/run/{world.markdown}", ".story-answer.formatted")
    yield GalleryPage("run, searched", f"/run/{tree}", ".turn .code", _search)
    yield GalleryPage("run, in review", f"/run/{tree}", ".turn .code", _press("r", ".review"))
    yield GalleryPage("keys", f"/run/{tree}", ".turn .code", _press("?", "dialog"))
    yield GalleryPage(
        "compare", f"/compare/{tree}/{world.other}/{world.plain}", ".compared-calls .vrow"
    )
    yield GalleryPage("compare, a call", f"/compare/{tree}/{world.other}/call/0", "#parting")
    yield GalleryPage("compare, one run", f"/compare/{tree}", "main select, main a")
    yield GalleryPage("trainings", "/training", ".verdict li, table.records a")
    yield GalleryPage("training", "/training/p2%2Fbase", ".verdict li", _until("canvas"))
    yield GalleryPage("two trainings", "/training/p2%2Fbase/p2%2Fsecond", ".verdict li")
    yield GalleryPage("evaluations", "/evaluation", "table.records a")
    yield GalleryPage("evaluation", f"/evaluation/{evaluation}", ".square", _until(".card"))
    yield GalleryPage("label", "/label", ".card")
    yield GalleryPage("maps", "/map", "table.records a")
    yield GalleryPage("map", f"/map/p3%3A{world.map}", ".map-row")
    yield GalleryPage("no such run", "/run/nothing", ".problem")


def _until(selector: str) -> Callable[[Any], None]:
    def wait(page: Any) -> None:
        page.locator(selector).first.wait_for()

    return wait


def _press(key: str, selector: str) -> Callable[[Any], None]:
    def press(page: Any) -> None:
        page.keyboard.press(key)
        page.locator(selector).first.wait_for()

    return press


def _search(page: Any) -> None:
    page.locator("#search").fill("disk")
    page.keyboard.press("Enter")
    page.locator(".hit").first.wait_for()


def _unfold(page: Any) -> None:
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")


def show(page: Any, url: str, shown: GalleryPage) -> None:
    """Open a page in its state, from scratch."""
    page.goto("about:blank")
    page.goto(f"{url}#{shown.address}")
    page.locator(shown.ready).first.wait_for()
    shown.prepare(page)
