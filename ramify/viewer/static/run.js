// Page of one run: head and budget, the picture of the tree, the list of calls, and a transcript.

import { follow, get, offline } from "./api.js";
import { copy, fill, h, toast } from "./dom.js";
import { parseFilter } from "./filter.js";
import { many, runAddress } from "./format.js";
import { MEASURES } from "./measures.js";
import { callFields, Outline } from "./outline.js";
import { sharedRun } from "./shared_run.js";
import { Story } from "./story.js";
import { Transcript } from "./transcript.js";
import { Picture } from "./tree.js";
import { marksOf } from "./turn.js";

const NONE = [];
// calls whose texts come with the picture (early.js requests the same number)
const FIRST_TEXTS = 256;

// State of a run, updated by the server's events.
export class Run {
  constructor({ head, num, columns }) {
    this.calls = [];
    this.byId = new Map();
    this.below = new Map(); // "parent/turn/cell" -> indices
    this.setHead(head);
    // A column whose values are all the same is sent as one value.
    const whole = Object.fromEntries(
      Object.entries(columns).map(([name, each]) => [
        name,
        Array.isArray(each) ? each : new Array(num).fill(each),
      ]),
    );
    for (let index = 0; index < num; index++) this.add(index, callAt(whole, index));
  }

  // Texts that arrive later, for the calls from `first`; updates received meanwhile are newer.
  addTexts(first, { question, answer, telling }) {
    const changed = [];
    for (let at = 0; at < question.length && first + at < this.calls.length; at++) {
      const call = this.calls[first + at];
      if (call.question) continue;
      call.question = question[at];
      call.answer ||= answer[at];
      call.telling ||= telling[at];
      changed.push(first + at);
    }
    return changed;
  }

  setHead(head) {
    this.head = head;
    this.alive = head.alive;
    this.seenAt = performance.now();
  }

  add(index, call) {
    if (!this.calls[index]) {
      this.byId.set(call.id, index);
      const last = this.last; // most calls come from the same cell as the previous one
      if (last && last.parent === call.parent && last.turn === call.turn && last.cell === call.cell)
        last.indices.push(index);
      else {
        const place = `${call.parent}/${call.turn}/${call.cell}`,
          indices = this.below.get(place) || [];
        indices.push(index);
        this.below.set(place, indices);
        this.last = { parent: call.parent, turn: call.turn, cell: call.cell, indices };
      }
    }
    this.calls[index] = call;
  }

  apply({ head, indices, columns }) {
    this.setHead(head);
    for (const [at, index] of indices.entries()) this.add(index, callAt(columns, at));
    return indices;
  }

  indexOf(id) {
    return this.byId.has(id) ? this.byId.get(id) : -1;
  }

  made(parent, turn, cell) {
    return this.below.get(`${parent}/${turn}/${cell}`) || [];
  }

  lastSeen() {
    return this.head.at_s;
  }

  // Seconds since the run began: at its last event, or now while it is in progress.
  now() {
    return (
      this.head.at_s +
      (this.alive && !this.head.stop ? (performance.now() - this.seenAt) / 1000 : 0)
    );
  }
}

// Fields are written out, because it creates ten thousand objects several times faster.
function callAt(of, at) {
  return {
    id: of.id[at],
    kind: of.kind[at],
    parent: of.parent[at],
    turn: of.turn[at],
    cell: of.cell[at],
    depth: of.depth[at],
    model: of.model[at],
    started_s: of.started_s[at],
    ended_s: of.ended_s[at],
    state: of.state[at],
    stop: of.stop[at],
    turns: of.turns[at],
    tokens_in: of.tokens_in[at],
    tokens_out: of.tokens_out[at],
    cost: of.cost[at],
    reward: of.reward[at],
    advantage: of.advantage[at],
    gap: of.gap[at],
    question: of.question[at],
    answer: of.answer[at],
    error: of.error[at],
    reason: of.reason[at],
    failed: of.failed[at],
    outlier: of.outlier[at],
    telling: of.telling[at],
    spans: of.spans[at] || NONE,
    fork: of.fork[at],
    tools: of.tools[at] || NONE,
    scores: of.scores[at] || NONE,
  };
}

