// Links from values in outputs, code and the answer to the calls that returned them, and the key
// that walks back along them: answer → line of code → call → its answer → …  The answer of the run
// has its links at the head of the page, too.
//
// The server finds the links (viewer/provenance.py). A link is certain if the value came back
// through variables; one that only has the same text is drawn with dots.

import { get } from "./api.js";
import { h, toast } from "./dom.js";
import { oneLine } from "./format.js";
import { textOf } from "./turn.js";

const FORMULA = "[data-formula]";

export class Provenance {
  // view: the Transcript whose texts are linked; go(call) opens a call.
  constructor(view, go) {
    this.view = view;
    this.go = go;
    this.links = [];
    this.hero = null; // element that shows the answer of the run, in which `of` its links are drawn
    this.at = null; // { link, steps, step } on the way back
    this.of = "";
    this.isLoading = false;
  }

  // Fetches and draws the links of the shown call, once it has ended.
  async load() {
    const { call, run } = this.view,
      state = call ? `${call.id}/${call.num_turns}/${call.stop}` : "";
    if (!call || (!call.stop && run.alive)) return;
    if (state !== this.of) {
      this.of = state;
      this.links = [];
      this.at = null;
      this.isLoading = true;
      try {
        const found = await get("/api/provenance", { key: run.head.key, id: call.id });
        if (this.of !== state) return;
        this.links = found.links;
        this.isLoading = false;
      } catch (error) {
        this.of = "";
        this.isLoading = false;
        return void toast(error.message);
      }
    }
    this.draw();
    this.drawHero();
    if (this.wanted === call.id) this.begin();
  }

  draw() {
    const places = new Map();
    for (const link of this.links) {
      const place = this.element(link);
      if (!place || place.dataset.linked) continue;
      if (!places.has(place)) places.set(place, []);
      places.get(place).push(link);
    }
    for (const [place, links] of places) {
      place.dataset.linked = "yes";
      const moved =
        this.plain?.place === place
          ? links.map((link) => movedTo(link, this.plain.text, textIn(place))).filter(Boolean)
          : links;
      linkText(place, moved, (link, text) => this.anchor(link.link ?? link, text));
    }
  }

  // The answer at the head of the page, while its call is shown. Its text may be formatted and cut.
  drawHero() {
    const { call, run } = this.view;
    if (!this.hero || !this.links.length || call?.id !== rootOf(run)) return;
    if (this.hero.querySelector("a.from")) return;
    const plain = textOf(call.answer);
    const moved = this.links
      .filter((link) => link.part === "answer")
      .map((link) => movedTo(link, plain, textIn(this.hero)))
      .filter(Boolean);
    linkText(this.hero, moved, (link, text) => this.anchor(link.link, text));
  }

  // The text of `place` has been formatted: it lacks some characters of the plain `text`.
  redraw(place, text) {
    this.plain = { place, text };
    for (const link of this.links) if (this.element(link) === place) link.elements = [];
    delete place.dataset.linked;
    this.draw();
  }

  // The element that holds the text of a link.
  element({ turn = -1, cell, part }) {
    if (part === "answer") return this.view.foot.querySelector("section.answer .said");
    if (part === "question") return this.view.head.querySelector("h2[data-whole]");
    const block = this.view.turns.querySelector(`[data-turn="${turn}"] [data-cell="${cell}"]`);
    return block
      ? block.querySelector(part === "code" ? ".code code" : `[data-part="${part}"] .said`)
      : null;
  }

  anchor(link, text) {
    const sources = link.sources || [],
      label = this.labelOf(link);
    const target = this.target(link);
    const kind =
      link.part === "code"
        ? "in-code"
        : link.is_computed
          ? "computed"
          : link.is_certain
            ? "certain"
            : "guessed";
    const words =
      !sources.length && link.via?.length
        ? `computed from ${label}`
        : sources.length
          ? `${link.is_computed ? "computed from" : "returned by"} ${label}${link.is_certain ? "" : " (same text, possibly copied)"}`
          : "printed earlier";
    const element = h(
      "a.from",
      {
        class: kind,
        href: target
          ? this.view.actions.address(target, null)
          : this.view.actions.address(
              this.view.call.id,
              link.place ? Math.max(0, link.place[0]) : null,
            ),
        title: words,
      },
      text,
    );
    if (link.part !== "code" && label) element.dataset.from = `⟵ ${label}`;
    link.elements = [...(link.elements || []), element];
    const home = this.view.call.id,
      follow = (step) => (event) => {
        event.preventDefault();
        if (this.view.call?.id === home) step();
        else this.view.actions.go(home); // a link at the head of the page
      };
    if (sources.length > 1)
      element.onclick = follow(() => {
        if (link.via?.length) this.line(link.via[0]);
        this.view.actions.showOnly(
          sources.map((id) => this.view.run.indexOf(id)).filter((index) => index >= 0),
          `sources of ${text.slice(0, 30)}`,
        );
      });
    else if (!sources.length)
      element.onclick = follow(() => {
        if (link.via?.length) this.line(link.via[0]);
        else this.point(link.place);
      });
    return element;
  }

  // Of several sources the one that differs from its siblings, else the first.
  target(link) {
    const sources = link.sources || [],
      run = this.view.run;
    return sources.find((id) => run.calls[run.indexOf(id)]?.outlier) || sources[0];
  }