export async function runPage(page, key, route) {
  const told = await get("/api/run", { key, texts: FIRST_TEXTS }),
    run = new Run(told);
  const view = new RunView(run, key);
  view.start(page, route);
  if (told.texts < told.num)
    // visible parts first
    requestAnimationFrame(() => setTimeout(() => view.fetchTexts(told.texts)));
  return view;
}

class RunView {
  constructor(run, key) {
    this.run = run;
    this.key = key;
    this.address = (call, turn = null) =>
      `${runAddress(key)}/call/${encodeURIComponent(call)}${turn === null ? "" : `/turn/${turn + 1}`}`;
    const pick = (index) => this.go(run.calls[index].id);
    this.picture = new Picture(run, pick);
    this.outline = new Outline(run, pick);
    this.outline.onchange = (sort, kept) => {
      this.picture.setOrder(MEASURES[sort] ? sort : "start");
      this.picture.setOnly(kept);
    };
    this.picture.onorder = (field) => this.outline.sortBy(field, true);
    this.outline.list.onmove = (index) => {
      const row = this.outline.rows[index];
      if (row && row.call !== undefined) this.stepTo(run.calls[row.call].id);
    };
    this.transcript = new Transcript(run, {
      address: this.address,
      go: (id) => this.go(id),
      showOnly: (indices, words) => {
        this.outline.showOnly(indices, words);
        this.outline.element.scrollIntoView({ block: "nearest" });
        this.outline.list.box.focus({ preventScroll: true });
      },
    });
    this.following = false;
  }

  go(call, turn = null) {
    location.hash = this.address(call, turn);
  }

  // As go(), without an entry in the history: `j`, `k`, and following.
  stepTo(call) {
    location.replace(this.address(call));
  }

  start(page, route) {
    const run = this.run;
    this.story = new Story(run, this.address);
    this.transcript.provenance.hero = this.story.answer;
    this.story.onanswer = () => this.transcript.provenance.drawHero();
    this.problems = h("div.problems");
    this.review = h("div.review-holder");
    this.found = h("div.found", { hidden: true });
    this.search = h("input", {
      type: "search",
      placeholder: "search the run",
      "aria-label": "search the run",
      id: "search",
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.find(this.search.value.trim());
      if (event.key === "Escape") this.closeFound();
    });
    this.search.addEventListener("input", () => !this.search.value && this.closeFound());
    this.tail = h(
      "button.small",
      {
        type: "button",
        "aria-pressed": "false",
        onclick: () => this.setFollowing(!this.following),
      },
      "follow",
    );
    fill(
      this.story.tools,
      this.search,
      this.tail,
      this.story.opener,
      offline
        ? null
        : h("button.small", { type: "button", onclick: () => this.openReview() }, "review"),
      offline
        ? null
        : h("a.small", { href: `#/compare/${encodeURIComponent(this.key)}` }, "compare"),
    );
    fill(
      page,
      h(
        "div.run",
        null,
        h("div.run-head", null, this.story.element, this.review, this.found, this.problems),
        this.picture.element,
        this.outline.element,
        this.transcript.element,
      ),
    );
    this.outline.element.classList.toggle("settled", Boolean(run.head.stop) || !run.alive);
    this.drawHead();
    this.picture.changed();
    this.outline.changed();
    this.show(route);
    this.ticking = setInterval(() => {
      if (!run.alive || document.hidden) return;
      this.story.tick();
      this.outline.list.later(true); // the seconds of pending calls advance
    }, 100);
    if (run.head.is_journal && (run.alive || !run.head.stop)) {
      this.stop = follow(
        "/api/events",
        { key: this.key },
        () => run.head.version,
        (message) => this.apply(message),
        () => this.drawHead(),
      );
    }
  }