  // Begin at a value of the answer; one that comes from a call that differs is first. Returns
  // whether there is one.
  begin() {
    const ofAnswer = this.links.filter((link) => link.part === "answer"),
      drawn = ofAnswer.filter((link) => link.elements?.length), // not those in formulas
      links = drawn.length ? drawn : ofAnswer,
      run = this.view.run;
    const odd = links.find((link) => run.calls[run.indexOf(this.target(link))]?.outlier);
    const link = odd || links.find((each) => each.is_certain) || links[0];
    this.wanted = null;
    if (!link) return false;
    const steps = [
      ...(link.via || []).slice(0, 3).map((via) => ({ via })),
      ...(link.place ? [{ place: link.place }] : []),
      ...((link.sources || []).length ? [{ call: this.target(link) }] : []),
    ];
    this.at = { link, steps, step: -1 };
    for (const element of link.elements || []) mark(element, !this.hero?.contains(element));
    return true;
  }

  // One step back, from the answer to where its value was before.
  walk() {
    // The links come after the call; then load() takes the step.
    if (!this.view.call || this.isLoading) {
      this.wanted = this.view.id;
      return;
    }
    if (!this.at && !this.begin())
      return void toast("no value in this answer was traced to a call or an output");
    const { steps } = this.at,
      step = steps[++this.at.step];
    if (!step) {
      this.at.step--;
      return void toast("this is where the value comes from");
    }
    if (step.via) this.line(step.via);
    else if (step.place) this.point(step.place);
    else {
      this.wanted = step.call;
      this.at = null;
      this.go(step.call);
      return;
    }
    toast(this.wordsOfStep(step, this.at.link));
  }

  wordsOfStep(step, link) {
    if (step.place)
      return link.is_computed
        ? "this was printed from the context"
        : "the value was first shown here";
    const label = this.labelOf(link);
    return `${step.via[0]} was assigned here${label ? `: the answer ⟵ ${label}` : ""}`;
  }

  // "sums ⟵ sheet 1 … sheet 12"
  labelOf(link) {
    const { sources = [] } = link,
      names = sources.map((id) => this.nameOf(id));
    if (!sources.length) return link.via?.length ? link.via[0][0] : "";
    const calls = names.length <= 3 ? names.join(", ") : `${names[0]} … ${names.at(-1)}`;
    return link.is_computed && link.via?.length && link.part !== "code"
      ? `${link.via[0][0]} ⟵ ${calls}`
      : calls;
  }

  // What tells a call apart, since ids read as decimals.
  nameOf(id) {
    const call = this.view.run.calls[this.view.run.indexOf(id)];
    return call?.telling ? oneLine(call.telling, 24) : id;
  }

  line([, turn, cell, line]) {
    mark(
      this.view.turns.querySelector(
        `[data-turn="${turn}"] [data-cell="${cell}"] .line[data-n="${line}"]`,
      ),
    );
  }

  // The first place that showed a value: an output, or the prompt of a plain call.
  point([turn, cell, part, start, end]) {
    const place =
      part === "prompt"
        ? [...this.view.turns.querySelectorAll(".message .said")].pop()
        : this.element({ turn, cell, part });
    if (!place) return;
    const known = place.querySelector(`[data-start="${start}"]`);
    if (known) return void mark(known);
    let made = null;
    linkText(
      place,
      [{ start, end }],
      (_, text) => (made = h("span.seen", { "data-start": String(start) }, text)),
    );
    place.closest("details")?.setAttribute("open", "");
    mark(made);
  }
}

// The same occurrence of a link's text in a text that lacks some characters; null if it is not
// there, or if `plain` ends before it: links of a run that just ended may arrive before its answer.
function movedTo(link, plain, shown) {
  const value = plain.slice(link.start, link.end);
  if (!value) return null;
  let start = -1;
  for (
    let at = plain.indexOf(value);
    at >= 0 && at <= link.start;
    at = plain.indexOf(value, at + 1)
  )
    start = shown.indexOf(value, start + 1);
  return start < 0 ? null : { link, start, end: start + value.length };
}

// The call whose answer is that of the run.
function rootOf(run) {
  return run.head.answered_by || run.calls[0]?.id;
}

function mark(element, isScrolled = true) {
  if (!element) return;
  element.classList.add("walked");
  if (isScrolled) element.scrollIntoView({ block: "center" });
  setTimeout(() => element.classList.remove("walked"), 2500);
}

// The parts of an element's text in order, as { text, node }. Marks of errors between the lines of
// code are not parts of it. A formula is one part: the source that it was drawn from, without a
// node, so that nothing is put into it.
function partsOf(root) {
  const walker = document.createTreeWalker(
    root,
    NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT,
    (node) =>
      node instanceof Element && (node.matches(".fault") || node.parentElement.closest(FORMULA))
        ? NodeFilter.FILTER_REJECT
        : NodeFilter.FILTER_ACCEPT,
  );
  const parts = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node instanceof Text) {
      if (!node.parentElement.closest(FORMULA)) parts.push({ text: node.data, node });
    } else if (node instanceof HTMLElement && node.matches(FORMULA))
      parts.push({ text: node.dataset.formula, node: null });
  }
  return parts;
}

function textIn(root) {
  return partsOf(root)
    .map(({ text }) => text)
    .join("");
}

// Wraps pieces of an element's text: the text of each link becomes make(link, text).
export function linkText(root, links, make) {
  const sorted = [...links].sort((a, b) => a.start - b.start || b.end - a.end);
  let at = 0,
    next = 0,
    reached = 0;
  for (const { text, node } of partsOf(root)) {
    const start = at,
      pieces = [];
    let done = 0;
    at += text.length;
    while (next < sorted.length && sorted[next].start < at) {
      const link = sorted[next];
      const from = Math.max(link.start, start, reached),
        to = Math.min(link.end, at);
      if (to > from && node) {
        pieces.push(
          text.slice(done, from - start),
          make(link, text.slice(from - start, to - start)),
        );
        done = to - start;
        reached = to;
      }
      if (link.end > at) break; // continues in the next node
      next++;
    }
    if (pieces.length)
      node.replaceWith(...pieces.filter((piece) => piece !== ""), text.slice(done));
  }
}