  close() {
    clearInterval(this.ticking);
    if (this.stop) this.stop();
    this.story.close();
    this.picture.close();
    this.outline.close();
  }

  shared() {
    return sharedRun(this.run, this.key, this.picture.canvas);
  }

  async fetchTexts(first) {
    try {
      const changed = this.run.addTexts(
        first,
        await get("/api/texts", { key: this.key, from: first }),
      );
      if (this.picture.closed) return;
      this.picture.later();
      this.outline.changed(true);
      this.transcript.changed(changed);
    } catch (error) {
      toast(error.message);
    }
  }

  // The address changed, but the run is the same.
  show(route) {
    const run = this.run;
    const id = route.call ?? (run.calls.length ? run.calls[0].id : null);
    if (id === null)
      return fill(
        this.transcript.head,
        h("p.quiet", null, run.head.problems.length ? "" : "no calls yet"),
      );
    const index = run.indexOf(id);
    if (index < 0)
      return fill(this.transcript.head, h("p.problem", null, `the run has no call ${id}`));
    this.picture.select(index);
    this.outline.select(index);
    this.shown = id;
    return this.transcript.show(id, route.turn);
  }

  apply(message) {
    if (message.arriving) return this.transcript.arrive(message.arriving);
    // the file was truncated or replaced
    if (message.head.generation !== this.run.head.generation) return location.reload();
    const fresh = !this.run.calls.length,
      changed = this.run.apply(message);
    this.picture.changed();
    this.outline.changed();
    if (fresh && this.run.calls.length) this.show({});
    this.transcript.changed(changed);
    this.drawHead();
    if (this.following) this.followOn();
    document.documentElement.dataset.version = String(this.run.head.version);
  }

  setFollowing(on) {
    this.following = on;
    this.tail.setAttribute("aria-pressed", String(on));
    if (on) this.followOn();
  }

  // Follow the session that is working now, at the end of its transcript.
  followOn() {
    const working = this.run.calls.filter((call) => call.kind === "rlm" && call.stop === null);
    const call = working[working.length - 1];
    if (call && call.id !== this.shown) this.stepTo(call.id);
    const box = this.transcript.element;
    requestAnimationFrame(() => {
      if (box.scrollHeight > box.clientHeight + 1) box.scrollTop = box.scrollHeight;
      else box.lastElementChild?.scrollIntoView({ block: "end" });
    });
  }

  async openReview() {
    const { showReview } = await import("./review.js");
    showReview(this.review, this.run.head, (review) => {
      this.run.head.review = review;
      this.drawHead();
    });
  }

  // --- head --------------------------------------------------------------------------------------

  drawHead() {
    const head = this.run.head,
      told = head.marks.map((mark) => ({ ...mark, tokens: [] }));
    this.story.draw();
    fill(
      this.problems,
      marksOf(told),
      head.problems.map((text) => h("p.problem", { role: "alert" }, text)),
      head.num_errors
        ? h(
            "details.errors",
            null,
            h("summary", null, many(head.num_errors, "error")),
            h(
              "ul",
              null,
              head.errors.map((text) => h("li", null, this.linked(text))),
            ),
          )
        : null,
    );
    // it stays when the run ends, so that nothing moves
    if (head.alive) this.tail.dataset.seen = "yes";
    this.tail.hidden = !head.alive && !this.tail.dataset.seen;
    this.tail.disabled = !head.alive;
  }

  // "call 0.1, turn 0: …" becomes a link to that turn.
  linked(text) {
    const named = /^call ([\d.:]+)(?:, turn (\d+))?: /.exec(text);
    if (!named || this.run.indexOf(named[1]) < 0) return text;
    return [
      h(
        "a",
        { href: this.address(named[1], named[2] === undefined ? null : Number(named[2])) },
        named[0].slice(0, -2),
      ),
      text.slice(named[0].length - 2),
    ];
  }

  // --- search ------------------------------------------------------------------------------------

  async find(wanted) {
    if (!wanted) return this.closeFound();
    try {
      const { found, more } = await get("/api/search", { key: this.key, q: wanted });
      const rows = found.map((each) =>
        h(
          "a.hit",
          {
            href: this.address(each.call, each.turn < 0 ? null : each.turn),
            onclick: () => this.pointAt(each),
          },
          h(
            "span.where",
            null,
            `${each.call}${each.turn < 0 ? "" : ` · turn ${each.turn + 1}`} · ${each.where}`,
          ),
          h(
            "span.snippet",
            null,
            each.text.slice(0, each.at),
            h("mark", null, each.text.slice(each.at, each.at + wanted.length)),
            each.text.slice(each.at + wanted.length),
          ),
        ),
      );
      fill(
        this.found,
        h(
          "div.found-head",
          null,
          found.length
            ? `${many(found.length, "result")}${more ? ", and more" : ""}`
            : `no match for “${wanted}”`,
          h("button.small", { type: "button", onclick: () => this.closeFound() }, "close"),
        ),
        rows,
      );
      this.found.hidden = false;
    } catch (error) {
      toast(error.message);
    }
  }

  pointAt(hit) {
    if (hit.call === this.shown && hit.turn >= 0) this.transcript.scrollTo(hit.turn);
    if (matchMedia("(max-width: 800px)").matches) this.closeFound();
  }

  closeFound() {
    this.found.hidden = true;
    fill(this.found);
  }

  nextOutlier() {
    const calls = this.run.calls,
      at = this.run.indexOf(this.shown);
    const odd = [...calls.slice(at + 1), ...calls.slice(0, at + 1)].find((call) => call.outlier);
    if (odd) this.go(odd.id);
    else toast("no call differs from its siblings");
  }

  // The most expensive call; then the next most expensive one.
  nextExpensive() {
    const order = parseFilter("sort:cost", callFields(this.run)).order,
      calls = this.run.calls.filter((call) => call.cost !== null).sort(order);
    if (!calls.length) return toast("no call has a known cost");
    const at = this.walksCosts ? calls.findIndex((call) => call.id === this.shown) : -1;
    this.walksCosts = true;
    return this.go(calls[(at + 1) % calls.length].id);
  }

  // --- keys --------------------------------------------------------------------------------------

  keys() {
    const move = (step) => {
      this.outline.list.key(
        new KeyboardEvent("keydown", { key: step > 0 ? "ArrowDown" : "ArrowUp" }),
      );
    };
    return {
      j: ["next call", () => move(1)],
      k: ["previous call", () => move(-1)],
      b: ["trace the answer back one step", () => this.transcript.provenance.walk()],
      o: ["next call that differs from its siblings", () => this.nextOutlier()],
      $: ["most expensive call, then the next most expensive", () => this.nextExpensive()],
      u: [
        "parent call",
        () => {
          const call = this.run.calls[this.run.indexOf(this.shown)];
          if (call && call.parent >= 0) this.go(this.run.calls[call.parent].id, call.turn);
        },
      ],
      n: ["next turn", () => this.transcript.step(1)],
      p: ["previous turn", () => this.transcript.step(-1)],
      e: [
        "next error in this call",
        () => this.transcript.nextError() || toast("no error in this call"),
      ],
      f: ["follow the run", () => this.run.alive && this.setFollowing(!this.following)],
      y: [
        "copy the call's first cell",
        () => {
          const code = this.transcript.firstCode();
          return code ? copy(code, "cell") : toast("no code in this call");
        },
      ],
      ...(offline
        ? {}
        : { r: ["review: labels, note and corrected scores", () => this.openReview()] }),
      "/": ["search the run", () => this.search.focus()],
      "+": ["zoom in", () => this.picture.zoom(1 / 1.6)],
      "-": ["zoom out", () => this.picture.zoom(1.6)],
      0: ["show the whole picture", () => this.picture.fit()],
    };
  }
}
